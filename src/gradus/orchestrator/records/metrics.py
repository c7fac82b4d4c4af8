"""The metrics of one step: what counts in which, and when they are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradus.errors import AlarmedError
from gradus.orchestrator.groups.filters import dropped_by
from gradus.orchestrator.play.inference_client import AppliedPolicy
from gradus.orchestrator.records.counts import EpisodeCounts
from gradus.orchestrator.records.health import Alarms
from gradus.orchestrator.records.numbers import Mean, deviation, mean, percentiles
from gradus.orchestrator.types import EpisodeOutcome, Group, PlayedEpisode, Verdict
from gradus.wire.sample import Sample
from gradus.wire.versions import staleness

Metrics = dict[str, float]
TRAINABLE_SHARE = "sample/trainable/share"
"""Of the samples that became final since the last batch, those that no filter dropped."""


class SinceLastBatch(msgspec.Struct):
    """What was counted since the last batch."""

    episodes: dict[str, EpisodeCounts] = {}
    """By source."""
    counts: Counter[str] = msgspec.field(default_factory=Counter)
    """By metric, like `numbers`."""
    numbers: dict[str, Mean] = {}
    judged: int = 0
    """Samples that filters saw."""
    kept: int = 0
    """Of these, those that none dropped."""


class StepCounters:
    """Counts everything between two batches; `take` hands it over and starts again."""

    def __init__(self) -> None:
        self.state = SinceLastBatch()
        self.ended: Counter[tuple[str, EpisodeOutcome]] = Counter()
        """Episodes of this launch by source and by how they ended; `take` leaves them."""

    def add_ended(self, source: str, played: PlayedEpisode) -> None:
        """Count an episode as it ends; for all of a step together the loops would stand still."""
        self.ended[source, played.outcome] += 1
        _ = played.numbers

    def add_group(self, group: Group) -> None:
        """Count the episodes of a final group, and what was dropped of it."""
        state = self.state
        state.episodes.setdefault(group.source, EpisodeCounts()).add(group)
        for name, value in group.numbers.items():
            metric = f"group/{group.source}/{name}/mean"
            state.numbers[metric] = state.numbers.get(metric, Mean(0.0, 0.0)).merge(Mean(value))
        for verdicts in group.verdicts.values():
            state.judged += 1
            state.kept += dropped_by(verdicts) is None
            flagged = [name for name, verdict in verdicts.items() if verdict is Verdict.FLAG]
            state.counts.update(f"sample/{group.source}/flagged/{it}/sum" for it in flagged)

    def add(self, stage: str, source: str, what: str, reason: str = "") -> None:
        """Count once over all sources and once for one, there by its reason where it has one."""
        self.state.counts[f"{stage}/{what}/sum"] += 1
        names = filter(None, (stage, source, what, reason, "sum"))
        self.state.counts["/".join(names)] += 1

    def take(self, sources: Iterable[str] = ()) -> Metrics:
        """All metrics since the last call; one of `sources` that did nothing says so too."""
        state, self.state = self.state, SinceLastBatch()
        total = EpisodeCounts()
        for source in sources:
            state.episodes.setdefault(source, EpisodeCounts())
        found: Metrics = {}
        for source, counts in state.episodes.items():
            total.merge(counts)
            found |= counts.metrics(source)
        found |= total.total_metrics()
        found |= {name: float(count) for name, count in state.counts.items()}
        found |= {name: it.value for name, it in state.numbers.items()}
        if state.judged:
            found[TRAINABLE_SHARE] = state.kept / state.judged
        return found


def batch_metrics(samples: Sequence[Sample], *, step: int) -> Metrics:
    """Size and age of what step `step` trains."""
    ages = [staleness(step, sample.versions) for sample in samples]
    advantages = [float(it.mean()) for sample in samples if len(it := _advantages(sample))]
    spread = {"sample/advantage/std": deviation(advantages)} if advantages else {}
    return {
        **spread,
        **percentiles("sample/advantage", advantages),
        "sample/staleness/max": float(max(ages)),
        "sample/staleness/mean": mean(ages),
        **percentiles("sample/staleness", ages, (50, 95)),
        "batch/samples/sum": float(len(samples)),
        "batch/tokens/sum": float(sum(len(sample) for sample in samples)),
        "batch/trainable_tokens/sum": float(sum(map(_num_trainable, samples))),
    }


def _advantages(sample: Sample) -> NDArray[np.float32]:
    """Of the tokens that may train."""
    chosen: NDArray[np.float32] = sample.arrays.advantages[sample.arrays.loss_mask]
    return chosen


def _num_trainable(sample: Sample) -> int:
    """`sum` of a short array takes ten times as long."""
    return int(np.count_nonzero(sample.arrays.loss_mask))


_TOTALS = {
    "batch/tokens/sum": "batch/tokens/total",
    "batch/samples/sum": "batch/samples/total",
    "episode/ended/sum": "episode/ended/total",
}
"""Sums of a step, and those of the run so far: axes on which runs can be compared."""


class UnfinishedRecords(msgspec.Struct):
    """Without clocks and the engine's counters, which start again after a restart."""

    open: dict[int, Metrics] = {}
    """By step."""
    finished: set[int] = set()
    """Of these, the steps that are trained."""
    applied: set[int] = set()
    """Of these, the steps whose version is served."""
    totals: Metrics = {}
    """What the complete records add up to, by name."""


class PendingStepMetrics:
    """Owns the unfinished records: a step's numbers come from the batch, the trainer and inference.

    A record is complete when the step is trained and the version it made is served, in whichever
    order the trainer says so.
    """

    def __init__(
        self, *, now: float, generated_tokens: int = 0, alarms: Alarms | None = None
    ) -> None:
        """`alarms` look at every complete record, and stand in it."""
        self.alarms = alarms
        self.state = UnfinishedRecords()
        self._last_time = now
        self._last_generated = generated_tokens

    @property
    def alarm_end(self) -> AlarmedError | None:
        """The alarm that ends the run."""
        return None if self.alarms is None else self.alarms.end

    def shipped(self, step: int, metrics: Mapping[str, float]) -> None:
        """The batch of a step is on its way."""
        self.state.open.setdefault(step, {}).update(metrics)

    def held(self, step: int, seconds: float | None) -> None:
        """The version that a step made waited for an evaluation; None without evaluations."""
        if seconds is not None:
            self.shipped(step, {"time/evaluation_hold_seconds": seconds})

    def finished(self, step: int, metrics: Mapping[str, float]) -> Metrics | None:
        """The trainer trained the step; of two metrics with one name, ours is kept."""
        self.state.open[step] = dict(metrics) | self.state.open.get(step, {})
        self.state.finished.add(step)
        return self._take(step)

    def applied(self, policy: AppliedPolicy, *, now: float) -> Metrics | None:
        """Inference serves the version that a step made."""
        step = policy.version - 1
        seconds = max(now - self._last_time, 1e-9)
        generated = policy.status.generated_tokens - self._last_generated
        mine = {
            "weights/version": float(policy.version),
            "weights/apply_seconds": policy.apply_seconds,
            "weights/pause_seconds": policy.pause_seconds,
            "throughput/generated_tokens_per_second": generated / seconds,
            "time/step_seconds": seconds,
        }
        self.state.open[step] = self.state.open.get(step, {}) | mine
        self._last_time = now
        self._last_generated = policy.status.generated_tokens
        self.state.applied.add(step)
        return self._take(step)

    def applied_again(self, policy: AppliedPolicy, *, now: float) -> Metrics | None:
        """A resumed run serves the version of its checkpoint: that may complete a record."""
        is_awaited = policy.version - 1 in self.state.open
        metrics = self.applied(policy, now=now)
        if not is_awaited:
            self.state.open.pop(policy.version - 1, None)
            self.state.applied.discard(policy.version - 1)
        return metrics if is_awaited else None

    def _take(self, step: int) -> Metrics | None:
        if step not in self.state.finished or step not in self.state.applied:
            return None
        self.state.finished.discard(step)
        self.state.applied.discard(step)
        metrics = self.state.open.pop(step)
        for name, total in _TOTALS.items():
            if name in metrics:
                self.state.totals[total] = self.state.totals.get(total, 0.0) + metrics[name]
        metrics |= self.state.totals
        return metrics if self.alarms is None else metrics | self.alarms.add(metrics, step=step)
