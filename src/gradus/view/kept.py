"""The index of a long run, kept in the user's cache folder, so that the next look begins there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gradus.errors import GradusError
from gradus.run.lease import read_marker
from gradus.run.paths import RunDirectory
from gradus.view.index import EpisodeIndex

FORMAT = 1
KEPT_FROM = 5_000
"""Rows that must be new before an index is written: fewer are read in a moment."""
_MAX_KEPT = 40
"""Indexes; the oldest goes for a new one."""
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile)


def open_index(run_dir: RunDirectory, variables: Mapping[str, str] | None = None) -> EpisodeIndex:
    """The index as far as it was kept, else an empty one."""
    index = EpisodeIndex(run_dir)
    path = _path_of(run_dir, os.environ if variables is None else variables)
    if path is None or not path.is_file():
        return index
    with contextlib.suppress(*_DAMAGED), path.open("rb") as file, np.load(file) as kept:
        about = json.loads(bytes(kept["about"]))
        named = {name: kept[f"arr_{place}"] for place, name in enumerate(about["columns"])}
        index.restore(named, about)
    return index


def keep_index(index: EpisodeIndex, variables: Mapping[str, str] | None = None) -> bool:
    """Write an index for the next look; a cache that cannot be written is done without."""
    path = _path_of(index.run_dir, os.environ if variables is None else variables)
    if path is None:
        return False
    columns, about = index.state()
    told = np.frombuffer(json.dumps(about | {"columns": list(columns)}).encode(), np.uint8)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez(file, *columns.values(), about=told)
        temporary.replace(path)
        kept = sorted(path.parent.glob("*.npz"), key=lambda it: it.stat().st_mtime)
        for old in kept[:-_MAX_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True


def _path_of(run_dir: RunDirectory, variables: Mapping[str, str]) -> Path | None:
    """By the identity of the run and the place where it lies; None for a user without a home."""
    root = variables.get("XDG_CACHE_HOME", "")
    if not root.startswith("/"):
        home = variables.get("HOME", "")
        root = f"{home}/.cache" if home.startswith("/") else ""
    try:
        marker = read_marker(run_dir)
    except GradusError:
        marker = None
    if not root or marker is None:
        return None
    told = f"{FORMAT} {marker.run_id} {run_dir.root.resolve()}"
    return Path(root, "gradus", "view", f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.npz")
