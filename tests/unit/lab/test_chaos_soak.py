"""A soak hurts what it should, waits for the next step, and tells what did not hold."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from commands import wait_until
from run_folders import a_run

from gradus.cli.main import main
from gradus.errors import ExitCode
from gradus.processes.table import descendants, living_processes, read_process
from gradus.run.paths import RunDirectory
from gradus_lab.chaos import links
from gradus_lab.chaos.faults import (
    DEFAULT_KINDS,
    KINDS,
    LIMITS,
    LINKS,
    Clock,
    Injected,
    Victim,
    choose,
    damage_newest,
    do,
    kinds_here,
    undo,
)
from gradus_lab.chaos.soak import Plan, Round, Soak, grown, growth, sum_up

FOUND = [
    *(Victim("launcher", 1), Victim("trainer", 2), Victim("inference", 3, is_linked=True)),
    *(Victim("env_words", 4), *(Victim(f"env_words/{n}", 4 + n) for n in range(1, 9))),
]
STOPPED_SECONDS = 0.5
A_RUN = """
import ctypes, json, signal, subprocess, sys, time
from pathlib import Path
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
root = Path(sys.argv[1])
lease = RunLease.take(RunDirectory(root))
def end(*_):
    lease.release()
    child.kill()
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
die_too = lambda: ctypes.CDLL(None).prctl(1, 9)
wait = [sys.executable, "-c", "import signal; signal.pause()"]
child = subprocess.Popen(wait, preexec_fn=die_too)
start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
entry = {"name": "trainer", "pid": child.pid, "start_time": start}
registry = {"launch": "1.1", "processes": [entry], "temporary_folder": None}
(root / "pids.json").write_text(json.dumps(registry))
done = len((root / "metrics.jsonl").read_text().splitlines())
stopped = 0.0
while child.poll() is None or sys.argv[2] != "ends":
    if sys.argv[2] == "frees" and child.poll() is None:
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        stopped += 0.05 * (state == "T")
        if stopped > 0.5:
            child.kill()
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": done, "time": time.time(), "loss/total/mean": 1.0}) + "\\n")
    done += 1
    time.sleep(0.05)
lease.release()
sys.exit(70)
"""
"""Stands for `gradus rl`: steps, and a trainer whose death it survives or not."""


def soak(tmp_path: Path, how: str, **plan: object) -> tuple[list[Round], list[str]]:
    run_dir = RunDirectory(a_run(tmp_path / "demo", outcome=None))
    for name in ("metrics.jsonl", "journal.jsonl"):
        (run_dir.root / name).touch()
    told: list[str] = []
    made = Plan(
        **{
            "words": [str(run_dir.root), how],
            "run_dir": run_dir,
            "minutes": 0.05,
            "seed": 1,
            "kinds": ("kill",),
            "rest_seconds": 0.1,
            "limit_seconds": 30.0,
            "program": (sys.executable, "-c", A_RUN),
            **plan,
        }  # type: ignore[arg-type]
    )
    return Soak(made, tmp_path / "demo.chaos.jsonl", told.append).run(), told


def test_the_same_seed_gives_the_same_faults() -> None:
    def faults(seed: int) -> list[Injected | None]:
        draw = random.Random(seed)
        return [choose(FOUND, KINDS, draw, has_checkpoint=True) for _ in range(40)]

    assert faults(7) == faults(7)
    assert faults(7) != faults(8)


def drawn(kinds: Sequence[str], number: int, *, has_checkpoint: bool = False) -> list[Injected]:
    draw = random.Random(0)
    made = [choose(FOUND, kinds, draw, has_checkpoint=has_checkpoint) for _ in range(number)]
    return [it for it in made if it is not None]


def test_every_role_and_kind_is_drawn_about_as_often() -> None:
    made = drawn(("kill", "stop"), 4_000)
    roles = Counter(it.victim.role for it in made)
    assert set(roles) == {"launcher", "trainer", "inference", "env_words"}
    assert min(roles.values()) > 900
    assert {it.victim for it in made} == set(FOUND)


def test_a_kind_that_is_given_three_times_comes_three_times_as_often() -> None:
    found = Counter(it.kind for it in drawn(("kill", "stop", "kill", "kill"), 4_000))
    assert 2.5 < found["kill"] / found["stop"] < 3.5


def test_no_checkpoint_is_damaged_while_there_is_only_one() -> None:
    assert {it.kind for it in drawn(tuple(KINDS), 200)} == set(KINDS) - {"damage"}
    assert drawn(("damage",), 1) == []


def test_each_fault_hits_only_what_can_suffer_it() -> None:
    def hit(*kinds: str) -> set[str]:
        return {it.victim.name for it in drawn(kinds, 200, has_checkpoint=True)}

    assert hit(*LIMITS) == {it.name for it in FOUND} - {"launcher"}
    assert hit(*LINKS) == {"inference"}
    assert hit("damage") == {"trainer"}
    assert hit("clock") == {"+1h", "-1h"}


TRIES = """
import sys
for line in sys.stdin:
    try:
        bytearray(256 << 20)
        open(sys.argv[1], "w").write("x" * 10_000)
        print("fine", flush=True)
    except (MemoryError, OSError) as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize(("kind", "said"), [("memory", "MemoryError"), ("disk", "File too large")])
def test_what_a_process_is_denied_it_gets_back(kind: str, said: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", TRIES, str(tmp_path / "file")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:

        def attempt() -> str:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            return child.stdout.readline()

        assert attempt() == "fine\n"
        fault = Injected(kind, Victim("trainer", child.pid))
        do(fault, RunDirectory(tmp_path))
        assert said in attempt()
        undo(fault, RunDirectory(tmp_path))
        assert attempt() == "fine\n"
        assert child.stdin is not None
        child.stdin.close()
    undo(fault, RunDirectory(tmp_path))  # of one that has ended, it does nothing


REPEATS = """
import socket, sys
near, far = socket.socketpair()
far.sendall(b"x")
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
try:
    while received := link.recv(100):
        link.sendall(received)
    print("said nothing")
except OSError:
    print("cut", near.recv(1))
"""
"""A client that sends back what it gets, and has a pair of sockets that is no link."""

Repeater = tuple[socket.socket, socket.socket, "subprocess.Popen[str]"]


@pytest.fixture
def repeater() -> Iterator[Repeater]:
    """What listens, the connection of a process to it, and the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [sys.executable, "-c", REPEATS, str(server.getsockname()[1])]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
            link, _ = server.accept()
            with link:
                link.settimeout(20)
                link.sendall(b"1")
                assert link.recv(1) == b"1"
                yield server, link, child
            child.kill()


@pytest.mark.skipif(links.refusal() is not None, reason="sockets of children cannot be reached")
def test_a_link_is_cut_at_both_ends_and_nothing_else_is(repeater: Repeater) -> None:
    _, link, child = repeater
    assert links.is_linked(child.pid, links.connections())
    links.cut(child.pid)
    with pytest.raises(ConnectionError):
        link.recv(1)
    assert child.stdout is not None
    assert child.stdout.readline() == "cut b'x'\n"
    child.wait()
    links.cut(child.pid)


@pytest.mark.skipif(links.refusal() is not None, reason="sockets of children cannot be reached")
def test_what_is_said_to_a_muted_process_arrives_later(repeater: Repeater) -> None:
    _, link, child = repeater
    links.mute(child.pid)
    link.sendall(b"2")
    link.settimeout(0.2)
    with pytest.raises(TimeoutError):
        link.recv(1)
    links.unmute(child.pid)
    link.settimeout(20)
    assert link.recv(1) == b"2"


@pytest.mark.skipif(links.refusal() is not None, reason="sockets of children cannot be reached")
def test_a_muted_server_answers_no_new_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        links.mute(os.getpid())
        with pytest.raises(TimeoutError):
            socket.create_connection(server.getsockname(), timeout=0.2)
        links.unmute(os.getpid())
        socket.create_connection(server.getsockname(), timeout=20).close()


TELLS = """
import sys, time
from time import time as taken
for line in sys.stdin:
    print(round(time.time() - taken()), round(time.time()), round(time.time_ns() / 1e9), flush=True)
"""


def test_a_turned_clock_is_that_of_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nprint('here', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(theirs))
    clock = Clock(RunDirectory(tmp_path / "demo"))
    words, env = [sys.executable, "-c", TELLS], {**os.environ, **clock.variables()}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        for hours in (0, 1, -1, 0):
            clock.turn(3600 * hours)
            child.stdin.write("go\n")
            child.stdin.flush()
            differs, *read = map(int, child.stdout.readline().split())
            assert differs == 0
            assert {round((it - time.time()) / 3600) for it in read} == {hours}
        child.stdin.close()
    clock.close()
    assert [it.name for it in tmp_path.iterdir()] == ["theirs"]


def test_with_double_a_second_process_is_hit_before_the_first_has_recovered(tmp_path: Path) -> None:
    rounds, told = soak(tmp_path, "heals", is_double=True, seed=4)
    *faults, last = rounds
    assert {it.fault for it in faults} & {
        *("kill trainer + kill launcher", "kill launcher + kill trainer"),
        "kill launcher + kill launcher",
    }
    assert last.broken == ["I8 there is no summary.json"]
    assert any("kill launcher" in it and it.endswith("steps again") for it in sum_up(rounds))
    assert len(told) == len(rounds)


def test_damage_changes_bytes_and_no_size(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    for step in (1, 2):
        folder = run_dir.checkpoints / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(1000))
        (folder / "label").write_bytes(b"small")
    damage_newest(run_dir)
    older, newer = (path.read_bytes() for path in sorted(run_dir.checkpoints.rglob("weights")))
    assert older == bytes(1000)
    assert len(newer) == 1000
    assert newer.count(0xFF) == 64
    assert (folder / "label").read_bytes() == b"small"


def test_a_run_that_goes_on_after_each_fault_is_told_so(tmp_path: Path) -> None:
    rounds, told = soak(tmp_path, "heals")
    *faults, last = rounds
    assert faults
    assert {it.fault for it in faults} <= {"kill trainer", "kill launcher"}
    assert [it.broken for it in faults if it.seconds is None or it.broken] == []
    assert last.fault == "end"
    # It writes no summary, as a real run would.
    assert last.broken == ["I8 there is no summary.json"]
    lines = (tmp_path / "demo.chaos.jsonl").read_text().splitlines()
    assert [json.loads(line)["fault"] for line in lines] == [it.fault for it in rounds]
    assert len(told) == len(rounds)
    assert sum_up(rounds)[-1] == f"{len(faults)} faults; broken: I8 1 times"


def test_a_stopped_process_is_waited_for_until_something_ends_it(tmp_path: Path) -> None:
    rounds, _ = soak(tmp_path, "frees", kinds=("stop",), seed=3)
    hit = [it for it in rounds if it.fault == "stop trainer"]
    assert hit
    assert all(it.seconds is not None and it.seconds >= STOPPED_SECONDS for it in hit)


def test_a_run_that_ends_at_a_fault_is_found_and_named(tmp_path: Path) -> None:
    began = time.monotonic()
    rounds, _ = soak(tmp_path, "ends", minutes=1.0, seed=0)
    assert time.monotonic() - began < 30
    *_, last = rounds
    assert any(it.startswith("I8 exit code 70") for it in last.broken)


def test_a_run_that_stands_still_is_found_and_ended(tmp_path: Path) -> None:
    run = "import signal, time\nsignal.signal(15, lambda *_: exit(75))\nwhile True: signal.pause()"
    rounds, _ = soak(tmp_path, "", program=(sys.executable, "-c", run), limit_seconds=0.3)
    (last,) = rounds
    assert last.broken[0] == "I8 no step within 0.3 s of the last fault"


def test_an_interrupted_soak_ends_a_run_that_it_had_paused(tmp_path: Path) -> None:
    run_dir = RunDirectory(a_run(tmp_path / "demo", outcome=None))
    for name in ("metrics.jsonl", "journal.jsonl"):
        (run_dir.root / name).touch()

    def interrupted(_: str) -> None:
        made._process.send_signal(signal.SIGSTOP)
        raise KeyboardInterrupt

    words, program = [str(run_dir.root), "heals"], (sys.executable, "-c", A_RUN)
    plan = Plan(words, run_dir, 1.0, 1, ("kill",), rest_seconds=0.1, program=program)
    made = Soak(plan, tmp_path / "chaos.jsonl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert made._process.poll() is not None


LEAVES = """
import sys
from pathlib import Path
from gradus_lab.chaos import soak
from gradus_lab.chaos.command import _hurt
from gradus.run.paths import RunDirectory
root, program = Path(sys.argv[1]), (sys.executable, "-c", sys.argv[2])
plan = soak.Plan([str(root), "heals"], RunDirectory(root), 1.0, 1, ("pause",), program=program)
_hurt(plan)
"""


def test_a_soak_that_is_asked_to_end_ends_its_run(tmp_path: Path) -> None:
    run_dir = RunDirectory(a_run(tmp_path / "demo", outcome=None))
    for name in ("metrics.jsonl", "journal.jsonl"):
        (run_dir.root / name).touch()
    words = [sys.executable, "-c", LEAVES, str(run_dir.root), A_RUN]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as chaos:
        wait_until(lambda: (run_dir.root / "metrics.jsonl").stat().st_size > 0)
        run = [it.pid for it in descendants(chaos.pid, living_processes())]
        assert len(run) == 2
        chaos.send_signal(signal.SIGTERM)
        assert chaos.wait(60) == ExitCode.TRY_AGAIN
    wait_until(lambda: [pid for pid in run if read_process(pid)] == [])


@pytest.mark.shows("I10")
@pytest.mark.parametrize(("what", "said"), [("memory_mib", "MiB"), ("files", "open files")])
def test_a_role_that_grows_through_a_soak_is_named(what: str, said: str) -> None:
    steady = {"trainer": 300, "inference": 300}
    rounds = [
        Round(n, "kill trainer", 0.0, **{"memory_mib": steady, what: steady | {"trainer": 100 * n}})
        for n in range(1, 17)
    ]
    assert list(map(str, grown(rounds))) == [f"I10 trainer grew from 800 to 1600 {said}"]
    assert grown(rounds[:8]) == [], "too short"


def test_growth_compares_the_halves_of_a_soak() -> None:
    rounds = [
        Round(
            n, "kill trainer", 0.0, memory_mib={"trainer": n, "trainer/1": 9}, files={"trainer": n}
        )
        for n in range(10, 14)
    ]
    assert growth(rounds) == {"trainer": [(11, 11), (13, 13)]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "--minutes 0: give a number of at least 0.1"),
        (["--minutes", "nan"], "--minutes nan"),
        (["--seed", "1.5"], "--seed 1.5"),
        (["--seed", "inf"], "--seed inf"),
        (["--rest", "-1"], "--rest -1: give a number of at least 0"),
        (["--kind", "flood"], "--kind flood: choose from kill, stop, pause, disk, damage, cut,"),
        (["--check", ".", "--seed", "1"], "--check takes the folder of a run"),
        (["--against", "x"], "--against compares with the run behind --check"),
        ([], "needs a name"),
        (["--name", "taken"], "is there already"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "rl.toml").write_text(
        'max_steps = 2\n[model]\nname = "m"\n[[orchestrator.train.env]]\nid = "words"\n'
    )
    assert main(["lab", "chaos", "@", "rl.toml", *words]) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_what_cannot_be_done_here_is_refused_or_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(pid: int, number: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(links, "_copy", denied)
    assert (
        main(["lab", "chaos", "--kind", "kill", "--kind", "mute", "--name", "x"]) == ExitCode.CONFIG
    )
    assert "--kind mute cannot be done here: a process may not take" in capsys.readouterr().err
    kinds, left_out = kinds_here([])
    assert set(kinds) == set(DEFAULT_KINDS) - set(LINKS)
    assert left_out.startswith("cut and mute are left out: a process may not take the descriptors")
    assert kinds_here(["kill"]) == (["kill"], "")
