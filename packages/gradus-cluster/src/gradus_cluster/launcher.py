"""The launcher's end of its nodes: who has joined, what runs there, and who was given up."""

from __future__ import annotations

import contextlib
import os
import platform
import selectors
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import gradus
from gradus.config import LaunchConfig
from gradus.errors import (
    DeadlineError,
    ExitCode,
    ProcessError,
    ProtocolError,
)
from gradus.files import read_json, write_atomically, write_json
from gradus.log import LogSettings
from gradus.processes.leftovers import KILL_SECONDS
from gradus.processes.log_tail import log_end
from gradus.processes.secured import AUTHORITY_VARIABLE
from gradus.processes.started import (
    MEETING_ADDRESS,
    MEETING_PORT,
    Child,
    Engine,
    NodeLost,
    ProcessFailed,
    ProcessSpec,
)
from gradus.run.lease import STARTER_VARIABLE, RunLease
from gradus.run.paths import RunDirectory
from gradus.wire.codec import decode
from gradus_cluster.certificates import authority_certificate, keep_node_token, tls_context
from gradus_cluster.link import (
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
from gradus_cluster.ports import (
    interface_variables,
    listen,
    loopback_lines,
    own_address,
    reserve_port,
)

_LOOK_SECONDS = 0.1
_GREETING_SECONDS = 10.0
"""For whoever connects to say who it is."""
_MOST_GREETED = 64
_FAREWELL_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
"""For a node that is reached to say that all of its processes have ended."""


class FailedElsewhere(ProcessFailed, ProcessError):
    """A child on another node ended although it should run; its node side says why."""

    def __init__(self, ended: Ended, process: str, host: str, log: Path) -> None:
        super().__init__(f"{ended.message} on {host}")
        self.exit_code = ExitCode(ended.exit_code)
        self.log, self.log_tail = log, ended.log_tail
        self.fault = replace(ended.fault, process=process)


@dataclass(frozen=True)
class NodeSettings:
    """What a launcher tells its node sides."""

    term: int
    host: str
    """The address of this node that the others reach."""
    away_seconds: float
    stop_seconds: float
    hang_seconds: float
    logs: LogSettings
    num_gpus: int = 0
    """What each node must have."""
    port: int = 0
    spare_seconds: float = KILL_SECONDS + 5.0
    """For a node side that is alone to kill what does not end by itself."""

    @property
    def gives_up_seconds(self) -> float:
        """Silence after which nothing runs on a node any more."""
        return self.away_seconds + self.stop_seconds + self.spare_seconds


@dataclass
class _Node:
    """One node side that has joined."""

    number: int
    hello: Hello
    link: Link = field(default_factory=Link)
    ended: dict[int, Ended] = field(default_factory=dict)
    stopped: AllEnded = field(default_factory=lambda: AllEnded(0))

    @property
    def title(self) -> str:
        return f"node {self.number} ({self.hello.host})"


@dataclass(frozen=True)
class _ChildElsewhere(Child):
    nodes: Nodes
    node: _Node
    number: int

    @property
    def pid(self) -> int:
        return -self.number

    def exit_code(self) -> int | None:
        return self.nodes.exit_code(self.node, self.number)

    def bury(self) -> None:
        self.nodes.bury(self.node, self.number)

    @property
    def failure(self) -> ProcessFailed | None:
        return self.nodes.failure(self.node, self.number, self.spec)


class Nodes:
    """Owns the connections to all node sides of a launch, in a thread; implements `OtherNodes`."""

    def __init__(
        self,
        run_dir: RunDirectory,
        settings: NodeSettings,
        engine: Engine | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._engine = engine
        self._settings = settings
        token = keep_node_token(run_dir.node_token)
        self._tls = tls_context(token, "launcher")
        write_atomically(run_dir.authority, authority_certificate(token), mode=0o600)
        self._lock = threading.RLock()
        self._nodes: dict[int, _Node] = {}
        self._given_up: dict[str, str] = {}  # incarnation → why
        self._greeted: set[Channel] = set()
        self._lines: list[str] = []
        self._num_children = 0
        self._round = 0
        self.num_turned_away = 0  # strangers, and those who thought so of us
        self._is_closing = threading.Event()
        self._listener = listen(settings.host, settings.port, backlog=_MOST_GREETED)
        self._meeting = reserve_port(settings.host)
        self._thread = threading.Thread(target=self._serve, name="nodes", daemon=True)

    def __enter__(self) -> Nodes:
        host, port = self._listener.getsockname()[:2]
        where = {"host": host, "port": port, "term": self._settings.term}
        write_json(self._run_dir.launcher, where, mode=0o600)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let the node sides go; those that cannot be reached end by themselves."""
        with self._lock:
            for node in self._nodes.values():
                node.link.send(Dismissed())
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < deadline and self._is_telling():
            time.sleep(_LOOK_SECONDS)
        self._is_closing.set()
        self._thread.join()
        # That of the next launcher must stay, whose node sides look for it.
        with contextlib.suppress(FileNotFoundError):
            if read_json(self._run_dir.launcher)["term"] == self._settings.term:
                self._run_dir.launcher.unlink()
        self._meeting.close()

    def _is_telling(self) -> bool:
        with self._lock:
            links = (it.link for it in self._nodes.values() if it.link.channel is not None)
            return any(it.num_unacknowledged for it in links)

    # ------------------------------------------------------------------ for the launch

    def lines(self) -> list[str]:
        """What node sides, and what starts them, tell the person at the terminal."""
        said = [] if self._engine is None else self._engine.look()
        with self._lock:
            lines, self._lines = self._lines, []
        return lines + said

    def wait_joined(
        self,
        numbers: Iterable[int],
        timeout_seconds: float,
        *,
        on_wait: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Return when these nodes have joined; DeadlineError, naming who is missing."""
        deadline = time.monotonic() + timeout_seconds
        wanted, engine, advice = list(numbers), self._engine, ""
        if engine is not None:
            engine.place(self._run_dir.root)
        elif missing := self.missing(wanted):
            advice = self._ask_for(missing, tell)
        while (missing := self.missing(wanted)) or (engine is not None and engine.lacks):
            if time.monotonic() > deadline:
                if engine is not None:
                    advice = f"it waits for {engine.lacks or 'their node sides to connect'}"
                which = ", ".join(map(str, missing)) or "0"
                raise DeadlineError(
                    f"node {which} has not joined in {timeout_seconds:g} s "
                    f"(launch.ready_timeout_seconds); {advice}"
                )
            on_wait()
            time.sleep(_LOOK_SECONDS)
        with self._lock:
            for number, hello in ((it, self._nodes[it].hello) for it in wanted):
                tell(f"{f'node {number}':<18}{hello.host}, {hello.address}")

    def _ask_for(self, missing: Sequence[int], tell: Callable[[str], None]) -> str:
        """Say what these nodes wait for; what to do when they do not join."""
        which = ", ".join(map(str, missing))
        if starter := os.environ.get(STARTER_VARIABLE):
            tell(f"waits for node {which}: {starter} starts `gradus node` there")
            return f"{starter} starts `gradus node` there: look into its log"
        advice = f"`gradus node {shlex.quote(str(self._run_dir.root))}` there"
        tell(f"waits for node {which}: run {advice}")
        return f"start {advice}"

    def missing(self, numbers: Iterable[int]) -> list[int]:
        with self._lock:
            return sorted(set(numbers) - self._nodes.keys())

    # ------------------------------------------------------------------ for the supervisor

    def start(self, spec: ProcessSpec) -> Child:
        """Start a child on its node; NodeLost when that was given up."""
        self._num_children += 1
        number = self._num_children
        order = Order(spec, self._settings.logs, self._settings.stop_seconds).encode()
        log_start = log_end(spec.log)
        with self._lock:
            node = self._nodes.get(spec.node)
            if node is None:
                raise NodeLost(spec.name, f"{spec.name} cannot start: node {spec.node} is lost")
            node.link.send(Start(number, order))
        return _ChildElsewhere(spec, time.monotonic(), log_start, self, node, number)

    def complete(self, spec: ProcessSpec) -> ProcessSpec:
        """The spec with what its node must know; NodeLost when its ranks have no place to meet."""
        spec = replace(spec, env={**spec.env, AUTHORITY_VARIABLE: str(self._run_dir.authority)})
        if spec.meets_at is None:
            return spec
        address, port = self._meeting_of(spec.meets_at)
        named = [word.replace(MEETING_ADDRESS, address) for word in spec.argv]
        argv = tuple(word.replace(MEETING_PORT, str(port)) for word in named)
        own = {} if spec.node else interface_variables(self._settings.host)
        env = {**own, **spec.env}
        return replace(spec, argv=argv, env=env)

    def _meeting_of(self, number: int) -> tuple[str, int]:
        if number == 0:
            host, port = self._meeting.getsockname()[:2]
            return str(host), int(port)
        with self._lock:
            node = self._nodes.get(number)
        if node is None:
            raise NodeLost("trainer", f"the trainer cannot start: node {number} is lost")
        return node.hello.address, node.hello.port

    def stop(self) -> None:
        with self._lock:
            self._round += 1
            for node in self._nodes.values():
                node.link.send(EndAll(self._round))

    def wait_stopped(self, *, is_urgent: Callable[[], bool]) -> None:
        """ProcessError when a child cannot be killed.

        A node that does not answer is waited for until it is given up, unless it is urgent.
        """
        is_hurried = False
        deadline = time.monotonic() + self._settings.stop_seconds + _ANSWER_SECONDS
        while waiting := self._not_stopped():
            if is_urgent() and not is_hurried:
                is_hurried = True
                with self._lock:
                    for node in waiting:
                        node.link.send(Hurry())
            reached = [node for node in waiting if node.link.channel is not None]
            if is_hurried and not reached:
                return
            if time.monotonic() > deadline and reached:
                raise ProcessError(f"processes on {reached[0].title} do not end even when killed")
            time.sleep(_LOOK_SECONDS)
        with self._lock:
            errors = [it.stopped.error for it in self._nodes.values() if it.stopped.error]
        if errors:
            raise ProcessError(errors[0])

    def _not_stopped(self) -> list[_Node]:
        with self._lock:
            return [it for it in self._nodes.values() if it.stopped.round < self._round]

    def exit_code(self, node: _Node, number: int) -> int | None:
        """None while a child runs, as far as this end knows; 75 once its node is given up."""
        with self._lock:
            if (ended := node.ended.get(number)) is not None:
                return ended.code
            is_lost = node.hello.incarnation in self._given_up
        return int(ExitCode.TRY_AGAIN) if is_lost else None

    def failure(self, node: _Node, number: int, spec: ProcessSpec) -> ProcessFailed | None:
        with self._lock:
            if (ended := node.ended.get(number)) is not None:
                return FailedElsewhere(ended, spec.name, node.title, spec.log)
            why = self._given_up.get(node.hello.incarnation)
        return None if why is None else NodeLost(spec.name, f"{spec.name} is lost with {why}")

    def bury(self, node: _Node, number: int) -> None:
        with self._lock:
            if node.ended.pop(number, None) is not None:
                node.link.send(Bury(number))

    # ------------------------------------------------------------------ in the thread

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.closing(self._listener):
            while not self._is_closing.is_set():
                with self._lock:
                    self._watch(selector)
                selector.select(_LOOK_SECONDS)
                with self._lock:
                    self._accept()
                    self._greet()
                    for node in list(self._nodes.values()):
                        self._look_at(node)
            for node in self._nodes.values():
                node.link.drop()
            for channel in self._greeted:
                channel.close()

    def _watch(self, selector: selectors.BaseSelector) -> None:
        channels = [it.link.channel for it in self._nodes.values()]
        wanted = {self._listener, *(it.socket for it in self._greeted)}
        wanted |= {it.socket for it in channels if it is not None}
        for known in list(selector.get_map().values()):
            if known.fileobj not in wanted:
                selector.unregister(known.fileobj)
        for new in wanted - {it.fileobj for it in selector.get_map().values()}:
            selector.register(new, selectors.EVENT_READ)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                if len(self._greeted) >= _MOST_GREETED:
                    connected.close()
                    continue
                with contextlib.closing(connected), contextlib.suppress(OSError):
                    connected.setblocking(False)
                    # The handshake goes with what is read: nobody keeps the others waiting.
                    secured = self._tls.wrap_socket(
                        connected, server_side=True, do_handshake_on_connect=False
                    )
                    self._greeted.add(Channel(secured))

    def _greet(self) -> None:
        """Whoever connected says who it is; a stranger is turned away without a word."""
        for channel in list(self._greeted):
            hello: Hello | None = None
            try:
                channel.read()
                if (body := channel.next_body()) is not None:
                    hello = decode(body, Hello)
            except (OSError, ProtocolError):
                self._turn_away(channel)
                continue
            if hello is not None:
                self._greeted.discard(channel)
                with contextlib.suppress(OSError):
                    self._welcome(channel, hello)
            elif channel.is_ended or time.monotonic() - channel.opened_at > _GREETING_SECONDS:
                self._turn_away(channel)

    def _turn_away(self, channel: Channel) -> None:
        self.num_turned_away += 1
        self._greeted.discard(channel)
        channel.close()

    def _welcome(self, channel: Channel, hello: Hello) -> None:
        node = next(
            (it for it in self._nodes.values() if it.hello.incarnation == hello.incarnation), None
        )
        if node is None:
            refused = self._refusal(hello)
            if refused is not None:
                channel.send(refused)
                channel.close()
                return
            free = (it for it in range(1, len(self._nodes) + 2) if it not in self._nodes)
            number = next(free) if hello.number is None else hello.number
            node = self._nodes[number] = _Node(number, hello)
            node.stopped = AllEnded(self._round)
        settings = self._settings
        told = (settings.away_seconds, settings.hang_seconds)
        channel.send(Welcome(node.number, settings.term, node.link.received, *told))
        node.link.open(channel, hello.received)

    def _refusal(self, hello: Hello) -> TurnedAway | None:
        if (why := self._given_up.get(hello.incarnation)) is not None:
            return TurnedAway(f"the launcher gave up {why}", ExitCode.TRY_AGAIN)
        if hello.term not in (0, self._settings.term):
            return TurnedAway(
                f"{self._run_dir.root} has another launcher, in term {self._settings.term}; this "
                f"node side is of term {hello.term}, and its processes end",
                ExitCode.TRY_AGAIN,
            )
        ours = {
            "gradus": (gradus.__version__, hello.gradus),
            "Python": (platform.python_version(), hello.python),
            "the path of the run's folder": (str(self._run_dir.root), hello.run_dir),
        }
        for what, (here, there) in ours.items():
            if here != there:
                self._lines.append(f"a node side on {hello.host} is refused: {what} is {there}")
                text = f"{what} is {there} on {hello.host} and {here} at the launcher"
                return TurnedAway(f"{text}; make them the same", ExitCode.CONFIG)
        if hello.num_gpus < (wanted := self._settings.num_gpus):
            text = f"{hello.host} has {hello.num_gpus} GPUs, and launch.nodes.gpus is {wanted}"
            self._lines.append(f"a node side is refused: {text}")
            return TurnedAway(f"{text}; lower that, or take another node", ExitCode.CONFIG)
        held = None if hello.number is None else self._nodes.get(hello.number)
        if held is not None and held.hello.incarnation == hello.replaces:
            self._give_up(held, f"{held.title}, whose node side was killed")
        elif held is not None:
            text = f"node {hello.number} is {held.title} already"
            return TurnedAway(text, ExitCode.TRY_AGAIN)
        return None

    def _look_at(self, node: _Node) -> None:
        for message in node.link.take():
            self._handle(node, message)
        node.link.beat()
        # Whatever ran there has ended before this: it counts from an earlier moment.
        silent = time.monotonic() - node.link.heard_at
        if silent > self._settings.gives_up_seconds:
            self._give_up(node, f"{node.title}, which did not answer for {silent:.0f} s")

    def _give_up(self, node: _Node, why: str) -> None:
        """Nothing that was started there runs any more."""
        self._given_up[node.hello.incarnation] = why
        del self._nodes[node.number]
        node.link.drop()
        self._lines.append(f"{why}, is given up")

    def _handle(self, node: _Node, message: Message) -> None:
        if isinstance(message, Ended):
            node.ended[message.child] = message
        elif isinstance(message, AllEnded):
            node.stopped = message
            node.ended.clear()
        elif isinstance(message, Left):
            self._give_up(node, f"{node.title}, whose node side ended")
        elif isinstance(message, Told):
            self._lines.append(f"{message.line} (on {node.title})")


def open_nodes(
    config: LaunchConfig, lease: RunLease, logs: LogSettings, engine: Engine | None = None
) -> Nodes:
    """Who owns the processes of the nodes beside the launcher's."""
    assert config.nodes is not None
    settings = NodeSettings(
        term=lease.term,
        host=own_address(config.nodes.host or (None if engine is None else engine.host)),
        away_seconds=config.nodes.away_seconds,
        stop_seconds=config.stop_timeout_seconds,
        hang_seconds=config.hang_seconds,
        logs=logs,
        num_gpus=config.nodes.gpus,
        port=config.nodes.port,
    )
    nodes = Nodes(lease.run_dir, settings, engine)
    nodes._lines += [] if engine else loopback_lines(settings.host, config.nodes.host)
    return nodes
