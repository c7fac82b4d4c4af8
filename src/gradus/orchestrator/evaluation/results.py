"""What an evaluation found: avg@k, pass@k, pass^k, errors and lengths, exact (pure).

Of one task with n episodes of which c were solved, for k of them drawn without putting back:

    avg@k    mean reward, here over all n: the k in the name is the number of episodes per task
    pass@k   1 - C(n-c, k) / C(n, k)   at least one of the k is solved (Chen et al. 2021)
    pass^k   C(c, k) / C(n, k)         all of the k are solved (Yao et al. 2024, tau-bench)

Both are unbiased, and only defined for rewards of 0 or 1, up to rounding. An episode with an error
has no reward; it counts in the error share and nowhere else, so a broken endpoint does not look
like a bad model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite

from gradus.monitor.statistics import pass_all_k, pass_at_k
from gradus.orchestrator.algorithms.credit import are_equal
from gradus.orchestrator.records.numbers import MAX_NAMES, percentiles

_Estimate = Callable[[int, int, int], float]


@dataclass(frozen=True)
class EpisodeScore:
    """What one episode of an evaluation contributes."""

    task: int
    """Index of the task in its environment."""
    reward: float | None = None
    """None when the episode ended with an error."""
    error: str | None = None
    """Kind of that error, e.g. "ProviderError"."""
    length_tokens: int = 0
    """Tokens that the model wrote."""
    is_truncated: bool = False
    """Whether a limit cut the episode short."""
    values: Mapping[str, float] = field(default_factory=dict)
    """What its environment measured, by name, also as `agent/<agent>/<name>` where several agents
    played; a mean over the traces."""
    is_shared: bool = False
    """Whether the reward is a mean over several agents: that of a zero-sum game says nothing."""


@dataclass(frozen=True)
class EnvironmentResult:
    """The numbers of one environment, or of all of them together. None means: not known (yet)."""

    num_episodes: int
    """Episodes that ended, with or without an error."""
    num_tasks: int
    """Tasks with at least one episode without error; the means are over these."""
    group_size: int | None
    """Episodes per task that were asked for: the k of avg@k. None for environments together that
    differ in it."""
    avg: float | None
    """Mean over tasks of the mean reward of a task. None also where `is_shared`."""
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """k → pass@k; empty unless every reward is 0 or 1."""
    pass_all: Mapping[int, float] = field(default_factory=dict)
    """k → pass^k; empty unless every reward is 0 or 1."""
    is_binary: bool = True
    """Whether every reward so far is 0 or 1."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Kind of error → episodes."""
    error_share: float | None = None
    """Of all episodes that ended."""
    truncated_share: float | None = None
    """Of the episodes without error."""
    mean_length_tokens: float | None = None
    """Of the episodes without error."""
    values: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured, by name: means over the episodes that have it. Empty for
    environments together."""
    percentiles: Mapping[str, float] = field(default_factory=dict)
    """Of the lengths and of the seconds of each stage, as `<name>/p95`. Empty as `values`."""
    num_left_out: int = 0
    """Names of values beyond MAX_NAMES."""
    is_shared: bool = False
    """Whether several agents are measured at once: then rewards are told by agent."""


def shown_ks(group_size: int) -> list[int]:
    """The k that are reported: powers of two up to the group size, and the group size.

    >>> shown_ks(6)
    [1, 2, 4, 6]
    """
    powers = [1 << exponent for exponent in range(group_size.bit_length())]
    return powers if powers[-1] == group_size else [*powers, group_size]


def evaluate(scores: Iterable[EpisodeScore], *, group_size: int) -> EnvironmentResult:
    """The numbers of one environment, from the episodes that ended so far.

    pass@k and pass^k are means over the tasks with at least k episodes without error.
    """
    ended = list(scores)
    rewards = _by_task(ended)
    finished = [score for score in ended if score.reward is not None]
    errors = Counter(score.error or "unknown" for score in ended if score.reward is None)
    is_shared = any(score.is_shared for score in finished)
    is_binary = all(_is_zero_or_one(score.reward) for score in finished)
    groups = list(rewards.values()) if is_binary and not is_shared else []
    values = _gathered(score.values for score in finished)
    kept = dict(list(values.items())[:MAX_NAMES])
    return EnvironmentResult(
        num_episodes=len(ended),
        num_tasks=len(rewards),
        group_size=group_size,
        avg=None if is_shared else _mean(mean_rewards(ended)),
        pass_at=_by_k(groups, group_size, pass_at_k),
        pass_all=_by_k(groups, group_size, pass_all_k),
        is_binary=is_binary,
        errors=dict(errors.most_common()),
        error_share=_mean([score.reward is None for score in ended]),
        truncated_share=_mean([score.is_truncated for score in finished]),
        mean_length_tokens=_mean([score.length_tokens for score in finished]),
        values=_means(kept, is_shared=is_shared),
        percentiles={
            **percentiles("length_tokens", [score.length_tokens for score in finished]),
            **_percentiles_of_stages(kept),
        },
        num_left_out=len(values) - len(kept),
        is_shared=is_shared,
    )


def mean_rewards(scores: Iterable[EpisodeScore]) -> list[float]:
    """The mean reward of each task that has one."""
    return [fsum(rewards) / len(rewards) for rewards in _by_task(scores).values()]


def _by_task(scores: Iterable[EpisodeScore]) -> dict[int, list[float]]:
    rewards: dict[int, list[float]] = defaultdict(list)
    for score in scores:
        if score.reward is not None:
            rewards[score.task].append(score.reward)
    return rewards


def combine(results: Sequence[EnvironmentResult]) -> EnvironmentResult:
    """All environments as one: avg, pass@k and pass^k are means over environments, each counting
    the same however many tasks it has; the other numbers are over all episodes.

    An environment in which every episode failed has no mean, so that all together have none. One
    that measures several agents at once has none of its own, and counts in the other numbers.
    """
    begun = [result for result in results if result.num_episodes and not result.is_shared]
    known = [] if any(result.avg is None for result in begun) else begun
    errors: Counter[str] = Counter()
    for result in results:
        errors.update(result.errors)
    num_episodes = sum(result.num_episodes for result in results)
    sizes = {result.group_size for result in results}
    return EnvironmentResult(
        num_episodes=num_episodes,
        num_tasks=sum(result.num_tasks for result in results),
        group_size=sizes.pop() if len(sizes) == 1 else None,
        avg=_mean([result.avg for result in known if result.avg is not None]),
        pass_at=_common([result.pass_at for result in known]),
        pass_all=_common([result.pass_all for result in known]),
        is_binary=all(result.is_binary for result in results),
        errors=dict(errors.most_common()),
        error_share=errors.total() / num_episodes if num_episodes else None,
        truncated_share=_weighted([(r.truncated_share, _num_finished(r)) for r in results]),
        mean_length_tokens=_weighted([(r.mean_length_tokens, _num_finished(r)) for r in results]),
    )


def metrics(result: EnvironmentResult, prefix: str) -> dict[str, float]:
    """The numbers as monitor metrics below `prefix`; what is not known is left out.

    >>> metrics(evaluate([EpisodeScore(0, 1.0)], group_size=1), "eval/words")["eval/words/pass@1"]
    1.0
    """
    named = {
        "avg" if result.group_size is None else f"avg@{result.group_size}": result.avg,
        **{f"pass@{k}": value for k, value in result.pass_at.items()},
        **{f"pass^{k}": value for k, value in result.pass_all.items()},
        "error/share": result.error_share,
        "truncated/share": result.truncated_share,
        "length_tokens/mean": result.mean_length_tokens,
        "episodes/sum": float(result.num_episodes),
        **{f"error/{kind}/sum": float(count) for kind, count in result.errors.items()},
        **{f"{name}/mean": value for name, value in result.values.items()},
        **result.percentiles,
        "names_left_out/sum": float(result.num_left_out) or None,
    }
    return {f"{prefix}/{name}": value for name, value in named.items() if value is not None}


def result_metrics(found: Mapping[str, EnvironmentResult]) -> dict[str, float]:
    """`eval/<environment>/...` of each, and `eval/...` of all together."""
    named = metrics(combine(list(found.values())), "eval")
    for name, result in found.items():
        named |= metrics(result, f"eval/{name}")
    return named


def _is_zero_or_one(reward: float | None) -> bool:
    return reward is not None and (are_equal([reward, 0.0]) or are_equal([reward, 1.0]))


def _by_k(
    groups: Sequence[Sequence[float]], group_size: int, estimate: _Estimate
) -> dict[int, float]:
    found: dict[int, float] = {}
    for k in shown_ks(group_size):
        values = [estimate(len(g), round(fsum(g)), k) for g in groups if len(g) >= k]
        if values:
            found[k] = fsum(values) / len(values)
    return found


def _common(tables: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Mean per k, for the k that every environment has."""
    if not tables:
        return {}
    ks = set(tables[0]).intersection(*tables[1:])
    return {k: fsum(table[k] for table in tables) / len(tables) for k in sorted(ks)}


def _gathered(found: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for named in found:
        for name, value in named.items():
            values.setdefault(name, []).append(value)
    return values


def _means(values: Mapping[str, Sequence[float]], *, is_shared: bool) -> dict[str, float]:
    """Finite ones; a part of the reward is told by agent alone where several are measured."""
    means = {name: sum(listed) / len(listed) for name, listed in values.items()}
    return {
        name: it
        for name, it in means.items()
        if isfinite(it) and not (is_shared and name.startswith("reward/"))
    }


def _percentiles_of_stages(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in values.items():
        if name.endswith("_seconds") and "/" not in name:
            found |= percentiles(name, seconds, (50, 95))
    return found


def _num_finished(result: EnvironmentResult) -> int:
    return result.num_episodes - sum(result.errors.values())


def _weighted(values: Sequence[tuple[float | None, int]]) -> float | None:
    total = sum(weight for value, weight in values if value is not None)
    return fsum(v * w for v, w in values if v is not None) / total if total else None


def _mean(values: Sequence[float]) -> float | None:
    return fsum(values) / len(values) if values else None
