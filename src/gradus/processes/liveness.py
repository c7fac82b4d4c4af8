"""Which processes of a run are silent: heartbeats, and the launcher's watch over them.

Each process whose event loop matters writes `alive/<process>.json` every few seconds, with what it
knows of others that are silent. The launcher reads these files and asks the kernel which processes
are stopped, and tells a person about a silent process within a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.processes.started import ChildSilent
from gradus.processes.table import stopped_processes

BEAT_SECONDS = 5.0
"""Between two heartbeats."""
TELL_SECONDS = 20.0
"""Silence after which a person gets a line about it."""
_LOOK_SECONDS = 2.0
_MAX_STEP_SECONDS = 10.0
"""After a longer pause between two looks, it was the launcher that was stopped."""


async def beat(folder: Path, process: str, tell: Callable[[], Mapping[str, str]] = dict) -> None:
    """Say every few seconds that this event loop runs, until cancelled.

    `tell` names who is silent as far as this process knows, and what that one does.
    """
    path = folder / f"{process}.json"
    for number in itertools.count():
        # A disk that takes nothing must not end the process; it is silent then.
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            _replace(path, {"number": number, "pid": os.getpid(), "silent": dict(tell())})
        await asyncio.sleep(BEAT_SECONDS)


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Like `write_json`, without waiting for the disk: an old heartbeat is worth nothing."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


@dataclass(frozen=True)
class Watched:
    """One child of the launch."""

    name: str
    pid: int
    is_vital: bool
    """Whether it has failed when it is silent for too long; the orchestrator watches the others."""


@dataclass(frozen=True)
class _Sign:
    """What was seen in one look."""

    who: str
    what: str
    """Is followed by "for 20 s"."""
    process: str
    """The child that it is about, or that reports it."""
    advice: str = ""
    is_fatal: bool = False


@dataclass
class _Silence:
    """Something that was seen in every look since."""

    sign: _Sign
    since: float
    tell_after: float
    is_shown: bool = False


class SilenceWatch:
    """Owns what is known of silent processes; the launcher asks it often.

    >>> watch = SilenceWatch(Path("runs/demo/alive"), limit_seconds=300)  # doctest: +SKIP
    >>> watch.look([Watched("trainer", 4711, is_vital=True)])  # doctest: +SKIP
    ['trainer (pid 4711) is stopped by a signal for 20 s; `kill -CONT 4711` lets it continue']
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A vital process that is silent for `limit_seconds` has failed."""
        self._folder = folder
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._looked_at = clock()
        self._watched_seconds = 0.0
        self._beats: dict[str, tuple[object, float]] = {}
        self._silences: dict[str, _Silence] = {}
        # A run whose steps take minutes says so once, and again only when one takes twice as long.
        self._usual_seconds: dict[str, float] = {}

    def look(self, processes: Sequence[Watched]) -> list[str]:
        """Lines for a person; a silence is repeated once it has lasted three times as long.

        Raises ChildSilent when a vital process is silent for too long.
        """
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return []
        self._watched_seconds += min(now - self._looked_at, _MAX_STEP_SECONDS)
        self._looked_at = now
        found = self._stopped(processes)
        for watched in processes:
            found |= self._reported_by(watched, is_stopped=f"{watched.pid}" in found)
        lines = self._forget_all_but(found)
        for key, sign in found.items():
            tell_after = max(TELL_SECONDS, 2 * self._usual_seconds.get(key, 0.0))
            new = _Silence(sign, self._watched_seconds, tell_after)
            silence = self._silences.setdefault(key, new)
            silence.sign = sign
            lines += self._tell(silence)
        return lines

    def _tell(self, silence: _Silence) -> list[str]:
        seconds, sign = self._watched_seconds - silence.since, silence.sign
        text = f"{sign.who} {sign.what} for {seconds:.0f} s"
        if sign.is_fatal and seconds >= self._limit_seconds:
            limit = "launch.silent_process_seconds is the limit"
            raise ChildSilent(sign.process, f"{text}; {limit}")
        if seconds < silence.tell_after:
            return []
        silence.tell_after *= 3
        silence.is_shown = True
        end = f"; it counts as failed after {self._limit_seconds:g} s" if sign.is_fatal else ""
        return [f"{text}{sign.advice}{end}"]

    def _forget_all_but(self, found: Mapping[str, _Sign]) -> list[str]:
        lines = []
        for key in [key for key in self._silences if key not in found]:
            silence = self._silences.pop(key)
            seconds = self._watched_seconds - silence.since
            if silence.is_shown:
                lines.append(f"{silence.sign.who} responds again after {seconds:.0f} s")
                self._usual_seconds[key] = max(seconds, self._usual_seconds.get(key, 0.0))
        return lines

    def _stopped(self, processes: Sequence[Watched]) -> dict[str, _Sign]:
        """Stopped processes by pid; programs in other sessions do not count."""
        sessions = {watched.pid: watched for watched in processes}
        signs = {}
        for entry in stopped_processes():
            watched = sessions.get(entry.session)
            if watched is None:
                continue
            who = _title(watched.name)
            if entry.pid != watched.pid:
                who = f"a worker process of {who}"
            signs[f"{entry.pid}"] = _Sign(
                f"{who} (pid {entry.pid})",
                "is stopped by a signal",
                watched.name,
                advice=f"; `kill -CONT {entry.pid}` lets it continue",
                is_fatal=watched.is_vital,
            )
        return signs

    def _reported_by(self, watched: Watched, *, is_stopped: bool) -> dict[str, _Sign]:
        """That its heartbeat stopped, or what it reports of others."""
        content = _read(self._folder / f"{watched.name}.json")
        if content is None or content.get("pid") != watched.pid or is_stopped:
            return {}
        number = content.get("number")
        last, since = self._beats.get(watched.name, (None, 0.0))
        if number != last:
            self._beats[watched.name] = (number, self._watched_seconds)
            since = self._watched_seconds
        if self._watched_seconds - since > 2 * BEAT_SECONDS:
            title, is_vital = _title(watched.name), watched.is_vital
            sign = _Sign(title, "does nothing", watched.name, is_fatal=is_vital)
            return {watched.name: sign}
        silent = content.get("silent")
        reported = silent.items() if isinstance(silent, dict) else ()
        return {
            f"{watched.name}: {who}": _Sign(str(who), str(what), watched.name)
            for who, what in reported
        }


def _title(process: str) -> str:
    for prefix, words in (("env_", "environment"), ("eval_", "evaluated environment")):
        if process.startswith(prefix):
            return f"{words} {process.removeprefix(prefix)!r}"
    return process


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
