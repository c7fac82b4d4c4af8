"""A node side owns what a launcher starts on its node, through cuts, and ends it when it is alone.

Both ends are real; the relay between them takes the place of the network.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import finish, start, wait_until

from gradus.errors import DeadlineError, ExitCode
from gradus.files import read_json, write_json
from gradus.log import LogSettings
from gradus.processes.started import Child, ProcessSpec
from gradus.processes.supervisor import Supervisor
from gradus.processes.table import is_alive
from gradus.run.lease import STARTER_VARIABLE
from gradus.run.paths import RunDirectory
from gradus.wire.codec import decode
from gradus_cluster.certificates import LAUNCHER_NAME, read_node_token, tls_context
from gradus_cluster.launcher import Engine, NodeLost, Nodes, NodeSettings, _Node
from gradus_cluster.link import (
    SILENT_SECONDS,
    Channel,
    EndAll,
    Hello,
    Hurry,
    Link,
    Message,
    TurnedAway,
)
from gradus_cluster.side import _first_body, serve_again

pytestmark = pytest.mark.slow

SERVE = """
import json, os, pathlib, signal, sys
path = pathlib.Path(sys.argv[1])
path.with_suffix(".tmp").write_text(json.dumps({"pid": os.getpid()}))
path.with_suffix(".tmp").rename(path)
signal.pause()
"""
WATCHES = "from gradus.processes.child import watch_death_pipe; watch_death_pipe()\n"
LONG = 600.0


class Relay:
    """Passes bytes between node sides and the launcher, until it is cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self.is_cut = threading.Event()
        self.is_stalled = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_over.is_set():
                if self.is_stalled.is_set():
                    self._is_over.wait(0.05)
                    continue
                for found, _ in selector.select(0.05):
                    self._pass(selector, found.fileobj)
                if self.is_cut.is_set():
                    for end in list(self._pairs):
                        selector.unregister(end)
                        end.close()
                    self._pairs.clear()
            for end in (self._listener, *self._pairs):
                end.close()

    def _pass(self, selector: selectors.BaseSelector, end: object) -> None:
        if end is self._listener:
            near, _ = self._listener.accept()
            if self.is_cut.is_set():
                near.close()
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                return
            self._pairs |= {near: far, far: near}
            selector.register(near, selectors.EVENT_READ)
            selector.register(far, selectors.EVENT_READ)
            return
        assert isinstance(end, socket.socket)
        if end not in self._pairs:
            return  # Its other end was closed in this round.
        other = self._pairs[end]
        try:
            content = end.recv(1 << 16)
            other.sendall(content)
        except OSError:
            content = b""
        if not content:
            for one in (end, other):
                selector.unregister(one)
                one.close()
                del self._pairs[one]


@dataclass
class Stage:
    """A launcher of a run with the folder of a test, and its node sides."""

    run_dir: RunDirectory
    nodes: Nodes
    relay: Relay
    sides: list[subprocess.Popen[str]] = field(default_factory=list)

    def join(self, number: int = 1, *words: str, stdin: int | None = None) -> subprocess.Popen[str]:
        chosen = ("--number", str(number), *words)
        side: subprocess.Popen[str] = start("node", str(self.run_dir.root), *chosen, stdin=stdin)
        self.sides.append(side)
        self.nodes.wait_joined([number], 60)
        return side

    def is_reached(self, number: int) -> bool:
        """Whether a connection to a node stands now."""
        node = self.nodes._nodes.get(number)
        return node is not None and node.link.channel is not None

    def supervisor(self) -> Supervisor:
        registry = self.run_dir.processes
        return Supervisor(registry, stop_timeout_seconds=5, elsewhere=self.nodes)

    def spec(self, name: str = "server", program: str = SERVE) -> ProcessSpec:
        ready = self.run_dir.ready_file(name)
        argv = (sys.executable, "-c", program, str(ready))
        log = self.run_dir.logs / f"{name}.log"
        return ProcessSpec(name, argv, {"PATH": os.environ["PATH"]}, log, ready, node=1)


def open_stage(
    stack: ExitStack,
    folder: Path,
    *,
    away_seconds: float = LONG,
    num_gpus: int = 0,
    engine: Engine | None = None,
) -> Stage:
    run_dir = RunDirectory(folder)
    for path in (run_dir.ready, run_dir.logs):
        path.mkdir(exist_ok=True)
    settings = NodeSettings(
        term=3,
        host="127.0.0.1",
        away_seconds=away_seconds,
        stop_seconds=0.5,
        hang_seconds=LONG,
        logs=LogSettings(),
        num_gpus=num_gpus,
        spare_seconds=0.5,
    )
    nodes = stack.enter_context(Nodes(run_dir, settings, engine=engine))
    where = read_json(run_dir.launcher)
    relay = Relay((where["host"], where["port"]))
    stack.callback(relay.close)
    write_json(run_dir.launcher, {**where, "port": relay.port})
    stage = Stage(run_dir, nodes, relay)
    stack.callback(end_all, stage)
    return stage


def end_all(stage: Stage) -> None:
    for side in stage.sides:
        if side.poll() is None:
            side.kill()
        side.communicate()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield open_stage(stack, tmp_path)


def serve(stage: Stage, supervisor: Supervisor, *, program: str = SERVE) -> tuple[Child, int]:
    """A child on node 1 that is ready, and its pid there."""
    child = supervisor.start(stage.spec(program=program))
    supervisor.wait_ready([child], timeout_seconds=60)
    return child, int(read_json(stage.run_dir.ready_file("server"))["pid"])


def look(supervisor: Supervisor) -> bool:
    """False, until a child that failed is raised."""
    supervisor.check()
    return False


def runs(pid: int) -> bool:
    try:
        return is_alive(pid, start_of(pid))
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text[text.rindex(")") + 2 :].split()[19])


def wait_gone(pid: int) -> None:
    wait_until(
        lambda: not runs(pid),
        timeout_seconds=60,
        what="its end",
    )


def test_a_child_starts_elsewhere_and_ends_with_the_others(stage: Stage) -> None:
    side = stage.join()
    with stage.supervisor() as supervisor:
        child, pid = serve(stage, supervisor)
        assert runs(pid)
        assert child.exit_code() is None
        kept = sorted(os.listdir(stage.run_dir.secrets))
        assert kept == ["authority.pem", "node_token"], "its variables are on no disk"
    assert not runs(pid)
    stage.nodes.__exit__()
    assert finish(side, seconds=60).startswith("node 1 of")


COPIES = """
import json, pathlib, sys
run_dir = pathlib.Path(sys.argv[1]).parent.parent
found = json.loads((run_dir / "config" / "run.json").read_text())
print("the config says", found, flush=True)
others = sorted(path.name for path in run_dir.iterdir())
pathlib.Path(sys.argv[1]).write_text(json.dumps({"pid": 0, "others": others}))
raise ValueError("the reward is nan")
"""


def test_no_two_threads_speak_to_a_node_at_once(stage: Stage) -> None:
    nodes = stage.nodes
    lock: Any = nodes._lock
    are_alone: list[tuple[type[Message], bool]] = []

    class Watched(Link):
        def send(self, message: Message) -> None:
            are_alone.append((type(message), lock._is_owned()))

    hello = Hello("1.a", 1, "", "", "", "", "127.0.0.1", 1, 0, 0)
    with lock:
        nodes._nodes[1] = _Node(1, hello, Watched())
    nodes.stop()
    nodes.wait_stopped(is_urgent=lambda: True)
    assert are_alone == [(EndAll, True), (Hurry, True)]


def test_why_a_child_failed_comes_from_its_node(stage: Stage) -> None:
    stage.join()
    with stage.supervisor() as supervisor:
        supervisor.start(stage.spec(program="raise ValueError('the reward is nan')"))
        with pytest.raises(Exception, match=r"ended with exit code 1 .* the reward is nan") as told:
            wait_until(partial(look, supervisor), timeout_seconds=60, what="the failure")
    assert f"on node 1 ({socket.gethostname()})" in str(told.value)


def test_a_child_is_replaced_on_its_node(stage: Stage) -> None:
    stage.join()
    with stage.supervisor() as supervisor:
        _, pid = serve(stage, supervisor)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception, match="killed by SIGKILL"):
            wait_until(partial(look, supervisor), timeout_seconds=60, what="the failure")
        supervisor.replace("server", stage.spec(), wait_seconds=0, ready_seconds=60)
        wait_until(
            lambda: look(supervisor) or not supervisor.is_replaced("server"),
            timeout_seconds=60,
            what="it",
        )
        assert runs(int(read_json(stage.run_dir.ready_file("server"))["pid"]))


def test_nothing_ends_while_the_connection_is_cut(stage: Stage) -> None:
    stage.join()
    with stage.supervisor() as supervisor:
        child, pid = serve(stage, supervisor)
        stage.relay.is_cut.set()
        wait_until(lambda: not stage.is_reached(1), timeout_seconds=60, what="the cut")
        other = supervisor.start(stage.spec("later"))
        assert runs(pid)
        stage.relay.is_cut.clear()
        supervisor.wait_ready([other], timeout_seconds=60)
        assert runs(pid)
        assert child.exit_code() is None


def test_nothing_ends_while_the_connection_stalls(stage: Stage) -> None:
    """Longer than a sign of life may take; then what was held back comes, on the old socket too."""
    stage.join()
    link = stage.nodes._nodes[1].link
    with stage.supervisor() as supervisor:
        child, pid = serve(stage, supervisor)
        stage.relay.is_stalled.set()
        other = supervisor.start(stage.spec("later"))
        silence = SILENT_SECONDS + 2
        wait_until(
            lambda: time.monotonic() - link.heard_at > silence, timeout_seconds=60, what="silence"
        )
        assert runs(pid)
        stage.relay.is_stalled.clear()
        supervisor.wait_ready([other], timeout_seconds=60)
        assert runs(pid)
        assert child.exit_code() is None
        assert stage.nodes._nodes[1].link is link


def test_a_killed_node_side_takes_its_processes_with_it_and_another_takes_its_place_at_once(
    stage: Stage,
) -> None:
    side = stage.join()
    with stage.supervisor() as supervisor:
        _, pid = serve(stage, supervisor, program=WATCHES + SERVE)
        side.kill()
        side.wait()
        stage.join()
        with pytest.raises(NodeLost, match=r"node 1 \(.*\), whose node side was killed"):
            wait_until(partial(look, supervisor), timeout_seconds=60, what="its loss")
        wait_gone(pid)
        assert stage.nodes.missing([1]) == []


def test_a_node_side_without_its_launcher_ends_its_processes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stage = open_stage(stack, tmp_path, away_seconds=2)
        side = stage.join()
        supervisor = stack.enter_context(stage.supervisor())
        _, pid = serve(stage, supervisor)
        stage.relay.is_cut.set()
        wait_gone(pid)
        printed = finish(side, exit_code=ExitCode.TRY_AGAIN, seconds=60)
        assert "the launcher did not answer for 2 s" in printed


def test_a_node_side_whose_starter_is_gone_ends_and_says_so(stage: Stage) -> None:
    read_end, starter = os.pipe()
    side = stage.join(1, "--while-stdin", stdin=read_end)
    os.close(read_end)
    with stage.supervisor() as supervisor:
        _, pid = serve(stage, supervisor)
        os.close(starter)
        with pytest.raises(NodeLost, match=r"lost with node 1 \(.*\), whose node side ended"):
            wait_until(partial(look, supervisor), timeout_seconds=60, what="its loss")
        assert not runs(pid)
    assert "stopped by SIGTERM" in finish(side, exit_code=ExitCode.TRY_AGAIN, seconds=60)


class FullEngine:
    """What starts node sides, and never finds room for them."""

    host = "127.0.0.1"
    lacks = "a node with 8 GPUs"

    def __init__(self) -> None:
        self.placed: list[Path] = []

    def place(self, run: Path) -> None:
        self.placed.append(run)

    def look(self) -> list[str]:
        return ["still full"]


def test_what_an_engine_lacks_is_said_when_no_node_joins_in_time(tmp_path: Path) -> None:
    with ExitStack() as stack:
        engine = FullEngine()
        stage = open_stage(stack, tmp_path, engine=engine)
        told: list[str] = []
        for numbers, which in (([1, 2], "1, 2"), ([], "0")):
            why = rf"node {which} has not joined in 0.2 s \(.*\); it waits for a node with 8 GPUs"
            with pytest.raises(DeadlineError, match=why):
                stage.nodes.wait_joined(numbers, 0.2, tell=told.append)
        assert (engine.placed, told) == ([tmp_path, tmp_path], [])
        assert stage.nodes.lines() == ["still full"]


@pytest.mark.parametrize("starter", ["", "job 7 of SLURM"])
def test_who_starts_the_missing_node_sides_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starter: str
) -> None:
    """A person is told the command; where a job does it, nobody has to."""
    monkeypatch.setenv(STARTER_VARIABLE, starter)
    told: list[str] = []
    with ExitStack() as stack:
        stage = open_stage(stack, tmp_path)
        with pytest.raises(DeadlineError) as raised:
            stage.nodes.wait_joined([1, 2], 0.2, tell=told.append)
    (line,) = told
    assert line.startswith("waits for node 1, 2: " + (starter or "run `gradus node"))
    assert (f"run `gradus node {tmp_path}`" in line) is not bool(starter)
    assert (starter or "start `gradus node") in str(raised.value)


def test_one_that_was_given_up_is_turned_away_when_it_returns(tmp_path: Path) -> None:
    """AllEnded meanwhile, as a machine that sleeps is, it could not end its processes by itself."""
    with ExitStack() as stack:
        stage = open_stage(stack, tmp_path, away_seconds=1)
        side = stage.join()
        supervisor = stack.enter_context(stage.supervisor())
        _, pid = serve(stage, supervisor)
        side.send_signal(signal.SIGSTOP)
        wait_until(lambda: stage.nodes.missing([1]) == [1], timeout_seconds=60, what="its loss")
        assert runs(pid)
        side.send_signal(signal.SIGCONT)
        finish(side, exit_code=ExitCode.TRY_AGAIN, seconds=60)
        assert not runs(pid)


def test_one_of_an_earlier_launcher_ends_when_it_sees_the_next(stage: Stage) -> None:
    side = stage.join()
    supervisor = stage.supervisor()
    _, pid = serve(stage, supervisor)
    where = read_json(stage.run_dir.launcher)
    write_json(stage.run_dir.launcher, {**where, "term": 4})
    stage.relay.is_cut.set()
    printed = finish(side, exit_code=ExitCode.TRY_AGAIN, seconds=60)
    assert "has another launcher, in term 4" in printed
    assert not runs(pid)
    supervisor.stop(is_urgent=lambda: True)


def test_a_node_side_that_stays_waits_for_its_number_and_for_the_next_launcher(
    tmp_path: Path,
) -> None:
    words = ("node", str(tmp_path), "--number", "1", "--stay")
    with ExitStack() as stack:
        stage = open_stage(stack, tmp_path, away_seconds=4.0)
        first = stage.join()
        second = start(*words)
        stage.sides.append(second)
        assert second.stdout is not None
        assert "node 1 (" in (told := second.stdout.readline())
        assert told.endswith("already; tries again\n")
        first.kill()
        first.wait()
        wait_until(
            lambda: not stage.nodes.missing([1]) and "given up" in "".join(stage.nodes.lines()),
            timeout_seconds=60,
            what="the second in the place of the first",
        )
        where = read_json(stage.run_dir.launcher)
        stage.relay.is_cut.set()
        write_json(stage.run_dir.launcher, {**where, "term": 4})
        wait_until(
            lambda: bool(stage.nodes.missing([1])), timeout_seconds=60, what="the loss of it"
        )
        assert second.poll() is None
        stage.relay.is_cut.clear()
        stage.nodes.wait_joined([1], 60)
        second.send_signal(signal.SIGTERM)
        printed = finish(second, exit_code=ExitCode.TRY_AGAIN, seconds=60)
    assert "already" not in printed, "once is enough"
    assert "has another launcher, in term 4" in printed
    assert "stopped by SIGTERM" in printed


def test_a_node_side_may_be_there_long_before_its_launcher(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    side = start("node", str(tmp_path), variables={"GRADUS_ALIVE": str(alive)})
    wait_until(alive.exists, timeout_seconds=60, what="its sign of life")
    began = alive.stat().st_mtime
    wait_until(
        lambda: alive.stat().st_mtime > began + 6, timeout_seconds=60, what="more than it may"
    )
    with ExitStack() as stack:
        stage = open_stage(stack, tmp_path, away_seconds=5.0)
        stage.sides.append(side)
        stage.nodes.wait_joined([1], 60)
        supervisor = stage.supervisor()
        supervisor.start(stage.spec())
        wait_until(stage.spec().ready_file.exists, timeout_seconds=60, what="a process there")
        supervisor.stop(is_urgent=lambda: True)
        assert side.poll() is None


def test_a_signal_between_two_tries_ends_a_node_side_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Making the next side may take long, and only a running one has handlers of its own."""
    made: list[Side] = []

    class Side:
        is_told_to_end = False

        def __init__(self) -> None:
            made.append(self)
            made[0].is_told_to_end = len(made) == 2  # the signal comes meanwhile

        def run(self) -> int:
            raise DeadlineError("no launcher")

    monkeypatch.setattr("gradus_cluster.side._TRY_SECONDS", 0.0)
    with pytest.raises(DeadlineError, match="stopped while no launcher was there"):
        serve_again(Side, lambda _: None)  # type: ignore[arg-type, return-value]
    assert len(made) == 2


def test_a_node_side_that_stays_ends_when_it_is_refused_or_told_to(tmp_path: Path) -> None:
    words = ("node", str(tmp_path), "--stay")
    lonely = start(*words, variables={"GRADUS_ALIVE": str(tmp_path / "alive")})
    wait_until((tmp_path / "alive").exists, timeout_seconds=60, what="its sign of life")
    lonely.send_signal(signal.SIGTERM)
    finish(lonely, exit_code=ExitCode.TRY_AGAIN, seconds=60)
    with ExitStack() as stack:
        open_stage(stack, tmp_path, num_gpus=80)
        finish(start(*words), exit_code=ExitCode.CONFIG, seconds=60)


def test_a_stranger_is_told_nothing_and_turned_away(stage: Stage) -> None:
    where = ("127.0.0.1", read_json(stage.run_dir.launcher)["port"])
    with socket.create_connection(where) as stranger:
        stranger.settimeout(60)
        stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(64))
        heard = b"".join(iter(lambda: stranger.recv(4096), b""))
    assert len(heard) < 16, "an alert of TLS, and no more"
    wait_until(lambda: stage.nodes.num_turned_away == 1, timeout_seconds=60, what="a refusal")


def test_one_of_an_earlier_launcher_is_turned_away_by_the_next(stage: Stage) -> None:
    tls = tls_context(read_node_token(stage.run_dir.node_token), "node")
    hello = Hello("1.a", 1, "there", "", "", "", "", 0, 0, 0, term=2)
    with socket.create_connection(("127.0.0.1", stage.relay.port)) as plain:
        channel = Channel(tls.wrap_socket(plain, server_hostname=LAUNCHER_NAME))
        channel.send(hello)
        answer: TurnedAway = decode(_first_body(channel), TurnedAway)
        channel.close()
    assert "another launcher, in term 3; this node side is of term 2" in answer.reason
    assert stage.nodes.missing([1]) == [1]


def test_a_node_side_with_another_token_gets_no_answer(stage: Stage) -> None:
    stage.run_dir.node_token.write_text("00" * 32)
    side = start("node", str(stage.run_dir.root))
    stage.sides.append(side)
    wait_until(lambda: stage.nodes.num_turned_away > 1, timeout_seconds=60, what="two refusals")
    assert stage.nodes.missing([1]) == [1]
    assert side.poll() is None, "the right token may come yet"
    side.send_signal(signal.SIGTERM)
    printed = finish(side, exit_code=ExitCode.TRY_AGAIN, seconds=60)
    assert printed.count("another run, or one after --clean, has another token") == 1


def test_a_launcher_that_was_fenced_leaves_the_next_one_where_node_sides_find_it(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        run_dir = open_stage(stack, tmp_path).run_dir
        where = read_json(run_dir.launcher)
        write_json(run_dir.launcher, {**where, "term": 4})
    assert read_json(run_dir.launcher)["term"] == 4


def test_a_node_with_fewer_gpus_than_the_plan_counts_on_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        stage = open_stage(stack, tmp_path, num_gpus=80)
        side = start("node", str(tmp_path), variables={"CUDA_VISIBLE_DEVICES": ""})
        printed = finish(side, exit_code=ExitCode.CONFIG, seconds=60)
        assert "has 0 GPUs, and launch.nodes.gpus is 80" in printed
        assert "is refused" in stage.nodes.lines()[0]
