"""The taskset `reasoning-gym`: tasks of one generator, rated by its own scorer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from gradus.errors import EnvironmentFailure
from gradus_kit.sandbox import CallFailed, HelperCalls
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_reasoning_gym.generators import Generator, Question, scorer
from gradus_reasoning_gym.safety import ARITHMETIC, fits, may_score

Style = Literal["tags", "plain"]

INSTRUCTION = "Think first. Then write the final answer once, as <answer>...</answer>."
_OPEN, _CLOSE = "<answer>", "</answer>"
_RATE = "gradus_reasoning_gym.computed:rate"
_RATE_SECONDS = 3.0
"""CPU time of an answer that a scorer computes, and of opening its generator in a new helper."""
_HELPER_MEMORY_BYTES = 2 << 30
_LOOKED_AT = 20
"""Questions that are made for each one of the wanted side, at most."""


class ReasoningGymConfig(vf.TasksetConfig, HoldoutKeys):
    """Which generator, with which settings."""

    generator: str = "chain_sum"
    """Name of the generator, e.g. `countdown`, `sudoku`, `knights_knaves`, `word_ladder`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the generator, by its own names."""
    num_tasks: int = Field(200, ge=1)
    """Number of tasks."""
    seed: int = 0
    """Seed of the tasks."""
    style: Style = "tags"
    """`tags` reads the answer between tags, `plain` takes the whole reply."""
    instruction: str | None = INSTRUCTION
    """System prompt; none in the plain style, and none where this is None."""


class ReasoningGymData(vf.TaskData):
    """One question; it is the prompt."""

    generator: str
    """Name of the generator."""
    settings: str
    """Its settings as JSON."""
    seed: int
    """The seed that the generator was given, made from that of the config."""
    index: int
    """Which of its tasks this is."""
    size: int
    """How many it was told to have."""
    answer: str | None
    """The gold answer, where there is one."""
    entry: dict[str, Any] | None
    """What the scorer reads; None means that it makes it again."""
    style: Style
    """Where the answer is in a reply."""


def read_answer(reply: str, style: Style) -> str | None:
    """The answer of a reply; None for one that has none, or several.

    >>> read_answer("so <answer> 4 </answer>", "tags")
    '4'
    """
    if style == "tags":
        if reply.count(_OPEN) != 1 or reply.count(_CLOSE) != 1:
            return None
        reply = reply.partition(_OPEN)[2].partition(_CLOSE)[0]
    return re.sub(r"^\n+|\n+$", "", reply).strip(" ") or None


async def _rated(generator: Mapping[str, Any], answer: str, question: Question) -> float:
    """What the scorer says in a helper process; 0 where it comes to no end: a power of a power,
    and the simplest form of a sum of roots, may take hours."""
    try:
        value = await _helpers().call(
            _RATE, generator, answer, asdict(question), seconds=_RATE_SECONDS
        )
    except CallFailed as error:
        if error.is_broken:
            raise EnvironmentFailure(
                f"answers cannot be scored in a helper process: {error}; try `python -c 'import "
                f"{_RATE.partition(':')[0]}'`, and look whether the machine has memory and cores "
                "left"
            ) from error
        return 0.0
    return float(value)


@cache
def _helpers() -> HelperCalls:
    return HelperCalls(memory_bytes=_HELPER_MEMORY_BYTES)


class ReasoningGymTask(vf.Task[ReasoningGymData, vf.State, vf.TaskConfig]):
    """One question of a generator."""

    def gold_replies(self) -> list[str]:
        """The gold answer, for the check of environments; none where its scorer may not see it,
        such as an integral that the generator could not solve either."""
        if self.data.answer is None or not may_score(self.data.generator, self.data.answer):
            return []
        is_plain = self.data.style == "plain"
        return [self.data.answer if is_plain else f"{_OPEN}{self.data.answer}{_CLOSE}"]

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Ask the generator's scorer; 1 for the gold answer."""
        data = self.data
        answer = read_answer(trace.last_reply, data.style)
        if answer is None or not fits(data.generator, answer, data.answer):
            return 0.0
        question = Question(data.prompt_text, data.answer, data.index, data.entry)
        if data.generator not in ARITHMETIC or not may_score(data.generator, answer):
            opened = scorer(data.generator, data.settings, data.seed, data.size)
            return opened.score(answer, question)
        settings = data.model_dump(include={"settings", "seed", "size"})
        return await _rated({"name": data.generator, **settings}, answer, question)

    @vf.metric
    async def unreadable(self, trace: vf.Trace) -> float:
        """1 for a reply without an answer, or with several."""
        return float(read_answer(trace.last_reply, self.data.style) is None)


class ReasoningGymTaskset(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):
    """Questions of one generator on the configured side."""

    def load(self) -> Iterable[ReasoningGymTask]:
        """Yield them in the order of the generator; none comes twice."""
        config = self.config
        size = config.num_tasks * _LOOKED_AT
        # The package seeds task i with seed + i: neighbouring seeds would share nearly all.
        digest = hashlib.sha256(f"reasoning-gym {config.seed}".encode()).digest()
        seed = int.from_bytes(digest[:4]) >> 1
        generator = Generator.open(config.generator, config.settings, seed=seed, size=size)
        settings = json.dumps(config.settings, sort_keys=True)
        seen: set[str] = set()
        for question in generator.questions(size):
            if question.text in seen or not config.keeps(question.text):
                continue
            seen.add(question.text)
            data = ReasoningGymData(
                prompt=question.text,
                system_prompt=config.instruction if config.style == "tags" else None,
                generator=config.generator,
                settings=settings,
                seed=seed,
                index=question.index,
                size=size,
                answer=question.answer,
                entry=dict(question.entry) if question.entry is not None else None,
                style=config.style,
            )
            yield ReasoningGymTask(data, config.task)
            if len(seen) == config.num_tasks:
                return
