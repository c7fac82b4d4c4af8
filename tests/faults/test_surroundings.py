"""Odd paths, clocks, users and folders around a run."""

from __future__ import annotations

import ast
import io
import itertools
import json
import os
import resource
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_launch
from commands import wait_until
from small_launch import LAUNCHER, build_job
from tracked_runs import build_tracked_run

from gradus.config.schema.monitor import TensorBoardConfig
from gradus.files import read_json
from gradus.launch.launch import launch
from gradus.run.paths import RunDirectory
from gradus.tracking.follow.feed import Feed
from gradus_lab.chaos.invariants import check_run

ROOT = Path(__file__).resolve().parents[2]
READS_THE_CLOCK = {
    "orchestrator/build.py": "the journal notes when something was",
    "orchestrator/algorithms/teacher.py": "Retry-After may be a date; the wait has a bound",
    "processes/log_writer.py": "lines of a log have a time",
    "monitor/jsonl.py": "records have a time",
    "monitor/live.py": "a look has a time",
    "tracking/prometheus/board.py": "says for how long nothing was recorded",
    "tracking/tensorboard.py": "points have a time",
    "tracking/trackio.py": "a run there has a date",
    "testing/engine_script.py": "replies have a date, as the engine's",
    "run/growing_files.py": "the audit log has a time",
    "run/lease.py": "the owner says since when",
    "processes/secured.py": "certificates have dates",
    "gradus_lab/chaos/soak.py": "says when a fault was",
    "cli/check/machine.py": "the clock itself is looked at",
    "launch/machine.py": "numbers of the machine have a time",
    "view/opened.py": "says how old what it shows is",
    "view/shelf.py": "says how old the newest record is",
}
CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


def reads_the_clock(path: Path) -> bool:
    return any(
        ast.unparse(it) in CLOCKS
        if isinstance(it, ast.Attribute)
        else isinstance(it, ast.ImportFrom) and it.module == "time"
        for it in ast.walk(ast.parse(path.read_text()))
    )


@pytest.mark.shows("F33")
@pytest.mark.parametrize("name", ["a b", 'it\'s "so"', "наука", "two\nlines", "x" * 200], ids=repr)
def test_f33_a_run_below_an_odd_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    assert launch(build_job(folder), io.StringIO()) == 0
    assert check_run(RunDirectory(folder / "demo")) == []


@pytest.mark.shows("F73")
def test_f73_no_wait_reads_the_clock_of_the_day() -> None:
    rooms = [ROOT / "src" / "gradus", *ROOT.glob("packages/*/src")]
    found = {
        path.relative_to(room).as_posix()
        for room in rooms
        for path in room.rglob("*.py")
        if reads_the_clock(path)
    }
    assert found == set(READS_THE_CLOCK), "a wait goes by time.monotonic"


@pytest.mark.shows("F73")
def test_f73_a_clock_that_jumps_by_hours_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, jumps = time.time, itertools.cycle([3600.0, -3600.0, 86_400.0 * 400])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    stream = io.StringIO()
    assert launch(build_job(tmp_path), stream) == 0
    assert stream.getvalue().count("step 3/3") == 1
    assert check_run(RunDirectory(tmp_path / "demo")) == []


@pytest.mark.shows("F76")
def test_f76_a_tracker_that_cannot_write_its_folder_costs_nothing_else(tmp_path: Path) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=3)
    in_the_way = tmp_path / "taken"
    in_the_way.write_text("mine")
    said: list[str] = []
    feed = Feed(run_dir, TensorBoardConfig(folder=str(in_the_way / "board")), say=said.append)
    feed.finish()
    wait_until(lambda: feed.failed_in_a_row == 2)
    feed.close()
    assert len(said) == 1
    assert "Not a directory" in said[0]
    assert in_the_way.read_text() == "mine"


def run_with(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A small run of a launcher with few open files, and a umask that hides nothing."""

    def few_files() -> None:
        os.umask(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    programs = json.dumps({"orchestrator": small_launch.PLAY})
    words = [str(folder), programs, json.dumps([str(Path(small_launch.__file__).parent)]), "", "0"]
    argv = [sys.executable, "-c", LAUNCHER, *words]
    return subprocess.run(
        argv, env=variables, preexec_fn=few_files, capture_output=True, text=True, check=False
    )


@pytest.mark.shows("F79", "SEC13", "SEC36")
def test_f79_without_home_with_an_odd_locale_and_umask_and_few_files(tmp_path: Path) -> None:
    variables = {"PATH": os.environ["PATH"], "LC_ALL": "tr_TR.ISO-8859-9", "LANG": "xx_YY"}
    done = run_with(tmp_path, variables)
    assert (done.returncode, done.stderr) == (0, ""), done
    run_dir = RunDirectory(tmp_path / "demo")
    assert check_run(run_dir) == []
    assert read_json(run_dir.summary)["outcome"] == "done"
    for folder in (run_dir.root, run_dir.secrets):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(it.stat().st_mode) for it in run_dir.secrets.iterdir()} == {0o600}


@pytest.mark.shows("SEC38")
def test_sec38_the_page_of_security_says_what_it_must() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    parts = {it.partition("\n")[0]: it for it in page.split("\n## ")}
    assert {
        *("Reporting a vulnerability", "Who is trusted with what", "What listens"),
        *("Secrets", "Risks that we accept"),
    } <= parts.keys()
    assert "Security page" in parts["Reporting a vulnerability"]
    assert all(word in parts["Risks that we accept"] for word in ("NCCL", "vLLM", "TCPStore"))
    assert "SECURITY.md" in (ROOT / "README.md").read_text()
