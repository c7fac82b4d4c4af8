"""`gradus rl --ray`: a cluster of Ray starts the node sides of a run.

Ray ends every process that has joined a cluster that is gone, so its library is not in the
launcher: a helper (`gradus_cluster.ray_helper`) joins the cluster and lives as long as the launcher
does. The two speak in lines of JSON.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal

import msgspec

from gradus.config import LaunchedConfig
from gradus.errors import ConfigError, DeadlineError, ExitCode, StallError, first_line
from gradus.plan.nodes import required_nodes
from gradus.processes.started import Fault, ProcessFailed

HELPER = (sys.executable, "-P", "-c", "from gradus_cluster.ray_helper import main; main()")
INSTALL = "pip install 'gradus-rl[ray]'"
_VARIABLE = "RAY_ADDRESS"
_JOIN_SECONDS = 90.0
_SILENT_SECONDS = 90.0
"""Ray itself gives up a cluster that it does not reach for 60 s."""
_LEAVE_SECONDS = 20.0
_LOOK_SECONDS = 0.1
_ADDRESS = re.compile(r"auto|local|[A-Za-z0-9._-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")


class WantedNodes(msgspec.Struct, frozen=True):
    """What a run needs of a cluster."""

    address: str | None
    gpus: int
    """Of each node."""
    is_on_own_gpus: bool
    """Whether the node of the launcher computes on GPUs too."""
    numbers: list[int]
    """The other nodes."""


class ClusterNode(msgspec.Struct, frozen=True):
    """What one node of a cluster has."""

    id: str
    host: str
    cpus: float
    gpus: float


class Said(msgspec.Struct, frozen=True):
    """A line of the helper."""

    kind: Literal["joined", "refused", "lacks", "told", "beat"]
    """`joined`: with this node's address; `lacks`: what it waits for, "" when all is placed."""
    text: str = ""
    exit_code: int = 0


class ClusterLost(ProcessFailed, StallError):
    """The cluster is gone, or the process that had joined it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.fault = Fault("ray", "silence", cause="its cluster is lost")


def unfit(nodes: list[ClusterNode], own: str, wanted: WantedNodes) -> str:
    """Why a run never fits the nodes that a cluster has; "" when it does."""
    mine = next(it for it in nodes if it.id == own)
    others = [it for it in nodes if it.id != own]
    fit = [it for it in others if it.gpus >= wanted.gpus and it.cpus >= 1]
    has = ", ".join(f"{it.host} has {_amount(it)}" for it in nodes)
    if wanted.is_on_own_gpus and mine.gpus < wanted.gpus:
        return (
            f"the launcher's node, {mine.host}, must have {wanted.gpus} GPUs (launch.nodes.gpus); "
            f"{has}"
        )
    if len(fit) < (count := len(wanted.numbers)):
        each = _amount(ClusterNode("", "", 1, wanted.gpus))
        return (
            f"the run takes {count} node{'s' * (count > 1)} beside the launcher's with {each} each "
            f"(launch.nodes), and the cluster has {len(fit)}: {has}; start more, or change the plan"
        )
    return ""


def _amount(node: ClusterNode) -> str:
    counts = {"CPU": node.cpus, "GPU": node.gpus}
    return ", ".join(f"{count:g} {name}{'s' * (count != 1)}" for name, count in counts.items())


class RayCluster:
    """Owns the helper that has joined a cluster; implements `Engine`."""

    def __init__(self, config: LaunchedConfig, address: str | None) -> None:
        """ConfigError for what no cluster could run."""
        plan = required_nodes(config, "--ray", "run")
        key = "--ray" if address else _VARIABLE
        address = address or os.environ.get(_VARIABLE) or None
        if address is not None and not _ADDRESS.fullmatch(address):
            raise ConfigError(
                f"{key}: {address!r} is no address of a cluster; write HOST:PORT as `ray start` "
                "prints it, auto, or local"
            )
        if find_spec("ray") is None:
            raise ConfigError(f"--ray needs Ray, which is not installed here: {INSTALL}")
        others = {*plan.trainer, *plan.node_of.values()} - {0}
        is_on_own_gpus = any(node == 0 for _, node in plan.gpus)
        self._wanted = WantedNodes(address, plan.gpus_per_node, is_on_own_gpus, sorted(others))
        self._helper: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 as long as this
        self._unread = b""
        self._heard_at = 0.0
        self._run: Path | None = None
        self.host: str | None = None
        """The address of this node in the cluster."""
        self.lacks = ""

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the cluster, in which nothing of the run stays."""
        self._end(_LEAVE_SECONDS)
        self._errors.close()

    def join(self) -> list[str]:
        """Join the cluster; lines for a person.

        ConfigError for what it can never run, DeadlineError when it does not answer.
        """
        self._start()
        deadline, lines = time.monotonic() + _JOIN_SECONDS, []
        while self.host is None:
            lines += self.look()
            if time.monotonic() > deadline:
                self._end()
                raise DeadlineError(
                    f"{self._title} did not answer in {_JOIN_SECONDS:g} s; is it the address that "
                    "`ray start` prints, and is this machine a node of that cluster?"
                )
            time.sleep(_LOOK_SECONDS)
        return [*lines, f"{'ray':<18}{self._title}, this node is {self.host}"]

    def place(self, run: Path) -> None:
        """Let the cluster start the node sides of a run, and start again those that end."""
        if self._helper is None:
            self.join()
        assert self._helper is not None
        assert self._helper.stdin is not None
        if self._run is None:
            self._run = run
            self.lacks = "its answer"
            with contextlib.suppress(BrokenPipeError):  # `look` says so
                self._helper.stdin.write(msgspec.json.encode(str(run)) + b"\n")
                self._helper.stdin.flush()

    def look(self) -> list[str]:
        """What is new, for a person. ClusterLost when the cluster is gone, ConfigError or
        DeadlineError for what it refuses."""
        if self._helper is None:
            return []
        lines = []
        is_ended = self._read()
        *whole, self._unread = self._unread.split(b"\n")
        for line in whole:
            said = msgspec.json.decode(line, type=Said)
            self._heard_at = time.monotonic()
            if said.kind == "joined":
                self.host = said.text
            elif said.kind == "refused":
                self._end()
                is_config = said.exit_code == ExitCode.CONFIG
                raise (ConfigError if is_config else DeadlineError)(f"{self._title}: {said.text}")
            elif said.kind == "told":
                lines.append(f"ray: {said.text}")
            elif said.kind == "lacks":
                if said.text and said.text != self.lacks:
                    lines.append(f"ray: waits for {said.text}")
                self.lacks = said.text
        is_silent = self.host is not None and time.monotonic() - self._heard_at > _SILENT_SECONDS
        if is_ended or is_silent:
            self._end()
            raise ClusterLost(f"{self._title} is gone{self._last_words()}")
        return lines

    @property
    def _title(self) -> str:
        address = self._wanted.address
        return "Ray's cluster" + ("" if address is None else f" at {address}")

    def _start(self) -> None:
        self.host, self._run, self._unread = None, None, b""
        self._errors.seek(0)
        self._errors.truncate()
        # A group of its own: Ctrl-C at the terminal is for the launcher, which may still need it.
        self._helper = subprocess.Popen(
            [*HELPER, msgspec.json.encode(self._wanted).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ},
            process_group=0,
        )
        assert self._helper.stdout is not None
        os.set_blocking(self._helper.stdout.fileno(), False)
        self._heard_at = time.monotonic()

    def _read(self) -> bool:
        """Take what the helper has said; whether it has ended."""
        assert self._helper is not None
        assert self._helper.stdout is not None
        while (said := self._helper.stdout.read(1 << 16)) is not None:
            if not said:
                return True
            self._unread += said
        return False

    def _end(self, seconds: float = 0.0) -> None:
        """Let the helper leave by itself within so many seconds."""
        if self._helper is None:
            return
        helper, self._helper = self._helper, None
        assert helper.stdin is not None
        assert helper.stdout is not None
        with contextlib.suppress(OSError):
            helper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(seconds)
        helper.kill()
        helper.wait()
        helper.stdout.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {first_line(said[-1])}" if said else ""
