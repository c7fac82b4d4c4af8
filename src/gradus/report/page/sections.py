"""The sections of a page about a run that are more than curves."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

from gradus.report.episodes import EpisodesRead, Pair, ShownEpisode
from gradus.report.folder import RunFolder
from gradus.report.page.charts import Chart, Line, draw
from gradus.report.series import RunSeries
from gradus.report.text import duration, escape, number, signed
from gradus.run.paths import Purpose

_MAX_SETTINGS = 400
_MAX_NOTICES = 60
_MAX_KINDS_OF_FAILURE = 12
_MAX_PARTS = 12
"""Of a reward."""
_TRAINER_PARTS = {
    "time/receive_seconds": "waiting for a batch",
    "time/forward_backward_seconds": "forward and backward",
    "time/optimize_seconds": "update",
    "time/publish_seconds": "copying weights",
    "time/validate_seconds": "validation",
}
"""What a trainer does in a step, one after the other."""
_OTHER_TIMES = {
    "time/step_seconds": "the whole step",
    "time/generate_wait_seconds": "a batch waits for its last episodes",
    "time/evaluation_hold_seconds": "a version waits for an evaluation",
    "weights/publish_seconds": "weights are written",
    "weights/apply_seconds": "the engine takes new weights",
    "weights/pause_seconds": "of these, the engine stands still",
}
_STAGES = ("boot", "setup", "agent", "finalize", "scoring")
_FAILED = re.compile(r"episode/error/(.+)/sum")
_DROPPED = re.compile(r"sample/([^/]+)/dropped/(.+)/sum")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[int]) -> str:
    """A table of cells that are HTML already."""

    def cell(tag: str, place: int, content: str) -> str:
        return f'<{tag} class="{"n" if place in numeric else "w"}">{content}</{tag}>'

    lines = [[cell("th", place, escape(word)) for place, word in enumerate(head)]]
    lines += [[cell("td", place, content) for place, content in enumerate(row)] for row in rows]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f'<div class="scroll"><table>{body}</table></div>'


def result_section(folder: RunFolder) -> str:
    """The table of an evaluation; nothing for other runs."""
    path = folder.run_dir.root / "results.json"
    try:
        value = json.loads(path.read_bytes()) if path.stat().st_size < 16 << 20 else {}
        rows = [
            *value["environments"],
            *([value["overall"]] if len(value["environments"]) > 1 else []),
        ]
        cells = [_result_row(row) for row in rows[:200]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    head = ("environment", "episodes", "mean reward", "pass@k", "errors", "truncated", "tokens")
    return table(head, cells, numeric=range(1, 7))


def _result_row(row: Mapping[str, Any]) -> list[str]:
    solved = ", ".join(f"@{k} {number(v)}" for k, v in sorted((row["pass_at"] or {}).items()))
    return [
        escape(row["name"]),
        escape(f"{row['num_episodes']} of {row['planned_episodes']}"),
        number(row["avg"]),
        escape(solved or "-"),
        number(float(sum((row["errors"] or {}).values()))),
        number(row["truncated_share"]),
        number(row["mean_length_tokens"]),
    ]


def settings_section(folder: RunFolder) -> str:
    """What somebody chose, then everything."""
    settings = folder.settings
    note = f'<p class="lead">{escape(settings.note)}</p>' if settings.note else ""
    if not settings.values:
        return note
    chosen = _settings_table(settings.changed)
    count = len(settings.values)
    words = "" if settings.note else "Chosen for this run; all else has its default."
    return (
        f'{note}<p class="lead">{words}</p>{chosen}'
        f"<details><summary>All {count} settings</summary>"
        f"{_settings_table(settings.values)}</details>"
    )


def _settings_table(values: Mapping[str, Any]) -> str:
    rows = [
        (f"<code>{escape(key, limit=160)}</code>", f"<code>{escape(toml(value))}</code>")
        for key, value in list(values.items())[:_MAX_SETTINGS]
    ]
    return table(("key", "value"), rows, numeric=())


def toml(value: Any) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)


def episode_section(episodes: EpisodesRead) -> str:
    """The same task early and late; else a few episodes from the least to the most rewarded."""
    if episodes.pairs:
        first, last = (_range(it, episodes.purpose) for it in (episodes.early, episodes.late))
        words = (
            f"From {episodes.num_read:,} episodes of {first} and {last}. Of each task the episode "
            "is shown whose reward is nearest to the task's mean there."
        )
        if episodes.left_out:
            words += escape(f" Not shown: {', '.join(episodes.left_out)}.", limit=400)
        return f'<p class="lead">{words}</p>' + "".join(_pair(pair) for pair in episodes.pairs)
    if not episodes.singles:
        return ""
    shown = "".join(
        f'<div class="pair">{_episode(episode, "")}</div>' for episode in episodes.singles
    )
    words = f"From {episodes.num_read:,} episodes, from the least to the most rewarded."
    return f'<p class="lead">{words}</p>{shown}'


_PLACES: Mapping[Purpose, str] = {"train": "step", "eval": "version"}


def _range(places: tuple[int, int], purpose: Purpose) -> str:
    first, last = places
    word = _PLACES[purpose]
    return f"{word} {first:,}" if first == last else f"{word}s {first:,} to {last:,}"


def _pair(pair: Pair) -> str:
    gain = ""
    if pair.gain is not None:
        way = "up" if pair.gain > 0 else "down" if pair.gain < 0 else ""
        gain = f': <span class="{way}">{signed(pair.gain)}</span> in mean reward'
    title = f"{escape(pair.title)}{gain}"
    early = pair.early.played
    task = early.title or early.task[:12]
    where = f"source {escape(early.source)} · task {escape(task, limit=120)}"
    return (
        f'<div class="pair"><h3>{title}</h3><p class="note">{where}</p><div class="two">'
        f"{_episode(pair.early, 'early')}{_episode(pair.late, 'late')}</div></div>"
    )


def _episode(episode: ShownEpisode, word: str) -> str:
    played, trace = episode.played, episode.played.shown
    several = len(played.traces) > 1
    rewards = [] if trace is None or played.error else list(trace.rewards.items())[:_MAX_PARTS]
    parts = " · ".join(f"{escape(k, limit=60)} {number(v)}" for k, v in rewards)
    reward = f"reward {number(played.reward)}" if played.reward is not None else "no reward"
    facts = [
        f"<b>{escape(reward)}</b>",
        f"<span>{f'{word}, ' if word else ''}{_PLACES[episode.purpose]} {episode.place:,}</span>",
        f"<span>{trace.num_tokens:,} tokens</span>" if trace and trace.num_tokens else "",
        f"<span>agent {escape(trace.agent)}</span>" if trace and trace.agent and several else "",
        f"<span>{parts}</span>" if len(rewards) > 1 else "",
    ]
    said = "".join(
        f'<div class="msg{" own" if message.is_sampled else ""}">'
        f"<span>{escape(message.role, limit=30)}</span>"
        f"<pre>{escape(message.text or '(nothing)', limit=8_000)}</pre></div>"
        for message in (trace.messages if trace else ())
    )
    return f'<div><div class="ep">{"".join(facts)}</div>{said}</div>'


def alarm_section(series: RunSeries, notices: Sequence[str]) -> str:
    """Alarms with the steps in which they sounded, then the lines at the terminal."""
    rows = []
    for name in series.names:
        if not name.startswith("alarm/") or name.endswith("/value"):
            continue
        loud = [point.step for point, value in series.values(name) if value > 0]
        if loud:
            spans = _spans(loud, [point.step for point, _ in series.values(name)])
            words = f"<code>{escape(name.removeprefix('alarm/'), limit=120)}</code>"
            rows.append((words, escape(spans), f"{len(loud):,}"))
    known = any(name.startswith("alarm/") for name in series.names)
    alarms = '<p class="lead">No alarm sounded.</p>' if known else ""
    if rows:
        alarms = table(("alarm", "sounded in steps", "records"), rows, numeric=(2,))
    if not notices:
        quiet = '<p class="lead">No notices.</p>'
        return alarms + quiet if known or series.steps else ""
    # A notice that comes again and again is one line with its count.
    counted = Counter(notices)
    lines = "".join(
        f"<tr><td class='n'>{count:,} x</td><td class='w'><code>{escape(line)}</code></td></tr>"
        for line, count in list(counted.items())[-_MAX_NOTICES:]
    )
    left_out = len(counted) - _MAX_NOTICES
    more = f'<p class="note">{left_out:,} earlier ones are left out.</p>' if left_out > 0 else ""
    return f'{alarms}<h3>Notices</h3><div class="scroll"><table>{lines}</table></div>{more}'


def _spans(loud: Sequence[int], recorded: Sequence[int]) -> str:
    """Steps as ranges of records that follow each other; step 1 is the first."""
    place = {step: number_of for number_of, step in enumerate(sorted(set(recorded)))}
    runs = [
        [step for _, step in group]
        for _, group in groupby(enumerate(sorted(set(loud))), key=lambda it: place[it[1]] - it[0])
    ]
    shown = [f"{r[0] + 1}" if len(r) == 1 else f"{r[0] + 1} to {r[-1] + 1}" for r in runs]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "")


def time_section(folder: RunFolder, series: RunSeries) -> str:
    """Parts of the trainer's step as bars, medians of what runs beside it, stages of episodes."""
    drawn = []
    lines = [
        Line(label, series.positions(name, "steps"))
        for name, label in _TRAINER_PARTS.items()
        if any(value > 0 for _, value in series.values(name))
    ]
    if lines:
        note = "Parts of the trainer's step, one after the other; beside the colours, means."
        names = [line.label for line in lines]
        drawn.append(draw(Chart("The trainer's step", "seconds", lines, note, bars=names)))
    stages = _stage_chart(series)
    drawn += [] if stages is None else [draw(stages)]
    rows = []
    for name, label in {**_OTHER_TIMES, **_TRAINER_PARTS}.items():
        values = sorted(value for _, value in series.values(name))
        if values:
            high = values[math.ceil(len(values) * 0.95) - 1]
            cells = (number(median(values)), number(high), duration(sum(values)))
            total = "" if series.is_sampled else cells[2]
            rows.append((escape(label), f"<code>{name}</code>", cells[0], cells[1], total))
    head = ("what", "metric", "median, s", "95 %, s", "in all")
    medians = table(head, rows, numeric=(2, 3, 4)) if rows else ""
    seconds = folder.summary.get("seconds")
    phases = ""
    if isinstance(seconds, Mapping):
        named = [(k, seconds.get(k)) for k in ("start_up", "steps", "stop")]
        said = [
            f"{k.replace('_', '-')} {duration(v)}" for k, v in named if isinstance(v, int | float)
        ]
        phases = f'<p class="lead">The last launch: {escape(", ".join(said))}.</p>' if said else ""
    if not drawn and not medians:
        return phases
    words = '<p class="note">Roles work at once, so these times overlap and do not add up.</p>'
    return f'{phases}<div class="charts">{"".join(drawn)}</div>{medians}{words if medians else ""}'


def _stage_chart(series: RunSeries) -> Chart | None:
    """Mean seconds of each stage of an episode; of several sources the mean over them."""
    lines = []
    for stage in _STAGES:
        names = series.matching([f"episode/*/{stage}_seconds/mean"])
        by_step: dict[float, list[float]] = {}
        for name in names:
            for x, y in series.positions(name, "steps"):
                by_step.setdefault(x, []).append(y)
        points = [(x, fmean(values)) for x, values in sorted(by_step.items())]
        if any(y > 0.001 for _, y in points):
            lines.append(Line(stage, points))
    if not lines:
        return None
    note = "Means over the episodes of a step; of several sources the mean over these."
    bars = [line.label for line in lines]
    return Chart("Stages of an episode", "seconds", lines, note, bars=bars)


def failure_section(folder: RunFolder, series: RunSeries, episodes: EpisodesRead) -> str:
    """Types of errors and reasons of drops, how often, and an example of each."""
    counts: Counter[tuple[str, str]] = Counter()
    for name in series.names:
        total = round(sum(value for _, value in series.values(name)))
        if failed := _FAILED.fullmatch(name):
            counts["episodes failed", failed[1]] += total
        elif dropped := _DROPPED.fullmatch(name):
            counts["samples dropped", dropped[2]] += total
    known = {kind for _, kind in counts}
    for reason, times in episodes.counts.items():
        is_error = bool(episodes.failures[reason][0].played.error)
        word = "episodes failed" if is_error else "samples dropped"
        if reason not in known:
            counts[word, reason] += times
    if not counts:
        done = '<p class="lead">Every episode that was read finished and trained.</p>'
        return done if episodes.num_read and folder.kind != "eval" else ""
    rows = [
        (escape(word), escape(kind, limit=120), f"{count:,}")
        for (word, kind), count in counts.most_common(40)
        if count
    ]
    note = (
        "Counts of the records; of types that stand in no record, of the episodes that were read."
    )
    if series.is_sampled:
        note = "Counted in a sample of the records: compare them with each other only."
    examples = "".join(
        _failure(kind, shown)
        for kind, shown in list(episodes.failures.items())[:_MAX_KINDS_OF_FAILURE]
    )
    words = f'<p class="note">{note}</p>'
    return table(("what", "type or reason", "count"), rows, numeric=(2,)) + words + examples


def _failure(kind: str, examples: Sequence[ShownEpisode]) -> str:
    example = examples[0]
    said = escape(example.played.error_message, limit=1_500)
    return (
        f"<details><summary>Example: {escape(kind, limit=120)}</summary>"
        f"{f'<p class=mono>{said}</p>' if said else ''}{_episode(example, '')}</details>"
    )
