"""A launch of small real processes that are programs of a few lines."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from commands import wait_until

from gradus.config import LaunchConfig, StrictConfig, TrackerProcessConfig
from gradus.config.schema.monitor import TensorBoardConfig
from gradus.files import read_json
from gradus.launch.job import Job
from gradus.launch.launch import _Attempt
from gradus.launch.steps import Steps
from gradus.monitor import RL_COLUMNS
from gradus.plan.processes import LAUNCHED, LaunchPlan, log_file
from gradus.processes.started import Listens, ProcessSpec
from gradus.processes.table import read_process
from gradus.run.paths import RunDirectory

# What every small process can say; argv: run directory, own name.
WORDS = """
import json, os, pathlib, signal, sys, time
run_dir, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def ready(**content):
    path = run_dir / "ready" / (name + ".json")
    path.with_suffix(".tmp").write_text(json.dumps(content))
    path.with_suffix(".tmp").rename(path)
def record(step, **metrics):
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time": 0.0, **metrics}) + "\\n")
def until(*names):
    "Wait for files of the run directory, which others write."
    end = time.monotonic() + 60
    while not all((run_dir / name).exists() for name in names) and time.monotonic() < end:
        time.sleep(0.01)
"""
SERVE = "ready(base_url='http://127.0.0.1:1'); signal.pause()"
TRAIN = "ready(done=True)"
PLAY = """
ready()
(run_dir / "journal.jsonl").touch()
(run_dir / "model").mkdir(exist_ok=True)
for step in range(3):
    record(step, **{"episode/reward/mean": 0.25 * (step + 1), "time/step_seconds": 0.5})
ready(done=True)
"""
WAIT = "ready(); signal.pause()"

# A launcher process of its own; argv: output directory, then the programs as JSON. It makes the
# file `following` when all are ready: what fails from then on does so in the middle of the run.
LAUNCHER = """
import json, pathlib, sys
from dataclasses import replace
sys.path[:0] = json.loads(sys.argv[3])
from small_launch import build_job, tell_when_all_are_ready
from gradus.errors import GradusError
from gradus.launch import restarts
from gradus.launch.launch import _Attempt, launch
follow = _Attempt._follow
def told(attempt):
    (attempt._lease.run_dir.root / "following").touch()
    follow(attempt)
_Attempt._follow = told
restarts.FIRST_WAIT_SECONDS = float(sys.argv[5])
tell_when_all_are_ready()
try:
    job = build_job(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))
    how = {name: True for name in sys.argv[4].split()}
    sys.exit(launch(replace(job, **how), sys.stdout))
except GradusError as error:
    print(error)
    sys.exit(error.exit_code)
"""


class Told(io.StringIO):
    """What a launch prints; `told` appears in the run directory with the first `text` in it."""

    def __init__(self, text: str, tmp_path: Path) -> None:
        super().__init__()
        self._text, self._file = text, tmp_path / "demo" / "told"

    def write(self, text: str) -> int:
        length = super().write(text)
        if self._text in self.getvalue():
            self._file.touch()
        return length


def tell_when_all_are_ready(set_attribute: Callable[..., None] = setattr) -> None:
    """Each attempt touches `following_N` once it has seen that all its processes are ready."""
    follow = _Attempt._follow

    def told(attempt: _Attempt) -> None:
        root = attempt._lease.run_dir.root
        (root / f"following_{len(list(root.glob('following_*'))) + 1}").touch()
        follow(attempt)

    set_attribute(_Attempt, "_follow", told)


def spec_of(run_dir: RunDirectory, name: str, program: str) -> ProcessSpec:
    argv = (sys.executable, "-c", WORDS + program, str(run_dir.root), name)
    log, ready_file = log_file(run_dir, name), run_dir.ready_file(name)
    if name == "tracker":
        return ProcessSpec(name, argv, {}, log, is_companion=True)
    serves = name.startswith("inference")
    return ProcessSpec(
        *(name, argv, {}, log, ready_file),
        finishes=not serves,
        is_replaceable=name != "orchestrator",
        listens=Listens("127.0.0.1", 0) if serves else None,
    )


def build_plan(run_dir: RunDirectory, programs: Mapping[str, str]) -> LaunchPlan:
    """inference first, then trainer and orchestrator."""
    specs = {name: spec_of(run_dir, name, program) for name, program in programs.items()}
    servers = tuple(spec for name, spec in specs.items() if name.startswith("inference"))
    workers = tuple(spec for spec in specs.values() if spec not in servers)
    stages = tuple(stage for stage in (servers, workers) if stage)
    monitor = [TensorBoardConfig(flush_seconds=2.0)]
    tracker = TrackerProcessConfig(run_dir=str(run_dir.root), term=1, monitor=monitor)
    configs: dict[str, StrictConfig] = {"tracker": tracker} if "tracker" in programs else {}
    configs[LAUNCHED] = LaunchConfig()
    return LaunchPlan(configs=configs, stages=stages)


def build_job(
    tmp_path: Path, programs: Mapping[str, str] | None = None, *, num_restarts: int = 5
) -> Job:
    given = dict(programs or {})
    servers = {} if "inference_0" in given else {"inference": SERVE}
    chosen = servers | {"trainer": TRAIN, "orchestrator": PLAY} | given
    return Job(
        name="demo",
        output_dir=tmp_path,
        kind="rl",
        launch=LaunchConfig(
            ready_timeout_seconds=60.0,
            stop_timeout_seconds=2.0,
            restarts=num_restarts,
        ),
        plan=lambda run_dir, term, resume_step: build_plan(run_dir, chosen),
        workload=Steps("rl", 3, RL_COLUMNS),
    )


def start_launcher(
    tmp_path: Path, programs: Mapping[str, str], *, how: str = "", wait_seconds: float = 0.0
) -> subprocess.Popen[str]:
    words = [str(tmp_path), json.dumps(programs), json.dumps([str(Path(__file__).parent)])]
    argv = [sys.executable, "-c", LAUNCHER, *words, how, str(wait_seconds)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def registered(tmp_path: Path, count: int) -> list[int]:
    """The pids of the run, once `count` processes are ready."""
    wait_until(lambda: len(list((tmp_path / "demo" / "ready").glob("*.json"))) == count)
    return [entry["pid"] for entry in read_json(tmp_path / "demo" / "pids.json")["processes"]]


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if read_process(pid)]
