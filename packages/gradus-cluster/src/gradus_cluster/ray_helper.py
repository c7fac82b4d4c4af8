"""The process that has joined a cluster of Ray for a launcher, and the actor that owns a node side.

Nothing but strings crosses the cluster. The actors and what is reserved belong to the job of this
process: Ray ends them with it, however it ends.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gradus.errors import ExitCode, first_line
from gradus_cluster.ray import ClusterNode, Said, WantedNodes, unfit

PROGRAM = (sys.executable, "-P", "-m", "gradus.cli.main")
_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")
"""Ray kills the children of a worker that ends: not those of its children, so that a node side can
end what it owns, and say so."""
_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_LEAVE_SECONDS = 15.0
_OBJECT_STORE_BYTES = 100_000_000
"""Of a cluster that is started here: no objects are put there."""
_TINY = 0.001
_ABSENT = re.compile(r"No module named '?(gradus\b[^'\s]*)")


class NodeOwner:
    """An actor, one a node: owns the process of `gradus node` there, and nothing else."""

    def own(self, run: str, number: str) -> str:
        """Start a node side and wait for its end: its exit code and what it said last, as JSON."""
        side = subprocess.Popen(
            [*_SHELL, *PROGRAM, "node", run, "--number", number, "--while-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        said = ""
        assert side.stdout is not None
        for line in side.stdout:
            said = line.strip() or said
        return msgspec.json.encode([side.wait(), said]).decode()


class _Refused(Exception):
    def __init__(self, text: str, exit_code: ExitCode) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class _Helper:
    """Owns what a run has in a cluster."""

    def __init__(self, wanted: WantedNodes, out: int) -> None:
        self._wanted = wanted
        self._out = out
        self._run = ""
        self._is_over = threading.Event()
        self._group: Any = None
        self._sides: dict[int, Any] = {}
        self._due: dict[int, float] = dict.fromkeys(wanted.numbers, 0.0)
        self._why: dict[int, str] = {}

    def say(self, said: Said) -> None:
        os.write(self._out, msgspec.json.encode(said) + b"\n")

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self._join()
            while not self._is_over.wait(_LOOK_SECONDS):
                if self._run:
                    self._look()
                self.say(Said("beat"))
        except _Refused as refused:
            self.say(Said("refused", str(refused), refused.exit_code))

    def _listen(self) -> None:
        """The folder of the run, then nothing until the launcher is gone or done."""
        for line in sys.stdin.buffer:
            self._run = msgspec.json.decode(line, type=str)
        self._is_over.set()
        time.sleep(_LEAVE_SECONDS)
        os._exit(ExitCode.TRY_AGAIN)  # a cluster that does not answer keeps nobody

    # ------------------------------------------------------------------ the cluster

    def _join(self) -> None:
        self._reach()
        address = self._wanted.address
        try:
            try:
                ray.init("auto" if address is None else address, log_to_driver=False)
            except ConnectionError as error:
                if address is not None or error.__cause__ is not None:
                    raise
                self._start_here()
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            raise _refusal(error) from None
        if why := unfit(self._nodes(), self._own, self._wanted):
            raise _Refused(why, ExitCode.CONFIG)
        self.say(Said("joined", get_node_ip_address()))

    def _reach(self) -> None:
        """What does not listen is refused sooner than Ray does."""
        host, _, port = (self._wanted.address or "").rpartition(":")
        if host:
            try:
                where = (host.strip("[]"), int(port))
                socket.create_connection(where, timeout=_ANSWER_SECONDS).close()
            except (OSError, OverflowError) as error:
                raise _Refused(f"nothing answers there: {error}", ExitCode.TRY_AGAIN) from None

    def _start_here(self) -> None:
        ray.init(
            "local",
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
        self.say(Said("told", "started a cluster of this machine alone, for this run"))

    @property
    def _own(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def _nodes(self) -> list[ClusterNode]:
        return [
            ClusterNode(
                *(it["NodeID"], it["NodeManagerHostname"]),
                *(it["Resources"].get(name, 0.0) for name in ("CPU", "GPU")),
            )
            for it in ray.nodes()
            if it["Alive"]
        ]

    # ------------------------------------------------------------------ the nodes of the run

    def _look(self) -> None:
        if self._group is None:
            self._group = self._reserve()
        self._hear_sides()
        if placement_group_table(self._group)["state"] != "CREATED":
            self.say(Said("lacks", self._lacks()))
            return
        self.say(Said("lacks", ""))
        for number, due in list(self._due.items()):
            if time.monotonic() >= due:
                del self._due[number]
                self._start_side(number)

    def _reserve(self) -> Any:
        """All GPUs of this node if the run computes here, and a node for each side."""
        wanted, own = self._wanted, self._own
        here = {f"node:{get_node_ip_address()}": _TINY}
        if wanted.is_on_own_gpus:
            here["GPU"] = next(it.gpus for it in self._nodes() if it.id == own)
        return placement_group(
            [here, *({"CPU": 1.0, "GPU": float(wanted.gpus)} for _ in wanted.numbers)],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": own}, *({} for _ in wanted.numbers)],
        )

    def _lacks(self) -> str:
        count, gpus = len(self._wanted.numbers), self._wanted.gpus
        free = ray.available_resources()
        text = f"{count} other node{'s' * (count != 1)} with 1 free CPU"
        text += f" and {gpus} free GPUs each" if gpus else ""
        has = ", ".join(f"{it.host} ({it.cpus:g} CPUs, {it.gpus:g} GPUs)" for it in self._nodes())
        left = f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
        return f"{text}: the cluster has {has}, of which {left} are free"

    def _start_side(self, number: int) -> None:
        bundle = 1 + self._wanted.numbers.index(number)
        placed: Any = PlacementGroupSchedulingStrategy(self._group, bundle)
        actor = (
            ray.remote(NodeOwner)
            .options(
                num_cpus=1,
                num_gpus=self._wanted.gpus,
                max_restarts=0,
                scheduling_strategy=placed,
            )
            .remote()
        )
        self._sides[number] = (actor, actor.own.remote(self._run, str(number)))

    def _hear_sides(self) -> None:
        """Node sides that ended start again, but for those that were let go or refused."""
        for number, (_, ended) in list(self._sides.items()):
            if not ray.wait([ended], timeout=0)[0]:
                continue
            del self._sides[number]
            try:
                code, said = msgspec.json.decode(ray.get(ended), type=tuple[int, str])
            except RayError as error:
                code, said = ExitCode.TRY_AGAIN, str(error)
            if code == ExitCode.DONE:
                continue
            if found := _ABSENT.search(said):
                text = f"the Python of node {number} has no {found[1]}; install it there"
                raise _Refused(text, ExitCode.CONFIG)
            said = _said(said)
            if code == ExitCode.CONFIG:
                raise _Refused(f"node {number}: {said}", ExitCode.CONFIG)
            if self._why.get(number) != said:
                self._why[number] = said
                self.say(Said("told", f"node {number} ended and starts again: {said}"))
            self._due[number] = time.monotonic() + _AGAIN_SECONDS


def _refusal(error: BaseException) -> _Refused:
    """Why a cluster was not joined."""
    cause = error.__cause__ or error
    if "AuthenticationError" in repr(cause):
        text = "it refuses the token of RAY_AUTH_TOKEN or ~/.ray/auth_token"
        why = str(cause).partition("AuthenticationError: ")[2] or cause
        return _Refused(f"{text}: {_said(why)}", ExitCode.CONFIG)
    if "ersion mismatch" in str(error):
        return _Refused(f"it is of other versions. {_said(error)}", ExitCode.CONFIG)
    return _Refused(f"it was not joined: {_said(cause)}", ExitCode.TRY_AGAIN)


def _said(error: BaseException | str) -> str:
    """What Ray says, on one line."""
    return first_line(" ".join(str(error).split()) or type(error).__name__)


def main() -> None:
    """Be the helper of the launcher at the other end of the standard streams."""
    out = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no answer
    _Helper(msgspec.json.decode(sys.argv[1], type=WantedNodes), out).run()
