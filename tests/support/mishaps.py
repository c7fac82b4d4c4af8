"""Episodes that go wrong in each way that an environment or an engine can fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifiers.v1.episode import WireEpisode

from gradus.testing.episodes import build_episode, build_message, build_trace


def _reported_error(seed: int) -> WireEpisode:
    return build_episode([build_trace(error="ProviderError", seed=seed)], seed=seed)


def _error_without_words(seed: int) -> WireEpisode:
    episode = build_episode(seed=seed)
    episode.ok = False
    return episode


def _error_of_one_trace(seed: int) -> WireEpisode:
    return build_episode([build_trace(seed=seed), build_trace(error="TaskError", seed=seed + 1)])


def _timed_out(seed: int) -> WireEpisode:
    episode = build_episode(seed=seed)
    episode.ok, episode.is_timeout = False, True
    return episode


def _truncated(seed: int) -> WireEpisode:
    trace = build_trace(reward=float(seed % 2), seed=seed)
    trace.stop_condition = "max_turns"
    return build_episode([trace], seed=seed)


def _huge(seed: int) -> WireEpisode:
    messages = [build_message(None, [3] * 20), build_message(0, [4] * 3_000, sampled=2_990)]
    return build_episode([build_trace(messages, reward=1e12, seed=seed)], seed=seed)


def _nothing_sampled(seed: int) -> WireEpisode:
    return build_episode([build_trace([build_message(None, [3, 4])], seed=seed)], seed=seed)


def _wrong_logprobs(seed: int) -> WireEpisode:
    episode = build_episode(seed=seed)
    episode.traces[0].nodes[1].logprobs.pop()
    return episode


def _infinite_logprob(seed: int) -> WireEpisode:
    messages = [build_message(None, [3, 4, 5], sampled=2, logprob=float("-inf"))]
    return build_episode([build_trace(messages, seed=seed)], seed=seed)


MISHAPS: dict[str, Callable[[int], WireEpisode]] = {
    "error": _reported_error,
    "error_without_words": _error_without_words,
    "error_of_one_trace": _error_of_one_trace,
    "nan_reward": lambda seed: build_episode([build_trace(reward=float("nan"), seed=seed)]),
    "no_reward": lambda seed: build_episode([build_trace(reward=None, seed=seed)]),
    "overflowing_reward": lambda seed: build_episode([build_trace(reward=1e39, seed=seed)]),
    "timeout": _timed_out,
    "truncated": _truncated,
    "huge": _huge,
    "no_trace": lambda seed: build_episode([], seed=seed),
    "no_message": lambda seed: build_episode([build_trace([], seed=seed)], seed=seed),
    "nothing_sampled": _nothing_sampled,
    "wrong_logprobs": _wrong_logprobs,
    "infinite_logprob": _infinite_logprob,
}
"""Name → an episode that environments, engines and their failures leave, made from a seed.

`truncated` and `huge` may train; the others are failures.
"""


@dataclass(frozen=True)
class FailureProfile:
    """Which share of the episodes goes wrong, and how: the same for the same seed.

    >>> FailureProfile(share=0.0).play(3).ok
    True
    """

    share: float = 0.4
    kinds: Sequence[str] = tuple(MISHAPS)

    def kind(self, seed: int) -> str | None:
        """What goes wrong in the episode of `seed`; None for one that ends well."""
        source = random.Random(f"mishap/{seed}")
        return source.choice(self.kinds) if source.random() < self.share else None

    def play(self, seed: int) -> WireEpisode:
        """The episode of `seed`; one that ends well is rewarded 0 or 1."""
        kind = self.kind(seed)
        if kind is not None:
            return MISHAPS[kind](seed)
        return build_episode(reward=float(random.Random(seed).random() < 0.5), seed=seed)
