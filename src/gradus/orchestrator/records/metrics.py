"""The metrics of one step: what counts in which, and when they are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gradus.orchestrator.groups.filters import dropped_by
from gradus.orchestrator.play.inference_client import AppliedPolicy
from gradus.orchestrator.records.counts import EpisodeCounts
from gradus.orchestrator.records.health import Alarms
from gradus.orchestrator.records.numbers import (
    Mean,
    load_means,
    mean,
    percentiles,
    savable,
    saved_means,
)
from gradus.orchestrator.types import EpisodeOutcome, Group, PlayedEpisode, Verdict
from gradus.wire.sample import Sample
from gradus.wire.versions import staleness

Metrics = dict[str, float]
TRAINABLE_SHARE = "sample/trainable/share"
"""Of the samples that became final since the last batch, those that no filter dropped."""


class StepCounters:
    """Counts everything between two batches; `take` hands it over and starts again."""

    def __init__(self) -> None:
        self._episodes: dict[str, EpisodeCounts] = {}
        self._counts: Counter[str] = Counter()
        self._numbers: dict[str, Mean] = {}
        self._judged = 0
        self._kept = 0
        self.ended: Counter[tuple[str, EpisodeOutcome]] = Counter()
        """Episodes of this launch by source and by how they ended; `take` leaves them."""

    def add_ended(self, source: str, played: PlayedEpisode) -> None:
        """Count an episode as it ends; for all of a step together the loops would stand still."""
        self.ended[source, played.outcome] += 1
        _ = played.numbers

    def add_group(self, group: Group) -> None:
        """Count the episodes of a final group, and what was dropped of it."""
        self._episodes.setdefault(group.source, EpisodeCounts()).add(group)
        for name, value in group.numbers.items():
            metric = f"group/{group.source}/{name}/mean"
            self._numbers[metric] = self._numbers.get(metric, Mean(0.0, 0.0)).merge(Mean(value))
        for verdicts in group.verdicts.values():
            self._judged += 1
            self._kept += dropped_by(verdicts) is None
            flagged = [name for name, verdict in verdicts.items() if verdict is Verdict.FLAG]
            self._counts.update(f"sample/{group.source}/flagged/{name}/sum" for name in flagged)

    def add_abandoned(self, source: str, reason: str) -> None:
        """A group was given up while it ran."""
        self._counts["group/abandoned/sum"] += 1
        self._counts[f"group/{source}/abandoned/{reason}/sum"] += 1

    def add_retried(self, source: str, kind: str) -> None:
        """An episode failed with an error that is worth another attempt."""
        self._counts["episode/retried/sum"] += 1
        self._counts[f"episode/{source}/retried/{kind}/sum"] += 1

    def add_given_up(self, source: str) -> None:
        """A task was too slow every time; it is drawn again only when its turn comes."""
        self._counts["task/given_up/sum"] += 1
        self._counts[f"task/{source}/given_up/sum"] += 1

    def add_set_aside(self, source: str, reason: str) -> None:
        """A task cannot be played, and is not drawn again."""
        self._counts["task/set_aside/sum"] += 1
        self._counts[f"task/{source}/set_aside/{reason}/sum"] += 1

    def add_dropped(self, source: str) -> None:
        """A group was played to its end and trains nothing; its samples say why."""
        self._counts["group/dropped/sum"] += 1
        self._counts[f"group/{source}/dropped/sum"] += 1

    def state(self) -> dict[str, Any]:
        """What was counted since the last batch."""
        return {
            "episodes": {source: counts.state() for source, counts in self._episodes.items()},
            "counts": dict(self._counts),
            "numbers": saved_means(self._numbers),
            "judged": self._judged,
            "kept": self._kept,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._counts = Counter(state["counts"])
        self._numbers = load_means(state["numbers"])
        self._judged = int(state["judged"])
        self._kept = int(state["kept"])
        self._episodes = {
            source: EpisodeCounts.load(counts) for source, counts in state["episodes"].items()
        }

    def take(self, sources: Iterable[str] = ()) -> Metrics:
        """All metrics since the last call; one of `sources` that did nothing says so too."""
        total = EpisodeCounts()
        for source in sources:
            self._episodes.setdefault(source, EpisodeCounts())
        found: Metrics = {}
        for source, counts in self._episodes.items():
            total.merge(counts)
            found |= counts.metrics(source)
        found |= total.total_metrics()
        found |= {name: float(count) for name, count in self._counts.items()}
        found |= {name: it.value for name, it in self._numbers.items()}
        if self._judged:
            found[TRAINABLE_SHARE] = self._kept / self._judged
        self._episodes = {}
        self._counts = Counter()
        self._numbers = {}
        self._judged = self._kept = 0
        return found


def batch_metrics(samples: Sequence[Sample], *, step: int) -> Metrics:
    """Size and age of what step `step` trains."""
    ages = [staleness(step, sample.versions) for sample in samples]
    return {
        "sample/staleness/max": float(max(ages)),
        "sample/staleness/mean": mean(ages),
        **percentiles("sample/staleness", ages, (50, 95)),
        "batch/samples/sum": float(len(samples)),
        "batch/tokens/sum": float(sum(len(sample) for sample in samples)),
        "batch/trainable_tokens/sum": float(sum(map(_num_trainable, samples))),
    }


def _num_trainable(sample: Sample) -> int:
    """`sum` of a short array takes ten times as long."""
    return int(np.count_nonzero(sample.arrays.loss_mask))


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
        self._open: dict[int, Metrics] = {}
        self._finished: set[int] = set()
        self._applied: set[int] = set()
        self._last_time = now
        self._last_generated = generated_tokens

    def shipped(self, step: int, metrics: Mapping[str, float]) -> None:
        """The batch of a step is on its way."""
        self._open.setdefault(step, {}).update(metrics)

    def held(self, step: int, seconds: float | None) -> None:
        """The version that a step made waited for an evaluation; None without evaluations."""
        if seconds is not None:
            self.shipped(step, {"time/evaluation_hold_seconds": seconds})

    def finished(self, step: int, metrics: Mapping[str, float]) -> Metrics | None:
        """The trainer trained the step; of two metrics with one name, ours is kept."""
        self._open[step] = dict(metrics) | self._open.get(step, {})
        self._finished.add(step)
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
        self._open[step] = self._open.get(step, {}) | mine
        self._last_time = now
        self._last_generated = policy.status.generated_tokens
        self._applied.add(step)
        return self._take(step)

    def state(self) -> dict[str, Any]:
        """The unfinished records, without clocks and the engine's counters, which start again."""
        return {
            "open": {
                str(step): {name: savable(value) for name, value in metrics.items()}
                for step, metrics in self._open.items()
            },
            "finished": sorted(self._finished & self._open.keys()),
            "applied": sorted(self._applied & self._open.keys()),
            "alarms": {} if self.alarms is None else self.alarms.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._open = {
            int(step): {name: float(value) for name, value in metrics.items()}
            for step, metrics in state["open"].items()
        }
        self._finished = set(state["finished"])
        self._applied = set(state["applied"])
        if self.alarms is not None:
            self.alarms.load_state(state["alarms"])

    def applied_again(self, policy: AppliedPolicy, *, now: float) -> Metrics | None:
        """A resumed run serves the version of its checkpoint: that may complete a record."""
        is_awaited = policy.version - 1 in self._open
        metrics = self.applied(policy, now=now)
        if not is_awaited:
            self._open.pop(policy.version - 1, None)
        return metrics if is_awaited else None

    def _take(self, step: int) -> Metrics | None:
        if step not in self._finished or step not in self._applied:
            return None
        self._finished.discard(step)
        self._applied.discard(step)
        metrics = self._open.pop(step)
        return metrics if self.alarms is None else metrics | self.alarms.add(metrics, step=step)
