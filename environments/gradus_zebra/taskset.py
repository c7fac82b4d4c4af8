"""The taskset `zebra`: name the people in the order of their houses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated

import verifiers.v1 as vf
from pydantic import Field

from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.marked import only_tagged
from gradus_zebra.puzzles import make_puzzles

INSTRUCTION = "Think first. Then write the final answer once, as <answer>name, name, ...</answer>."
_MAX_CHARACTERS = 200
_LOOKED_AT = 20
"""Puzzles that are made for each one of the wanted side, at most."""
Side = Annotated[int, Field(ge=2, le=7)]


class ZebraConfig(vf.TasksetConfig, HoldoutKeys):
    """How large the puzzles are, and how many."""

    sizes: tuple[tuple[Side, Side], ...] = Field(((3, 3), (4, 3), (3, 4)), min_length=1)
    """People and kinds of characteristics (names are one), 2 to 7 of each; in turn. Making one of
    4 x 4 takes half a second, one of 5 x 5 three seconds, one of 7 x 7 a minute."""
    num_tasks: int = Field(60, ge=1)
    """Number of puzzles."""
    seed: int = 0
    """Seed of the puzzles."""
    instruction: str | None = INSTRUCTION
    """System prompt, which must ask for the answer between tags."""


class ZebraData(vf.TaskData):
    """The puzzle is the prompt."""

    names: tuple[str, ...]
    """Who lives in each house."""
    size: tuple[int, int]
    """People and kinds of characteristics."""


def read_names(reply: str, known: Sequence[str]) -> list[str] | None:
    """The names of a reply in their order; None unless it has one answer of known names.

    >>> read_names("<answer>Bob, ann</answer>", ["ann", "bob"])
    ['bob', 'ann']
    """
    answer = only_tagged(reply, "answer", _MAX_CHARACTERS)
    names = re.findall(r"[a-z]+", (answer or "").lower())
    return names if len(names) == len(known) and set(names) <= set(known) else None


class ZebraTask(vf.Task[ZebraData, vf.State, vf.TaskConfig]):
    """One puzzle."""

    def gold_replies(self) -> list[str]:
        return [f"<answer>{', '.join(self.data.names)}</answer>"]

    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        """1 when everybody is in the right house, else 0."""
        return float(read_names(trace.last_reply, self.data.names) == list(self.data.names))

    @vf.metric
    async def by_size(self, trace: vf.Trace) -> dict[str, float]:
        """The reward under the name of the size, so that its mean is pass@1 of that size."""
        people, kinds = self.data.size
        return {f"solved_{people}x{kinds}": await self.solved(trace)}

    @vf.metric
    async def right_houses(self, trace: vf.Trace) -> float:
        """Share of the houses with the right name."""
        names = read_names(trace.last_reply, self.data.names) or []
        right = [a == b for a, b in zip(names, self.data.names, strict=False)]
        return sum(right) / len(self.data.names)

    @vf.metric
    async def unreadable(self, trace: vf.Trace) -> float:
        """1 for a reply that does not name everybody once between tags."""
        return float(read_names(trace.last_reply, self.data.names) is None)


class ZebraTaskset(vf.Taskset[ZebraTask, ZebraConfig]):
    """Puzzles of the configured side, the sizes in turn."""

    def load(self) -> Iterable[ZebraTask]:
        """Make the puzzles."""
        config = self.config
        made = islice(make_puzzles(config.sizes, seed=config.seed), config.num_tasks * _LOOKED_AT)
        kept = (puzzle for puzzle in made if config.keeps(puzzle.text))
        for puzzle in islice(kept, config.num_tasks):
            data = ZebraData(
                prompt=puzzle.text,
                system_prompt=config.instruction,
                names=puzzle.names,
                size=puzzle.size,
            )
            yield ZebraTask(data, config.task)
