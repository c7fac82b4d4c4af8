"""Episodes worth reading: the same task early and late, and an example of each failure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low
from typing import Any, Literal

from gradus.report.bounded import head_objects
from gradus.run.paths import RunDirectory

_STEP = re.compile(r"step_(\d+)")
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
class Message:
    """What one side said."""

    role: str
    text: str
    is_sampled: bool
    """Whether the trained model, or another that plays, wrote it."""


@dataclass(frozen=True)
class ShownEpisode:
    """One episode as a person reads it."""

    step: int
    source: str
    task: str
    """The task's key, or what stands for it."""
    title: str
    """The task's name for a person; may be empty."""
    reward: float | None
    """None for an episode that failed."""
    parts: Mapping[str, float]
    """The parts of the reward, weighted."""
    messages: Sequence[Message]
    num_tokens: int
    agent: str = ""
    """Whose trace is shown, where several play."""
    error: str = ""
    """Type of its error; empty for an episode that finished."""
    error_message: str = ""
    dropped: str = ""
    """Why it trained nothing, where it did not."""


@dataclass(frozen=True)
class Pair:
    """An episode of early steps and one of late steps."""

    title: str
    """What this pair stands for among all tasks."""
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
    early_steps: tuple[int, int] = (0, 0)
    late_steps: tuple[int, int] = (0, 0)


def read_episodes(run_dir: RunDirectory) -> EpisodesRead:
    """What a page shows; the same files give the same episodes."""
    purpose: Literal["train", "eval"] = "train"
    files = _files(run_dir, purpose)
    if not files:
        purpose = "eval"
        files = _files(run_dir, purpose)
    if not files:
        return EpisodesRead()
    edge = max(1, len(files) // _EDGE)
    early_files = files[:edge]
    late_files = files[max(edge, len(files) - edge) :]
    early = list(_read(early_files))
    late = list(_read(reversed(late_files)))
    failures: dict[str, list[ShownEpisode]] = {}
    counts: Counter[str] = Counter()
    for episode in (*late, *early):
        reason = episode.error or episode.dropped
        if reason:
            counts[reason] += 1
            examples = failures.setdefault(reason, [])
            if len(examples) < 2:
                examples.append(episode)
    finished_early = [e for e in early if e.reward is not None and e.messages]
    finished_late = [e for e in late if e.reward is not None and e.messages]
    pairs = _pairs(finished_early, finished_late)
    return EpisodesRead(
        pairs=pairs,
        singles=() if pairs else _spread(finished_early or finished_late),
        failures=failures,
        counts=counts,
        num_read=len(early) + len(late),
        early_steps=_range(early_files),
        late_steps=_range(late_files),
    )


def _files(run_dir: RunDirectory, purpose: str) -> list[tuple[int, Path]]:
    """Step and file, in the order of steps."""
    if not run_dir.episodes.is_dir():
        return []
    matches = [(path, _STEP.fullmatch(path.name)) for path in run_dir.episodes.iterdir()]
    found = [(int(m[1]), path / f"{purpose}.jsonl") for path, m in matches if m and len(m[1]) < 18]
    return sorted(found)


def _range(files: Sequence[tuple[int, Path]]) -> tuple[int, int]:
    return (files[0][0], files[-1][0]) if files else (0, 0)


def _read(files: Iterator[tuple[int, Path]] | Sequence[tuple[int, Path]]) -> Iterator[ShownEpisode]:
    num_read = num_bytes = 0
    for step, path in files:
        if not path.is_file():
            continue
        values = head_objects(
            path, max_bytes=_MAX_BYTES - num_bytes, max_objects=_MAX_EPISODES - num_read
        )
        for value in values:
            num_read += 1
            try:
                yield _shown(value, step)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                continue  # A record of another form costs itself and nothing else.
        num_bytes += path.stat().st_size
        if num_read >= _MAX_EPISODES or num_bytes >= _MAX_BYTES:
            return


def _shown(value: Mapping[str, Any], step: int) -> ShownEpisode:
    own = value.get("gradus") or {}
    traces = [trace for trace in value.get("traces") or [] if isinstance(trace, Mapping)]
    trace = _trace_to_show(traces)
    task = value.get("task") or {}
    named = own.get("task") or task
    error = own.get("error") or next(iter(value.get("errors") or []), None) or {}
    is_failed = bool(error) or value.get("ok") is False
    data = task.get("data") or {}
    parts = {} if is_failed else _parts(trace)
    reward = own.get("reward")
    if reward is None and not is_failed and traces:
        reward = sum(parts.values())
    agents = len(traces) > 1
    return ShownEpisode(
        step=step,
        source=str(own.get("source") or (value.get("env") or {}).get("name") or ""),
        task=str(named.get("key") or named.get("index") or ""),
        title=str(data.get("name") or "") if isinstance(data, Mapping) else "",
        reward=float(reward) if isinstance(reward, int | float) and not is_failed else None,
        parts=parts,
        messages=_messages(trace.get("nodes") or []),
        num_tokens=int(trace.get("num_output_tokens") or 0),
        agent=str((trace.get("agent") or {}).get("name") or "") if agents else "",
        error=str(error.get("type") or "failed") if is_failed else "",
        error_message=str(error.get("message") or "")[:_MAX_CHARACTERS],
        dropped=str(next(iter((own.get("dropped") or {}).values()), "")),
    )


def _trace_to_show(traces: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first that trains, else the first."""
    trained = [t for t in traces if (t.get("agent") or {}).get("trainable", True)]
    return next(iter(trained or traces), {})


def _parts(trace: Mapping[str, Any]) -> dict[str, float]:
    rewards = trace.get("rewards") or {}
    return {
        str(name)[:80]: float(part.get("score") or 0.0) * float(part.get("weight", 1.0))
        for name, part in list(rewards.items())[:12]
    }


def _messages(nodes: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The first and the last messages, their texts cut so that all of them fit.

    A later prompt may repeat a reply in other tokens; such a copy is left out.
    """
    nodes = [node for place, node in enumerate(nodes) if not _is_copy(nodes, place)]
    head = nodes[: _MAX_MESSAGES // 2]
    tail = nodes[len(head) :][-_MAX_MESSAGES // 2 :]
    left_out = len(nodes) - len(head) - len(tail)
    shown = [_message(node) for node in head]
    if left_out:
        shown.append(Message("", f"{left_out} messages left out", False))
    shown += [_message(node) for node in tail]
    each = max(200, _MAX_CHARACTERS // max(1, len(shown)))
    return [Message(m.role, _cut(m.text, each), m.is_sampled) for m in shown]


def _is_copy(nodes: Sequence[Mapping[str, Any]], place: int) -> bool:
    node = nodes[place]
    message = node.get("message") or {}
    if node.get("sampled") or message.get("role") != "assistant":
        return False
    said = message.get("content")
    return any(
        other.get("sampled") and (other.get("message") or {}).get("content") == said
        for other in nodes[:place]
    )


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def _message(node: Mapping[str, Any]) -> Message:
    message = node.get("message") or {}
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    said = [message.get("reasoning_content"), content]
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call.get("function"), Mapping) else call
        said.append(f"{function.get('name', '')}({function.get('arguments', '')})")
    text = "\n".join(part for part in said if isinstance(part, str) and part)
    return Message(str(message.get("role") or ""), text, bool(node.get("sampled")))


def _pairs(early: Sequence[ShownEpisode], late: Sequence[ShownEpisode]) -> list[Pair]:
    """For each source the tasks with the largest, the median and the least gain."""
    sources = list(dict.fromkeys(episode.source for episode in (*early, *late)))[:_MAX_SOURCES]
    pairs = []
    for source in sources:
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
        if episode.source == source:
            found.setdefault(episode.task, []).append(episode)
    return found


def _mean(episodes: Sequence[ShownEpisode]) -> float:
    return fmean(episode.reward or 0.0 for episode in episodes)


def _typical(episodes: Sequence[ShownEpisode]) -> ShownEpisode:
    """The one whose reward is nearest to their mean, so that nobody picked a lucky one."""
    mean = _mean(episodes)
    return min(episodes, key=lambda episode: abs((episode.reward or 0.0) - mean))


def _middle(episodes: Sequence[ShownEpisode]) -> ShownEpisode:
    middle = median_low([episode.reward or 0.0 for episode in episodes])
    return next(episode for episode in episodes if (episode.reward or 0.0) == middle)


def _spread(episodes: Sequence[ShownEpisode]) -> list[ShownEpisode]:
    """Up to four, evenly from the least to the most rewarded, of different tasks where possible."""
    ordered = sorted(episodes, key=lambda episode: episode.reward or 0.0)
    if len(ordered) <= 4:
        return ordered
    return [ordered[place * (len(ordered) - 1) // 3] for place in range(4)]
