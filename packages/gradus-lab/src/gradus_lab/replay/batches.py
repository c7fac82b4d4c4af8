"""Makes batches again from recorded episodes, with the code that made them first.

Credit, samples, filters, staleness and order are computed again; each result is compared with the
journal, and the first difference ends the replay.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from gradus.config import RunProcessConfig
from gradus.errors import CorruptStateError, ReplayError
from gradus.orchestrator.groups.batcher import ReadyGroup, SampleBatch, build_batcher
from gradus.orchestrator.groups.grading import SourceGrader, build_grader
from gradus.orchestrator.groups.packing import digest_samples, first_difference
from gradus.orchestrator.types import Group, Task
from gradus_lab.replay.journal_reader import CutBatch, Decision, GradedGroup
from gradus_lab.replay.recording import RecordedEpisodes

_SHOWN_IDS = 4


class BatchMaker:
    """Owns the algorithms' state and the queue of ready groups of a replay."""

    def __init__(self, config: RunProcessConfig, episodes: RecordedEpisodes) -> None:
        """`config` is the recorded orchestrator's."""
        self._episodes = episodes
        self._frozen = {source.name for source in config.sources if source.is_frozen}
        # Reference models were asked when the episodes ended; their answers are on the episodes.
        self._graders: Mapping[str, SourceGrader] = {
            source.name: build_grader(config, source) for source in config.sources
        }
        self._batcher = build_batcher(config)
        self._groups_per_batch = config.orchestrator.groups_per_batch

    async def make(self, decisions: Iterable[Decision]) -> AsyncIterator[SampleBatch]:
        """Every batch in step order; ReplayError at the first that is not the recorded one."""
        for decision in decisions:
            if isinstance(decision, GradedGroup):
                self._grade(decision)
            else:
                yield await self._cut(decision)

    def _grade(self, decision: GradedGroup) -> None:
        group = Group(decision.id, decision.pointer, Task({}, decision.task_key))
        group.played += [self._episodes.load(episode) for episode in decision.episodes]
        if group.source not in self._graders:
            raise CorruptStateError(
                f"the journal opens group {group.id} for source {group.source!r}, which the "
                f"recorded config does not have, only {sorted(self._graders)}; one of the two is "
                "damaged"
            )
        self._graders[group.source].grade(group)
        if decision.failure is not None:
            # A deadline or a curriculum failed it, which the credit does not show.
            group.samples.clear()
        found = [sample.id for sample in group.samples]
        if found != list(decision.samples):
            raise ReplayError(
                f"group {group.id}: the replay keeps {_few(found)}, the run kept "
                f"{_few(decision.samples)}; the algorithm or a filter decides otherwise now"
            )
        if group.samples:
            is_frozen = group.source in self._frozen
            self._batcher.add(ReadyGroup(group.id, tuple(group.samples), is_frozen))

    async def _cut(self, decision: CutBatch) -> SampleBatch:
        waiting = [group.id for group in self._batcher.ready]
        if len(waiting) < self._groups_per_batch:
            raise ReplayError(
                f"batch {decision.step}: only {_few(waiting)} wait in the replay, the run cut "
                f"{_few(decision.groups)}"
            )
        batch = await self._batcher.next_batch()
        assert batch is not None
        self._batcher.drop_stale()
        check_batch(batch, decision)
        return batch


def check_batch(batch: SampleBatch, recorded: CutBatch) -> None:
    """ReplayError that names the first thing in which a batch differs from the recorded one."""
    found = [sample.id for sample in batch.samples]
    if batch.step != recorded.step or found != list(recorded.samples):
        raise ReplayError(
            f"batch {recorded.step}: the replay cut {_few(found)} for step {batch.step}, the run "
            f"trained {_few(recorded.samples)}"
        )
    field = first_difference(recorded.digests, digest_samples(batch.samples))
    if field is not None:
        raise ReplayError(
            f"batch {recorded.step}: `{field}` differs from the recorded batch; the samples are "
            "the same, so the code or a config that computes this field is not"
        )


def _few(ids: Sequence[str]) -> str:
    """The first ids and the number of all, for a message."""
    shown = ", ".join(ids[:_SHOWN_IDS])
    return f"{len(ids)} ({shown}{', ...' if len(ids) > _SHOWN_IDS else ''})" if ids else "nothing"
