"""The metrics of one step: what counts in which, and when they are complete."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradus.orchestrator.algorithms.credit import are_equal
from gradus.orchestrator.groups.filters import dropped_by
from gradus.orchestrator.play.inference_client import AppliedPolicy
from gradus.orchestrator.types import EpisodeOutcome, Group, PlayedEpisode, Verdict
from gradus.wire.sample import Sample
from gradus.wire.versions import staleness

Metrics = dict[str, float]
MAX_NAMES = 200
"""Names of values that one environment may bring into one record."""
TRAINABLE_SHARE = "sample/trainable/share"
"""Of the samples that became final since the last batch, those that no filter dropped."""


@dataclass(frozen=True)
class Mean:
    """A weighted mean in parts that merge in any order; means of means would not."""

    total: float
    """Sum of weight x value."""
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass
class EpisodeCounts:
    """What the episodes of a source did; all that ended count, also those that never train."""

    rewards: list[float] = field(default_factory=list)
    """Of every trainable trace of a finished episode."""
    lengths_tokens: list[int] = field(default_factory=list)
    """Sampled tokens of every finished episode."""
    turns: list[int] = field(default_factory=list)
    """Model turns of every finished episode."""
    num_truncated: int = 0
    """Finished episodes with a trace that a limit cut short."""
    num_cancelled: int = 0
    """Episodes that were given up while they ran."""
    num_dropped: int = 0
    """Finished episodes of which nothing trains."""
    num_flat: int = 0
    """Finished episodes of groups with equal rewards."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed episodes by kind."""
    values: dict[str, Mean] = field(default_factory=dict)
    """Parts of the reward, metrics of the environment and seconds of each stage, by name."""
    num_left_out: int = 0
    """Values whose name was one too many."""
    agents: dict[str, Mean] = field(default_factory=dict)
    """The same by `<agent>/<name>`, and their rewards, where several agents played."""
    is_shared: bool = False
    """Whether several agents trained in one episode: their rewards have no common mean, and those
    of a zero-sum game cancel."""

    def add(self, group: Group) -> None:
        """Count a group whose episodes have ended."""
        self.num_dropped += untrained_episodes(group)
        self.num_flat += len(group.finished) if is_flat(group) else 0
        for played in group.played:
            self.num_cancelled += played.outcome is EpisodeOutcome.CANCELLED
            if played.failure is not None:
                self.errors[played.failure.kind] += 1
            if played.numbers is not None:
                self.rewards += played.numbers.rewards
                self.lengths_tokens.append(played.numbers.length_tokens)
                self.turns.append(played.numbers.num_turns)
                self.num_truncated += played.numbers.is_truncated
                for name, values in played.numbers.values.items():
                    self._add_values(self.values, name, values)
                self.is_shared |= len(set(played.numbers.agents)) > 1
                for agent, named in played.numbers.of_agents.items():
                    for name, values in named.items():
                        self._add_values(self.agents, f"{agent}/{name}", values)

    def _add_values(self, means: dict[str, Mean], name: str, values: Sequence[float]) -> None:
        """A name made of a task's text would give every step thousands of metrics."""
        if name not in means and len(means) >= MAX_NAMES:
            self.num_left_out += len(values)
            return
        before = means.get(name, Mean(0.0, 0.0))
        means[name] = before.merge(Mean(sum(values), len(values)))

    def state(self) -> dict[str, Any]:
        """Everything, as JSON values; a Counter does not survive `dataclasses.asdict`."""
        return {
            "rewards": list(self.rewards),
            "lengths_tokens": list(self.lengths_tokens),
            "turns": list(self.turns),
            "num_truncated": self.num_truncated,
            "num_cancelled": self.num_cancelled,
            "num_dropped": self.num_dropped,
            "num_flat": self.num_flat,
            "errors": dict(self.errors),
            "values": {
                name: [_saved(mean.total), mean.weight] for name, mean in self.values.items()
            },
            "num_left_out": self.num_left_out,
            "agents": {name: [_saved(m.total), m.weight] for name, m in self.agents.items()},
            "is_shared": self.is_shared,
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> EpisodeCounts:
        """What `state()` gave."""
        means = {
            key: {name: Mean(*map(float, mean)) for name, mean in state[key].items()}
            for key in ("values", "agents")
        }
        return cls(**{**state, "errors": Counter(state["errors"]), **means})

    def merge(self, other: EpisodeCounts) -> None:
        """Add the counts of another source; what its environment measured stays its own."""
        self.rewards += [] if other.is_shared else other.rewards
        self.lengths_tokens += other.lengths_tokens
        self.turns += other.turns
        self.num_truncated += other.num_truncated
        self.num_cancelled += other.num_cancelled
        self.num_dropped += other.num_dropped
        self.num_flat += other.num_flat
        self.errors += other.errors

    def metrics(self, prefix: str) -> Metrics:
        """Means over finished episodes, shares of all that ended; absent where nothing counts."""
        num_finished = len(self.turns)
        num_ended = num_finished + self.errors.total()
        found: Metrics = {}
        if self.rewards and not self.is_shared:
            found[f"{prefix}/reward/mean"] = _mean(self.rewards)
        if num_finished:
            found[f"{prefix}/length_tokens/mean"] = _mean(self.lengths_tokens)
            found[f"{prefix}/turns/mean"] = _mean(self.turns)
            found[f"{prefix}/truncated/share"] = self.num_truncated / num_finished
            found[f"{prefix}/dropped/share"] = self.num_dropped / num_finished
            found[f"{prefix}/flat/share"] = self.num_flat / num_finished
        if num_ended:
            found[f"{prefix}/error/share"] = self.errors.total() / num_ended
        if self.num_cancelled:
            found[f"{prefix}/cancelled/sum"] = float(self.num_cancelled)
        for kind, count in self.errors.items():
            found[f"{prefix}/error/{kind}/sum"] = float(count)
        for name, mean in self.values.items():
            if not (self.is_shared and name.startswith("reward/")):
                found[f"{prefix}/{name}/mean"] = mean.value
        for name, mean in self.agents.items():
            found[f"{prefix}/agent/{name}/mean"] = mean.value
        if self.num_left_out:
            found[f"{prefix}/names_left_out/sum"] = float(self.num_left_out)
        return found


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
        finished = {
            played.id for played in group.played if played.outcome is EpisodeOutcome.FINISHED
        }
        for verdicts in group.verdicts.values():
            self._judged += 1
            self._kept += dropped_by(verdicts) is None
            flagged = [name for name, verdict in verdicts.items() if verdict is Verdict.FLAG]
            self._counts.update(f"sample/{group.source}/flagged/{name}/sum" for name in flagged)
        for dropped_id, reason in group.dropped.items():
            # Failures are counted as errors of episodes, not as dropped samples.
            if dropped_id in finished or "/" in dropped_id:
                self._counts["sample/dropped/sum"] += 1
                self._counts[f"sample/{group.source}/dropped/{reason}/sum"] += 1

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
            "numbers": {
                name: [_saved(mean.total), mean.weight] for name, mean in self._numbers.items()
            },
            "judged": self._judged,
            "kept": self._kept,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._counts = Counter(state["counts"])
        self._numbers = {name: Mean(*map(float, m)) for name, m in state["numbers"].items()}
        self._judged = int(state["judged"])
        self._kept = int(state["kept"])
        self._episodes = {
            source: EpisodeCounts.load(counts) for source, counts in state["episodes"].items()
        }

    def take(self) -> Metrics:
        """All metrics since the last call."""
        total = EpisodeCounts()
        found: Metrics = {"sample/dropped/sum": 0.0}
        for source, counts in self._episodes.items():
            total.merge(counts)
            found |= counts.metrics(f"episode/{source}")
        found |= total.metrics("episode")
        found |= {name: float(count) for name, count in self._counts.items()}
        found |= {name: mean.value for name, mean in self._numbers.items()}
        if self._judged:
            found[TRAINABLE_SHARE] = self._kept / self._judged
        self._episodes = {}
        self._counts = Counter()
        self._numbers = {}
        self._judged = self._kept = 0
        return found


def is_flat(group: Group) -> bool:
    """Whether all its finished episodes, two or more, have the same reward.

    Agents are compared each with itself: in a zero-sum game the mean of all is always 0.
    """
    rewards = [p.numbers.rewards for p in group.played if p.numbers is not None]
    if len(rewards) < 2 or len({len(of_traces) for of_traces in rewards}) > 1:
        return False
    return all(are_equal(of_agent) for of_agent in zip(*rewards, strict=True))


def untrained_episodes(group: Group) -> int:
    """How many finished episodes gave no sample that trains."""
    kept = {sample.episode_id for sample in group.samples if sample.id not in group.dropped}
    return sum(played.id not in kept for played, _ in group.finished)


def batch_metrics(samples: Sequence[Sample], *, step: int) -> Metrics:
    """Size and age of what step `step` trains."""
    ages = [staleness(step, sample.versions) for sample in samples]
    return {
        "sample/staleness/max": float(max(ages)),
        "sample/staleness/mean": _mean(ages),
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

    def __init__(self, *, now: float, generated_tokens: int = 0) -> None:
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
                str(step): {name: _saved(value) for name, value in metrics.items()}
                for step, metrics in self._open.items()
            },
            "finished": sorted(self._finished & self._open.keys()),
            "applied": sorted(self._applied & self._open.keys()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._open = {
            int(step): {name: float(value) for name, value in metrics.items()}
            for step, metrics in state["open"].items()
        }
        self._finished = set(state["finished"])
        self._applied = set(state["applied"])

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
        return self._open.pop(step)


def _mean(values: Iterable[float]) -> float:
    chosen = list(values)
    return sum(chosen) / len(chosen)


def _saved(value: float) -> float | str:
    """JSON has no number for what is not finite: a metric that is not becomes text, as "nan"."""
    return float(value) if math.isfinite(value) else str(float(value))
