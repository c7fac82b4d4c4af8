"""What the episodes of one source did between two batches, and the metrics that it comes to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from verifiers.v1.trace import WireTrace

from gradus.orchestrator.algorithms.credit import are_equal
from gradus.orchestrator.groups.samples import TRAINED, token_fates
from gradus.orchestrator.records.numbers import MAX_NAMES, Mean, deviation, mean, percentiles
from gradus.orchestrator.traces import num_quarantined, trainable_traces, weighted_parts
from gradus.orchestrator.types import EpisodeNumbers, EpisodeOutcome, Group

LEAST_VARIANCE = 1e-12
"""Below it, equal rewards differ by rounding."""


@dataclass
class EpisodeCounts:
    """What the episodes of a source did; all that ended count, also those that never train."""

    rewards: list[float] = field(default_factory=list)
    """Of every trainable trace of a finished episode."""
    lengths_tokens: list[int] = field(default_factory=list)
    """Sampled tokens of every finished episode."""
    turns: list[int] = field(default_factory=list)
    """Model turns of every finished episode."""
    prompts_tokens: list[int] = field(default_factory=list)
    """What each trainable trace of a finished episode began with."""
    stops: Counter[str] = field(default_factory=Counter)
    """What ended these traces."""
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_truncated: int = 0
    """Finished episodes with a trace that a limit cut short."""
    num_cancelled: int = 0
    """Episodes that were given up while they ran."""
    num_dropped: int = 0
    """Finished episodes of which nothing trains."""
    num_flat: int = 0
    """Finished episodes of groups with equal rewards."""
    num_groups: int = 0
    """Groups with two finished episodes or more."""
    num_flat_groups: int = 0
    """Of these, those with equal rewards."""
    num_all_bad_groups: int = 0
    """Of these, those in which nobody earned more than 0."""
    num_kept_samples: int = 0
    """Samples that train."""
    dropped_samples: Counter[str] = field(default_factory=Counter)
    """Samples that do not, and finished episodes without one, by reason."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed episodes by kind."""
    values: dict[str, Mean] = field(default_factory=dict)
    """Parts of the reward and metrics of the environment, by name."""
    covariances: dict[str, Mean] = field(default_factory=dict)
    """Of each part of the reward with the whole, inside groups, of all traces that have parts."""
    num_quarantined: int = 0
    """Model turns that the environment could not read."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens by what became of them: trained, or why not."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of each stage of every finished episode, by name."""
    num_left_out: int = 0
    """Values whose name was one too many."""
    agents: dict[str, Mean] = field(default_factory=dict)
    """Rewards, their parts and metrics by `<agent>/<name>`, where several agents played."""
    agents_played: Counter[str] = field(default_factory=Counter)
    """Finished episodes of each of these agents."""
    agents_trained: Counter[str] = field(default_factory=Counter)
    """Of these, those in which it trains."""
    is_shared: bool = False
    """Whether several agents trained in one episode: their rewards have no common mean, and those
    of a zero-sum game cancel."""

    def add(self, group: Group) -> None:
        is_equal = is_flat(group)
        self.num_dropped += untrained_episodes(group)
        self.num_flat += len(group.finished) if is_equal else 0
        self.num_groups += len(group.finished) > 1
        self.num_flat_groups += is_equal
        self.num_all_bad_groups += is_equal and max(_earned(group)) <= 0
        self._add_samples(group)
        traces = trainable_traces(group.finished_episodes)
        self.num_quarantined += sum(map(num_quarantined, traces))
        for fate, number in token_fates(group).items():
            is_new = fate not in self.tokens and len(self.tokens) >= MAX_NAMES
            self.tokens["other" if is_new else fate] += number
        for name, covariance in part_covariances(traces).items():
            self._add_values(self.covariances, name, (covariance,))
        for played in group.played:
            self.num_cancelled += played.outcome is EpisodeOutcome.CANCELLED
            if played.failure is not None:
                self.errors[played.failure.kind] += 1
            if played.numbers is not None:
                self._add_finished(played.numbers)

    def _add_samples(self, group: Group) -> None:
        """Failures are counted as errors of episodes, not as dropped samples."""
        finished = {played.id for played, _ in group.finished}
        self.num_kept_samples += sum(it.id not in group.dropped for it in group.samples)
        self.dropped_samples.update(
            reason for of, reason in group.dropped.items() if of in finished or "/" in of
        )

    def _add_finished(self, numbers: EpisodeNumbers) -> None:
        self.rewards += numbers.rewards
        self.lengths_tokens.append(numbers.length_tokens)
        self.turns.append(numbers.num_turns)
        self.num_truncated += numbers.is_truncated
        self.prompts_tokens += numbers.prompt_tokens
        self.num_tool_calls += len(numbers.tool_failures)
        self.num_tool_errors += sum(numbers.tool_failures)
        known = (it for it in numbers.stops if it in self.stops or len(self.stops) < MAX_NAMES)
        self.stops.update(known)
        for name, values in numbers.values.items():
            if name.endswith("_seconds") and "/" not in name:
                self.seconds.setdefault(name, []).extend(values)
            else:
                self._add_values(self.values, name, values)
        trained = set(numbers.agents)
        self.is_shared |= len(trained) > 1
        for agent, named in numbers.of_agents.items():
            self.agents_played[agent] += 1
            self.agents_trained[agent] += agent in trained
            for name, values in named.items():
                self._add_values(self.agents, f"{agent}/{name}", values)

    def _add_values(self, means: dict[str, Mean], name: str, values: Sequence[float]) -> None:
        """A name made of a task's text would give every step thousands of metrics."""
        if name not in means and len(means) >= MAX_NAMES:
            self.num_left_out += len(values)
            return
        before = means.get(name, Mean(0.0, 0.0))
        means[name] = before.merge(Mean(sum(values), len(values)))

    def merge(self, other: EpisodeCounts) -> None:
        """Add the counts of another source; what its environment measured stays its own."""
        self.rewards += [] if other.is_shared else other.rewards
        self.lengths_tokens += other.lengths_tokens
        self.turns += other.turns
        self.prompts_tokens += other.prompts_tokens
        self.errors += other.errors
        self.dropped_samples += other.dropped_samples
        self.tokens += other.tokens
        for name in (
            *("num_truncated", "num_cancelled", "num_dropped", "num_flat"),
            *("num_groups", "num_flat_groups", "num_kept_samples", "num_quarantined"),
            *("num_all_bad_groups", "num_tool_calls", "num_tool_errors"),
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def total_metrics(self) -> dict[str, float]:
        """Of all sources together."""
        common = {
            **self._episodes("episode"),
            "sample/dropped/sum": float(self.dropped_samples.total()),
        }
        return common | self._flat_groups("group")

    def metrics(self, source: str) -> dict[str, float]:
        """Of one source. Means over finished episodes, shares of all that ended; absent where
        nothing counts."""
        found = self._episodes(f"episode/{source}") | self._flat_groups(f"group/{source}")
        total = max(self.tokens.total(), 1)
        untrained = {fate: number for fate, number in self.tokens.items() if fate != TRAINED}
        found |= {
            f"episode/{source}/tokens/untrained/{reason}/share": number / total
            for reason, number in untrained.items()
        }
        return found | self._samples(f"sample/{source}") | self._measured(f"episode/{source}")

    def _episodes(self, prefix: str) -> dict[str, float]:
        num_finished = len(self.turns)
        num_ended = num_finished + self.errors.total()
        found = {f"{prefix}/ended/sum": float(num_ended)}
        if self.rewards and not self.is_shared:
            found[f"{prefix}/reward/mean"] = mean(self.rewards)
            found |= percentiles(f"{prefix}/reward", self.rewards)
            found[f"{prefix}/reward/std"] = deviation(self.rewards)
        if num_finished:
            found[f"{prefix}/length_tokens/mean"] = mean(self.lengths_tokens)
            found |= percentiles(f"{prefix}/length_tokens", self.lengths_tokens)
            found[f"{prefix}/turns/mean"] = mean(self.turns)
            found |= percentiles(f"{prefix}/turns", self.turns, (95,))
            found |= percentiles(f"{prefix}/prompt_tokens", self.prompts_tokens)
            found[f"{prefix}/truncated/share"] = self.num_truncated / num_finished
            found[f"{prefix}/dropped/share"] = self.num_dropped / num_finished
            found[f"{prefix}/flat/share"] = self.num_flat / num_finished
        if self.num_tool_calls:
            found[f"{prefix}/tool_calls/mean"] = self.num_tool_calls / num_finished
            found[f"{prefix}/tool_error/share"] = self.num_tool_errors / self.num_tool_calls
        if num_turns := sum(self.turns):
            found[f"{prefix}/quarantined/share"] = self.num_quarantined / num_turns
        if num_tokens := self.tokens.total():
            found[f"{prefix}/tokens/sampled/sum"] = float(num_tokens)
            found[f"{prefix}/tokens/trained/share"] = self.tokens[TRAINED] / num_tokens
        if num_ended:
            found[f"{prefix}/error/share"] = self.errors.total() / num_ended
        if self.num_cancelled:
            found[f"{prefix}/cancelled/sum"] = float(self.num_cancelled)
        for kind, count in self.errors.items():
            found[f"{prefix}/error/{kind}/sum"] = float(count)
            found[f"{prefix}/error/{kind}/share"] = count / num_ended
        return found

    def _flat_groups(self, prefix: str) -> dict[str, float]:
        if not self.num_groups:
            return {}
        num_good = self.num_flat_groups - self.num_all_bad_groups
        return {
            f"{prefix}/flat/share": self.num_flat_groups / self.num_groups,
            f"{prefix}/all_bad/share": self.num_all_bad_groups / self.num_groups,
            f"{prefix}/all_good/share": num_good / self.num_groups,
        }

    def _samples(self, prefix: str) -> dict[str, float]:
        total = self.num_kept_samples + self.dropped_samples.total()
        found = {}
        for reason, count in self.dropped_samples.items():
            found[f"{prefix}/dropped/{reason}/sum"] = float(count)
            found[f"{prefix}/dropped/{reason}/share"] = count / total
        return found

    def _measured(self, prefix: str) -> dict[str, float]:
        found = {}
        for name, it in self.values.items():
            if not (self.is_shared and name.startswith("reward/")):
                found[f"{prefix}/{name}/mean"] = it.value
        variance = sum(it.total for it in self.covariances.values())
        if LEAST_VARIANCE < variance < math.inf and not self.is_shared:
            for name, it in self.covariances.items():
                found[f"{prefix}/reward/{name}/variance_share"] = it.total / variance
        for stop, count in self.stops.items():
            found[f"{prefix}/stop/{stop}/share"] = count / self.stops.total()
        for stage, seconds in self.seconds.items():
            found[f"{prefix}/{stage}/mean"] = mean(seconds)
            found |= percentiles(f"{prefix}/{stage}", seconds, (50, 95))
        for name, it in self.agents.items():
            found[f"{prefix}/agent/{name}/mean"] = it.value
        for agent, count in self.agents_played.items():
            share = self.agents_trained[agent] / count
            found[f"{prefix}/agent/{agent}/trained/share"] = share
        if self.num_left_out:
            found[f"{prefix}/names_left_out/sum"] = float(self.num_left_out)
        return found


def _earned(group: Group) -> list[float]:
    return [reward for p in group.played if p.numbers for reward in p.numbers.rewards] or [0.0]


def is_flat(group: Group) -> bool:
    """Whether all its finished episodes, two or more, have the same reward.

    Agents are compared each with itself: in a zero-sum game the mean of all is always 0.
    """
    rewards = [p.numbers.rewards for p in group.played if p.numbers is not None]
    if len(rewards) < 2 or len({len(of_traces) for of_traces in rewards}) > 1:
        return False
    return all(are_equal(of_agent) for of_agent in zip(*rewards, strict=True))


def part_covariances(traces: Sequence[WireTrace]) -> dict[str, float]:
    """By part, the sum over a group's traces of its distance from its mean times that of the
    reward; empty where the reward has one part, or several agents have it.
    """
    rows = [row for row in map(weighted_parts, traces) if row]
    names = dict.fromkeys(name for row in rows for name in row)
    if len(rows) < 2 or len(names) < 2 or len({trace.agent.name for trace in traces}) > 1:
        return {}
    rewards = [sum(row.values()) for row in rows]
    middle = mean(rewards)
    return {
        name: sum(row.get(name, 0.0) * (r - middle) for row, r in zip(rows, rewards, strict=True))
        for name in names
    }


def untrained_episodes(group: Group) -> int:
    """How many finished episodes gave no sample that trains."""
    kept = {sample.episode_id for sample in group.samples if sample.id not in group.dropped}
    return sum(played.id not in kept for played, _ in group.finished)
