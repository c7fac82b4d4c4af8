"""Who runs where on several nodes, and what is refused because it does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configs import build_eval_config, build_run_config, build_sft_config

from gradus.plan.gpus import FoundGpus
from gradus.plan.machine import check
from gradus.plan.nodes import plan_nodes
from gradus.plan.processes import LaunchPlan, Machine, describe_processes, plan_config
from gradus.plan.show import describe_config
from gradus.plan.variables import LOOPBACK
from gradus.run.paths import RunDirectory

HERE = Machine("/bin/python", 8, {"PATH": "/bin"}, FoundGpus(why_none="none"))


def config(nodes: dict[str, Any], *, ranks: int = 16, replicas: int = 2, size: int = 8) -> Any:
    return build_run_config(
        {
            "trainer": {"num_processes": ranks},
            "inference": {"replicas": replicas, "tensor_parallel_size": size},
            "orchestrator": {"groups_per_batch": 64},
            "launch": {"nodes": nodes},
        }
    )


def described(given: Any) -> list[str]:
    found = plan_nodes(given)
    assert found is not None
    assert found.refusals == []
    return [line.strip() for line in found.describe()]


def plan_of(given: Any) -> LaunchPlan:
    return plan_config(given, HERE, RunDirectory(Path("/runs/demo")), 1)


def test_the_size_of_a_node_alone_packs_trainer_and_replicas_on_whole_nodes() -> None:
    assert described(config({"gpus": 8})) == [
        "node 0    launcher, orchestrator, environments, trainer ranks 0 to 7 (GPU 0 to 7)",
        "node 1    gradus node, trainer ranks 8 to 15 (GPU 0 to 7)",
        "node 2    gradus node, inference_0 (GPU 0 to 7)",
        "node 3    gradus node, inference_1 (GPU 0 to 7)",
    ]


def test_small_parts_share_a_node() -> None:
    assert described(config({"gpus": 8}, ranks=4, size=2)) == [
        "node 0    launcher, orchestrator, environments, trainer ranks 0 to 3 (GPU 0 to 3), "
        "inference_0 (GPU 4 to 5), inference_1 (GPU 6 to 7)"
    ]


def test_ranks_are_spread_evenly_over_the_fewest_nodes() -> None:
    found = plan_nodes(config({"gpus": 8}, ranks=12, size=2))
    assert found is not None
    assert (found.trainer, found.ranks_per_node, found.node_of) == (
        (0, 1),
        6,
        {"inference_0": 0, "inference_1": 1},
    )


def test_lists_place_processes_that_compute_on_cpus() -> None:
    assert described(config({"trainer": [1, 2], "inference": [2, 1]}, ranks=2)) == [
        "node 0    launcher, orchestrator, environments",
        "node 1    gradus node, trainer rank 0, inference_1",
        "node 2    gradus node, trainer rank 1, inference_0",
    ]


@pytest.mark.parametrize(
    ("nodes", "sizes", "key", "told"),
    [
        ({"gpus": 8, "number": 3}, {}, "number", "3: the processes of this run take 4 nodes"),
        ({"gpus": 4}, {}, "gpus", "a replica takes 8 GPUs (inference.tensor_parallel_size)"),
        ({"gpus": 8, "trainer": [0]}, {}, "trainer", "16 processes on each, which has 8 GPUs"),
        ({"trainer": [0, 1, 2]}, {}, "trainer", "16 processes (trainer.num_processes) do not"),
        ({"trainer": [1, 1]}, {}, "trainer", "names a node twice"),
        ({"number": 2, "trainer": [1, 2]}, {}, "trainer", "there is no node 2; the nodes are 0 to"),
        ({"inference": [-1]}, {}, "inference", "there is no node -1"),
        ({"inference": [0, 1, 2]}, {}, "inference", "2 replicas (inference.replicas) do not"),
        ({"gpus": 8, "inference": [0]}, {}, "inference", "0 of 8 are free on node 0; trainer has"),
        ({"gpus": 8, "inference": [3]}, {}, "inference", "inference_1 takes 8 GPUs"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_with_numbers(
    nodes: dict[str, Any], sizes: dict[str, int], key: str, told: str
) -> None:
    problems = check(config(nodes, **sizes), gpus=FoundGpus(why_none="none"))
    texts = [str(it) for it in problems if it.path[:3] == ("launch", "nodes", key)]
    assert [told in text for text in texts] == [True], problems


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"weight_transfer": "broadcast"}},
        {"trainer": {"gpus": [0]}},
        {"inference": {"gpus": [0]}},
        {"inference": {"gpu_sharing": "turns"}},
        {"inference": {"addresses": "servers.txt"}},
    ],
)
def test_what_needs_one_machine_is_refused(changes: dict[str, Any]) -> None:
    given = build_run_config({**changes, "launch": {"nodes": {"trainer": [1]}}})
    ((section, table),) = changes.items()
    paths = [it.path for it in check(given, gpus=FoundGpus(why_none="none"))]
    assert (section, *table) in paths


def supervised(nodes: dict[str, Any], **changes: Any) -> Any:
    return build_sft_config({"launch": {"nodes": nodes}, "num_processes": 16, **changes})


def evaluated(nodes: dict[str, Any], **changes: Any) -> Any:
    inference = {"replicas": 2, "tensor_parallel_size": 8}
    return build_eval_config({"launch": {"nodes": nodes}, "inference": inference, **changes})


def test_an_evaluation_that_takes_more_nodes_is_told_of_no_trainer() -> None:
    found = check(evaluated({"gpus": 8, "number": 1}), gpus=FoundGpus(why_none="none"))
    (told,) = [str(it) for it in found if it.path == ("launch", "nodes", "number")]
    assert told.endswith("take 2 nodes; see inference_0 is on node 0, inference_1 is on node 1")


def test_a_supervised_run_has_ranks_on_several_nodes() -> None:
    assert described(supervised({"gpus": 8})) == [
        "node 0    launcher, trainer ranks 0 to 7 (GPU 0 to 7)",
        "node 1    gradus node, trainer ranks 8 to 15 (GPU 0 to 7)",
    ]
    played = {"env": [{"id": "gradus-reverse-text"}]}
    assert described(supervised({"gpus": 8}, eval=played))[2:] == [
        "node 2    gradus node, inference (GPU 0)"
    ]
    specs = [spec for stage in plan_of(supervised({"gpus": 8})).stages for spec in stage]
    assert [(spec.name, spec.node) for spec in specs] == [("trainer", 0), ("trainer_1", 1)]


def test_an_evaluation_has_replicas_on_several_nodes() -> None:
    assert described(evaluated({"gpus": 8})) == [
        "node 0    launcher, evaluator, environments, inference_0 (GPU 0 to 7)",
        "node 1    gradus node, inference_1 (GPU 0 to 7)",
    ]
    specs = [spec for stage in plan_of(evaluated({"gpus": 8})).stages for spec in stage]
    assert {spec.name: spec.node for spec in specs}["inference_1"] == 1


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (supervised({"gpus": 8, "inference": [1]}), "launch.nodes.inference"),
        (supervised({"gpus": 8}, gpus=[0]), "gpus"),
        (supervised({"gpus": 8, "trainer": [0, 1, 2]}), "launch.nodes.trainer"),
        (evaluated({"gpus": 8, "trainer": [1]}), "launch.nodes.trainer"),
        (evaluated({"inference": [1]}, base_url="http://h:1/v1"), "launch.nodes.inference"),
        (evaluated({"gpus": 4}), "launch.nodes.gpus"),
    ],
)
def test_what_other_jobs_have_not_is_refused_on_nodes_too(given: Any, key: str) -> None:
    found = plan_nodes(given)
    assert found is not None
    assert [".".join(map(str, it.path)) for it in found.refusals] == [key]


def test_words_of_a_refusal_are_those_of_the_job() -> None:
    found = plan_nodes(supervised({"trainer": [0, 1, 2]}))
    assert found is not None
    assert "16 processes (num_processes) do not spread" in found.refusals[0].message


def test_ranks_on_several_nodes_meet_at_the_first_of_them() -> None:
    specs = {s.name: s for stage in plan_of(config({"gpus": 8})).stages for s in stage}
    first, second = specs["trainer"], specs["trainer_1"]
    assert (first.node, second.node, first.meets_at, second.meets_at) == (0, 1, 0, 0)
    options = ("--nnodes=2", "--rdzv-backend=bound", "--rdzv-endpoint={address}")
    for number, spec in enumerate((first, second)):
        words = [*options, f"--rdzv-conf=rank={number},port={{port}}", "--nproc-per-node=8"]
        assert [word for word in words if word not in spec.argv] == []
        assert not any("127.0.0.1" in word for word in spec.argv)
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert not LOOPBACK.keys() & spec.env.keys(), "the loopback reaches no other node"
        assert not spec.is_replaceable, "all ranks start again together"
    assert (second.ready_file, second.beats_as) == (None, "trainer")
    assert specs["inference_1"].node == 3


def test_ranks_on_several_nodes_talk_where_the_user_says() -> None:
    here = replace(HERE, environment={"NCCL_SOCKET_IFNAME": "ib0"})
    plan = plan_config(config({"gpus": 8}), here, RunDirectory(Path("/runs/demo")), 1)
    specs = {s.name: s for stage in plan.stages for s in stage}
    assert specs["trainer_1"].env["NCCL_SOCKET_IFNAME"] == "ib0"


def test_without_the_table_everything_is_as_it_was() -> None:
    plan = plan_of(build_run_config())
    assert plan.other_nodes == []
    assert "node" not in "".join(describe_processes(plan)).replace("-node", "")


def test_the_plan_for_a_person_says_who_runs_where() -> None:
    given = config({"trainer": [1, 2]}, ranks=2)
    assert "  node 2    gradus node, trainer rank 1" in describe_config(given)
    assert "  trainer_1, on node 2" in describe_processes(plan_of(given))
