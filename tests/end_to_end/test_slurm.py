"""Runs as jobs of a real SLURM, over two nodes: each ends with the weights of one machine, bitwise.

`make slurm` starts a cluster of several nodes on this machine for them. They are no part of
`make test`: each is a whole run, with twice the processes of one on one machine.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import finish, start, wait_until
from scripted_runs import SCRIPTED, assert_same_run, write_config

from gradus.errors import ExitCode
from gradus.files import read_json
from gradus.processes.table import living_processes
from gradus.run.paths import RunDirectory

CLIENT = shlex.split(os.environ.get("GRADUS_SLURM", ""))
"""What makes a command a client of the cluster."""
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.torch,
    pytest.mark.skipif(not CLIENT, reason="a cluster is missing; `make slurm` starts one"),
]
JOB = """
[inference]
replicas = 2
env_vars = { SCRIPTED_LATENCY_SECONDS = "1.5" }
[launch]
ready_timeout_seconds = 60
[launch.nodes]
trainer = [0, 1]
inference = [0, 1]
[slurm]
partition = "main"
time = "10"
"""
END_SECONDS = 300.0


def ask(*words: str) -> str:
    done = subprocess.run([*CLIENT, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def submit(*words: str, exit_code: int = 0) -> str:
    """What `gradus rl --slurm` prints."""
    command = [*CLIENT, sys.executable, *SCRIPTED, "rl", *words, "--slurm"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == exit_code, done.stdout
    return done.stdout


class Job:
    """A submitted run, whose end is waited for."""

    def __init__(self, root: Path, name: str, model: Path) -> None:
        config = Path(write_config(root, name, model))
        config.write_text(config.read_text() + JOB)
        self.words = ("@", str(config))
        self.run_dir = RunDirectory(root / name)
        submit(*self.words)
        self.number = str(read_json(self.run_dir.slurm_job)["job"])

    def said(self) -> str:
        log = self.run_dir.slurm_log
        return log.read_text() if log.exists() else ""

    def wait_for_step(self, step: int) -> None:
        folder = self.run_dir.checkpoints / f"step_{step:08d}"
        wait_until(
            lambda: folder.exists() or self.is_done(),
            timeout_seconds=END_SECONDS,
            what=f"checkpoint {step}",
        )
        assert not self.is_done(), self.said()

    def is_done(self) -> bool:
        """A start that was ended says how far it came, and the next one continues."""
        summary = self.run_dir.summary
        return summary.exists() and read_json(summary)["outcome"] == "done"

    def finish(self) -> str:
        """What it printed until it was done."""
        ended = re.compile(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)")
        show = ("scontrol", "show", "job", self.number)
        wait_until(lambda: ended.search(ask(*show)), timeout_seconds=END_SECONDS, what="its end")
        assert "JobState=COMPLETED" in ask(*show), self.said()
        return self.said()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("it's a résumé $(touch X) #")


@pytest.fixture(scope="module")
def straight(root: Path, tiny_model: Path) -> Path:
    """A run on this machine that nothing disturbed."""
    finish(start("rl", "@", write_config(root, "straight", tiny_model), program=SCRIPTED))
    return root / "straight"


def test_what_slurm_does_not_have_is_refused_before_anything_is_submitted(
    root: Path, tiny_model: Path
) -> None:
    config = Path(write_config(root, "refused", tiny_model))
    config.write_text(config.read_text() + JOB)
    for words in (("--slurm.partition", "nowhere"), ("--launch.nodes.number", "9")):
        told = submit("@", str(config), *words, exit_code=ExitCode.CONFIG)
        assert "SLURM refuses this job" in told
    assert ask("squeue", "--noheader", "--name=refused") == ""
    assert not (root / "refused").exists()


@pytest.mark.shows("F69", "F71", "I5")
def test_a_preempted_run_is_that_of_one_machine_bit_for_bit(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    """First in the middle of its start-up, then after a checkpoint."""
    job = Job(root, "preempted", tiny_model)
    assert "already; wait" in submit(*job.words, "--resume", exit_code=ExitCode.CONFIG)
    wait_until(lambda: "starting" in job.said(), timeout_seconds=END_SECONDS, what="its start")
    ask("scontrol", "requeue", job.number)
    job.wait_for_step(2)
    ask("scontrol", "requeue", job.number)
    told = job.finish()
    assert told.count("no checkpoint: starts again") == 2
    assert re.search(r"from checkpoint \d of 6 steps", told), told
    assert_same_run(job.run_dir.root, straight)
    assert not list(root.rglob("X"))


@pytest.mark.shows("F69")
def test_a_job_whose_time_is_almost_over_saves_and_continues_by_itself(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    job = Job(root, "warned", tiny_model)
    job.wait_for_step(1)
    # As SLURM does when so much time is left as the script asks for.
    ask("scancel", "--batch", "--signal=USR1", job.number)
    told = job.finish()
    assert "is saved; the run ends" in told
    # One step more may be saved while the processes end: the last line says which it is.
    said = re.search(r"--resume continues from checkpoint (\d)", told)
    resumed = re.search(r"from checkpoint (\d) of 6 steps", told)
    assert said, told
    assert resumed, told
    assert said[1] == resumed[1], told
    assert_same_run(job.run_dir.root, straight)


def test_a_killed_node_side_comes_back_and_the_run_continues(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    job = Job(root, "killed", tiny_model)
    job.wait_for_step(1)
    (side,) = [it for it in living_processes() if is_node_side(it.pid, job.run_dir)]
    os.kill(side.pid, signal.SIGKILL)
    told = job.finish()
    assert "whose node side was killed" in told
    assert "restart 1 of 5" in told
    assert_same_run(job.run_dir.root, straight)


def is_node_side(pid: int, run_dir: RunDirectory) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    ours = [b"node", os.fsencode(run_dir.root), b"--number"]
    return words[0] == os.fsencode(sys.executable) and words[2:5] == ours
