"""The taskset `gsm8k`: solve a word problem, and write the number after `####`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import islice
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from gradus_gsm8k.problems import make_problems
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.hub import hub_rows

HUB_DATASET = "openai/gsm8k"
INSTRUCTION = (
    "Reason step by step. Write the answer alone on the last line, as #### and the number."
)
_ANSWER = re.compile(r"^####[ \t]*(.{1,60})$", re.MULTILINE)
_NUMBER = re.compile(r"-?(?:\d{1,15}|\d{1,3}(?:,\d{3}){1,4})(?:\.\d{1,10})?", re.ASCII)
_READ_CHARACTERS = 20_000
"""From the end of a reply."""


class Gsm8kConfig(vf.TasksetConfig, HoldoutKeys):
    """Which problems."""

    source: Literal["templates", "hub"] = "templates"
    """`templates` makes problems and needs no network, `hub` loads `dataset`."""
    dataset: str = HUB_DATASET
    """Data set on the hub, or a local folder, with `question` and `answer` in each row."""
    dataset_subset: str | None = "main"
    """Subset of that data set."""
    dataset_split: str = "train"
    """Split of that data set."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of problems. None means 400 of `templates`, and all of `hub`."""
    seed: int = 0
    """Seed of the templates."""
    instruction: str | None = INSTRUCTION
    """System prompt."""


class Gsm8kData(vf.TaskData):
    """The problem is the prompt."""

    answer: str
    """The number."""


def read_number(reply: str) -> str | None:
    """The number after the last `####` of a reply; None for anything else that stands there.

    >>> read_number("2 * 610 = 1220\\n#### $1,220.00")
    '1220.00'
    >>> read_number("#### 2 * 610") is None
    True
    """
    found = _ANSWER.findall(reply[-_READ_CHARACTERS:])
    text = found[-1].strip().removeprefix("$").rstrip(". ") if found else ""
    return text.replace(",", "") if _NUMBER.fullmatch(text) else None


class Gsm8kTask(vf.Task[Gsm8kData, vf.State, vf.TaskConfig]):
    """One problem."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 when the number after the last `####` is the answer."""
        given = read_number(trace.last_reply)
        return float(given is not None and Fraction(given) == Fraction(self.data.answer))

    @vf.metric
    async def has_answer(self, trace: vf.Trace) -> float:
        """1 when a number stands after the last `####`."""
        return float(read_number(trace.last_reply) is not None)

    def gold_replies(self) -> list[str]:
        return [f"#### {self.data.answer}"]


class Gsm8kTaskset(vf.Taskset[Gsm8kTask, Gsm8kConfig]):
    """The problems of the configured side."""

    def load(self) -> Iterable[Gsm8kTask]:
        """Yield them in the order of their source."""
        config = self.config
        limit = config.num_tasks
        if limit is None and config.source == "templates":
            limit = 400
        kept = (found for found in self._problems() if config.keeps(found[0]))
        for text, answer in islice(kept, limit):
            data = Gsm8kData(prompt=text, system_prompt=config.instruction, answer=answer)
            yield Gsm8kTask(data, config.task)

    def _problems(self) -> Iterator[tuple[str, str]]:
        config = self.config
        if config.source == "templates":
            yield from ((text, str(answer)) for text, answer in make_problems(config.seed))
            return
        columns = ("question", "answer")
        rows = hub_rows(
            config.dataset,
            split=config.dataset_split,
            columns=columns,
            subset=config.dataset_subset,
        )
        for row in rows:
            number = read_number(str(row["answer"]))
            if number is not None:
                yield str(row["question"]), number
