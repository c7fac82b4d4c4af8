"""What a tracker learns about a run: its identity, its config without secrets, its versions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast, get_args

from gradus.config import MonitorConfig
from gradus.errors import RunDirectoryError
from gradus.files import read_json
from gradus.run.lease import read_marker
from gradus.run.paths import RunDirectory
from gradus.tracking.base import RunOutcome, TrackedRun
from gradus.tracking.follow.cursor import Cursor, run_identity
from gradus.tracking.redact import without_any_secret

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
        raise RunDirectoryError(f"{run_dir.root} is no run of gradus")
    launched = read_launched(run_dir)
    return TrackedRun(
        id=run_identity(run_dir),
        name=marker.run_id,
        kind=marker.kind,
        folder=run_dir.root.resolve(),
        tracker=monitor.title,
        config=without_any_secret(launched.get("config") or {}, variables),
        code_version=str(launched.get("code_version") or "unknown"),
        packages=launched.get("packages") or {},
        group=monitor.group,
        tags=tuple(monitor.tags),
        resume_step=cursor.resume_step,
        mark=cursor.mark,
    )


def read_launched(run_dir: RunDirectory) -> dict[str, Any]:
    """What the last launch noted of itself; empty for a run that was started in another way."""
    try:
        value = read_json(run_dir.launched)
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}


def read_outcome(run_dir: RunDirectory) -> RunOutcome:
    """How the run ended, as far as its folder says."""
    try:
        value = read_json(run_dir.summary)
        outcome = value.get("outcome") if isinstance(value, dict) else None
        return cast("RunOutcome", outcome) if outcome in get_args(RunOutcome) else "unknown"
    except FileNotFoundError:
        # An evaluation writes no summary.
        return "done" if (run_dir.root / _RESULTS_NAME).is_file() else "unknown"
