"""A node's copy of the run's folder, where it does not see the one of the launcher.

One thread fetches what is new there, another brings what is new here. Whatever a process is started
for lies here before it starts, and whatever it did lies there before the launcher hears of its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from gradus.errors import (
    ConfigError,
    CorruptStateError,
    DeadlineError,
    GradusError,
    ProcessError,
    ProtocolError,
    StorageError,
)
from gradus.files import (
    FULL_DISK_SECONDS,
    DurableFiles,
    storage_error,
    take_lock,
    write_atomically,
)
from gradus.nodes.folder import (
    CHECKPOINTS,
    PIECE_BYTES,
    SEALED,
    Append,
    AskStaged,
    Delete,
    Done,
    FileRange,
    Finish,
    Listing,
    Look,
    Put,
    PutPiece,
    ReadRange,
    Staged,
    Talk,
    images_of,
    is_listed,
    may_append,
    may_delete,
    may_put,
    may_read,
    may_stage,
    read_piece,
    signature,
    size_of,
    write_piece,
)
from gradus.processes.leftovers import end_leftovers
from gradus.run.lease import LEFTOVERS_SECONDS
from gradus.run.paths import RunDirectory
from gradus.sealed import (
    MANIFEST_NAME,
    FileEntry,
    discard,
    file_entry,
    open_sealed,
    put_in_place,
    staging_path,
)

_LOOK_SECONDS = 0.02
_SELDOM_SECONDS = 0.5
"""Between two looks at logs and signs of life."""
_LISTING_SECONDS = 0.5
_TRY_SECONDS = 0.5
_FULL_PAUSE_SECONDS = 2.0
SIDE_SUFFIX = ".side.json"
"""Of the file with the last node side of a number, beside the list of what it started."""
_KEPT = {"nodes", "secrets", CHECKPOINTS, "weights"}
"""Below the root, where a node side begins anew: what is sealed is compared, and need not come
again."""


class _HandedOver(msgspec.Struct, frozen=True):
    folder: str
    files: list[str]


class Mirror:
    """Owns the copy at the path of `run_dir`, and two connections."""

    def __init__(self, run_dir: RunDirectory, connect: Callable[[str], Talk]) -> None:
        """`connect` gives a connection to the launcher, by what it is for, or raises OSError or
        ProtocolError."""
        self._held = begin_anew(run_dir)
        self.error: GradusError | None = None
        """Why the copy is none any more."""
        self.lines: list[str] = []
        """For a person: what holds the copy."""
        self._root = run_dir.root
        self._run_dir = run_dir
        self._connect = connect
        self._files = DurableFiles()
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}  # path → what the launcher's end called it
        self._has_looked = False
        self._local: dict[str, str] = {}  # path → our signature of what both ends have
        self._ours: set[str] = set()
        """Of these, what was written here."""
        self._grown: dict[str, tuple[int, int]] = {}  # path → bytes brought: of all, of the file
        self._handed_over: set[str] = set()
        self._measured: dict[str, dict[str, FileEntry]] = {}
        """Of the request that is met: reading it may take longer than the other end waits."""
        self._wanted: set[str] = set()
        self._fetch_asked = self._fetched = self._bring_asked = self._brought = 0
        self._seldom_at = 0.0
        self._is_closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(turn, name), name=name, daemon=True)
            for name, turn in (("fetches", self._fetch), ("brings", self._bring))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._is_closing.set()
        for thread in self._threads:
            thread.join(timeout=10.0)
        self._held.close()

    def fetch(self, wanted: str = "") -> int:
        """Ask for all that is in the run's folder now, for what `wanted` does; a number for
        `has_fetched`."""
        with self._lock:
            self._wanted |= {wanted} - {""}
            self._fetch_asked += 1
            return self._fetch_asked

    def has_fetched(self, number: int) -> bool:
        return self._fetched >= number

    def bring(self) -> int:
        """Ask that all that is here now is brought; a number for `has_brought`."""
        with self._lock:
            self._bring_asked += 1
            return self._bring_asked

    def has_brought(self, number: int) -> bool:
        return self._brought >= number

    # ------------------------------------------------------------------ both threads

    def _repeat(self, turn: Callable[[Talk], None], way: str) -> None:
        """Turn after turn, over as many connections as it takes; a disk that fails holds it."""
        failed_at: list[float] = []
        while not self._is_closing.is_set():
            try:
                try:
                    self._turns(turn, way, failed_at)
                except OSError as error:
                    if isinstance(error, ConnectionError):
                        raise
                    # Not of the connection: what failed is this node's disk.
                    place = Path(error.filename or self._root)
                    raise storage_error(error, place) from error
            except (StorageError, CorruptStateError) as error:
                failed_at.append(time.monotonic())
                self._measured = {}
                if len(failed_at) == 2:  # What was gone just as it was read is no failure.
                    self.lines.append(f"the copy of the run's folder waits: {error}")
                if failed_at[-1] - failed_at[0] > FULL_DISK_SECONDS:
                    self.error = error
                    return
                self._is_closing.wait(_FULL_PAUSE_SECONDS)
            except (ConnectionError, ProtocolError):
                self._is_closing.wait(_TRY_SECONDS)
            except Exception as error:
                self.error = ProcessError(f"the copy of the run's folder is given up: {error!r}")
                return

    def _turns(self, turn: Callable[[Talk], None], way: str, failed_at: list[float]) -> None:
        """Turn after turn over one connection; ConnectionError when there is none."""
        try:
            talk = self._connect(way)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        with contextlib.closing(talk):
            while not self._is_closing.is_set():
                turn(talk)
                failed_at.clear()

    # ------------------------------------------------------------------ from the launcher

    def _fetch(self, talk: Talk) -> None:
        if not self._has_looked:  # here, since it may take longer than a node side may be silent
            self._known, self._has_looked = _sealed_here(self._root), True
        with self._lock:
            number, wanted = self._fetch_asked, sorted(self._wanted)
            before = {path for path in self._ours if may_read(path)}
        is_behind = number > self._fetched
        look = Look(wanted, 0.0 if is_behind else _LISTING_SECONDS, is_behind)
        entries = talk.ask(look, Listing).entries
        for path, sign in entries.items():
            if self._known.get(path) == sign:
                continue
            if SEALED.fullmatch(path):
                self._fetch_folder(talk, path, sign)
            elif path not in self._ours:
                self._fetch_file(talk, path)
            self._known[path] = sign
        for path in {*self._known, *before} - entries.keys():
            if is_listed(path, wanted, with_checkpoints=is_behind):
                self._forget(path)
        self._fetched = number

    def _fetch_file(self, talk: Talk, path: str) -> None:
        content = bytearray()
        while piece := talk.ask(ReadRange(path, len(content)), FileRange).content:
            content += piece
            if len(piece) < PIECE_BYTES:
                break
        target = self._root / path
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock:
                write_atomically(target, bytes(content), mode=0o600)
                self._local[path] = signature(target)
        except OSError as error:
            raise storage_error(error, target, needed_bytes=len(content)) from error

    def _fetch_folder(self, talk: Talk, path: str, digest: str) -> None:
        """What lies staged of it, after a cut, does not come again; nor what was made here."""
        target = self._root / path
        with contextlib.suppress(CorruptStateError, ConfigError):
            if open_sealed(target, Any).digest == digest:
                return
        staging = staging_path(target, 0)
        manifest = talk.ask(ReadRange(f"{path}/{MANIFEST_NAME}", 0), FileRange).content
        self._files.make_folder(staging)
        write_piece(staging / MANIFEST_NAME, 0, manifest)
        sealed = open_sealed(staging, Any)
        for name, entry in sealed.files.items():
            self._fetch_into(talk, f"{path}/{name}", staging / name, entry.bytes)
        try:
            sealed.verify("crc32")
        except CorruptStateError as error:
            self._files.delete(staging)
            raise StorageError(f"{error}; it is fetched again") from error
        if path.startswith("spool/"):  # a batch, which is read as soon as it has its name
            for name in sealed.files:
                self._fetch_images(talk, (staging / name).read_bytes())
        if target.exists():
            discard(target, 0, self._files)
        put_in_place(staging, target, self._files)

    def _fetch_images(self, talk: Talk, part: bytes) -> None:
        """Those that a rank's part of a batch shows and no earlier one showed."""
        for path in images_of(part):
            target = self._root / path
            if not target.exists():
                self._fetch_file(talk, path)
                if hashlib.sha256(target.read_bytes()).hexdigest() != target.name:
                    target.unlink()
                    raise StorageError(f"{path} at the launcher has other bytes; restore the file")

    def _fetch_into(self, talk: Talk, path: str, target: Path, size: int) -> None:
        offset = min(size_of(target), size)
        if not size:
            write_piece(target, 0, b"")
        while offset < size:
            content = talk.ask(ReadRange(path, offset), FileRange).content
            if not content:
                raise CorruptStateError(f"{path} ends at {offset}, not at {size}")
            write_piece(target, offset, content)
            offset += len(content)

    def _forget(self, path: str) -> None:
        """It is gone at the launcher's end."""
        target = self._root / path
        with self._lock:
            self._known.pop(path, None)
            self._local.pop(path, None)
            self._ours.discard(path)
            if not target.is_dir():
                target.unlink(missing_ok=True)
        if target.is_dir():
            discard(target, 0, self._files)

    # ------------------------------------------------------------------ to the launcher

    def _bring(self, talk: Talk) -> None:
        number = self._bring_asked
        is_asked = number > self._brought
        for request in sorted(self._below("handed_over")):
            self._bring_folder(talk, request)
        is_due = is_asked or time.monotonic() - self._seldom_at > _SELDOM_SECONDS
        if is_due:
            self._seldom_at = time.monotonic()
            for path in ("audit.jsonl", "notices.log", *self._below("logs")):
                self._bring_growth(talk, path)
        for place in ("tokens", "alive") if is_due else ():
            for path in self._below(place):
                self._bring_file(talk, path)
        # Events in their order; last, since what they tell of comes before them.
        for path in (*sorted(self._below("ready")), *sorted(self._below("spool/events"))):
            self._bring_file(talk, path)
        self._bring_deletions(talk)
        self._brought = number
        if not is_asked:
            self._is_closing.wait(_LOOK_SECONDS)

    def _below(self, place: str) -> Iterator[str]:
        """Paths of the files below a folder, from the root."""
        for folder, _, names in os.walk(self._root / place):
            whole = (name for name in names if not name.startswith("."))
            yield from (str(Path(folder, name).relative_to(self._root)) for name in whole)

    def _bring_file(self, talk: Talk, path: str) -> None:
        if not may_put(path):
            return
        source, content = self._root / path, bytearray()
        try:
            with self._lock:
                sign = signature(source)
                if self._local.get(path) == sign:
                    return
            while piece := read_piece(source, len(content)):
                content += piece
        except (FileNotFoundError, CorruptStateError):
            return  # It went while it was read.
        for offset in range(0, max(len(content), 1), PIECE_BYTES):
            piece = bytes(content[offset : offset + PIECE_BYTES])
            is_last = offset + PIECE_BYTES >= len(content)
            talk.ask(Put(path, offset, piece, is_last), Done)
        with self._lock:
            self._local[path] = sign
            self._ours.add(path)

    def _bring_growth(self, talk: Talk, path: str) -> None:
        if not may_append(path):
            return
        source = self._root / path
        total, known = self._grown.get(path, (0, 0))
        if size_of(source) < known:  # A full one was renamed, with what it got last.
            total, _ = self._bring_rest(talk, path, Path(f"{source}.1"), (total, known))
            known = 0
        self._grown[path] = self._bring_rest(talk, path, source, (total, known))

    def _bring_rest(
        self, talk: Talk, path: str, source: Path, begun: tuple[int, int]
    ) -> tuple[int, int]:
        (total, known), size = begun, size_of(source)
        while known < size:
            content = read_piece(source, known)[: size - known]
            if not content:
                break
            talk.ask(Append(path, total, content), Done)
            total, known = total + len(content), known + len(content)
        return total, known

    def _bring_folder(self, talk: Talk, request: str) -> None:
        """What a process hands over, and waits for until its request is gone."""
        path = self._root / request
        wanted = msgspec.json.decode(path.read_bytes(), type=_HandedOver)
        folder = self._root / wanted.folder
        entries = self._measured.get(request) or _entries(folder, wanted.files)
        self._measured = {request: entries}
        if may_stage(wanted.folder, list(entries)):
            staged = talk.ask(AskStaged(wanted.folder, entries), Staged)
            if not staged.is_there:
                for name, entry in entries.items():
                    self._bring_pieces(talk, wanted.folder, name, staged.sizes[name], entry.bytes)
                talk.ask(Finish(wanted.folder, entries), Done)
        if folder.name.startswith("version_"):
            self._handed_over.add(wanted.folder)
        for name in entries if wanted.folder.startswith(CHECKPOINTS) else ():
            (folder / name).unlink()  # As where it is renamed: a step may be trained again.
        path.unlink()

    def _bring_pieces(self, talk: Talk, folder: str, file: str, start: int, size: int) -> None:
        offset = start if start <= size else 0
        while offset < size or not size:
            content = read_piece(self._root / folder / file, offset)
            talk.ask(PutPiece(folder, file, offset, content), Done)
            offset += len(content)
            if not size:
                return

    def _bring_deletions(self, talk: Talk) -> None:
        with self._lock:
            known = [*self._local, *self._handed_over]
            gone = [it for it in known if not (self._root / it).exists()]
        for path in gone:  # told until it is acknowledged
            if may_delete(path):
                talk.ask(Delete(path), Done)
            with self._lock:
                self._local.pop(path, None)
                self._ours.discard(path)
                self._handed_over.discard(path)


def begin_anew(run_dir: RunDirectory) -> IO[bytes]:
    """Make the folder, or clear what an earlier node side had in it; a file that holds it.

    What an earlier one left running is ended first. ConfigError for a folder that holds something
    else, DeadlineError while another node side has it.
    """
    root, marker = run_dir.root, run_dir.mirror
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # After it: a network disk may remember that the folder was absent.
    others = [it.name for it in root.iterdir() if it.name != "secrets"]
    if others and not marker.exists():
        raise ConfigError(
            f"{root} on this node is not the folder of the run that its launcher has, and holds "
            f"{others[0]!r}; move it away, or share the run's folder"
        )
    marker.touch(mode=0o600)
    held = marker.open("ab")
    try:
        take_lock(held.fileno(), root)
    except BlockingIOError:
        held.close()
        raise DeadlineError(
            f"another node side keeps its copy in {root}; end it, or give this node a disk of its "
            "own there"
        ) from None
    for registry in run_dir.nodes.glob("*.json"):  # They would write into what is cleared.
        if not registry.name.endswith(SIDE_SUFFIX):
            end_leftovers(registry, timeout_seconds=LEFTOVERS_SECONDS)
    for path in root.iterdir():
        if path.name in _KEPT or path == marker:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in (run_dir.spool / "events", run_dir.ready, run_dir.handed_over, run_dir.logs):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return held


def _sealed_here(root: Path) -> dict[str, str]:
    """What is whole of an earlier copy; the rest of it goes."""
    found = {}
    for path in (*(root / CHECKPOINTS).glob("*"), *(root / "weights").glob("*")):
        name = str(path.relative_to(root))
        try:
            if not SEALED.fullmatch(name):
                raise CorruptStateError(f"{path} is not sealed")
            sealed = open_sealed(path, Any)
            sealed.verify("crc32")
            found[name] = sealed.digest
        except (CorruptStateError, ConfigError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _entries(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    """What the other end must find; those of a sealed folder stand in its manifest."""
    if (folder / MANIFEST_NAME).exists():
        manifest = file_entry(folder / MANIFEST_NAME)
        return {**open_sealed(folder, Any).files, MANIFEST_NAME: manifest}
    every = names or [str(it.relative_to(folder)) for it in folder.rglob("*") if it.is_file()]
    return {name: file_entry(folder / name) for name in every}
