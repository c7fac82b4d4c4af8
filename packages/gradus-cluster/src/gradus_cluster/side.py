"""`gradus node`: owns the processes of one node of a run, for a launcher on another.

It ends all of them when the launcher did not answer for `launch.nodes.away_seconds`, when another
launcher has the run, and when the launcher gave it up meanwhile. It decides nothing else.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradus
from gradus.errors import (
    ConfigError,
    CorruptStateError,
    DeadlineError,
    ExitCode,
    FencedError,
    GradusError,
    ProtocolError,
)
from gradus.files import read_json, write_atomically, write_json
from gradus.heartbeat import touch_alive
from gradus.plan.gpus import VISIBLE, find_gpus
from gradus.processes.leftovers import end_leftovers
from gradus.processes.liveness import SilenceWatch, Watched, watched
from gradus.processes.log_writer import LogWriter
from gradus.processes.secured import CERTIFICATE_VARIABLE
from gradus.processes.started import Child, ChildFailed, Fault, ProcessFailed, ProcessSpec
from gradus.processes.supervisor import Supervisor, become_subreaper
from gradus.processes.table import is_alive, own_mark
from gradus.run.lease import LEFTOVERS_SECONDS
from gradus.run.paths import RunDirectory
from gradus.run.ready import NODE_VARIABLE
from gradus.wire.codec import decode
from gradus_cluster.certificates import (
    LAUNCHER_NAME,
    read_node_token,
    server_certificate,
    tls_context,
)
from gradus_cluster.link import (
    SILENT_SECONDS,
    AllEnded,
    Bury,
    Channel,
    Dismissed,
    EndAll,
    Ended,
    Hello,
    Hurry,
    Left,
    Link,
    Message,
    Order,
    Start,
    Told,
    TurnedAway,
    Welcome,
)
from gradus_cluster.ports import interface_variables, new_incarnation, reserve_port

_JOIN_SECONDS = 600.0
"""For the launcher of the run to be there."""
_TRY_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_COUNT_SECONDS = 1.0
_SIDE_SUFFIX = ".side.json"
_OWN_VARIABLES = ("TMPDIR",)
"""Of this node, whatever the launcher's are."""


class NodeSide:
    """Owns the children of one node, below a supervisor."""

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        number: int | None = None,
        host: str | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`number` None lets the launcher choose, `host` None means the address of the way to the
        launcher. Where that is, and its token, stand in the run's folder, which every node sees."""
        self._run_dir = run_dir
        self._tell = tell
        self._number = number
        self._host = host
        self._link = Link()
        self._incarnation = new_incarnation()
        self._replaces = ""
        self._joined: Welcome | None = None
        self._address = ""
        self._distrust = ""
        self._reserved: socket.socket | None = None
        self._num_gpus = len(find_gpus(os.environ).gpus)
        self._supervisor: Supervisor | None = None
        self._children: dict[int, Child] = {}
        self._told: set[int] = set()
        self._watch: SilenceWatch | None = None
        self._tried_at = self._counted_at = -1.0
        self._is_hurried = False
        self._is_dismissed = False
        self._signal: int | None = None

    @property
    def is_told_to_end(self) -> bool:
        return self._signal is not None

    def run(self) -> int:
        """Serve the launcher until it lets this node go; the exit code.

        DeadlineError when it is gone for too long, FencedError when another took the run over.
        """
        become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note_signal)
        try:
            self._join()
            while not self._is_dismissed:
                self._turn()
                if self._signal is not None:
                    name = signal.Signals(self._signal).name
                    raise DeadlineError(f"stopped by {name}; the processes of this node end")
        finally:
            self._is_hurried = False
            self._end_all()
            if not self._is_dismissed:
                self._link.send(Left())
            self._link.drop()
        return ExitCode.DONE

    # ------------------------------------------------------------------ the connection

    def _join(self) -> None:
        deadline = time.monotonic() + _JOIN_SECONDS
        self._replaces = _killed_before(self._run_dir, self._number)
        while self._joined is None:
            if time.monotonic() > deadline:
                advice = self._distrust or "start the run; every node must see its folder"
                raise DeadlineError(
                    f"no launcher of {self._run_dir.root} answered in {_JOIN_SECONDS:g} s; {advice}"
                )
            if self._signal is not None:
                raise DeadlineError("stopped before the launcher was found")
            touch_alive()
            self._connect()
            time.sleep(_LOOK_SECONDS)
        settings = self._joined
        registry = self._registry
        registry.parent.mkdir(mode=0o700, exist_ok=True)
        end_leftovers(registry, timeout_seconds=LEFTOVERS_SECONDS)
        own = {"incarnation": self._incarnation, "machine": _machine(), "process": own_mark()}
        write_json(_side_file(self._run_dir, settings.number), own)
        self._watch = SilenceWatch(self._run_dir.alive, hang_seconds=settings.hang_seconds)
        self._tell(f"node {settings.number} of {self._run_dir.root}, {self._address}")

    @property
    def _registry(self) -> Path:
        assert self._joined is not None
        return self._run_dir.nodes / f"{self._joined.number}.json"

    def _turn(self) -> None:
        """One look at everything."""
        touch_alive()
        assert self._joined is not None
        if self._link.channel is None:
            self._connect()
            time.sleep(_LOOK_SECONDS)
        else:
            select.select([self._link.channel.socket], [], [], _LOOK_SECONDS)
            self._pump()
        away = self._joined.away_seconds
        if time.monotonic() - self._link.safe_at > away:
            raise DeadlineError(
                f"the launcher did not answer for {away:g} s (launch.nodes.away_seconds); the "
                "processes of this node end"
            )
        self._look()

    def _pump(self) -> None:
        """Hear the launcher, do what it says, and give a sign of life."""
        for message in self._link.take():
            self._handle(message)
        if time.monotonic() - self._link.heard_at > SILENT_SECONDS:
            self._link.drop()
        self._link.beat()

    def _connect(self) -> None:
        """Reach the launcher, if it can be reached now.

        FencedError when the run has another launcher or this one gave us up.
        """
        if time.monotonic() - self._tried_at < _TRY_SECONDS:
            return
        self._tried_at = time.monotonic()
        try:
            channel = Channel(self._dial())
            answer = self._introduce(channel)
        except ssl.SSLCertVerificationError:
            if not self._distrust:
                self._distrust = (
                    f"the launcher there is not that of {self._run_dir.node_token}: another run, "
                    "or one after --clean, has another token; or compare clocks"
                )
                self._tell(f"{self._distrust}; tries again")
        except (OSError, ProtocolError, CorruptStateError):
            return
        else:
            if isinstance(answer, TurnedAway):
                kind = ConfigError if answer.exit_code == ExitCode.CONFIG else FencedError
                raise kind(answer.reason)
            self._joined = answer

    def _dial(self) -> ssl.SSLSocket:
        """A connection to the launcher; OSError and others when there is none now, FencedError when
        the folder names another."""
        found: Any = read_json(self._run_dir.launcher)
        if self._joined is not None and found["term"] != self._joined.term:
            raise FencedError(
                f"{self._run_dir.root} has another launcher, in term {found['term']}; this "
                f"node side is of term {self._joined.term}, and its processes end"
            )
        where = (found["host"], found["port"])
        tls = tls_context(read_node_token(self._run_dir.node_token), "node")
        source = None if self._host is None else (self._host, 0)
        connected = socket.create_connection(where, timeout=_ANSWER_SECONDS, source_address=source)
        with contextlib.closing(connected):
            return tls.wrap_socket(connected, server_hostname=LAUNCHER_NAME)

    def _introduce(self, channel: Channel) -> Welcome | TurnedAway:
        """Say who this is; the link continues on the socket when welcome."""
        try:
            self._address = str(channel.socket.getsockname()[0])
            said_at = time.monotonic()
            channel.send(self._hello())
            answer: Welcome | TurnedAway = decode(_first_body(channel), Welcome | TurnedAway)
        except BaseException:
            channel.close()
            raise
        if isinstance(answer, Welcome):
            self._link.open(channel, answer.received)
            # The answer shows that the launcher has heard of this one since.
            self._link.safe_at = max(self._link.safe_at, said_at)
        return answer

    def _hello(self) -> Hello:
        if self._reserved is None:
            self._reserved = reserve_port(self._address)
        return Hello(
            incarnation=self._incarnation,
            number=self._number,
            host=socket.gethostname(),
            run_dir=str(self._run_dir.root),
            gradus=gradus.__version__,
            python=platform.python_version(),
            address=self._address,
            port=int(self._reserved.getsockname()[1]),
            num_gpus=self._num_gpus,
            received=self._link.received,
            replaces=self._replaces,
            term=0 if self._joined is None else self._joined.term,
        )

    # ------------------------------------------------------------------ the children

    def _handle(self, message: Message) -> None:
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, EndAll):
            self._stop(message)
        elif isinstance(message, Hurry):
            self._is_hurried = True
        elif isinstance(message, Bury):
            child = self._children.pop(message.child, None)
            if child is not None and self._supervisor is not None:
                self._supervisor.bury(child)
        elif isinstance(message, Dismissed):
            self._is_dismissed = True

    def _start(self, start: Start) -> None:
        try:
            order = Order.decode(start.order)
        except GradusError as error:
            self._refuse(start.child, error)
            return
        self._start_child(start.child, order)

    def _start_child(self, number: int, order: Order) -> None:
        try:
            if self._supervisor is None:
                self._supervisor = Supervisor(
                    self._registry,
                    stop_timeout_seconds=order.stop_seconds,
                    logs=LogWriter(order.logs),
                )
            self._children[number] = self._supervisor.start(self._as_here(order.spec))
        except GradusError as error:
            self._refuse(number, error)

    def _refuse(self, number: int, error: GradusError) -> None:
        text, code = str(error), int(error.exit_code)
        self._link.send(Ended(number, code, text, code, Fault("", "exit", code, text), []))

    def _as_here(self, spec: ProcessSpec) -> ProcessSpec:
        """The process with what only this node knows."""
        env = {name: value for name, value in spec.env.items() if name not in _OWN_VARIABLES}
        env |= {name: os.environ[name] for name in _OWN_VARIABLES if name in os.environ}
        assert self._joined is not None
        env[NODE_VARIABLE] = str(self._joined.number)
        if spec.meets_at is not None:
            env = {**interface_variables(self._address), **env}
        mine = [it for it in os.environ.get(VISIBLE, "").split(",") if it]
        if mine and env.get(VISIBLE):
            env[VISIBLE] = ",".join(mine[int(number)] for number in env[VISIBLE].split(","))
        listens = spec.listens
        if listens is not None:
            listens = replace(listens, host=self._address, allow_public_bind=True)
            certificate = self._run_dir.secrets / f"{spec.name}.pem"
            own = server_certificate(read_node_token(self._run_dir.node_token), self._address)
            write_atomically(certificate, own, mode=0o600)
            env[CERTIFICATE_VARIABLE] = str(certificate)
        return replace(spec, env=env, listens=listens, node=0)

    def _stop(self, stop: EndAll) -> None:
        self._is_hurried = False
        error = ""
        try:
            self._end_all()
        except GradusError as failed:
            error = str(failed)
        self._link.send(AllEnded(stop.round, error))

    def _end_all(self) -> None:
        self._children.clear()
        self._told.clear()
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            supervisor.stop(is_urgent=self._is_urgent)
            supervisor.reap_orphans()

    def _is_urgent(self) -> bool:
        """Asked often while children end: the launcher is still heard."""
        if self._link.channel is not None:
            self._pump()
        return self._is_hurried

    def _look(self) -> None:
        """Tell of children that ended, and of those that are silent."""
        supervisor, watch = self._supervisor, self._watch
        if supervisor is None or watch is None:
            return
        looked = watch.look(list(self._watched()))
        for line in looked.lines:
            self._link.send(Told(line))
        for hang in looked.hangs:
            supervisor.end_hung(hang)
        if time.monotonic() - self._counted_at > _COUNT_SECONDS:
            self._counted_at = time.monotonic()
            supervisor.note_memory()
            supervisor.reap_orphans()
        for number, child in self._children.items():
            code = child.exit_code()
            if code is not None and number not in self._told:
                self._told.add(number)
                self._link.send(_ended(number, code, supervisor.failure_of(child, code)))

    def _watched(self) -> Iterator[Watched]:
        for child in self._children.values():
            one = watched(child.spec, child.pid)
            yield replace(one, ready_file=self._run_dir.ready_file(one.name))

    def _note_signal(self, number: int, _: object) -> None:
        self._signal = number


def serve_again(build_side: Callable[[], NodeSide], tell: Callable[[str], None]) -> int:
    """Serve one launcher of a run after the other; the exit code once one lets this node go.

    What would end so again, and a signal, end it.
    """
    last, side = "", build_side()
    while True:
        try:
            return side.run()
        except GradusError as error:
            if side.is_told_to_end or error.exit_code != ExitCode.TRY_AGAIN:
                raise
            if str(error) != last:
                last = str(error)
                tell(f"{last}; tries again")
        time.sleep(_TRY_SECONDS)
        following = build_side()  # may take long; until its `run` the last one hears the signals
        if side.is_told_to_end:
            raise DeadlineError("stopped while no launcher was there")
        side = following


def _side_file(run_dir: RunDirectory, number: int) -> Path:
    return run_dir.nodes / f"{number}{_SIDE_SUFFIX}"


def _machine() -> str:
    """This boot of this machine, as far as process numbers mean the same in it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _killed_before(run_dir: RunDirectory, number: int | None) -> str:
    """The incarnation of the last node side of this number, when it was killed on this machine and
    nothing that it started runs any more; else nothing."""
    if number is None:
        return ""
    try:
        last = read_json(_side_file(run_dir, number))
        pid, _, start_time = last["process"].partition(".")
        if last["machine"] != _machine() or is_alive(int(pid), int(start_time)):
            return ""
        incarnation = str(last["incarnation"])
    except (OSError, CorruptStateError, KeyError, TypeError, ValueError):
        return ""
    end_leftovers(run_dir.nodes / f"{number}.json", timeout_seconds=LEFTOVERS_SECONDS)
    return incarnation


def _ended(number: int, code: int, failure: ProcessFailed) -> Ended:
    log_tail = failure.log_tail if isinstance(failure, ChildFailed) else []
    return Ended(number, code, str(failure), int(failure.exit_code), failure.fault, log_tail)


def _first_body(channel: Channel) -> bytes:
    """The next frame, waited for."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        select.select([channel.socket], [], [], _LOOK_SECONDS)
        channel.read()
        body = channel.next_body()
        if body is not None:
            return body
        if channel.is_ended:
            break
    raise ProtocolError("the launcher did not answer")
