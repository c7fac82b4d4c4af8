r"""The taskset `aime`: a hard problem, and a whole number from 0 to 999 in `\boxed{}`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from gradus_hendrycks_math.problems import SUBJECTS, unseen_problems
from gradus_hendrycks_math.reading import plain
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.hub import hub_rows
from gradus_kit.tasksets.marked import last_boxed

HUB_DATASET = "HuggingFaceH4/aime_2024"
INSTRUCTION = (
    "Reason step by step. The answer is a whole number from 0 to 999; put it into \\boxed{}."
)
LARGEST = 999
_HARDEST = (5, 4)


class AimeConfig(vf.TasksetConfig, HoldoutKeys):
    """Which problems."""

    source: Literal["templates", "hub"] = "templates"
    """`templates` makes problems and needs no network, `hub` loads `dataset`."""
    dataset: str = HUB_DATASET
    """Data set on the hub, or a local folder, with `problem` and `answer` in each row."""
    dataset_split: str = "train"
    """Split of that data set."""
    num_tasks: int = Field(30, ge=1)
    """Number of problems, at most."""
    seed: int = 0
    """Seed of the templates."""
    holdout_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the problems that is held out, by the hash of each."""
    instruction: str | None = INSTRUCTION
    """System prompt."""


class AimeData(vf.TaskData):
    """The problem is the prompt."""

    answer: int


def whole_number(text: str) -> int | None:
    """The number that a box holds, leading zeros allowed as on the sheet; None for all else.

    >>> whole_number("073"), whole_number("1,000"), whole_number("70+3")
    (73, None, None)
    """
    digits = plain(text) if len(text) <= 20 else ""
    if not (digits.isascii() and digits.isdecimal()):
        return None
    return number if (number := int(digits)) <= LARGEST else None


class AimeTask(vf.Task[AimeData, vf.State, vf.TaskConfig]):
    """One problem."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 when the last box holds the number; an expression is none."""
        return float(whole_number(last_boxed(trace.last_reply)) == self.data.answer)

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        """1 when the last box holds a whole number from 0 to 999."""
        return float(whole_number(last_boxed(trace.last_reply)) is not None)

    def gold_replies(self) -> list[str]:
        return [f"\\boxed{{{self.data.answer}}}"]


class AimeTaskset(vf.Taskset[AimeTask, AimeConfig]):
    """The problems of the configured side."""

    def load(self) -> Iterable[AimeTask]:
        """Yield them in the order of their source."""
        config = self.config
        kept = (found for found in self._problems() if config.keeps(found[0]))
        for text, answer in islice(kept, config.num_tasks):
            data = AimeData(prompt=text, system_prompt=config.instruction, answer=answer)
            yield AimeTask(data, config.task)

    def _problems(self) -> Iterator[tuple[str, int]]:
        config = self.config
        if config.source == "hub":
            columns = ("problem", "answer")
            rows = hub_rows(config.dataset, split=config.dataset_split, columns=columns)
            written = ((str(row["problem"]), str(row["answer"])) for row in rows)
        else:
            problems = unseen_problems(SUBJECTS, _HARDEST, seed=f"aime {config.seed}")
            written = ((problem.text, problem.answer) for problem in problems)
        for text, answer in written:
            number = whole_number(answer)
            if number is not None:
                yield text, number
