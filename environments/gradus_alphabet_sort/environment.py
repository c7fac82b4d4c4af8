"""The environment `alphabet-sort`: a scripted user who adds names, and the tasks it plays."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gradus_alphabet_sort.names import FIRST_NAMES, SHORT_NAMES, read_people
from gradus_alphabet_sort.rules import (
    Shape,
    Sorting,
    Style,
    build_sorting,
    read_list,
    score,
    similarity,
    sortings,
)
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.hub import hub_rows

HUB_DATASET = "kalomaze/alphabetic-arxiv-authors-it1"
DEFAULT_NUM_TASKS = 1000
_MOST_DRAWS_PER_TASK = 200
"""Conversations that are looked at for one of the wanted side."""


class AlphabetSortTaskConfig(vf.TaskConfig):
    """How similarity becomes the reward."""

    similarity_power: float = Field(4, ge=1, le=64)
    """Exponent of the similarity: a larger one leaves less for a list that is nearly right."""
    power_per_turn: bool = True
    """Apply it to each turn and then take the mean; false takes the mean first."""


class AlphabetSortConfig(vf.TasksetConfig, HoldoutKeys):
    """Where the names come from, and how long a conversation is."""

    source: Literal["names", "hub"] = "names"
    """`names` draws from our own lists and needs no network, `hub` loads `dataset`."""
    num_tasks: int = Field(DEFAULT_NUM_TASKS, ge=1)
    """Number of conversations; of `hub`, the most."""
    seed: int = 0
    """Seed of the conversations."""
    min_turns: int = Field(2, ge=1)
    """Fewest turns of a conversation."""
    max_turns: int = Field(5, ge=1)
    """Most turns of a conversation."""
    min_names_per_turn: int = Field(1, ge=1)
    """Fewest names that a turn brings."""
    max_names_per_turn: int = Field(5, ge=1, le=9)
    """Most names that a turn brings."""
    style: Style = "tags"
    """`tags` asks in sentences for lists between tags. `plain`, for very small models, says nothing
    but names of two letters, and the reply is nothing but the list."""
    dataset: str = HUB_DATASET
    """Data set on the Hugging Face hub, or a local folder, with a list of `names` in each row."""
    dataset_split: str = "train"
    """Split of that data set."""
    task: AlphabetSortTaskConfig = AlphabetSortTaskConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = self.shape.max_turns * self.shape.max_names_per_turn
        most = len(SHORT_NAMES if self.style == "plain" else FIRST_NAMES)
        if needed > most:
            raise ValueError(f"max_turns * max_names_per_turn = {needed}: at most {most} names")
        if self.source == "hub" and self.style == "plain":
            raise ValueError("style = 'plain' has names of its own; take source = 'names'")
        return self

    @property
    def shape(self) -> Shape:
        """The keys that the rules know."""
        return Shape(
            min_turns=self.min_turns,
            max_turns=self.max_turns,
            min_names_per_turn=self.min_names_per_turn,
            max_names_per_turn=self.max_names_per_turn,
            style=self.style,
        )


class AlphabetSortData(vf.TaskData):
    """One conversation; the user opens it, so there is no prompt."""

    user_turns: tuple[str, ...]
    """What the user says in each turn."""
    lists: tuple[tuple[str, ...], ...]
    """The right list of each turn."""
    style: Style
    """Form of the lists."""

    @property
    def sorting(self) -> Sorting:
        return Sorting(self.user_turns, self.lists, self.style)


class AlphabetSortTask(vf.Task[AlphabetSortData, vf.State, AlphabetSortTaskConfig]):
    """One conversation, rated by all its lists."""

    def gold_replies(self) -> list[str]:
        """The right list of each turn."""
        return [self.data.sorting.gold(turn) for turn in range(len(self.data.lists))]

    @vf.reward
    async def sortedness(self, trace: vf.Trace) -> float:
        """Mean similarity of the lists to the right ones, with the configured power."""
        return score(
            _replies(trace),
            self.data.sorting,
            power=self.config.similarity_power,
            power_per_turn=self.config.power_per_turn,
        )

    @vf.metric
    async def right_turns(self, trace: vf.Trace) -> float:
        """Share of the turns with exactly the right list."""
        data = self.data
        pairs = enumerate(zip(_replies(trace), data.lists, strict=False))
        right = [similarity(said, names, turn, data.style) == 1 for turn, (said, names) in pairs]
        return sum(right) / len(data.lists)

    @vf.metric
    async def unreadable_turns(self, trace: vf.Trace) -> float:
        """Share of the turns played whose reply holds no list, or several."""
        replies = _replies(trace)
        unread = [read_list(said, n, self.data.style) is None for n, said in enumerate(replies)]
        return sum(unread) / len(unread) if unread else 0.0


def _replies(trace: vf.Trace) -> list[str]:
    return [str(message.content or "") for message in trace.assistant_messages]


class AlphabetSortEnv(vf.SingleAgentEnv):
    """Says what the script says, turn by turn, until it ends or the model stops."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play one conversation."""
        async with agents.agent.interaction(task) as talk:
            for text in task.data.user_turns:
                if (await talk.turn(text)).terminated:
                    break


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Conversations of the configured side."""

    def load(self) -> Iterable[AlphabetSortTask]:
        """Yield them in the order of their source."""
        config = self.config
        kept = (found for found in self._sortings() if config.keeps("\n".join(found.user_turns)))
        for sorting in islice(kept, config.num_tasks):
            data = AlphabetSortData(
                user_turns=sorting.user_turns, lists=sorting.lists, style=sorting.style
            )
            yield AlphabetSortTask(data, config.task)

    def _sortings(self) -> Iterator[Sorting]:
        config = self.config
        if config.source == "names":
            looked_at = config.num_tasks * _MOST_DRAWS_PER_TASK
            drawn = islice(sortings(config.shape, seed=config.seed), looked_at)
            # As keys of a dict, so that none comes twice and the order stays.
            seen: dict[tuple[str, ...], None] = {}
            for sorting in drawn:
                if sorting.user_turns not in seen:
                    seen[sorting.user_turns] = None
                    yield sorting
            return
        draw = random.Random(f"alphabet-sort hub {config.seed}")
        for row in hub_rows(config.dataset, split=config.dataset_split, columns=["names"]):
            people = list(read_people(row["names"]))
            if len(people) >= config.max_turns * config.max_names_per_turn:
                yield build_sorting(people, draw, config.shape)
