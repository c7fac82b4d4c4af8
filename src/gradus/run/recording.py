"""What a run keeps so that it can be repeated: `replay/term_N/`, one folder for each launch.

    run.json      the config, and the versions of gradus and of the libraries that decide numbers
    model.json    SHA-256 of each file of the initial weights
    episodes.bin  every episode as it arrived, with all its tokens

Beside them, `replay/images/` holds the images of all episodes, each once, by its SHA-256.

`episodes.bin` only grows. An entry is a header, the id of the episode, and its body; what a kill
cut off at the end is not an entry. The journal says what became of the episodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pwd
import re
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

import gradus
from gradus.errors import ConfigError, CorruptStateError
from gradus.files import read_json, unlinked, write_json
from gradus.installed import module_digest
from gradus.redact import without_any_secret
from gradus.run.growing_files import audit
from gradus.run.paths import RunDirectory

FORMAT = 4
"""Raised when an older gradus could not replay what this one records."""

LIBRARIES = ("numpy", "pillow", "torch", "torchvision", "transformers", "verifiers")
"""What decides numbers, apart from gradus itself."""

_HEADER = struct.Struct("<IIH")
"""Bytes of the body, CRC-32 of id and body, bytes of the id."""
_GIT_SECONDS = 5.0
_TERM = re.compile(r"term_(\d{8})")


@dataclass(frozen=True)
class LaunchRecord:
    """The folder of one launch.

    >>> LaunchRecord(RunDirectory(Path("runs/demo")), term=1).episodes.name
    'episodes.bin'
    """

    run_dir: RunDirectory
    term: int

    @property
    def root(self) -> Path:
        return self.run_dir.replay / f"term_{self.term:08d}"

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    @property
    def model(self) -> Path:
        return self.root / "model.json"

    @property
    def episodes(self) -> Path:
        return self.root / "episodes.bin"


@dataclass(frozen=True)
class RecordedLaunch:
    """What `run.json` says."""

    term: int
    config: dict[str, Any]
    """The user's config with all defaults, without environment variables."""
    written: dict[str, Any]
    """What the user wrote of it, from which it is made again."""
    libraries: dict[str, str]
    """Version of each of LIBRARIES that was installed."""


@dataclass(frozen=True)
class Launched:
    """What the last launch noted of itself, in `config/launched.json`."""

    kind: str = ""
    """`rl`, `sft`, `eval`, `replay` or `bench`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the user wrote with all defaults, as JSON values, without environment variables."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """What the user wrote of it, from which it is made again; all of it in older records."""
    code_version: str = ""
    """Version of gradus, and the commit where it is known."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Library → version."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Key → what was chosen for its "auto", and why."""


def note_launched(
    run_dir: RunDirectory,
    kind: str,
    config: Mapping[str, Any],
    chosen: Mapping[str, str] | None = None,
    *,
    written: Mapping[str, Any] | None = None,
    term: int = 0,
    environments: Iterable[str] = (),
) -> None:
    """Write `launched.json`, and who started what to the audit log; `config` must hold no secret.

    `written` is what the user wrote of it; None means all of it. `environments` are ids of
    verifiers, whose modules the audit log tells apart by their digest.
    """
    own = config if written is None else written
    launched = Launched(kind, config, own, code_version(), installed_libraries(), chosen or {})
    write_json(run_dir.launched, asdict(launched))
    values = json.dumps(config, sort_keys=True).encode()
    user: int | str = os.geteuid()
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
    audit(
        run_dir,
        "started",
        term=term,
        kind=kind,
        user=user,
        host=socket.gethostname(),
        folder=str(Path.cwd()),
        command=without_any_secret(sys.argv, os.environ),
        config=hashlib.sha256(values).hexdigest(),
        code=launched.code_version,
        packages=launched.packages,
        environments={it: module_digest(it) for it in sorted(set(environments))},
    )


def read_launched(run_dir: RunDirectory) -> Launched:
    """What `launched.json` says; empty where it is missing or damaged."""
    try:
        content = run_dir.launched.read_bytes() if run_dir.launched.is_file() else b""
        found = msgspec.json.decode(content, type=Launched)
        return found if found.written else replace(found, written=found.config)
    except (OSError, ValueError, RecursionError):
        return Launched()


def note_launch(
    run_dir: RunDirectory,
    term: int,
    config: Mapping[str, Any],
    written: Mapping[str, Any] | None = None,
) -> None:
    """Write `run.json` of a launch that begins; `config` must hold no secret.

    `written` is what the user wrote of it; None means all of it.
    """
    value = {
        "format": FORMAT,
        "gradus": gradus.__version__,
        "libraries": installed_libraries(),
        "config": config,
        "written": config if written is None else written,
    }
    write_json(LaunchRecord(run_dir, term).run, value)


def read_launch(run_dir: RunDirectory, term: int) -> RecordedLaunch:
    """What `run.json` of a launch says; ConfigError when another gradus wrote it."""
    path = LaunchRecord(run_dir, term).run
    try:
        value = read_json(path)
        by = (value["format"], value["gradus"])
        if by != (FORMAT, gradus.__version__):
            raise ConfigError(
                f"{path} was written by gradus {by[1]} in format {by[0]}, this is gradus "
                f"{gradus.__version__} with format {FORMAT}; replay the run with the version that "
                "recorded it"
            )
        own = (dict(value[key]) for key in ("config", "written", "libraries"))
        return RecordedLaunch(term, *own)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing, so the config of launch {term} is not known; the run was not "
            "recorded (orchestrator.recording), or its records were deleted"
        ) from None
    except (KeyError, TypeError) as error:
        raise CorruptStateError(f"{path} does not describe a launch ({error!r})") from error


def recorded_terms(run_dir: RunDirectory) -> list[int]:
    """Terms of the launches that have a folder."""
    if not run_dir.replay.is_dir():
        return []
    matches = (_TERM.fullmatch(path.name) for path in run_dir.replay.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def installed_libraries() -> dict[str, str]:
    """Version of each of LIBRARIES that is installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_version() -> str:
    """Version of gradus, and the commits of its checkout and of the present folder."""
    own, here = _commit(Path(__file__).parent), _commit(Path.cwd())
    text = f"gradus {gradus.__version__}" + (f" ({own})" if own else "")
    return f"{text}, started in {here}" if here and here != own else text


def _commit(folder: Path) -> str | None:
    """The commit of the checkout that a folder is part of; None outside of one."""
    command = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12")
    options = ("--exclude", "*")
    try:
        found = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


@dataclass(frozen=True)
class EpisodeEntry:
    """Where the body of one episode lies in `episodes.bin`."""

    id: str
    start: int
    end: int
    crc: int


class EpisodeLog:
    """Owns an open `episodes.bin`; an entry is with the operating system when `append` returns."""

    def __init__(self, path: Path) -> None:
        """Cuts off what a kill left after the last whole entry."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(path, "ab", opener=unlinked)
        entries = list(iter_entries(path))
        self._file.truncate(entries[-1].end if entries else 0)

    def append(self, episode_id: str, body: bytes) -> None:
        """Add one entry; OSError when the disk does not take it; append nothing after that."""
        whole = pack_entry(episode_id, body)
        if self._file.write(whole) != len(whole):
            raise OSError("the disk took only a part of an episode")

    def close(self) -> None:
        self._file.close()


def pack_entry(name: str, body: bytes) -> bytes:
    encoded = name.encode()
    return _HEADER.pack(len(body), _crc(encoded, body), len(encoded)) + encoded + body


def iter_entries(path: Path, *, check: bool = False, start: int = 0) -> Iterator[EpisodeEntry]:
    """Every whole entry in order; with `check` every byte is read and compared.

    `start` is where an entry begins that is the first to be read.

    CorruptStateError names an entry whose bytes changed.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(start)
        while (entry := _next_entry(file, size, path)) is not None:
            if check:
                read_body(file, entry, path)
            file.seek(entry.end)
            yield entry


def read_body(file: BinaryIO, entry: EpisodeEntry, path: Path) -> bytes:
    """The bytes of one episode; CorruptStateError when they changed."""
    file.seek(entry.start)
    body = file.read(entry.end - entry.start)
    if _crc(entry.id.encode(), body) != entry.crc:
        raise CorruptStateError(
            f"{path}: episode {entry.id} at byte {entry.start} is damaged; restore the file"
        )
    return body


def _next_entry(file: BinaryIO, size: int, path: Path) -> EpisodeEntry | None:
    """The entry at the file's position; None at the end, and for one that is cut off."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    num_bytes, crc, name_bytes = _HEADER.unpack(header)
    start = file.tell() + name_bytes
    if start + num_bytes > size:
        return None
    name = file.read(name_bytes)
    try:
        return EpisodeEntry(name.decode(), start, start + num_bytes, crc)
    except UnicodeDecodeError as error:
        raise CorruptStateError(f"{path}: no episode at byte {start} ({error.reason})") from error


def _crc(name: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(name))
