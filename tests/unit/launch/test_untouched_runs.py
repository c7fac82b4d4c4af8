"""What a refused command and a dry run leave: every byte of every folder as it was."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import commit

from gradus.config import (
    EvalConfig,
    ModelConfig,
    ReplayConfig,
    RunConfig,
    SftConfig,
    SftDataConfig,
    SftEvalConfig,
    resolve,
)
from gradus.config.schema.environment import EvalEnvironmentConfig, TrainEnvironmentConfig
from gradus.config.schema.orchestrator import OrchestratorConfig, TrainSourcesConfig
from gradus.errors import ConfigError, CorruptStateError, GradusError, RunDirectoryError
from gradus.files import write_json
from gradus.launch.episodes import MODEL_FILES, digest_files
from gradus.launch.job import job_of, with_dtypes
from gradus.launch.launch import launch
from gradus.plan.hardware import Hardware
from gradus.run.checkpoints import CheckpointStore
from gradus.run.lease import RunKind, RunLease, open_run
from gradus.run.paths import RunDirectory
from gradus_lab.replay.job import replay_job

Launch = Callable[..., int]
KINDS: tuple[RunKind, ...] = ("rl", "sft", "eval", "replay", "bench")

WITH_BFLOAT16 = Hardware(frozenset({"avx512_bf16"}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def build_rl(runs: Path, model: Path, *, seed: int = 0) -> RunConfig:
    sources = TrainSourcesConfig(env=[TrainEnvironmentConfig(id="reverse-text")])
    return RunConfig(
        name="demo",
        output_dir=str(runs),
        model=ModelConfig(name=str(model)),
        max_steps=3,
        seed=seed,
        orchestrator=OrchestratorConfig(train=sources),
    )


def build_sft(runs: Path, model: Path) -> SftConfig:
    data = SftDataConfig(path="words.jsonl")
    return SftConfig(
        name="demo", output_dir=str(runs), model=ModelConfig(name=str(model)), data=data
    )


def build_eval(runs: Path, folder: Path, **changes: Any) -> EvalConfig:
    values: dict[str, Any] = {
        "name": "demo",
        "output_dir": str(runs),
        "model": ModelConfig(name=str(folder)),
        "env": [EvalEnvironmentConfig(id="reverse-text", num_tasks=4, group_size=2)],
    }
    return EvalConfig(**(values | changes))


def launches(runs: Path, model: Path) -> dict[str, Launch]:
    """Each command on the run `demo`."""
    return {
        "rl": partial(launch, job_of(build_rl(runs, model))),
        "sft": partial(launch, job_of(build_sft(runs, model))),
        "eval": partial(launch, job_of(build_eval(runs, model))),
    }


def fill(lease: RunLease) -> None:
    """What a run of any kind may have left."""
    root = lease.run_dir.root
    for name in ("config/run.json", "results.json"):
        write_json(root / name, {})
    write_json(root / "summary.json", {"outcome": "interrupted"})
    for name in ("episodes/step_0/eval.jsonl", "weights/version_00000001/x", "ready/trainer.json"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("precious")
    for name in ("metrics.jsonl", "journal.jsonl"):
        (root / name).write_text('{"step": 0, "time": 0}\n')


def make_run(runs: Path, kind: RunKind) -> Path:
    lease = open_run(runs, "demo", kind=kind)
    fill(lease)
    lease.release()
    return lease.run_dir.root


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, every folder with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


OTHER_KINDS = [(a, b) for a, b in itertools.product(KINDS, ("rl", "sft", "eval")) if a != b]


@pytest.mark.parametrize("option", ["resume", "clean", "neither"])
@pytest.mark.parametrize(("kind", "command"), OTHER_KINDS)
def test_a_run_of_another_kind_is_refused_and_left_as_it_is(
    tmp_path: Path, model: Path, kind: RunKind, command: str, option: str
) -> None:
    runs = tmp_path / "runs"
    make_run(runs, kind)
    before = snapshot(tmp_path)
    options = {} if option == "neither" else {option: True}
    with pytest.raises(RunDirectoryError, match=f"holds a run of kind '{kind}'") as caught:
        launches(runs, model)[command](**options)
    assert snapshot(tmp_path) == before
    assert "--clean" not in str(caught.value)
    assert "--resume" not in str(caught.value)


@pytest.mark.parametrize("command", ["rl", "sft", "eval"])
def test_a_dry_run_under_a_new_name_creates_nothing(
    tmp_path: Path, model: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(tmp_path)
    assert launches(tmp_path / "runs", model)[command](dry_run=True) == 0
    assert snapshot(tmp_path) == before
    assert "nothing was written and nothing started" in capsys.readouterr().out


@pytest.mark.parametrize("command", KINDS[:3])
def test_a_dry_resume_changes_nothing(tmp_path: Path, model: Path, command: RunKind) -> None:
    make_run(tmp_path / "runs", command)
    before = snapshot(tmp_path)
    assert launches(tmp_path / "runs", model)[command](resume=True, dry_run=True) == 0
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", KINDS[:3])
def test_a_dry_run_over_a_run_is_refused_and_changes_nothing(
    tmp_path: Path, model: Path, command: RunKind
) -> None:
    make_run(tmp_path / "runs", command)
    before = snapshot(tmp_path)
    launch = launches(tmp_path / "runs", model)[command]
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        launch(dry_run=True)
    with pytest.raises(ConfigError, match="--dry-run changes none"):
        launch(dry_run=True, clean=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", ["rl", "sft", "eval"])
@pytest.mark.parametrize("is_dry", [True, False])
def test_a_resume_where_no_run_is_creates_nothing(
    tmp_path: Path, model: Path, command: str, is_dry: bool
) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds no run to resume"):
        launches(tmp_path / "runs", model)[command](resume=True, dry_run=is_dry)
    assert snapshot(tmp_path) == before


def test_a_dry_replay_creates_nothing(tmp_path: Path, model: Path) -> None:
    recorded = make_run(tmp_path / "runs", "rl")
    before = snapshot(tmp_path)
    config, again = build_rl(tmp_path, model), tmp_path / "again"
    job = replay_job(ReplayConfig(config, recorded, num_steps=1), again)
    assert launch(job, dry_run=True) == 0
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("is_dry", [True, False])
def test_a_resume_with_settings_that_the_checkpoint_refuses_changes_nothing(
    tmp_path: Path, model: Path, is_dry: bool
) -> None:
    root = make_run(tmp_path / "runs", "rl")
    commit(CheckpointStore(RunDirectory(root), 1), 2)
    write_json(root / "config" / "run.json", {"seed": 1})
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="seed was 1 and is 0"):
        launch(job_of(build_rl(tmp_path / "runs", model)), resume=True, dry_run=is_dry)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("is_dry", [True, False])
def test_a_resume_without_a_whole_checkpoint_changes_nothing(
    tmp_path: Path, model: Path, is_dry: bool
) -> None:
    root = make_run(tmp_path / "runs", "rl")
    folder = commit(CheckpointStore(RunDirectory(root), 1), 2).folder
    (folder / "trainer" / "weights.bin").write_bytes(b"x")
    before = snapshot(tmp_path)
    with pytest.raises(CorruptStateError):
        launch(job_of(build_rl(tmp_path / "runs", model)), resume=True, dry_run=is_dry)
    assert snapshot(tmp_path) == before


def begun_evaluation(runs: Path, model: Path, config: EvalConfig) -> Path:
    """The folder of an evaluation whose identity is noted."""
    root = make_run(runs, "eval")
    resolved = resolve(with_dtypes(config, WITH_BFLOAT16), run_dir=root, term=1).launched.identity
    digests = digest_files(model, MODEL_FILES)
    write_json(root / "evaluation.json", resolved | {"files": digests})
    return root


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"inference": {"dtype": "float32"}}, r"inference\.dtype was 'bfloat16' and is 'float32'"),
        ({"inference": {"extra_args": {"quantization": "fp8"}}}, r"extra_args\.quantization was"),
        ({"renderer": "default"}, r"model\.renderer was 'auto' and is 'default'"),
        ({"tokenizer": "other"}, r"model\.tokenizer was None and is 'other'"),
        ({"max_length_tokens": 1024}, r"model\.max_length_tokens was 2048 and is 1024"),
    ],
)
@pytest.mark.parametrize("is_dry", [True, False])
def test_an_evaluation_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, model: Path, changes: dict[str, Any], named: str, is_dry: bool
) -> None:
    runs = tmp_path / "runs"
    begun_evaluation(runs, model, build_eval(runs, model))
    before = snapshot(tmp_path)
    if changes.keys() & {"renderer", "tokenizer", "max_length_tokens"}:
        changes = {"model": ModelConfig(name=str(model), **changes)}
    job = job_of(build_eval(runs, model, **changes), hardware=WITH_BFLOAT16)
    with pytest.raises(ConfigError, match=named):
        launch(job, resume=True, dry_run=is_dry)
    assert snapshot(tmp_path) == before


def test_a_supervised_run_whose_versions_were_evaluated_otherwise_is_left_as_it_is(
    tmp_path: Path, model: Path
) -> None:
    root = make_run(tmp_path / "runs", "sft")
    config = build_sft(tmp_path / "runs", model)
    section = SftEvalConfig(env=[EvalEnvironmentConfig(id="reverse-text")])
    config = config.model_copy(update={"eval": section})
    identity = resolve(config, run_dir=root, term=1).launched.identity
    write_json(root / "evaluation.json", identity | {"model": {"name": "other"}})
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.name was 'other'"):
        launch(job_of(config), resume=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_other_files_under_the_path_of_an_evaluated_model_are_noticed(
    tmp_path: Path, model: Path, name: str
) -> None:
    runs = tmp_path / "runs"
    begun_evaluation(runs, model, build_eval(runs, model))
    (model / name).write_bytes(b"other")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=f"files.{name} was"):
        launch(job_of(build_eval(runs, model), hardware=WITH_BFLOAT16), resume=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"env": [EvalEnvironmentConfig(id="reverse-text", num_tasks=2, group_size=1)]},
        {"max_in_flight_episodes": 1},
        {"inference": {"max_num_seqs": 4, "port": 1234}},
    ],
)
def test_fewer_tasks_and_other_speed_are_the_same_evaluation(
    tmp_path: Path, model: Path, changes: dict[str, Any]
) -> None:
    runs = tmp_path / "runs"
    begun_evaluation(runs, model, build_eval(runs, model))
    config = build_eval(runs, model, **changes)
    assert launch(job_of(config, hardware=WITH_BFLOAT16), resume=True, dry_run=True) == 0


def test_the_run_of_a_living_launcher_is_refused_and_left_as_it_is(
    tmp_path: Path, model: Path
) -> None:
    lease = open_run(tmp_path / "runs", "demo", kind="rl")
    fill(lease)
    before = snapshot(tmp_path)
    for options in ({}, {"clean": True}, {"resume": True}, {"resume": True, "dry_run": True}):
        with pytest.raises(GradusError, match="is in use by pid"):
            launches(tmp_path / "runs", model)["rl"](**options)
    assert snapshot(tmp_path) == before
    lease.release()


DAMAGES = (b"", b"{", b"[]", b"null", b'"x"', b"1", b'{"a": 1}', b'{"a": "\xff"}', b"[" * 100_000)
READ_BY_RESUME = (
    *(".gradus-run", "lease.json", "pids.json", "summary.json", "evaluation.json"),
    *("config/run.json", "metrics.jsonl", "journal.jsonl"),
    "checkpoints/step_00000002/manifest.json",
)


@pytest.mark.parametrize("command", KINDS[:3])
@pytest.mark.parametrize("name", READ_BY_RESUME)
def test_a_damaged_file_of_a_run_is_refused_in_words_or_not_read(
    tmp_path: Path, model: Path, command: RunKind, name: str
) -> None:
    root = make_run(tmp_path / "runs", command)
    commit(CheckpointStore(RunDirectory(root), 1), 2)
    write_json(root / "pids.json", {"launch": "1.1", "processes": []})
    write_json(root / "config" / "run.json", {})
    launch = launches(tmp_path / "runs", model)[command]
    for content in DAMAGES:
        (root / name).write_bytes(content)
        before = snapshot(tmp_path)
        with contextlib.suppress(GradusError):
            launch(resume=True, dry_run=True)
        assert snapshot(tmp_path) == before
