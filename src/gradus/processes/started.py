"""A process that was started: what it should do, whether it still runs, and why it ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from gradus.errors import DeadlineError, ExitCode, GradusError, ProcessError, StallError
from gradus.files import read_json
from gradus.processes.log_tail import (
    find_cause,
    find_crash,
    last_lines,
    last_rank_exit_code,
)

_NO_MEMORY = "the kernel had no memory left; use less of it, or give the job more"
_ROLE = re.compile(r"^gradus [a-z-]+: ")
_GPU_FAULTS = tuple(
    (re.compile(pattern, re.IGNORECASE), cause, advice)
    for pattern, cause, advice in (
        (
            r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEM",
            "the memory of the GPU was full",
            "`gradus check` says what each part takes; nvidia-smi shows who else uses the GPU",
        ),
        (
            r"Xid.{0,40}: (?:48|63|64|92|94|95)\b|uncorrectable ECC|ECC error",
            "the memory of the GPU is damaged",
            "`nvidia-smi -q -d ECC,PAGE_RETIREMENT` shows it; reset the GPU or leave it out",
        ),
        (
            r"Xid.{0,40}: 79\b|fallen off the bus|cudaErrorDeviceLost|no CUDA-capable device|"
            r"CUDA-capable device\(s\) is/are busy or unavailable|GPU is lost",
            "the GPU is gone, or another process has it for itself",
            "`nvidia-smi` must list it; else the machine needs a restart",
        ),
        (
            r"Xid.{0,40}: (?:119|120)\b|GSP (?:RPC )?timeout",
            "the firmware of the GPU does not answer",
            "reset the GPU, or restart the machine",
        ),
        (
            r"Xid.{0,40}: (?:74|14[4-9]|150)\b|NVLink.{0,40}(?:error|fatal)",
            "a link between GPUs failed",
            "`nvidia-smi nvlink -e` counts its errors; leave these GPUs out",
        ),
        (
            r"system not yet initialized|fabric ?manager",
            "the links between the GPUs are not set up",
            "nvidia-fabricmanager must run, in the version of the driver",
        ),
        (
            r"driver version is insufficient|no kernel image is available|forward compatibility",
            "the driver, this build of torch and the GPU do not fit together",
            "`gradus --version --all` and nvidia-smi show the versions; install a build that fits",
        ),
        (
            r"collective operation timeout|NCCL.{0,80}timeout|Watchdog caught collective",
            "a rank never joined an operation that the others wait in",
            "look for the rank whose log ends first",
        ),
        (
            r"NCCL error|ncclSystemError|ncclRemoteError|ncclInternalError|remote process exited",
            "the ranks lost each other",
            "look for a rank that ended first; if none did, NCCL_DEBUG=INFO in env_vars shows the "
            "connection",
        ),
        (
            r"Xid.{0,40}: (?:13|31|43)\b|illegal memory access|device-side assert|"
            r"CUBLAS_STATUS_EXECUTION_FAILED|misaligned address",
            "a kernel used memory that it must not, or failed an assertion",
            "CUDA_LAUNCH_BLOCKING=1 in env_vars names it; an index beyond a tensor is the usual "
            "reason",
        ),
    )
)
"""What texts of CUDA, NCCL and the driver mean, and what to do; the first that is found counts."""
_LEFT = "look for sys.exit and os._exit in your own plug-ins"
SIGNALS_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that others send; any other one says that the process itself went wrong."""

PASSED_TO_EVERY_PROCESS = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "PYTHONWARNINGS",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_CACHE",
        "HF_DATASETS_OFFLINE",
        "HF_ENDPOINT",
        "TRANSFORMERS_OFFLINE",
    ]
)
"""Variables that programs need of the caller's shell; none of them is a secret."""
NO_SECRETS = PASSED_TO_EVERY_PROCESS | {"CUDA_VISIBLE_DEVICES"}
"""What libraries look for in the real environment of their process, however it is passed."""


MEETING_ADDRESS, MEETING_PORT = "{address}", "{port}"
"""In the command of ranks on several nodes, until it is known where they meet."""


@dataclass(frozen=True)
class Listens:
    """Where a process serves; the launcher binds it, so that it stays when the process does not."""

    host: str
    port: int
    """0 lets the system choose."""
    allow_public_bind: bool = False


@dataclass(frozen=True)
class ProcessSpec:
    """What to start: everything about a child that is known before it runs."""

    name: str
    """Name in the registry, in messages and of the ready file."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment; nothing is inherited."""
    log: Path
    """Gets stdout and stderr."""
    ready_file: Path | None = None
    """JSON that the child writes when it can serve. None means ready at once."""
    finishes: bool = False
    """Whether it may end by itself, with exit code 0, once it was ready and its ready file says
    `done`."""
    restarts: int = 0
    """How often within the supervisor's window it is restarted when it ends after it was ready."""
    is_replaceable: bool = False
    """Whether the others wait for a new process in its place when it fails after all were ready;
    where not, all start again."""
    is_companion: bool = False
    """Whether the others continue without it when it ends; it is stopped after them."""
    ends_its_children: bool = False
    """Whether only the process itself gets SIGTERM while it lives: it ends what it started."""
    blocked_seconds: float = 0.0
    """How long code of others may hold its event loop before the gate interrupts it."""
    listens: Listens | None = None
    """A port that it inherits, the same after it was replaced."""
    node: int = 0
    """Where it runs; 0 is the launcher's node."""
    meets_at: int | None = None
    """The node whose address and free port stand in the places of `MEETING_ADDRESS` and
    `MEETING_PORT` in `argv`: where the ranks of a trainer on several nodes meet."""
    beats_as: str = ""
    """Whose ready file and heartbeats speak for it, where not those of its own name: ranks of one
    trainer."""
    temporary_variable: str | None = None
    """The variable that tells it of a private folder, which goes away with the launch."""


def is_done(spec: ProcessSpec) -> bool:
    """Whether a child has said so: any code of a plug-in may end it with exit code 0."""
    return spec.ready_file is None or bool((ready_content(spec) or {}).get("done"))


def ready_content(spec: ProcessSpec) -> Mapping[str, Any] | None:
    if spec.ready_file is None:
        return {}
    try:
        content = read_json(spec.ready_file)
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Child(ABC):
    """A started child, alive or dead."""

    spec: ProcessSpec
    started_at: float
    """Monotonic seconds."""
    log_start: int
    """End of its log when it started; before it lies what earlier launches wrote."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Negative on another node: no process here has it."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""

    @abstractmethod
    def bury(self) -> None:
        """Give back what a dead child still holds."""

    @property
    def failure(self) -> ProcessFailed | None:
        """Why it ended, where only others can say."""
        return None

    def seconds(self) -> float:
        return time.monotonic() - self.started_at


@dataclass(frozen=True)
class ChildHere(Child):
    """A child of this process."""

    process: subprocess.Popen[bytes]
    start_time: int
    death_pipe: int
    """Our end of the child's death pipe."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it.

        The dead child is not reaped here: its pid stays reserved, so its process group can be
        signalled safely until `Supervisor.stop` is done.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        found = os.waitid(os.P_PID, self.pid, flags)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def bury(self) -> None:
        self.process.wait()
        os.close(self.death_pipe)


class OtherNodes(Protocol):
    """Other nodes, on each of which a supervisor of its own owns the processes."""

    def complete(self, spec: ProcessSpec) -> ProcessSpec:
        """The spec with what is known only now: where ranks meet."""

    def start(self, spec: ProcessSpec) -> Child:
        """Start a child on the node that the spec names."""

    def wait_joined(
        self,
        numbers: Iterable[int],
        timeout_seconds: float,
        *,
        on_wait: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        """Return when these nodes have joined; DeadlineError, naming who is missing."""

    def lines(self) -> list[str]:
        """What they tell the person at the terminal."""

    def stop(self) -> None:
        """Ask all nodes to end their children within so long, and then by force; returns at
        once."""

    def wait_stopped(self, *, is_urgent: Callable[[], bool]) -> None:
        """Return when the children of every node that can be reached have ended."""


class Engine(Protocol):
    """What starts node sides on other nodes, instead of a person or a script."""

    @property
    def host(self) -> str | None:
        """The address of this node that the others reach; None until it is known."""

    @property
    def lacks(self) -> str:
        """What it waits for before it can start all of them; "" when it has."""

    def place(self, run: Path) -> None:
        """Start a side on each other node of a run, and again when one ends too early."""

    def look(self) -> list[str]:
        """What is new, for a person; raises what ends the attempt."""


@dataclass(frozen=True)
class Fault:
    """How a process failed, for whoever decides what follows; the error's message is for people."""

    process: str
    kind: Literal["exit", "signal", "silence", "not_ready"]
    number: int = 0
    """The exit code, or the number of the signal."""
    cause: str = ""
    """What its log or the kernel says, in one line."""

    @property
    def is_from_outside(self) -> bool:
        """Whether somebody else ended it."""
        return self.kind == "signal" and self.number in SIGNALS_FROM_OUTSIDE


class ProcessFailed(GradusError):
    """A process of a run ended, or does nothing any more."""

    fault: Fault


@dataclass(frozen=True)
class LastMemory:
    """What is known of a dead child's memory."""

    held_bytes: int = 0
    """By it and what was below it, when that was last looked at; 0 when it never was."""
    has_run_out: bool = False
    """Whether the kernel has ended a process of this machine's part for want of memory since."""

    def told(self, cause: str, *, is_killed: bool) -> str:
        """The cause of an end, with what memory has to do with it."""
        if self.has_run_out:
            cause = _NO_MEMORY if is_killed else f"{cause}; {_NO_MEMORY}"
        if self.held_bytes and (is_killed or self.has_run_out):
            cause += f"; it held {self.held_bytes / 2**30:.1f} GiB"
        return cause


class ChildFailed(ProcessFailed, ProcessError):
    """A child ended although it should run; carries its exit code and the end of its log."""

    def __init__(self, child: Child, exit_code: int, memory: LastMemory | None = None) -> None:
        spec, since = child.spec, child.log_start
        # torchrun itself always ends with 1; the class of the failure is the rank's.
        rank_code = last_rank_exit_code(spec.log, since=since) if exit_code == 1 else None
        code = exit_code if rank_code is None else rank_code
        if code < 0:
            who = spec.name if rank_code is None else f"a rank of {spec.name}"
            how, cause = (
                f"{who} was killed by {signal_name(-code)}",
                _cause_of_signal(child, -code),
            )
        else:
            early = " before its work was done" if code == 0 else ""
            how = f"{spec.name} ended with exit code {code}{early}"
            cause = _LEFT if early else find_cause(spec.log, since=since) or "it gave no reason"
        self.log = spec.log
        self.log_tail = last_lines(spec.log, since=since)
        meaning = explain_gpu_fault("\n".join([cause, *self.log_tail]))
        # Of a rank, or of the engine below its server, the log tells.
        is_killed = code == -signal.SIGKILL
        cause = (memory or LastMemory()).told(cause, is_killed=is_killed)
        super().__init__(f"{how} after {child.seconds():.1f} s: {cause}{meaning} (log: {spec.log})")
        self.exit_code = class_of_exit(code)
        kind: Literal["exit", "signal"] = "signal" if code < 0 else "exit"
        self.fault = Fault(spec.name, kind, abs(code), cause)


class ChildNotReady(ProcessFailed, DeadlineError):
    """A child runs but did not become ready in time; carries the end of its log."""

    def __init__(self, child: Child, timeout_seconds: float) -> None:
        spec = child.spec
        super().__init__(
            f"{spec.name} is not ready after {timeout_seconds:g} s; "
            f"see {spec.log} or raise launch.ready_timeout_seconds"
        )
        self.log = spec.log
        self.log_tail = last_lines(spec.log, since=child.log_start)
        self.fault = Fault(spec.name, "not_ready")


class ChildSilent(ProcessFailed, StallError):
    """A child did nothing for longer than it may, and was killed for it."""

    def __init__(self, process: str, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.fault = Fault(process, "silence", cause=cause)


def explain_gpu_fault(text: str) -> str:
    """What an error of a GPU in a log means, on which machine, and what to do; else nothing.

    >>> explain_gpu_fault("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.")[:23]
    '; its log names a fault'
    """
    for pattern, cause, advice in _GPU_FAULTS:
        if pattern.search(text):
            where = socket.gethostname()
            return f"; its log names a fault of a GPU: {cause} (on {where}); {advice}"
    return ""


def last_words(error: BaseException) -> list[str]:
    """The end of a failed child's log under a title; [] when it says no more than the error."""
    if not isinstance(error, ChildFailed | ChildNotReady):
        return []
    if all(_ROLE.sub("", line) in str(error) for line in error.log_tail):
        return []
    return [f"last lines of {error.log.name}:", *(f"  {line}" for line in error.log_tail)]


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cause_of_signal(child: Child, number: int) -> str:
    """A log can say why a process crashed, not why it was killed."""
    if number in SIGNALS_FROM_OUTSIDE:
        return cause_of_signal(number)
    return find_crash(child.spec.log, since=child.log_start) or cause_of_signal(number)


def cause_of_signal(number: int) -> str:
    """What is known of a signal that ended a process, without its log."""
    if number == signal.SIGKILL:
        return "out of memory (see `dmesg`), or killed by a person or a scheduler"
    if number in SIGNALS_FROM_OUTSIDE:
        return "a person, a scheduler or another program sent it"
    return "it crashed in compiled code; its log may show where"


def class_of_exit(code: int) -> ExitCode:
    """The launcher's exit code; after a kill from outside, the same run may be tried again."""
    if -code in SIGNALS_FROM_OUTSIDE or code == ExitCode.UNWRITABLE:
        return ExitCode.TRY_AGAIN
    known = {int(known) for known in ExitCode} - {0}
    return ExitCode(code) if code in known else ExitCode.INTERNAL


class NodeLost(ProcessFailed, StallError):
    """A node did not answer for so long that whatever ran there has ended by itself."""

    def __init__(self, process: str, message: str) -> None:
        super().__init__(message)
        self.fault = Fault(process, "silence", cause="its node is lost")
