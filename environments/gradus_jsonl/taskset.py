"""The taskset `jsonl`: one task for each line of a file, rated by a function of the user's."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from gradus.errors import EnvironmentFailure
from gradus.plugins import REWARD_ARGUMENTS
from gradus_jsonl.rows import read_rows
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.rewards import WeightedRewards, is_of_an_endpoint


class JsonlConfig(vf.TasksetConfig, HoldoutKeys):
    """Where the rows are, and what rates a reply."""

    path: Path
    """File of JSON lines; each has a `prompt`, which is a text, or `messages`."""
    reward: str | list[str] | dict[str, float] = "gradus_jsonl.answers:exact_answer"
    """`module:function` or `file.py:function`, a list of them, or a table of them with weights. A
    function may take `prompt` (its last text), `reply` (the last text), `row` (the line),
    `messages` (all of them) and `trace`, and returns a number or a dict of numbers, whose sum is
    the reward."""
    prompt_key: str | None = None
    """Key of the prompt. None means `prompt`, or `messages` where there is none."""
    instruction: str | None = None
    """System prompt. None means that the model sees only the prompt."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of tasks, from the first on. None means all."""
    holdout_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the rows that is held out, by the hash of each."""


class JsonlData(vf.TaskData):
    """One row; its prompt is the task's."""

    row: dict[str, Any]
    """The line as the file has it."""
    reward: str
    """What rates it, as JSON."""


class RewardError(vf.TaskError):
    """A reward function failed, or gave something else than numbers."""


@cache
def load_reward(given: str) -> WeightedRewards:
    """The functions that JSON text names, imported once in a process."""
    return WeightedRewards.load(json.loads(given), offered=REWARD_ARGUMENTS)


class JsonlTask(vf.Task[JsonlData, vf.State, vf.TaskConfig]):
    """One row of the file."""

    @property
    def key(self) -> str:
        """The identity of the row, wherever it stands and whatever rates it."""
        return hashlib.sha256(json.dumps(self.data.row, sort_keys=True).encode()).hexdigest()

    def gold_replies(self) -> list[str]:
        """The `answer` of the row where it has one, for the check of environments."""
        return [str(self.data.row["answer"])] if "answer" in self.data.row else []

    @vf.reward
    async def reward(self, trace: vf.Trace) -> dict[str, float]:
        """Ask the user's functions, under their own names."""
        rate = load_reward(self.data.reward)
        values: dict[str, Any] = {"reply": trace.last_reply, "row": self.data.row, "trace": trace}
        values["prompt"] = _last_text(self.data.prompt)
        if "messages" in rate.wanted:
            values["messages"] = [message.model_dump() for message in trace.messages]
        try:
            return await rate(values)
        except EnvironmentFailure as error:
            # What may pass is played again, as where the policy's own server does not answer.
            if is_of_an_endpoint(error.__cause__):
                raise vf.ProviderError(str(error)) from error
            raise RewardError(str(error)) from error


def _last_text(prompt: Any) -> str:
    """What is asked, of a conversation its last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].content)


class JsonlTaskset(vf.Taskset[JsonlTask, JsonlConfig]):
    """The rows in the order of the file."""

    def load(self) -> Iterable[JsonlTask]:
        """Yield the rows of the configured side; refuses a reward that cannot serve at once."""
        config = self.config
        reward = json.dumps(config.reward)
        load_reward(reward)
        rows = read_rows(config.path, key=config.prompt_key)
        kept = (found for found in rows if config.keeps(json.dumps(found.row, sort_keys=True)))
        for found in itertools.islice(kept, config.num_tasks):
            data = JsonlData(
                prompt=found.prompt,
                system_prompt=config.instruction,
                row=found.row,
                reward=reward,
            )
            yield JsonlTask(data, config.task)
