"""What a folder says besides numbers: settings, versions, history, and what its processes take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from gradus.errors import ConfigError
from gradus.monitor.machine import MachineNumbers, read_machine
from gradus.redact import without_any_secret
from gradus.report.folder import RunFolder, differing
from gradus.run.json_lines import read_objects, whole_lines
from gradus.run.paths import RunDirectory
from gradus.run.records import read_cuts

_MAX_KEYS = 2_000
_MAX_TEXT = 400
_MAX_EVENTS = 200
_TAIL_BYTES = 1 << 18
_LEAST_SECONDS = 60.0
"""Looks must lie so far apart before a rate is told."""
_LONGEST_SECONDS = 30 * 86_400.0
_FREE = "machine/disk_free_bytes"


def settings_page(folders: Mapping[str, RunFolder]) -> dict[str, Any]:
    """Of each run its settings; of several those that differ."""
    first = next(iter(folders.values()))
    settings = {name: it.settings for name, it in folders.items()}
    return {
        "runs": list(folders),
        "note": first.settings.note,
        "keys": [
            {"key": key, "value": _shown(value), "chosen": key in first.settings.changed}
            for key, value in sorted(first.settings.values.items())[:_MAX_KEYS]
        ],
        "differing": [
            {"key": key, "values": [_shown(it) for it in values]}
            for key, values in (differing(settings) if len(folders) > 1 else [])[:_MAX_KEYS]
        ],
        "versions": [
            {"name": name, "values": [it.versions.get(name, "") for it in folders.values()]}
            for name in dict.fromkeys(name for it in folders.values() for name in it.versions)
        ],
        "checkpoints": sorted(
            int(it.name.removeprefix("step_"))
            for it in first.run_dir.checkpoints.glob("step_*")
            if it.name.removeprefix("step_").isdecimal() and first.kind == "rl"
        ),
        "cuts": [it.step for it in read_cuts(first.run_dir)],
        "history": _history(first),
    }


def samples_behind(run_dir: RunDirectory, version: int) -> dict[str, Any]:
    """The samples that a version was trained on, batch by batch, as the journal has them.

    A batch that was shipped again after a resume counts as it was shipped last.
    """
    found: dict[int, list[str]] = {}
    if run_dir.journal.is_file():
        with run_dir.journal.open("rb") as file:
            for line in whole_lines(file):
                content = line.content or b""
                # Most lines are about episodes: they need not be decoded.
                if b'"batch_shipped"' not in content[:60]:
                    continue
                with contextlib.suppress(msgspec.DecodeError):
                    shipped = msgspec.json.decode(content, type=_Shipped)
                    if 0 <= shipped.step < version:
                        found[shipped.step] = shipped.samples
    return {"version": version, "batches": [[step, found[step]] for step in sorted(found)]}


class _Shipped(msgspec.Struct):
    step: int
    samples: list[str]


def _history(folder: RunFolder) -> list[dict[str, Any]]:
    """Who started the run with what, its terms, weights and end, from `audit.jsonl`."""
    if not folder.run_dir.audit.is_file():
        return []
    told = list(read_objects(folder.run_dir.audit))[-_MAX_EVENTS:]
    lines: list[dict[str, Any]] = [dict(without_any_secret(it, os.environ)) for it in told]
    return [
        {
            "time": time if isinstance(time := it.pop("time", None), int | float) else None,
            "event": str(it.pop("event", "")),
            "said": ", ".join(f"{name} {_shown(value)}" for name, value in it.items()),
        }
        for it in lines
    ]


def _shown(value: Any) -> str:
    return str(value)[:_MAX_TEXT]


def machine_now(run_dir: RunDirectory) -> dict[str, Any] | None:
    """The newest look, and in how many seconds the disk is full at the rate of the looks before.

    None where nothing was noted.
    """
    try:
        looks = read_machine(run_dir, max_bytes=_TAIL_BYTES)
    except (ConfigError, OSError) as error:
        return {"problem": str(error)}
    if not looks:
        return None
    last = looks[-1]
    numbers = {name.removeprefix("machine/"): value for name, value in last.numbers.items()}
    of_process: dict[str, dict[str, float]] = {}
    for name, value in numbers.items():
        owner, _, what = name.rpartition("/")
        of_process.setdefault(owner, {})[what] = value
    return {
        "time": last.time,
        "of": of_process,
        "full_seconds": _full_seconds([it for it in looks if it.term == last.term]),
    }


def _full_seconds(looks: list[MachineNumbers]) -> float | None:
    """None where the disk does not fill, or not within a month."""
    known = [(it.time, it.numbers[_FREE]) for it in looks if _FREE in it.numbers]
    if not known or known[-1][0] - known[0][0] < _LEAST_SECONDS:
        return None
    (began, before), (ended, free) = known[0], known[-1]
    rate = (before - free) / (ended - began)
    seconds = free / rate if rate > 0 else _LONGEST_SECONDS
    return seconds if seconds < _LONGEST_SECONDS else None
