"""Episodes worth reading: the same task early and late, and an example of each failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median_low

from gradus.log import bounded
from gradus.run.episodes import (
    Message,
    RecordedEpisode,
    episode_files,
    read_episodes,
)
from gradus.run.paths import Purpose, RunDirectory

_MAX_EPISODES = 2_000
"""Read of the early steps, and as many of the late ones."""
_MAX_BYTES = 32 << 20
"""Read of the early steps, and as many of the late ones."""
_EDGE = 10
"""Early and late are the first and the last of so many parts of the steps."""
_MAX_SOURCES = 4
_MAX_MESSAGES = 24
_MAX_CHARACTERS = 6_000
"""Kept of all messages of one episode."""


@dataclass(frozen=True)
class ShownEpisode:
    """One episode of a step, its messages bounded."""

    step: int
    played: RecordedEpisode
    purpose: Purpose = "train"

    @property
    def place(self) -> int:
        """A step counts from 1; an evaluation is of a version, which counts from 0."""
        return self.step + (self.purpose == "train")

    @property
    def reward(self) -> float:
        return self.played.reward or 0.0


@dataclass(frozen=True)
class Pair:
    """An episode of early steps and one of late steps."""

    title: str
    """How this pair compares with all tasks."""
    early: ShownEpisode
    late: ShownEpisode
    gain: float | None
    """Late mean reward of the task minus early; None when the tasks differ."""


@dataclass(frozen=True)
class EpisodesRead:
    """What the episode files of a run show."""

    pairs: Sequence[Pair] = ()
    singles: Sequence[ShownEpisode] = ()
    """From the least to the most rewarded, where early and late cannot be told apart."""
    failures: Mapping[str, Sequence[ShownEpisode]] = field(default_factory=dict)
    """Type of error, or reason of a drop → examples."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often each came in what was read."""
    num_read: int = 0
    purpose: Purpose = "train"
    early: tuple[int, int] = (0, 0)
    late: tuple[int, int] = (0, 0)
    """First and last place that was read."""
    left_out: Sequence[str] = ()
    """Sources of which no pair is shown."""


def choose_episodes(run_dir: RunDirectory) -> EpisodesRead:
    """What a page shows; the same files give the same episodes."""
    purpose: Purpose = "train"
    if not (files := episode_files(run_dir, purpose)):
        purpose = "eval"
        files = episode_files(run_dir, purpose)
    if not files:
        return EpisodesRead()
    edge = max(1, len(files) // _EDGE)
    early_files = files[:edge]
    late_files = files[max(edge, len(files) - edge) :]
    early = list(_read(early_files, purpose))
    late = list(_read(reversed(late_files), purpose))
    failures: dict[str, list[ShownEpisode]] = {}
    counts: Counter[str] = Counter()
    for episode in (*late, *early):
        reason = episode.played.error or episode.played.dropped
        if reason:
            counts[reason] += 1
            examples = failures.setdefault(reason, [])
            if len(examples) < 2:
                examples.append(episode)
    finished_early, finished_late = list(filter(_is_told, early)), list(filter(_is_told, late))
    pairs = _pairs(finished_early, finished_late)
    return EpisodesRead(
        pairs=pairs,
        singles=() if pairs else _spread(finished_early or finished_late),
        failures=failures,
        counts=counts,
        num_read=len(early) + len(late),
        purpose=purpose,
        early=_range(early),
        late=_range(late),
        left_out=_sources((*early, *late))[_MAX_SOURCES:],
    )


def _is_told(episode: ShownEpisode) -> bool:
    trace = episode.played.shown
    return episode.played.reward is not None and trace is not None and bool(trace.messages)


def _range(episodes: Sequence[ShownEpisode]) -> tuple[int, int]:
    """The steps that were read, which may be fewer than there are."""
    places = [episode.place for episode in episodes]
    return (min(places), max(places)) if places else (0, 0)


def _read(files: Iterable[tuple[int, Path]], purpose: Purpose) -> Iterator[ShownEpisode]:
    num_left, bytes_left = _MAX_EPISODES, _MAX_BYTES
    for step, path in files:
        for episode in islice(read_episodes(path, stop=bytes_left), num_left):
            num_left -= 1
            yield ShownEpisode(step, _bounded(episode), purpose)
        bytes_left -= path.stat().st_size
        if num_left <= 0 or bytes_left <= 0:
            return


def _bounded(episode: RecordedEpisode) -> RecordedEpisode:
    """With the messages of the shown trace alone."""
    shown = episode.shown
    traces = [
        replace(trace, messages=_messages(trace.messages) if trace is shown else ())
        for trace in episode.traces
    ]
    said = episode.error_message[:_MAX_CHARACTERS]
    return replace(episode, traces=traces, error_message=said, row={}, answer="")


def _messages(messages: Sequence[Message]) -> list[Message]:
    """The first and the last messages, their texts cut so that all of them fit."""
    head = messages[: _MAX_MESSAGES // 2]
    tail = messages[len(head) :][-_MAX_MESSAGES // 2 :]
    left_out = len(messages) - len(head) - len(tail)
    gap = [Message("", f"{left_out} messages left out", False)] if left_out else []
    shown = [*head, *gap, *tail]
    each = max(200, _MAX_CHARACTERS // max(1, len(shown)))
    return [replace(message, text=bounded(message.text, each)) for message in shown]


def _pairs(early: Sequence[ShownEpisode], late: Sequence[ShownEpisode]) -> list[Pair]:
    """For each source the tasks with the largest, the median and the least gain."""
    pairs = []
    for source in _sources((*early, *late))[:_MAX_SOURCES]:
        before = _by_task(early, source)
        after = _by_task(late, source)
        both = [task for task in before if task in after]
        gains = sorted((_mean(after[task]) - _mean(before[task]), task) for task in both)
        if gains:
            pairs += _chosen(gains, before, after)
        elif before and after:
            first = _middle([e for episodes in before.values() for e in episodes])
            last = _middle([e for episodes in after.values() for e in episodes])
            pairs.append(Pair("Two tasks: none was played both early and late", first, last, None))
    return pairs


def _sources(episodes: Iterable[ShownEpisode]) -> list[str]:
    return list(dict.fromkeys(episode.played.source for episode in episodes))


def _chosen(
    gains: Sequence[tuple[float, str]],
    before: Mapping[str, Sequence[ShownEpisode]],
    after: Mapping[str, Sequence[ShownEpisode]],
) -> list[Pair]:
    count = f"of {len(gains)} task{'s' if len(gains) > 1 else ''} seen early and late"
    places = {len(gains) - 1: "The largest gain", len(gains) // 2: "The median gain"}
    places.setdefault(0, "The least gain" if gains[0][0] >= 0 else "The largest loss")
    if len(gains) == 1:
        places = {0: "The only one"}
    return [
        Pair(f"{word} {count}", _typical(before[task]), _typical(after[task]), gain)
        for place, word in places.items()
        for gain, task in [gains[place]]
    ]


def _by_task(episodes: Sequence[ShownEpisode], source: str) -> dict[str, list[ShownEpisode]]:
    found: dict[str, list[ShownEpisode]] = {}
    for episode in episodes:
        if episode.played.source == source:
            found.setdefault(episode.played.task, []).append(episode)
    return found


def _mean(episodes: Sequence[ShownEpisode]) -> float:
    return fmean(episode.reward for episode in episodes)


def _typical(episodes: Sequence[ShownEpisode]) -> ShownEpisode:
    """The one whose reward is nearest to their mean, so that it was not picked for its luck."""
    mean = _mean(episodes)
    return min(episodes, key=lambda episode: abs(episode.reward - mean))


def _middle(episodes: Sequence[ShownEpisode]) -> ShownEpisode:
    middle = median_low([episode.reward for episode in episodes])
    return next(episode for episode in episodes if episode.reward == middle)


def _spread(episodes: Sequence[ShownEpisode]) -> list[ShownEpisode]:
    """Up to four, evenly from the least to the most rewarded, of different tasks where possible."""
    ordered = sorted(episodes, key=lambda episode: episode.reward)
    if len(ordered) <= 4:
        return ordered
    return [ordered[place * (len(ordered) - 1) // 3] for place in range(4)]
