"""Kills of real processes of `gradus rl`: what continues ends as what was never disturbed, bitwise.

The engine is scripted, so that it answers the same request with the same tokens whatever else it
answers at the same time; trainer (two ranks under torchrun), orchestrator, environment, launcher
and the folder between them are real.
"""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from commands import (
    finish,
    kill,
    records,
    start,
    wait_for_checkpoint,
    wait_until,
)
from listening import listeners
from metric_names import families_of
from scripted_runs import SCRIPTED, assert_same_run, write_config
from secured_servers import OwnAuthority
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gradus.files import read_json, write_atomically
from gradus.orchestrator.records.journal import read_journal
from gradus.processes.secured import CERTIFICATE_VARIABLE
from gradus.processes.table import descendants, living_processes
from gradus.run.paths import RunDirectory
from gradus_lab.chaos.invariants import check_run

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

REPLICAS = """
[inference]
replicas = 2
env_vars = { SCRIPTED_LATENCY_SECONDS = "1.5" }
"""
NODES = """
[inference]
replicas = 2
[launch.nodes]
trainer = [1, 2]
inference = [2, 3]
host = "127.0.0.1"
"""
POOL = """
[inference]
addresses = "{file}"
authority = "{authority}"
"""
TRACKER = """
[[monitor]]
type = "tensorboard"
episodes_interval_steps = 2
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a name that a shell, a URL and an ASCII terminal would trip over."""
    return tmp_path_factory.mktemp("it's a résumé")


def scripted_rl(*words: str) -> subprocess.Popen[str]:
    return start("rl", *words, program=SCRIPTED)


def node_side(run_dir: Path, number: int) -> subprocess.Popen[str]:
    """A process that owns those of one more node."""
    return start("node", str(run_dir), "--number", str(number))


@pytest.fixture(scope="module")
def straight(root: Path, tiny_model: Path) -> Path:
    """The directory of a run that nothing disturbed; of all runs here it alone has a tracker, and
    no HOME, an odd locale, a umask that hides nothing, and few open files."""
    config = Path(write_config(root, "straight", tiny_model))
    config.write_text(config.read_text() + TRACKER)
    open_files, umask = resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, open_files[1]))
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.delenv("HOME")
            patched.setenv("LC_ALL", "tr_TR.ISO-8859-9")
            process = scripted_rl("@", str(config))
    finally:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
    finish(process)
    return root / "straight"


@pytest.mark.shows("F79", "SEC36")
def test_what_a_run_in_odd_surroundings_creates_is_private(straight: Path) -> None:
    assert check_run(RunDirectory(straight)) == []
    assert stat.S_IMODE(straight.stat().st_mode) == 0o700
    of_roles = [*(straight / "checkpoints").rglob("*.*"), *(straight / "episodes").rglob("*.jsonl")]
    assert [it for it in of_roles if stat.S_IMODE(it.stat().st_mode) & 0o077] == []


def test_tensorboard_has_each_number_of_the_records_once_and_tables_of_episodes(
    straight: Path,
) -> None:
    folder = straight / "trackers" / "tensorboard"
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    of_machine = {it for it in events.Tags()["scalars"] if it.startswith("machine/")}
    assert of_machine, "machine.jsonl is followed too"
    points = [
        ((name, point.step), point.value)
        for name in set(events.Tags()["scalars"]) - of_machine
        for point in events.Scalars(name)
    ]
    recorded = {
        (name, row["step"]): row[name]
        for row in records(straight / "metrics.jsonl")
        for name in row.keys() - {"step", "time", "non_finite"}
    }
    assert len(points) == len(recorded)
    assert dict(points) == pytest.approx(recorded, rel=1e-6, abs=1e-30)
    assert [table.step for table in events.Tensors("episodes/train")] == [0, 2, 4]


def test_each_metric_of_a_run_has_one_entry_in_the_catalogue(straight: Path) -> None:
    rows = records(straight / "metrics.jsonl")
    names = {name for row in rows for name in row} - {"step", "time", "non_finite"}
    assert families_of(names) >= {"loss/mismatch_kl/mean", "time/step_seconds"}


def listens_at(run_dir: Path, role: str) -> set[str]:
    """Addresses of TCP at which a role's processes listen."""
    (child,) = [it for it in read_json(run_dir / "pids.json")["processes"] if it["name"] == role]
    pids = [child["pid"], *(it.pid for it in descendants(child["pid"], living_processes()))]
    return {it.address for it in listeners(pids) if it.is_tcp}


@pytest.mark.shows("F09", "F66", "I3", "I5", "SEC6")
def test_replicas_killed_one_after_the_other_change_no_bit_of_a_run(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    """Each comes back with the weights that it was started with, while the other serves later ones.
    What an engine says follows from its weights: one token of an older version would show."""
    config = Path(write_config(root, "replicas", tiny_model))
    config.write_text(config.read_text() + REPLICAS)
    run_dir = root / "replicas"
    process = scripted_rl("@", str(config))
    notices = RunDirectory(run_dir).notices
    wait_for_checkpoint(run_dir, 1, process)
    assert listens_at(run_dir, "trainer") == {"127.0.0.1"}, "torchrun's store and gloo's sockets"
    kill(run_dir, "inference_0")
    back = "inference_0 serves version"
    wait_until(
        lambda: (notices.exists() and back in notices.read_text()) or process.poll() is not None,
        timeout_seconds=60,
        what=back,
    )
    kill(run_dir, "inference_1")
    printed = finish(process)
    for name in ("inference_0", "inference_1"):
        assert re.search(rf"{name} was killed by SIGKILL .* of {name} alone", printed), printed
        assert f"{name} is left out, 1 of 2 replicas serve the policy: its process" in printed
    assert check_run(RunDirectory(run_dir)) == []
    assert_same_run(run_dir, straight)
    journal = read_journal(RunDirectory(run_dir).journal)
    assert not [line for line in journal if line["event"] == "episode_retried"]


class Servers:
    """Engines that the test starts for a run, and the file that names some of them."""

    def __init__(self, run_dir: Path, file: Path, model: Path) -> None:
        self.run_dir = RunDirectory(run_dir)
        self.file = file
        self.model = str(model)
        self.certificate = file.with_name("server.pem")
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> str:
        """Its address."""
        words = ("--engine", "rl", "--run-dir", str(self.run_dir.root), "--term", "1")
        words += ("--process", name, "--model", self.model)
        # Slow, so that the run lasts longer than the looks into the file.
        slow = {"SCRIPTED_LATENCY_SECONDS": "1.5", CERTIFICATE_VARIABLE: str(self.certificate)}
        env = os.environ | slow
        self.running[name] = subprocess.Popen([sys.executable, *SCRIPTED, *words], env=env)
        ready = self.run_dir.ready_file(name)
        wait_until(ready.exists, timeout_seconds=60, what=f"{name} is ready")
        return str(read_json(ready)["base_url"])

    def name(self, *addresses: str) -> None:
        write_atomically(self.file, "".join(f"{it}\n" for it in addresses).encode())

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.mark.shows("F09", "F66", "I3", "I5")
def test_servers_that_come_and_go_change_no_bit_of_a_run(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    config, file = Path(write_config(root, "pool", tiny_model)), root / "servers.txt"
    own, authority = OwnAuthority(), root / "authority.pem"
    authority.write_bytes(own.certificate)
    config.write_text(config.read_text() + POOL.format(file=file, authority=authority))
    run_dir = root / "pool"
    servers = Servers(run_dir, file, tiny_model)
    servers.certificate.write_bytes(own.server())
    servers.name()
    process = scripted_rl("@", str(config))

    def wait_for(text: str) -> None:
        notices = RunDirectory(run_dir).notices
        wait_until(
            lambda: (
                (notices.exists() and text in notices.read_text()) or process.poll() is not None
            ),
            timeout_seconds=60,
            what=text,
        )

    try:
        wait_for("the run waits for a server: none of")
        first = servers.start("first")
        assert first.startswith("https://")
        servers.name(first)
        wait_for_checkpoint(run_dir, 1, process)
        second = servers.start("second")
        servers.name(first, second)
        wait_for(f"{second} joins at version")
        servers.name(second)
        wait_for(f"{first} leaves, 1 of 1 servers serve the policy")
        servers.running["first"].kill()
        printed = finish(process)
    finally:
        servers.end()
    assert f"{first} leaves, 1 of 1 servers serve the policy" in printed
    assert check_run(RunDirectory(run_dir)) == []
    assert_same_run(run_dir, straight)
    journal = read_journal(RunDirectory(run_dir).journal)
    assert not [line for line in journal if line["event"] == "episode_retried"]


def test_a_run_on_four_nodes_is_that_of_one_machine_bit_for_bit(
    root: Path, tiny_model: Path, straight: Path
) -> None:
    """The nodes are processes on this machine; ranks of the trainer are on two of them."""
    config = Path(write_config(root, "nodes", tiny_model))
    config.write_text(config.read_text() + NODES)
    run_dir = root / "nodes"
    run = scripted_rl("@", str(config))
    sides = [node_side(run_dir, number) for number in (1, 2, 3)]
    try:
        printed = finish(run)
        for side in sides:
            finish(side, seconds=60)
    finally:
        for process in (run, *sides):
            process.kill()
    assert "node 3            " in printed
    assert printed.count("https://127.0.0.1:") == 2, "of the replicas"
    assert check_run(RunDirectory(run_dir)) == []
    assert_same_run(run_dir, straight)
