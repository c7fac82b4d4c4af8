"""What the folder of a run says about the run as a whole: kind, end, time, versions, settings."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gradus.config import EvalConfig, RunConfig, SftConfig, StrictConfig
from gradus.errors import ConfigError, GradusError
from gradus.processes.log_tail import find_cause
from gradus.redact import without_any_secret
from gradus.run.json_lines import last_lines
from gradus.run.lease import MARKER_NAME, Owner, read_marker
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launched
from gradus.run.records import read_cuts
from gradus.run.settings import leaves

_MODELS: dict[str, type[StrictConfig]] = {"rl": RunConfig, "sft": SftConfig, "eval": EvalConfig}
_MAX_JSON_BYTES = 16 << 20
_PLACES = re.compile(r"(name|output_dir)$|monitor\b")
"""Settings that only say where a run lies, and where it is seen."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run by the names that they have in its TOML file."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key → value, secrets hidden."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Those that are not what gradus would take by itself."""
    note: str = ""
    """Why some of this is not known."""


@dataclass(frozen=True)
class RunFolder:
    """What is known of one run.

    >>> read_folder(Path("runs/demo")).outcome  # doctest: +SKIP
    'done'
    """

    run_dir: RunDirectory
    name: str
    kind: str
    """`rl`, `sft`, `eval`, `replay`, `bench`, or empty when the folder does not say."""
    outcome: str
    """`done`, `failed`, `interrupted`, `running`, or `killed` when it ended without a word."""
    cause: str = ""
    """Why it did not end well."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """What the run wrote at its end."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """gradus and the libraries that decide numbers."""
    settings: Settings = field(default_factory=Settings)
    num_launches: int = 1


def read_folder(root: Path) -> RunFolder:
    """What the folder says; ConfigError when it is not a run's."""
    run_dir = RunDirectory(root)
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder; name the folder of a run, such as runs/NAME")
    try:
        marker = read_marker(run_dir)
    except GradusError:
        marker = None
    if not is_run(run_dir):
        raise ConfigError(f"{root} is not the folder of a run: it has neither metrics nor a config")
    summary = read_object(run_dir.summary)
    outcome = read_outcome(run_dir)
    launched = read_launched(run_dir)
    kind = str(summary.get("kind") or (marker.kind if marker else "") or launched.kind)
    versions = {"gradus": launched.code_version.removeprefix("gradus "), **launched.packages}
    return RunFolder(
        run_dir=run_dir,
        name=root.resolve().name,
        kind=kind,
        outcome=outcome,
        cause=_cause(run_dir, outcome, summary),
        summary=summary,
        versions={name: version for name, version in versions.items() if version},
        settings=settings_of(kind, launched.config),
        num_launches=1 + len(read_cuts(run_dir)),
    )


def is_run(run_dir: RunDirectory) -> bool:
    """Whether a folder is a run's, of whatever version of gradus."""
    known = (run_dir.metrics, run_dir.config, run_dir.summary, run_dir.journal)
    return any(path.exists() for path in (run_dir.root / MARKER_NAME, *known))


def read_outcome(run_dir: RunDirectory) -> str:
    """A summary of an earlier launch than the lease's is not this run's end."""
    summary, lease = read_object(run_dir.summary), read_object(run_dir.lease)
    if _is_running(lease):
        return "running"
    is_last = summary.get("term", 1) == lease.get("term", summary.get("term", 1))
    if summary.get("outcome") and is_last:
        return str(summary["outcome"])
    has_results = (run_dir.root / "results.json").is_file() and not lease.get("owner")
    return "done" if has_results else "killed"


def _cause(run_dir: RunDirectory, outcome: str, summary: Mapping[str, Any]) -> str:
    if outcome == "killed":
        found = [(log.stem, find_cause(log)) for log in sorted(run_dir.logs.glob("*.log"))]
        return "; ".join(f"{name} last said: {cause}" for name, cause in found if cause)
    is_own = summary.get("outcome") == outcome
    return str(summary.get("cause") or "") if is_own else ""


def _is_running(lease: Mapping[str, Any]) -> bool:
    try:
        return Owner(**lease["owner"]).is_known_alive
    except (KeyError, TypeError):
        return False


def settings_of(kind: str, config: Mapping[str, Any]) -> Settings:
    """The settings in a recorded config, and which of them somebody chose."""
    config = _mapping(without_any_secret(config, os.environ))
    values = {key: value for key, value in leaves(config) if value is not None}
    if not config:
        return Settings(note="The folder holds no config.")
    model = _MODELS.get(kind)
    if model is None:
        return Settings(values, values)
    try:
        typed = model.model_validate(config)
    except ValueError:
        note = (
            "This version of gradus reads the config only in part, so defaults are not told apart."
        )
        return Settings(values, values, note)
    chosen = dict(leaves(typed.model_dump(mode="json", exclude_defaults=True)))
    chosen |= _chosen_types(typed)
    return Settings(values, {key: value for key, value in chosen.items() if key in values})


def _chosen_types(table: BaseModel, above: str = "") -> dict[str, Any]:
    """Every `type` below `table` that is not the one of the default.

    To pydantic a `type` is never more than the default of its own class.
    """
    found: dict[str, Any] = {}
    for name, about in type(table).model_fields.items():
        value, usual = getattr(table, name), about.get_default(call_default_factory=True)
        entries, usuals = ({name: it} for it in (value, usual))
        if isinstance(value, list):
            usual = usual if isinstance(usual, list) else []
            entries, usuals = (_named(it, f"{name}.") for it in (value, usual))
        for key, entry in entries.items():
            if not isinstance(entry, BaseModel):
                continue
            tag = getattr(entry, "type", None)
            if tag != getattr(usuals.get(key), "type", None):
                found[f"{above}{key}.type"] = tag
            found |= _chosen_types(entry, f"{above}{key}.")
    return found


def _named(entries: Sequence[Any], above: str) -> dict[str, Any]:
    """The entries by the names that `leaves` gives them."""
    names = [
        str(getattr(it, "name", None) or getattr(it, "id", None) or place)
        for place, it in enumerate(entries)
    ]
    return {f"{above}{name}": it for name, it in zip(names, entries, strict=True)}


def differing(settings: Mapping[str, Settings]) -> list[tuple[str, list[Any]]]:
    """Keys whose values differ between runs, with the value of each run; None where it has none.

    A run whose folder holds no config differs in nothing. Of a table that only some runs have, a
    source for example, only what somebody chose is listed.
    """
    known = [of_run for of_run in settings.values() if of_run.values]
    tables = [{_table_of(key) for key in of_run.values} for of_run in known]
    keys = sorted({key for of_run in known for key in of_run.values})
    rows = []
    for key in keys:
        is_same = all(of_run.values.get(key) == known[0].values.get(key) for of_run in known)
        is_everywhere = all(_table_of(key) in of_run for of_run in tables)
        is_chosen = is_everywhere or any(key in of_run.changed for of_run in known)
        if not _PLACES.match(key) and not is_same and is_chosen:
            rows.append((key, [of_run.values.get(key) for of_run in settings.values()]))
    return rows


def _table_of(key: str) -> str:
    return key.rpartition(".")[0]


def notices(run_dir: RunDirectory, *, max_bytes: int = 1 << 18) -> list[str]:
    """The last lines that the person at the terminal was shown."""
    found = last_lines(run_dir.notices, max_bytes=max_bytes)
    lines = ((it.content or b"").decode(errors="replace").rstrip("\r\n") for it in found)
    return [line for line in lines if line.strip()]


def when(seconds: float | None) -> str:
    """A time for a person, in UTC."""
    if seconds is None or not 0 < seconds < 1e11:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty for a file that is missing, damaged or too large."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_JSON_BYTES:
            return {}
        return _mapping(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
