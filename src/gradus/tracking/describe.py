"""What a tracker gets of a run besides its records: its config without secrets, its end, and sample
episodes as rows of a table."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal, cast, get_args

from gradus.config import MonitorConfig
from gradus.errors import RunDirectoryError
from gradus.files import read_json
from gradus.log import bounded
from gradus.monitor import alarm_states, alarms_on
from gradus.redact import without_any_secret
from gradus.run.episodes import Message, RecordedEpisode, read_episodes
from gradus.run.json_lines import last_lines
from gradus.run.lease import read_marker
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launched
from gradus.run.records import Place, Record, read_block, read_cuts
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun
from gradus.tracking.follow.cursor import Cursor, run_identity

MAX_TEXT_CHARACTERS = 2_000
"""Of a prompt and of a reply; the middle of a longer one is left out."""

_RECORD_BYTES = 1 << 20
"""Before a place of `metrics.jsonl`, in which its last records are looked for."""
_MAX_EPISODES = 512
"""Of a step that the rows are chosen from."""
_NOTICE_BYTES = 1 << 16
_RESULTS_NAME = "results.json"
"""What an evaluation writes when every episode has ended."""


def describe_run(
    run_dir: RunDirectory,
    monitor: MonitorConfig,
    cursor: Cursor,
    variables: Mapping[str, str] = os.environ,
) -> TrackedRun:
    """The run as one tracker sees it; values of secret `variables` stand nowhere in it."""
    marker = read_marker(run_dir)
    if marker is None:
        raise RunDirectoryError(f"{run_dir.root} is not a run of gradus")
    launched = read_launched(run_dir)
    return TrackedRun(
        id=run_identity(run_dir),
        name=marker.run_id,
        kind=marker.kind,
        folder=run_dir.root.resolve(),
        tracker=monitor.title,
        config=without_any_secret(launched.config, variables),
        code_version=launched.code_version or "unknown",
        packages=launched.packages,
        group=monitor.group,
        tags=tuple(monitor.tags),
        include=tuple(monitor.include),
        exclude=tuple(monitor.exclude),
        resume_step=cursor.resume_step,
        mark=cursor.mark,
    )


def alarm_lines(run_dir: RunDirectory, record: Record, before: set[str]) -> dict[str, str]:
    """Alarm → the line about it, for each that begins or ends with a record.

    `before` are those that were on; the line is that of `notices.log`, if it is still there.
    """
    states = alarm_states(record.metrics)
    changed = [name for name, is_on in states.items() if is_on != (name in before)]
    notices = last_lines(run_dir.notices, max_bytes=_NOTICE_BYTES) if changed else []
    said = [(it.content or b"").decode(errors="replace").strip() for it in reversed(notices)]
    found = {}
    for name in changed:
        source, _, alarm = name.rpartition("/")
        of_source = f" of source {source!r}" if source else ""
        head = f"alarm {alarm}{of_source} at step {record.step + 1}"
        state = "" if states[name] else " is over"
        value = record.metrics.get(f"alarm/{name}/value", math.nan)
        told = (line for line in said if line.startswith(f"{head}{state}:"))
        found[name] = next(told, f"{head}{state}: {value:.3g}")
    return found


def alarms_before(run_dir: RunDirectory, offset: int) -> set[str]:
    """The alarms that were on in the last step's record before a place of `metrics.jsonl`."""
    start = max(0, offset - _RECORD_BYTES)
    place = Place(offset=start, num_cuts=len(read_cuts(run_dir)))
    records = read_block(run_dir, place, num_bytes=offset - start).records
    steps = [it for it in records if not it.is_evaluation]
    return set(alarms_on(steps[-1].metrics)) if steps else set()


def read_outcome(run_dir: RunDirectory) -> RunOutcome:
    """How the run ended, as far as its folder says."""
    try:
        value = read_json(run_dir.summary)
        outcome = value.get("outcome") if isinstance(value, dict) else None
        return cast("RunOutcome", outcome) if outcome in get_args(RunOutcome) else "unknown"
    except FileNotFoundError:
        # An evaluation writes no summary.
        return "done" if (run_dir.root / _RESULTS_NAME).is_file() else "unknown"


def sample_rows(run_dir: RunDirectory, record: Record, *, num_rows: int) -> Sequence[EpisodeRow]:
    """Rows about the episodes behind a record, from the least rewarded to the most.

    The same file gives the same rows. None for an evaluation or a step without episodes.
    """
    purpose: Literal["train", "eval"] = "eval" if record.is_evaluation else "train"
    path = run_dir.episodes / f"step_{record.step}" / f"{purpose}.jsonl"
    rows = [_row(episode, purpose) for episode in islice(read_episodes(path), _MAX_EPISODES)]
    rows.sort(key=lambda row: (row.reward is not None, row.reward or 0.0))
    if len(rows) <= num_rows:
        return rows
    if num_rows == 1:
        return [rows[len(rows) // 2]]
    # Evenly spread, so that the worst, the best and those between are seen.
    return [rows[place * (len(rows) - 1) // (num_rows - 1)] for place in range(num_rows)]


def _row(episode: RecordedEpisode, purpose: Literal["train", "eval"]) -> EpisodeRow:
    messages = episode.shown.messages if episode.shown else ()
    first_said = next((place for place, it in enumerate(messages) if it.is_sampled), len(messages))
    reply = _texts(messages[first_said:])
    credits = [value for value in episode.advantages if value is not None]
    return EpisodeRow(
        purpose=purpose,
        episode=episode.id,
        source=episode.source,
        task=_bounded(episode.task, 200),
        prompt=_bounded(_texts(messages[:first_said])),
        reply=_bounded(reply or f"{episode.error}: {episode.error_message}".strip(": ")),
        reward=episode.reward,
        advantage=sum(credits) / len(credits) if credits else None,
    )


def _texts(messages: Sequence[Message]) -> str:
    """Messages as one text; the role stands before each when there are several."""
    if len(messages) == 1:
        return messages[0].text
    return "\n\n".join(f"[{message.role}] {message.text}" for message in messages)


def _bounded(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    return bounded(text.encode("utf-8", errors="replace").decode(), limit)
