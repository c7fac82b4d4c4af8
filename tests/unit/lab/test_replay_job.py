"""A replay from a config to its plan, and from its report to the words of the verdict."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config

from gradus.config import ReplayConfig, RunProcessConfig, resolve
from gradus.errors import ConfigError
from gradus.files import write_json
from gradus.launch.job import job_of
from gradus.launch.launch import launch
from gradus.run.lease import open_run
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launch, recorded_terms
from gradus_lab.replay.job import (
    ReplayReport,
    read_report,
    replay_folder,
    replay_job,
    verdict_lines,
)


def test_a_replay_starts_the_trainer_and_the_replayer_alone(tmp_path: Path) -> None:
    recorded, folder = tmp_path / "demo", tmp_path / "again"
    job = replay_job(ReplayConfig(build_run_config({}), recorded, num_steps=3), folder)
    shown = io.StringIO()
    assert launch(job, shown, dry_run=True) == 0
    assert "stage 1, started together:\n  trainer" in shown.getvalue()
    assert "inference" not in shown.getvalue()


def test_the_configs_of_a_replay_can_be_loaded_by_both_processes(tmp_path: Path) -> None:
    config = ReplayConfig(build_run_config({}), tmp_path / "demo", num_steps=3)
    configs = resolve(config, run_dir=tmp_path, term=1).by_process()
    values = {name: config.model_dump(mode="json") for name, config in configs.items()}
    trainer = RunProcessConfig(**values["trainer"])
    assert (trainer.end_step, trainer.max_steps) == (3, 20)
    assert RunProcessConfig(**values["replayer"]).recorded.endswith("/demo")


@pytest.mark.parametrize("given", ["demo", "demo/", "x/../demo", "link", "demo/replay/x", "."])
def test_a_replay_never_lies_in_its_run_nor_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    recorded = tmp_path / "runs" / "demo"
    recorded.mkdir(parents=True)
    (tmp_path / "runs" / "x").mkdir()
    (tmp_path / "runs" / "link").symlink_to(recorded)
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"--run-dir .* choose a folder beside the recorded run"):
        replay_folder(recorded, given)


def test_the_ranks_of_the_run_train_its_replay(tmp_path: Path) -> None:
    config = build_run_config({"trainer": {"num_processes": 2, "env_vars": {"MINE": "1"}}})
    job = replay_job(ReplayConfig(config, tmp_path, num_steps=3), tmp_path)
    ((trainer, replayer),) = job.plan(RunDirectory(tmp_path), 1, None).stages
    assert "--nproc-per-node=2" in trainer.argv
    assert (trainer.env["MINE"], "MINE" in replayer.env) == ("1", False)
    assert trainer.finishes
    assert replayer.finishes
    assert replayer.log.name == "replayer.log"


def test_a_replay_lies_where_asked_or_beside_its_run(tmp_path: Path) -> None:
    run = tmp_path / ("r" * 64)
    assert replay_folder(run, str(tmp_path / "x" / "y")) == tmp_path / "x" / "y"
    beside = replay_folder(run, None)
    assert beside.parent == tmp_path
    assert beside != replay_folder(run, None)
    assert len(beside.name) <= 64


def test_a_launch_notes_its_config_for_a_replay(tmp_path: Path) -> None:
    config = build_run_config({"output_dir": str(tmp_path), "name": "demo"})
    silent = build_run_config({"output_dir": str(tmp_path), "orchestrator": {"recording": False}})
    lease = open_run(tmp_path, "demo", kind="rl")
    try:
        for noted, expected in ((silent, []), (config, [1])):
            job = job_of(noted)
            plan = job.plan(lease.run_dir, lease.term, None)
            job.workload.prepare(lease, plan, None).apply()
            assert recorded_terms(lease.run_dir) == expected
        assert read_launch(lease.run_dir, 1).config["max_steps"] == 20
    finally:
        lease.release()


def report(**changes: Any) -> ReplayReport:
    values: dict[str, Any] = {
        "is_same": True,
        "steps": 3,
        "versions_compared": 3,
        "first_different_version": None,
        "first_different_step": None,
        "different_metrics": [],
        "model_files": {"model/model.safetensors": True},
        "loss": [[0.5, 0.5], [0.25, 0.125]],
    }
    return ReplayReport(**(values | changes))


def test_equal_weights_are_called_bitwise_the_same() -> None:
    assert verdict_lines(report(), is_expected=True) == [
        "batches     3 made again from the episodes, each as recorded",
        "weights     bitwise the same: 3 published versions, model/model.safetensors",
    ]


def test_only_what_was_compared_is_named() -> None:
    lines = verdict_lines(report(versions_compared=0), is_expected=True)
    assert lines[1] == "weights     bitwise the same: model/model.safetensors"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_different_version": 2}, "weights     DIFFERENT, first after step 2 (version 2)"),
        (
            {"first_different_step": 1, "different_metrics": ["loss/total/mean"]},
            "numbers     DIFFERENT, first in step 2: loss/total/mean",
        ),
        (
            {"model_files": {"model/model.safetensors": False}},
            "weights     DIFFERENT in model/model.safetensors",
        ),
        ({"versions_compared": 0, "model_files": None}, "weights     unknown: the run kept no"),
    ],
)
def test_the_first_difference_is_said(changes: dict[str, Any], said: str) -> None:
    lines = verdict_lines(report(is_same=False, **changes), is_expected=True)
    assert lines[1].startswith(said)


@pytest.mark.parametrize(
    ("is_same", "said"), [(False, "differ, as they may"), (True, "are bitwise the same nev")]
)
def test_a_changed_trainer_is_not_expected_to_come_to_the_same(is_same: bool, said: str) -> None:
    lines = verdict_lines(report(is_same=is_same), is_expected=False)
    assert said in lines[1]
    assert lines[2:] == [
        "loss        first step 0.5 in the run, 0.5 now",
        "loss        last step 0.25 in the run, 0.125 now",
    ]


def test_a_changed_trainer_without_a_step_has_no_loss() -> None:
    assert len(verdict_lines(report(loss=[]), is_expected=False)) == 2
    missing = verdict_lines(report(loss=[[None, 0.5]]), is_expected=False)
    assert "first step - in the run, 0.5 now" in missing[2]


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = RunDirectory(tmp_path).replay_report
    write_json(path, vars(report()))
    assert read_report(tmp_path) == report()
