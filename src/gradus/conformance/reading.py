"""What is checked, and the child that loads it; imports nothing heavy, so that it starts first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.config import EnvironmentProcessConfig
from gradus.files import read_json, write_json
from gradus.processes.log_tail import find_cause

LOAD_SECONDS = 60.0
END_SECONDS = 15.0


@dataclass(frozen=True)
class ModelEndpoint:
    """A model behind an OpenAI-compatible endpoint."""

    base_url: str
    model: str
    api_key_var: str


@dataclass(frozen=True)
class Subject:
    """One environment that is checked."""

    process: EnvironmentProcessConfig
    """Of its environment process; the folder in it is replaced."""
    variables: Mapping[str, str]
    """The whole environment of that process, as a run would give it."""
    untrained: Sequence[str] = ()
    """Agents that the source does not train."""
    endpoint: ModelEndpoint | None = None
    """A model that plays one more episode. None means the scripted one alone."""
    attacks: bool = False
    """Whether every hostile policy is played, not a few."""


class ChildModule:
    """Owns a Python module that runs in a separate session, with the subject's variables."""

    def __init__(self, subject: Subject, *words: str, temporary: Path, log: Path) -> None:
        temporary.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [subject.process.python or sys.executable, "-P", "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**subject.variables, "TMPDIR": str(temporary)},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None when it did not end in time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def said(self) -> str:
        """How it ended, and what it complained about."""
        code = self.exit_code or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        cause = find_cause(self.log)
        return f"{how}: {cause}" if cause else how

    def end(self) -> None:
        """End it: politely, then with its whole session."""
        if self.exit_code is None:
            self._process.terminate()
            if self.wait(END_SECONDS) is None:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()


class Reading:
    """Owns the child that loads the environment and says what it saw."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        process = subject.process
        self._seconds = LOAD_SECONDS + (process.prepare_seconds if process.prepare else 0)
        self._result = folder / "seen.json"
        request = folder / "request.json"
        values = process.model_dump(mode="json")
        write_json(request, {**values, "run_dir": str(folder)})
        self._started = time.monotonic()
        self._child = ChildModule(
            subject,
            *("gradus.conformance.reader", str(request), str(self._result)),
            temporary=folder / "r",
            log=folder / "reader.log",
        )

    def result(self) -> dict[str, Any]:
        """What it saw; {"refused": ...} when the environment cannot be loaded."""
        try:
            code = self._child.wait(max(self._seconds - (time.monotonic() - self._started), 0.1))
        finally:
            self.close()
        if self._result.exists():
            seen: dict[str, Any] = read_json(self._result)
            return seen
        if code is None:
            return {"refused": f"it was not loaded within {self._seconds:g} s"}
        return {"refused": f"its code ended the process, {self._child.said()}"}

    def close(self) -> None:
        self._child.end()
