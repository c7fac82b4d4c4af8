"""Runs on a real cluster of Ray, over two nodes: each ends with the weights of one machine.

`make ray` starts a cluster of several nodes on this machine for them. They are no part of
`make test`: each is a whole run, with twice the processes of one on one machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import finish, start, wait_for_checkpoint, wait_until
from scripted_runs import SCRIPTED, assert_same_run, write_config

from gradus.errors import ExitCode
from gradus.processes.table import living_processes, read_process

PROGRAM = os.environ.get("GRADUS_RAY", "")
FOLDER = os.environ.get("GRADUS_RAY_FOLDER", "")
ADDRESS = os.environ.get("GRADUS_RAY_ADDRESS", "")
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.torch,
    pytest.mark.skipif(not PROGRAM, reason="a cluster of Ray is missing; `make ray` starts one"),
]
NODES = """
[inference]
replicas = 2
env_vars = { SCRIPTED_LATENCY_SECONDS = "1.5" }
[launch]
ready_timeout_seconds = 120
[launch.nodes]
away_seconds = 10
trainer = [0, 1]
inference = [0, 1]
"""
END_SECONDS = 400.0
STARTED: list[subprocess.Popen[bytes]] = []


def on_node(node: str, *words: str) -> list[str]:
    return [PROGRAM, "exec", FOLDER, node, *words]


def start_run(
    config: Path, *words: str, node: str = "n1", address: str = ADDRESS, **variables: str
) -> subprocess.Popen[str]:
    """`gradus rl --ray` on a node of the cluster."""
    command = [sys.executable, *SCRIPTED, "rl", "@", str(config), "--ray", address, *words]
    return subprocess.Popen(
        on_node(node, *command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
    )


def written(root: Path, name: str, model: Path) -> Path:
    config = Path(write_config(root, name, model))
    config.write_text(config.read_text() + NODES)
    return config


def found(*words: str) -> list[int]:
    """Processes whose command line has all of these words."""
    return [it.pid for it in living_processes() if set(words) <= set(command_line(it.pid))]


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def of_run(run_dir: Path) -> list[int]:
    """Processes that were started for a run, the launcher too."""
    name = str(run_dir)
    return [
        it.pid
        for it in living_processes()
        if any(name in word for word in command_line(it.pid)) and it.pid != os.getpid()
    ]


def daemons(node: str) -> list[int]:
    tag = (Path(FOLDER) / "tag").read_text().strip()
    words = ["ip", "netns", "pids", f"{tag}-{node}"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in said.split()]


def node_of(run_dir: Path) -> str:
    """The node of the cluster where the side of a run is."""
    sides = set(found("node", str(run_dir), "--number"))  # and the shell above it
    return next(it for it in ("n2", "n3") if sides & set(daemons(it)))


def kill_daemons(node: str, is_daemon: Callable[[str], bool] = lambda _: True) -> None:
    """kill -9 of Ray's processes on a node, or of some of them."""
    for pid in daemons(node):
        program = Path(command_line(pid)[0]).name if command_line(pid) else ""
        if is_daemon(program) and read_process(pid) is not None:
            os.kill(pid, signal.SIGKILL)


def start_daemons(node: str) -> None:
    log = Path(FOLDER) / f"{node}.log"
    with log.open("w") as file:
        daemon = subprocess.Popen(
            [PROGRAM, "start", FOLDER, node], stdout=file, stderr=file, start_new_session=True
        )
    STARTED.append(daemon)  # scripts/ray ends it
    wait_until(
        lambda: "Ray runtime started" in log.read_text(), timeout_seconds=120, what=f"Ray on {node}"
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("it's a résumé $(touch X) #")


@pytest.fixture(scope="module")
def straight(root: Path, tiny_model: Path) -> Path:
    """A run on this machine that nothing disturbed."""
    finish(start("rl", "@", write_config(root, "straight", tiny_model), program=SCRIPTED))
    return root / "straight"


def test_what_the_cluster_cannot_run_is_refused_before_anything_is_written(
    root: Path, tiny_model: Path
) -> None:
    config = written(root, "refused", tiny_model)
    no_gpus = ("--launch.nodes.gpus", "2", "--launch.nodes.inference", "[2]")
    told = finish(start_run(config, *no_gpus), exit_code=ExitCode.CONFIG)
    assert "n2 has 2 CPUs, 0 GPUs" in told
    told = finish(start_run(config, RAY_AUTH_TOKEN="0" * 64), exit_code=ExitCode.CONFIG)
    assert "it refuses the token" in told
    nowhere = f"{ADDRESS.partition(':')[0]}:9"
    told = finish(start_run(config, address=nowhere), exit_code=ExitCode.TRY_AGAIN)
    assert "nothing answers there" in told
    assert not (root / "refused").exists()


def test_a_run_is_that_of_one_machine_bit_for_bit_when_a_raylet_is_killed(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    run_dir = root / "raylet"
    process = start_run(written(root, "raylet", tiny_model))
    wait_for_checkpoint(run_dir, 2, process, seconds=END_SECONDS)
    node = node_of(run_dir)
    kill_daemons(node, lambda program: program == "raylet")
    told = finish(process, seconds=END_SECONDS)
    start_daemons(node)
    assert "whose node side ended" in told
    assert re.search(r"restart 1 of 5", told), told
    assert_same_run(run_dir, straight)
    assert not list(root.rglob("X"))


def wait_nothing_left(run_dir: Path, seconds: float = 60.0) -> None:
    wait_until(lambda: not of_run(run_dir), timeout_seconds=seconds, what="the end of all")


def test_nothing_is_left_of_a_killed_launcher_and_its_run_continues(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    config, run_dir = written(root, "killed", tiny_model), root / "killed"
    process = start_run(config)
    wait_for_checkpoint(run_dir, 1, process, seconds=END_SECONDS)
    process.kill()
    process.communicate()
    wait_nothing_left(run_dir)
    finish(start_run(config, "--resume"), seconds=END_SECONDS)
    assert_same_run(run_dir, straight)


def test_a_node_that_was_cut_off_for_half_a_minute_costs_nothing(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    run_dir = root / "cut"
    process = start_run(written(root, "cut", tiny_model), "--launch.nodes.away-seconds", "60")
    wait_for_checkpoint(run_dir, 1, process, seconds=END_SECONDS)
    number = node_of(run_dir).removeprefix("n")
    tag = (Path(FOLDER) / "tag").read_text().strip()
    link = ["ip", "-n", f"{tag}-net", "link", "set", f"v{number}"]
    subprocess.run([*link, "down"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(30)
    subprocess.run([*link, "up"], check=True)
    told = finish(process, seconds=END_SECONDS)
    assert "restart" not in told
    assert_same_run(run_dir, straight)


def test_a_lost_head_ends_the_run_which_continues_on_another_cluster(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    config, run_dir = written(root, "head", tiny_model), root / "head"
    # It may be done before Ray sees that the head is gone.
    slow = ("--inference.env-vars", '{"SCRIPTED_LATENCY_SECONDS": "30"}')
    process = start_run(config, *slow)
    wait_for_checkpoint(run_dir, 1, process, seconds=END_SECONDS)
    kill_daemons("n1", lambda program: program in {"gcs_server", "raylet"})
    told = finish(process, exit_code=ExitCode.TRY_AGAIN, seconds=END_SECONDS)
    assert f"Ray's cluster at {ADDRESS}" in told
    wait_nothing_left(run_dir, 120)
    for node in ("n1", "n2", "n3"):
        kill_daemons(node)
    for node in ("n1", "n2", "n3"):
        start_daemons(node)
    finish(start_run(config, "--resume"), seconds=END_SECONDS)
    assert_same_run(run_dir, straight)
