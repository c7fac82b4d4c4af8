"""A job from a real config to the configs of the processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config

from gradus.config import (
    ModelConfig,
    ReplayConfig,
    RunConfig,
    RunProcessConfig,
    ServeConfig,
    SftConfig,
    SftDataConfig,
    SftEvalConfig,
    SftProcessConfig,
)
from gradus.config.schema.environment import EvalEnvironmentConfig, TrainEnvironmentConfig
from gradus.config.schema.orchestrator import OrchestratorConfig, TrainSourcesConfig
from gradus.errors import RunDirectoryError
from gradus.files import write_json
from gradus.launch.job import (
    Dtypes,
    all_evaluations_seconds,
    job_of,
    precision_warnings,
    with_dtypes,
    with_trial,
)
from gradus.launch.launch import launch
from gradus.plan.hardware import Hardware
from gradus.plan.processes import LaunchPlan, Machine, config_file
from gradus.run.lease import RunLease, open_run
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launch
from gradus_lab.replay.job import replay_job


def rl_config(tmp_path: Path, *, name: str | None = None) -> RunConfig:
    sources = TrainSourcesConfig(env=[TrainEnvironmentConfig(id="reverse-text")])
    return RunConfig(
        name=name,
        output_dir=str(tmp_path),
        model=ModelConfig(name="models/tiny"),
        max_steps=3,
        orchestrator=OrchestratorConfig(train=sources),
    )


def sft_config(tmp_path: Path) -> SftConfig:
    data = SftDataConfig(path="words.jsonl")
    model = ModelConfig(name="tiny")
    return SftConfig(name="warm", output_dir=str(tmp_path), model=model, data=data)


def process_configs(plan: LaunchPlan) -> dict[str, Any]:
    """What the process configs hold on disk."""
    return {name: config.model_dump(mode="json") for name, config in plan.configs.items()}


def test_the_configs_of_an_rl_run_can_be_loaded_by_every_process(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "demo")
    configs = process_configs(job_of(rl_config(tmp_path)).plan(run_dir, 1, None))
    assert set(configs) == {"inference", "env_reverse-text", "run"}
    loaded = RunProcessConfig(**configs["run"])
    assert (loaded.run_dir, loaded.term) == (str(tmp_path / "demo"), 1)


def test_a_dry_run_shows_the_processes_of_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(job_of(rl_config(tmp_path, name="demo")), dry_run=True) == 0
    assert "stage 2, started together:\n  trainer" in capsys.readouterr().out


def test_the_configs_of_a_supervised_run_can_be_loaded_by_every_process(tmp_path: Path) -> None:
    section = SftEvalConfig(env=[EvalEnvironmentConfig(id="reverse-text")])
    config = sft_config(tmp_path).model_copy(update={"eval": section})
    configs = process_configs(job_of(config).plan(RunDirectory(tmp_path / "warm"), 1, None))
    assert set(configs) == {"inference", "eval_reverse-text", "run"}
    loaded = SftProcessConfig(**configs["run"])
    assert loaded.data.path == "words.jsonl"
    assert (loaded.max_steps, loaded.term) == (100, 1)


def test_all_evaluations_may_wait_for_the_end_of_training(tmp_path: Path) -> None:
    section = SftEvalConfig(
        env=[EvalEnvironmentConfig(id="reverse-text")],
        interval_steps=40,
        timeout_seconds=10.0,
    )
    config = sft_config(tmp_path)
    assert all_evaluations_seconds(config) == 0.0
    config = config.model_copy(update={"eval": section})
    assert all_evaluations_seconds(config) == 4 * 610.0, "versions 0, 40, 80 and 100"


def test_a_run_without_a_name_gets_one_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        launch(job_of(rl_config(tmp_path)), dry_run=True)
    names = re.findall(rf"^run +{tmp_path}/(\S+)$", capsys.readouterr().out, re.M)
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"reverse-text--tiny--[0-9a-f]{8}", name) for name in names)


def test_resume_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run to resume"):
        launch(job_of(rl_config(tmp_path, name="demo")), resume=True)
    assert list(tmp_path.iterdir()) == []


PLAIN = Hardware(frozenset({"avx2"}))
WITH_BFLOAT16 = Hardware(frozenset({"avx512_bf16"}))


def dtypes(config: RunConfig) -> tuple[str, str]:
    return config.trainer.compute_dtype, config.inference.dtype


@pytest.mark.parametrize(
    ("hardware", "dtype"), [(PLAIN, "float32"), (WITH_BFLOAT16, "bfloat16")], ids=["plain", "bf16"]
)
def test_every_job_computes_in_what_the_machine_multiplies_fast(
    tmp_path: Path, hardware: Hardware, dtype: str
) -> None:
    run_dir = RunDirectory(tmp_path / "demo")
    played = job_of(rl_config(tmp_path), hardware=hardware).plan(run_dir, 1, None)
    learned = job_of(sft_config(tmp_path), hardware=hardware).plan(run_dir, 1, None)
    configs = process_configs(played)
    assert configs["run"]["trainer"]["compute_dtype"] == dtype
    assert configs["inference"]["inference"]["dtype"] == dtype
    assert process_configs(learned)["run"]["compute_dtype"] == dtype
    assert with_dtypes(ServeConfig(model="tiny"), hardware).inference.dtype == dtype


def machine_with(tmp_path: Path, script: str) -> Machine:
    """A machine whose Python is a shell script, which notes what it was asked to run."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$3" >> {tmp_path}/asked\n{script}\n')
    python.chmod(0o700)
    return Machine(str(python), 2, {"XDG_CACHE_HOME": str(tmp_path / "cache")})


def asked(tmp_path: Path) -> list[str]:
    file = tmp_path / "asked"
    return sorted(file.read_text().split()) if file.exists() else []


def test_auto_is_float32_where_bfloat16_dies_and_one_line_says_why(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "kill -ILL $$")
    config = build_run_config()
    here = with_trial(WITH_BFLOAT16, config, machine)
    assert dtypes(with_dtypes(config, here)) == ("float32", "float32")
    [line] = precision_warnings(with_dtypes(config, here), here)
    assert line.startswith("float32, since bfloat16 failed its trial on this processor: ")
    assert "the engine was killed by SIGILL" in line
    assert "the trainer was killed by SIGILL" in line
    job = job_of(rl_config(tmp_path), hardware=here)
    assert job.notes[0] == f"precision         {line}"


def test_bfloat16_that_is_asked_for_stays_and_its_failure_is_told(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "kill -SEGV $$")
    config = build_run_config({"trainer": {"compute_dtype": "bfloat16"}})
    here = with_trial(PLAIN, config, machine)
    assert dtypes(with_dtypes(config, here)) == ("bfloat16", "bfloat16")
    [line] = precision_warnings(with_dtypes(config, here), here)
    assert line.startswith("bfloat16 as it was asked for, though it failed its trial")
    resumed = Dtypes("bfloat16", "bfloat16")
    before = with_trial(PLAIN, build_run_config(), machine, resumed)
    assert dtypes(with_dtypes(build_run_config(), before, resumed)) == ("bfloat16", "bfloat16")
    assert before.bfloat16_fault == here.bfloat16_fault


def test_only_what_would_compute_in_bfloat16_on_the_processor_is_tried(tmp_path: Path) -> None:
    engine, trainer = "gradus.inference.engine.precision", "gradus.trainer.entry.precision"
    on_gpu = Hardware(frozenset(), trains_on_gpu=True, serves_on_gpu=True)
    mixed = Hardware(frozenset({"avx512_bf16"}), trains_on_gpu=True)
    float32 = build_run_config({"inference": {"dtype": "float32"}})
    cases: list[tuple[Hardware, Any, list[str]]] = [
        (WITH_BFLOAT16, build_run_config(), [engine, trainer]),
        (WITH_BFLOAT16, sft_config(tmp_path), [trainer]),
        (WITH_BFLOAT16, ServeConfig(model="tiny"), [engine]),
        (mixed, build_run_config(), [engine]),
        (on_gpu, build_run_config(), []),
        (on_gpu, build_run_config({"trainer": {"gpus": []}}), []),
        (WITH_BFLOAT16, float32, []),
        (PLAIN, build_run_config(), []),
    ]
    for number, (hardware, config, expected) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        here = with_trial(hardware, config, machine_with(folder, "exit 0"))
        assert (asked(folder), here) == (expected, hardware)
        assert precision_warnings(with_dtypes(config, here), here) == []


def test_one_side_follows_the_dtype_that_is_written_for_the_other() -> None:
    trainer = {"trainer": {"compute_dtype": "float32"}}
    engine = {"inference": {"dtype": "float32"}}
    apart = {"trainer": {"compute_dtype": "bfloat16"}, "inference": {"dtype": "float32"}}
    found = [dtypes(with_dtypes(build_run_config(it), WITH_BFLOAT16)) for it in (trainer, engine)]
    assert found == [("float32", "float32")] * 2
    assert dtypes(with_dtypes(build_run_config(apart), PLAIN)) == ("bfloat16", "float32")


def test_a_trainer_that_is_kept_off_the_gpus_computes_as_the_cpu_likes_it() -> None:
    hardware = Hardware(PLAIN.cpu_flags, trains_on_gpu=True, serves_on_gpu=True)
    assert dtypes(with_dtypes(build_run_config(), hardware)) == ("bfloat16", "bfloat16")
    kept_off = build_run_config({"trainer": {"gpus": []}})
    assert dtypes(with_dtypes(kept_off, hardware)) == ("float32", "float32")


def test_a_resumed_run_keeps_its_dtypes_on_another_machine_and_says_so(tmp_path: Path) -> None:
    config = rl_config(tmp_path, name="demo")
    run_dir = RunDirectory(tmp_path / "demo")
    first = job_of(config, hardware=PLAIN).plan(run_dir, 1, None)
    for process, values in process_configs(first).items():
        write_json(config_file(run_dir, process), values)
    resumed = job_of(config, resume=True, hardware=WITH_BFLOAT16)
    assert process_configs(resumed.plan(run_dir, 1, None)) == process_configs(first)
    rate = "learning rate     5e-06, as in the launches before"
    assert resumed.notes == (
        "precision         float32, as in the launches before; on this machine auto would be "
        "bfloat16",
        rate,
    )
    assert job_of(config, resume=True, hardware=PLAIN).notes == (rate,)
    assert (
        job_of(config, hardware=WITH_BFLOAT16).notes[0].startswith("learning rate     5e-06, cho")
    )


def test_a_dtype_that_is_written_for_a_resume_holds_for_both_sides() -> None:
    config = build_run_config({"trainer": {"compute_dtype": "bfloat16"}})
    before = Dtypes("float32", "float32")
    assert dtypes(with_dtypes(config, WITH_BFLOAT16, before)) == ("bfloat16", "bfloat16")


@contextmanager
def closing_lease(runs: Path) -> Iterator[RunLease]:
    lease = open_run(runs, "demo", kind="rl")
    try:
        yield lease
    finally:
        lease.release()


def test_auto_in_a_replay_is_the_dtype_of_the_recorded_engine(tmp_path: Path) -> None:
    recorded = build_run_config()
    trainer = recorded.trainer.model_copy(update={"compute_dtype": "auto"})
    for dtype in ("float32", "bfloat16"):
        inference = recorded.inference.model_copy(update={"dtype": dtype})
        run = recorded.model_copy(update={"trainer": trainer, "inference": inference})
        job = replay_job(ReplayConfig(run, tmp_path / "recorded", num_steps=2), tmp_path / "new")
        config = job.plan(RunDirectory(tmp_path / "new"), 1, None).configs["run"]
        assert isinstance(config, RunProcessConfig)
        assert config.trainer.compute_dtype == dtype


def test_what_is_recorded_for_a_replay_names_the_dtype(tmp_path: Path) -> None:
    config = rl_config(tmp_path, name="demo")
    with closing_lease(tmp_path) as lease:
        job = job_of(config, hardware=WITH_BFLOAT16)
        job.workload.prepare(lease, job.plan(lease.run_dir, lease.term, None), None).apply()
        recorded = read_launch(lease.run_dir, lease.term).config
    assert recorded["trainer"]["compute_dtype"] == "bfloat16"


def test_a_launch_records_the_rate_that_it_chose_and_its_resume_keeps_it(tmp_path: Path) -> None:
    config = rl_config(tmp_path, name="demo")
    run_dir = RunDirectory(tmp_path / "demo")
    first = job_of(config, hardware=PLAIN)
    assert first.chosen["trainer.optimizer.lr"].startswith("5e-06, chosen for rl, all weights, ")
    plan = first.plan(run_dir, 1, None)
    assert plan.launched.trainer.optimizer.lr == 5e-6  # type: ignore[union-attr]
    for process, values in process_configs(plan).items():
        write_json(config_file(run_dir, process), values)
    grown = config.model_copy(update={"model": config.model.model_copy(update={"name": "x-7B"})})
    kept = job_of(grown, resume=True, hardware=PLAIN)
    assert kept.written.trainer.optimizer.lr == 5e-6  # type: ignore[union-attr]
    assert job_of(grown, hardware=PLAIN).written.trainer.optimizer.lr == 2.3e-6  # type: ignore[union-attr]
    optimizer = config.trainer.optimizer.model_copy(update={"lr": 1e-4})
    trainer = config.trainer.model_copy(update={"optimizer": optimizer})
    stated = job_of(config.model_copy(update={"trainer": trainer}), resume=True, hardware=PLAIN)
    assert stated.written.trainer.optimizer.lr == 1e-4  # type: ignore[union-attr]
    assert (stated.chosen, stated.notes) == ({}, ())
