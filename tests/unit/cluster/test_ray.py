"""A cluster of Ray as the launcher sees it: joined by a helper, which places and keeps node sides.

A stand-in takes the place of Ray's library; a program of a few lines that of `gradus node`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until
from configs import build_run_config

from gradus.cli.runs import bench_trainer, rl
from gradus.errors import ConfigError, DeadlineError
from gradus.files import read_json, write_json
from gradus.processes.table import descendants, is_alive, living_processes, read_process
from gradus_cluster import ray
from gradus_cluster.ray import ClusterLost, ClusterNode, RayCluster, WantedNodes, unfit

STAND_IN = Path(__file__).parents[2] / "support" / "ray_stand_in"
SIDE = """#!/bin/bash
printf '%s\\n' "$*" >> "$0.called"
source "$0.does"
"""
STAYS = "cat > /dev/null; exit 75"
"""Until its standard input ends."""


class Stage:
    """A run, and the cluster that a file describes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / 'it\'s a "résumé" $(touch X) #'
        self.folder.mkdir()
        self.side = self.folder / "side"
        self.side.write_text(SIDE)
        self.side.chmod(0o700)
        self.state: dict[str, Any] = {
            "nodes": [["a", 4.0, 0.0, True], ["b", 2.0, 0.0, True], ["c", 1.0, 0.0, True]],
            "asked": str(self.folder / "asked.json"),
            "program": [str(self.side)],
        }
        self.lines: list[str] = []
        self.does(STAYS)
        self.change()

    def does(self, program: str) -> None:
        (self.folder / "side.does").write_text(program)

    def change(self, **changes: object) -> None:
        self.state |= changes
        write_json(self.folder / "cluster.json", self.state)

    def cluster(self, address: str | None = None, **nodes: object) -> RayCluster:
        chosen = {"trainer": [1], "inference": [0], **nodes}
        return RayCluster(build_run_config({"launch": {"nodes": chosen}}), address)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "side.called"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, cluster: RayCluster, is_so: Any, what: str) -> None:
        def look() -> bool:
            self.lines += cluster.look()
            return bool(is_so())

        wait_until(look, timeout_seconds=60, what=what)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
    monkeypatch.setenv("RAY_STAND_IN", str(stage.folder / "cluster.json"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = {it.pid for it in descendants(os.getpid(), living_processes())}
    yield stage

    def left() -> set[int]:
        return {it.pid for it in descendants(os.getpid(), living_processes())} - before

    # A side ends when it reads the end of its input, a moment after the helper.
    wait_until(lambda: not left(), timeout_seconds=20, what="no process of the stage")
    assert not list(tmp_path.rglob("X"))


def test_a_cluster_starts_a_side_for_each_node_of_the_plan_and_again_when_it_ends(
    stage: Stage,
) -> None:
    with stage.cluster(trainer=[1, 2], inference=[2]) as cluster:
        assert cluster.join() == [f"{'ray':<18}Ray's cluster, this node is 127.0.0.1"]
        assert stage.calls == []
        cluster.place(stage.folder)
        assert cluster.lacks
        stage.does("echo told why; exit 75")
        stage.wait_for(cluster, lambda: len(stage.calls) >= 6, "both to start again")
        assert cluster.lacks == ""
        stage.does(STAYS)
    assert sorted(set(stage.calls)) == [
        f"node {stage.folder} --number {number} --while-stdin" for number in (1, 2)
    ]
    told = [f"ray: node {number} ended and starts again: told why" for number in (1, 2)]
    assert sorted(stage.lines) == told, "once, not at each try"
    asked = read_json(stage.folder / "asked.json")
    assert asked["strategy"] == "STRICT_SPREAD"
    assert asked["bundles"] == [{"node:127.0.0.1": 0.001}, *2 * [{"CPU": 1.0, "GPU": 0.0}]]
    assert asked["bundle_label_selector"] == [{"ray.io/node-id": "a"}, {}, {}]


def test_all_gpus_of_the_launchers_node_are_reserved_when_it_computes(stage: Stage) -> None:
    stage.change(nodes=[["a", 0.0, 8.0, True], ["b", 2.0, 2.0, True]])
    with stage.cluster(gpus=2, trainer=[0], inference=[1]) as cluster:
        cluster.join()
        cluster.place(stage.folder)
        stage.wait_for(cluster, lambda: stage.calls, "its side")
    bundles = read_json(stage.folder / "asked.json")["bundles"]
    assert bundles == [{"node:127.0.0.1": 0.001, "GPU": 8.0}, {"CPU": 1.0, "GPU": 2.0}]


def test_a_side_that_was_let_go_does_not_start_again(stage: Stage) -> None:
    stage.does('[ "$4" = 1 ] && exit 0; exit 75')
    with stage.cluster(trainer=[1, 2], inference=[0]) as cluster:
        cluster.join()
        cluster.place(stage.folder)
        stage.wait_for(cluster, lambda: len(stage.calls) == 3, "the other one to start again")
    assert len([it for it in stage.calls if "--number 1" in it]) == 1


def test_a_node_that_dies_gets_another_side(stage: Stage) -> None:
    with stage.cluster() as cluster:
        cluster.join()
        cluster.place(stage.folder)
        stage.wait_for(cluster, lambda: stage.calls, "its side")
        stage.change(dead=[1], is_full=True)
        stage.wait_for(cluster, lambda: cluster.lacks, "Ray to place it again")
        assert "1 other node with 1 free CPU: the cluster has a (4 CPUs" in cluster.lacks
        stage.change(dead=[], is_full=False)
        stage.wait_for(cluster, lambda: len(stage.calls) == 2, "another side")
        assert cluster.lacks == ""
    assert stage.lines[0].startswith("ray: node 1 ended and starts again: The actor died")
    assert stage.lines[1].startswith("ray: waits for 1 other node")


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("echo Python is 3.12.1 on b and 3.11.7 here; exit 64", "node 1: Python is 3.12.1 on b"),
        (
            "echo \"x: No module named 'gradus'\"; exit 1",
            "the Python of node 1 has no gradus; install it there",
        ),
    ],
)
def test_a_side_that_is_refused_ends_the_run(stage: Stage, does: str, told: str) -> None:
    stage.does(does)
    with stage.cluster() as cluster:
        cluster.join()
        cluster.place(stage.folder)
        with pytest.raises(ConfigError, match=told):
            stage.wait_for(cluster, lambda: False, "its refusal")
    assert len(stage.calls) == 1


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        (
            {"nodes": [["a", 4.0, 0.0, True], ["b", 2.0, 0.0, False]]},
            ConfigError,
            "takes 1 node beside the launcher's with 1 CPU, 0 GPUs each .* has 0: a has 4 CPUs",
        ),
        ({"refuses_token": "it is wrong"}, ConfigError, "refuses the token .*: it is wrong"),
        (
            {"hides": "Last error: Traceback: x.AuthenticationError: it is wrong"},
            ConfigError,
            "refuses the token .*: it is wrong",
        ),
        (
            {"raises": "Version mismatch: The cluster:\n  Python: 3.12\n  This: 3.11"},
            ConfigError,
            "other versions. Version mismatch: The cluster: Python: 3.12 This: 3.11",
        ),
        ({"raises": "no raylet here"}, DeadlineError, "was not joined: no raylet here"),
        ({"is_gone": True}, ClusterLost, "is gone: the cluster is gone"),
    ],
)
def test_a_cluster_that_cannot_run_it_is_refused_as_it_is_joined(
    stage: Stage, changes: dict[str, object], kind: type[Exception], told: str
) -> None:
    stage.change(**changes)
    with stage.cluster() as cluster, pytest.raises(kind, match=told):
        cluster.join()


def test_a_cluster_that_is_silent_is_refused_in_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "_JOIN_SECONDS", 1.0)
    monkeypatch.setattr(ray, "_SILENT_SECONDS", 0.5)
    stage.change(is_mute=True)
    with stage.cluster("auto") as cluster, pytest.raises(DeadlineError, match="auto did not answ"):
        cluster.join()


def test_an_address_where_nothing_listens_is_refused(stage: Stage) -> None:
    with stage.cluster("127.0.0.1:9") as cluster, pytest.raises(DeadlineError, match="nothing ans"):
        cluster.join()


def test_without_a_cluster_one_is_started_here_which_has_this_node_alone(stage: Stage) -> None:
    stage.change(is_absent=True)
    with stage.cluster() as cluster:
        assert cluster.join()[0] == "ray: started a cluster of this machine alone, for this run"


def test_a_cluster_that_is_lost_is_joined_again_by_the_next_attempt(stage: Stage) -> None:
    with stage.cluster() as cluster:
        cluster.join()
        cluster.place(stage.folder)
        stage.wait_for(cluster, lambda: stage.calls, "its side")
        stage.change(is_gone=True)
        with pytest.raises(ClusterLost, match="is gone: the cluster is gone"):
            stage.wait_for(cluster, lambda: False, "the loss")
        assert cluster.look() == []
        stage.change(is_gone=False)
        cluster.place(stage.folder)
        stage.wait_for(cluster, lambda: len(stage.calls) == 2, "another side")


def test_ctrl_c_at_the_terminal_is_not_for_the_helper(stage: Stage) -> None:
    before = {it.pid for it in living_processes()}
    with stage.cluster() as cluster:
        cluster.join()
        own = [it for it in living_processes() if it.parent == os.getpid()]
        (helper,) = [it for it in own if it.pid not in before]
        assert os.getpgid(helper.pid) == helper.pid
        os.kill(helper.pid, signal.SIGKILL)
        wait_until(lambda: read_process(helper.pid) is None, timeout_seconds=60, what="its end")
        cluster.place(stage.folder)
        with pytest.raises(ClusterLost):
            stage.wait_for(cluster, lambda: False, "the loss")
    assert not is_alive(helper.pid, helper.start_time)


@pytest.mark.parametrize(
    "address",
    ["ray://h:1", "h", "h:", "h:1:2", "h:123456", "a b:1", '"h":1', "$(x):1", "h:1\n"],
)
def test_what_is_no_address_is_refused(
    stage: Stage, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--ray: .* is no address"):
        stage.cluster(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: .* is no address"):
        stage.cluster()


def test_a_run_without_nodes_and_a_machine_without_ray_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"launch.nodes is missing.*\[launch.nodes\]"):
        RayCluster(build_run_config({}), None)
    monkeypatch.setattr(ray, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'gradus-rl\[ray\]'"):
        Stage(tmp_path).cluster()


def test_what_fits_is_counted_without_the_launchers_node() -> None:
    nodes = [ClusterNode("1", "a", 0, 8), ClusterNode("2", "b", 1, 8), ClusterNode("3", "c", 9, 4)]
    assert unfit(nodes, "1", WantedNodes(None, 8, True, [1])) == ""
    assert "the cluster has 1: a has" in unfit(nodes, "1", WantedNodes(None, 8, True, [1, 2]))
    assert "a, must have 9 GPUs" in unfit(nodes, "1", WantedNodes(None, 9, True, []))
    assert unfit(nodes, "1", WantedNodes(None, 4, False, [1, 2])) == ""
    assert "has 1:" in unfit(nodes, "2", WantedNodes(None, 4, False, [1, 2])), "a has no CPU"


def test_a_measurement_is_not_started_on_a_cluster() -> None:
    with pytest.raises(ConfigError, match="it runs on one machine"):
        bench_trainer(["@", "run.toml", "--ray"])
    with pytest.raises(ConfigError, match="SLURM starts the nodes itself"):
        rl(["@", "run.toml", "--ray", "h:1", "--slurm"])
