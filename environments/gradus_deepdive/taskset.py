"""The taskset `deepdive`: chains of three to five articles, rated also by what was read."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import Field

from gradus_wiki_search.taskset import (
    WikiSearchConfig,
    WikiSearchData,
    WikiSearchTask,
    WikiSearchTaskset,
    WikiTools,
)


class DeepDiveTaskConfig(vf.TaskConfig):
    """What a search is worth that did not end with the answer."""

    evidence_weight: float = Field(0.2, ge=0.0, le=0.5)
    """Reward for reading all the articles that lead to the answer, in a reply that misses it."""


class DeepDiveConfig(WikiSearchConfig):
    """As `wiki-search`, with longer chains."""

    min_hops: int = Field(3, ge=1)
    """Fewest articles that one must read."""
    max_hops: int = Field(5, ge=1, le=6)
    """Most articles that one must read."""
    task: DeepDiveTaskConfig = DeepDiveTaskConfig()


class DeepDiveTask(WikiSearchTask, vf.Task[WikiSearchData, vf.State, DeepDiveTaskConfig]):
    """One question at the end of a chain."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """1 for the right answer; else a part for the share of the chain that was read."""
        if await self.correct(trace):
            return 1.0
        return self.config.evidence_weight * await self.evidence(trace)

    @vf.metric
    async def correct(self, trace: vf.Trace) -> float:
        """1 for the right answer, which is no reward by itself."""
        return await super().correct(trace)


class DeepDiveTaskset(vf.Taskset[DeepDiveTask, DeepDiveConfig]):
    """Questions of the configured side, with long chains."""

    def load(self) -> Iterable[DeepDiveTask]:
        for task in WikiSearchTaskset(self.config).load():
            yield DeepDiveTask(task.data, self.config.task)

    @classmethod
    def toolsets(cls, config: DeepDiveConfig) -> list[vf.Toolset]:
        return [WikiTools(config.tools)]
