"""A soak hurts what it should, waits for the next step, and tells what did not hold."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from commands import wait_until
from run_folders import a_run

from gradus.chaos.faults import LIMITS, Injected, Victim, choose, damage_newest, do, undo
from gradus.chaos.soak import KINDS, Plan, Round, Soak, grown, growth, sum_up
from gradus.cli.main import main
from gradus.errors import ExitCode
from gradus.processes.table import descendants, living_processes, read_process
from gradus.run.paths import RunDirectory

FOUND = [
    *(Victim("launcher", 1), Victim("trainer", 2), Victim("inference", 3)),
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
    (run_dir.root / "metrics.jsonl").touch()
    told: list[str] = []
    made = Plan(
        **{
            "words": [str(run_dir.root), how],
            "run_dir": run_dir,
            "minutes": 0.05,
            "seed": 1,
            "kinds": ("kill",),
            "rest_seconds": (0.0, 0.1),
            "limit_seconds": 30.0,
            "program": (sys.executable, "-c", A_RUN),
            **plan,
        }  # type: ignore[arg-type]
    )
    return Soak(made, tmp_path / "demo.chaos.jsonl", told.append).run(), told


def test_the_same_seed_gives_the_same_faults() -> None:
    def faults(seed: int) -> list[Injected]:
        draw = random.Random(seed)
        return [choose(FOUND, KINDS, draw, has_checkpoint=True) for _ in range(40)]

    assert faults(7) == faults(7)
    assert faults(7) != faults(8)


def test_every_role_and_kind_is_drawn_about_as_often() -> None:
    draw = random.Random(0)
    made = [choose(FOUND, ("kill", "stop"), draw, has_checkpoint=False) for _ in range(4_000)]
    roles = Counter(it.victim.name.partition("/")[0] for it in made)
    assert set(roles) == {"launcher", "trainer", "inference", "env_words"}
    assert min(roles.values()) > 900
    assert {it.victim for it in made} == set(FOUND)


def test_no_checkpoint_is_damaged_while_there_is_only_one() -> None:
    draw = random.Random(0)
    kinds = {choose(FOUND, KINDS, draw, has_checkpoint=False).kind for _ in range(200)}
    assert kinds == set(KINDS) - {"damage"}


def test_a_launcher_is_never_denied_memory_or_disk() -> None:
    draw = random.Random(0)
    made = [choose(FOUND, tuple(LIMITS), draw, has_checkpoint=True) for _ in range(200)]
    assert {it.kind for it in made} == set(LIMITS)
    assert "launcher" not in {it.victim.name for it in made}


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
        undo(fault)
        assert attempt() == "fine\n"
        assert child.stdin is not None
        child.stdin.close()
    undo(fault)  # of one that has ended, it does nothing


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
    (run_dir.root / "metrics.jsonl").touch()

    def interrupted(_: str) -> None:
        made._process.send_signal(signal.SIGSTOP)
        raise KeyboardInterrupt

    words, program = [str(run_dir.root), "heals"], (sys.executable, "-c", A_RUN)
    rest = (0.0, 0.1)
    plan = Plan(words, run_dir, 1.0, 1, ("kill",), rest_seconds=rest, program=program)
    made = Soak(plan, tmp_path / "chaos.jsonl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert made._process.poll() is not None


LEAVES = """
import sys
from pathlib import Path
from gradus.chaos import soak
from gradus.cli.chaos import _hurt
from gradus.run.paths import RunDirectory
root, program = Path(sys.argv[1]), (sys.executable, "-c", sys.argv[2])
plan = soak.Plan([str(root), "heals"], RunDirectory(root), 1.0, 1, ("pause",), program=program)
_hurt(plan)
"""


def test_a_soak_that_is_asked_to_end_ends_its_run(tmp_path: Path) -> None:
    run_dir = RunDirectory(a_run(tmp_path / "demo", outcome=None))
    (run_dir.root / "metrics.jsonl").touch()
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
        (["--kind", "flood"], "--kind flood: choose from kill, stop, pause, disk, damage, memory"),
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
    assert main(["chaos", "@", "rl.toml", *words]) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
