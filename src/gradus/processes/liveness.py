"""Which processes of a run are silent: the launcher's watch over their heartbeats.

Each role says in files of `alive/` what its work did last (`gradus.heartbeat`), and what it knows
of others that are silent. The launcher reads them and asks the kernel which processes are stopped.
It tells a person about a silent process within a minute, and names the one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gradus.heartbeat import BEAT_SECONDS, STRANDS, Sign, beat, touch_alive
from gradus.processes.started import ProcessSpec
from gradus.processes.table import read_process, stopped_processes

TELL_SECONDS = 20.0
"""Silence after which a person gets a line about it."""
BLOCKED_GRACE_SECONDS = 60.0
"""After a plug-in's own deadline, at which its gate ends the process."""
_LOOK_SECONDS = 2.0
_MAX_STEP_SECONDS = 10.0
"""After a longer pause between two looks, it was the launcher that was stopped."""


async def beat_with_loop(tell: Callable[[], Mapping[str, str]] = dict) -> None:
    """Say every few seconds that this event loop runs, until cancelled.

    `tell` names who is silent as far as this process knows, and what that one does.
    """
    while True:
        beat("its event loop", silent=tell())
        await asyncio.sleep(BEAT_SECONDS)


@dataclass(frozen=True)
class Watched:
    """One child of the launch."""

    name: str
    pid: int
    is_vital: bool
    """Whether it must end when a process below it is stopped; environments replace theirs."""
    ready_file: Path | None = None
    """Without this file it still starts, which has a deadline of its own."""
    blocked_seconds: float = 0.0
    """How long its work may hold it without a sign, whatever the launch allows."""


def watched(spec: ProcessSpec, pid: int) -> Watched:
    is_vital, name = spec.restarts == 0, spec.beats_as or spec.name
    return Watched(name, pid, is_vital, spec.ready_file, spec.blocked_seconds)


@dataclass(frozen=True)
class Hang:
    """A child that was silent for too long."""

    watched: Watched
    text: str
    """For a person, with how long it was silent."""
    cause: str
    """The same when the same work hangs again."""


@dataclass(frozen=True)
class Looked:
    """What one look found."""

    lines: list[str]
    """For a person."""
    hangs: list[Hang]
    """Longest silence first."""


@dataclass(frozen=True)
class _Sign:
    """A silence that one look saw."""

    who: str
    what: str
    """Follows that, and is followed by "for 20 s"."""
    more: str = ""
    """Follows that."""
    advice: str = ""
    """Follows that, while it may still end."""
    watched: Watched | None = None
    """The child that hangs when it lasts; None where another process decides."""
    limit_seconds: float = 0.0
    since: float | None = None
    """When it began; None means at the first look that saw it."""


@dataclass
class _Silence:
    """Something that was seen in every look since."""

    sign: _Sign
    since: float
    tell_after: float
    is_shown: bool = False


class SilenceWatch:
    """Owns what is known of silent processes; the launcher asks it often."""

    def __init__(
        self,
        folder: Path,
        *,
        hang_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Who is silent for `hang_seconds` hangs, unless its work announced more."""
        self._folder = folder
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._looked_at = clock()
        # Of looks, so that a launcher that was stopped, as by a laptop asleep, blames nobody.
        self._watched_seconds = 0.0
        self._heard: dict[Path, tuple[tuple[int, int], float]] = {}
        self._silences: dict[str, _Silence] = {}
        # A run whose steps take minutes says so once, and again only when one takes twice as long.
        self._usual_seconds: dict[str, float] = {}

    def look(self, processes: Sequence[Watched]) -> Looked:
        """Who hangs, and lines for a person: a silence again once it lasted three times as long."""
        touch_alive()
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return Looked([], [])
        self._watched_seconds += min(now - self._looked_at, _MAX_STEP_SECONDS)
        self._looked_at = now
        found = self._stopped(processes)
        stopped = {sign.watched for sign in found.values()}
        for watched in processes:
            found |= self._unheard(watched, is_stopped=watched in stopped)
        lines = self._forget_all_but(found)
        hangs = []
        for key, sign in found.items():
            tell_after = max(TELL_SECONDS, 2 * self._usual_seconds.get(key, 0.0))
            since = self._watched_seconds if sign.since is None else sign.since
            silence = self._silences.setdefault(key, _Silence(sign, since, tell_after))
            silence.sign = sign
            if sign.watched is not None and self._seconds(silence) >= sign.limit_seconds:
                hangs.append((self._seconds(silence), self._hang(silence, sign.watched)))
                silence.is_shown = False  # it is ended, and does not respond again
            else:
                lines += self._tell(silence)
        hangs.sort(key=lambda it: -it[0])
        return Looked(lines, [hang for _, hang in hangs])

    def _seconds(self, silence: _Silence) -> float:
        return self._watched_seconds - silence.since

    def _hang(self, silence: _Silence, watched: Watched) -> Hang:
        sign, seconds = silence.sign, self._seconds(silence)
        text = f"{sign.who}{sign.what} for {seconds:.0f} s{sign.more}"
        limit = "launch.hang_seconds is the limit"
        if sign.limit_seconds > self._hang_seconds:
            limit = f"{sign.limit_seconds:g} s is its limit, or launch.hang_seconds if longer"
        return Hang(watched, f"{text}; {limit}", f"{sign.what}{sign.more}".lstrip(": "))

    def _tell(self, silence: _Silence) -> list[str]:
        seconds, sign = self._seconds(silence), silence.sign
        if seconds < silence.tell_after:
            return []
        silence.tell_after = 3 * seconds
        silence.is_shown = True
        end = "" if sign.watched is None else f"; it will be ended after {sign.limit_seconds:g} s"
        return [f"{sign.who}{sign.what} for {seconds:.0f} s{sign.more}{sign.advice}{end}"]

    def _forget_all_but(self, found: Mapping[str, _Sign]) -> list[str]:
        lines = []
        for key in [key for key in self._silences if key not in found]:
            silence = self._silences.pop(key)
            seconds = self._seconds(silence)
            if silence.is_shown:
                lines.append(f"{silence.sign.who} responds again after {seconds:.0f} s")
                self._usual_seconds[key] = max(seconds, self._usual_seconds.get(key, 0.0))
        return lines

    def _stopped(self, processes: Sequence[Watched]) -> dict[str, _Sign]:
        """Stopped processes by pid; programs of environments in other sessions do not count."""
        sessions = {watched.pid: watched for watched in processes}
        signs = {}
        vital = {watched.pid: watched for watched in processes if watched.is_vital}
        for entry in stopped_processes():
            # torchrun gives each rank a session of its own.
            watched = sessions.get(entry.session) or vital.get(entry.parent)
            if watched is None:
                continue
            who = _title(watched.name)
            if entry.pid != watched.pid:
                who = f"a worker process of {who}"
            ends = watched.is_vital or entry.pid == watched.pid
            signs[f"{entry.pid}"] = _Sign(
                f"{who} (pid {entry.pid})",
                " is stopped by a signal",
                advice=f"; `kill -CONT {entry.pid}` lets it continue",
                watched=watched if ends else None,
                limit_seconds=self._hang_seconds,
            )
        return signs

    def _unheard(self, watched: Watched, *, is_stopped: bool) -> dict[str, _Sign]:
        """The strands of a process that gave no sign of life, and whom it reports as silent."""
        if watched.ready_file is not None and not watched.ready_file.exists():
            return {}
        signs = {}
        for path, sign in _signs_of(self._folder, watched):
            heard = (sign.pid, sign.number)
            before, since = self._heard.get(path, (None, 0.0))
            if heard != before or is_stopped:
                since = self._watched_seconds
                self._heard[path] = (heard, since)
            if sign.seconds is None:
                continue
            limit = max(self._hang_seconds, sign.seconds)
            if watched.blocked_seconds >= limit:
                limit = watched.blocked_seconds + BLOCKED_GRACE_SECONDS
            # Announced work is named when half of its time is over.
            if self._watched_seconds - since > max(2 * BEAT_SECONDS, sign.seconds / 2):
                step = "" if sign.step is None else f" of step {sign.step}"
                signs[str(path)] = _Sign(
                    _title(watched.name, path),
                    ": no sign of life",
                    f", last: {sign.last}{step}",
                    watched=watched,
                    limit_seconds=limit,
                    since=since,
                )
            elif not is_stopped:
                reported = sign.silent.items()
                signs |= {
                    f"{watched.name}: {who}": _Sign(who, f" {what}") for who, what in reported
                }
        return signs


def _signs_of(folder: Path, watched: Watched) -> Iterator[tuple[Path, Sign]]:
    """What a child and its own processes say; not what an earlier launch left."""
    beside = sorted((folder / STRANDS).glob(f"{glob.escape(watched.name)}.*.json"))
    for path in (folder / f"{watched.name}.json", *beside):
        # Read in the middle of a write, it is as good as the one before.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            sign = msgspec.json.decode(path.read_bytes(), type=Sign)
            if os.getsid(sign.pid) == watched.pid or _parent(sign.pid) == watched.pid:
                yield path, sign


def _parent(pid: int) -> int | None:
    """That of a rank is torchrun, which gives each a session of its own."""
    entry = read_process(pid)
    return None if entry is None else entry.parent


def _title(process: str, path: Path | None = None) -> str:
    """What a person calls a process, or one of its strands: "trainer (rank 1, checkpoint)"."""
    strand = "" if path is None else path.stem.removeprefix(process).lstrip(".")
    if strand:
        return f"{_title(process)} ({strand.replace('.', ', ').replace('_', ' ')})"
    for prefix, words in (("env_", "environment"), ("eval_", "evaluated environment")):
        if process.startswith(prefix):
            return f"{words} {process.removeprefix(prefix)!r}"
    return process
