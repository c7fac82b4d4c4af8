"""A checkpoint leaves as a model directory that transformers loads, with exactly its weights."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradus.cli.main import main
from gradus.cli.serve import find_source, model_directory
from gradus.config import (
    CheckpointConfig,
    LoraConfig,
    ModelConfig,
    SftDataConfig,
    SftProcessConfig,
)
from gradus.errors import ConfigError, CorruptStateError, ExitCode, StorageError
from gradus.files import write_json
from gradus.run.model_files import BestKeeper, BestVersion, read_best
from gradus.run.paths import RunDirectory
from gradus.run.recording import note_launched
from gradus.sealed import SealedFolder
from gradus.trainer import export as module
from gradus.trainer.checkpoint.training_state import TrainingProgress, load_weights
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.entry.sft import run
from gradus.trainer.export import export, export_best
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import (
    ADAPTER_STEM,
    adapted_layers,
    adapter_files,
    adapter_tensors,
    add_adapters,
    base_digest,
)
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.publish import save_model
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import VersionLabel
from gradus.weights.tensor_files import write_tensors

pytestmark = pytest.mark.torch


def trained_run(root: Path, model: Path, **options: Any) -> Path:
    """A finished supervised run with checkpoints of steps 1 and 2."""
    data = root.parent / "data.jsonl"
    data.write_text(json.dumps({"prompt": "ab", "completion": "cd"}) + "\n")
    config = SftProcessConfig(
        run_dir=str(root),
        term=0,
        model=ModelConfig(name=str(model), max_length_tokens=64),
        data=SftDataConfig(path=str(data)),
        max_steps=2,
        batch_conversations=1,
        compute_dtype="bfloat16",
        micro_batch_tokens=64,
        checkpoint=CheckpointConfig(interval_steps=1),
        **options,
    )
    run(config)
    return root


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_the_newest_checkpoint_is_the_final_model(
    tmp_path: Path, tiny_model: Path, lora: LoraConfig | None
) -> None:
    root = trained_run(tmp_path / "run", tiny_model, lora=lora)
    assert export(root, tmp_path / "out") == 2
    final = load_file(root / "model/model.safetensors")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert final.keys() == exported.keys()
    assert [name for name in final if not torch.equal(final[name], exported[name])] == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = model(**tokenizer("ab", return_tensors="pt")).logits
    assert logits.isfinite().all()


def test_a_named_checkpoint_is_exported_by_the_command(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = trained_run(tmp_path / "run", tiny_model)
    step = root / "checkpoints/step_00000001"
    assert main(["export", str(step), str(tmp_path / "out")]) == ExitCode.DONE
    assert "holds the weights after 1 steps" in capsys.readouterr().out
    first = load_file(tmp_path / "out/model.safetensors")
    last = load_file(root / "model/model.safetensors")
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_a_run_of_a_relative_model_is_exported_and_served_from_another_folder(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    root = trained_run(tmp_path / "run", Path(tiny_model.name))
    final = load_file(root / "model/model.safetensors")
    shutil.rmtree(root / "model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert export(root, Path("out")) == 2
    with model_directory(find_source("../run/checkpoints/step_00000002")) as folder:
        served = load_file(Path(folder) / "model.safetensors")
    assert not Path(folder).exists()
    exported = load_file("out/model.safetensors")
    for model in (served, exported):
        assert [name for name in final if not torch.equal(final[name], model[name])] == []


def test_a_run_without_checkpoints_exports_its_newest_version_verified(
    tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = new_run(tmp_path)
    for version in (1, 2):
        weights = FilesystemWeights(
            run_dir, term=0, extra_files={"config.json": b"{}"}, keep_published=None
        )
        weights.publish_version(version, [("a", torch.full((2,), float(version)))])
    assert export(run_dir.root, tmp_path / "out") == 2
    assert load_file(tmp_path / "out/model.safetensors")["a"].tolist() == [2.0, 2.0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("config.json", "model.safetensors")
    ]
    (run_dir.version(2) / "config.json").write_text("{ }")
    with pytest.raises(CorruptStateError, match=r"config\.json has 3 bytes"):
        export(run_dir.root, tmp_path / "other")


def test_a_version_that_its_run_deletes_gives_way_to_the_one_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(tmp_path)
    for version in (1, 2):
        weights = FilesystemWeights(
            run_dir, term=0, extra_files={"config.json": b"{}"}, keep_published=None
        )
        weights.publish_version(version, [("a", torch.full((2,), float(version)))])
    verify = SealedFolder.verify

    def verify_late(sealed: SealedFolder[VersionLabel]) -> None:
        """The run deletes a version between the choice of it and its check."""
        if sealed.path == run_dir.version(2):
            shutil.rmtree(sealed.path)
        verify(sealed)

    monkeypatch.setattr(SealedFolder, "verify", verify_late)
    assert export(run_dir.root, tmp_path / "out") == 1


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, tiny_model: Path) -> None:
    root = trained_run(tmp_path / "run", tiny_model)
    step = root / "checkpoints/step_00000001"
    [shard] = (step / "trainer").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(CorruptStateError, match=r"rank_00000\.safetensors"):
        export(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_its_run_deletes_is_not_called_damaged(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained_run(tmp_path / "run", tiny_model)
    newest, before = (root / f"checkpoints/step_0000000{step}" for step in (2, 1))

    def load_late(policy: PolicyModel, part: Path) -> TrainingProgress:
        """The run deletes a checkpoint between its check and its use."""
        if part.parent == newest:
            newest.rename(newest.with_name(".deleted"))
        return load_weights(policy, part)

    monkeypatch.setattr("gradus.trainer.export.load_weights", load_late)
    with pytest.raises(ConfigError, match="was deleted by its run"):
        export(newest, tmp_path / "out")
    newest.with_name(".deleted").rename(newest)
    assert export(root, tmp_path / "out") == 1
    assert before.is_dir()


def test_a_place_that_takes_no_directory_is_named(tmp_path: Path, tiny_model: Path) -> None:
    root = trained_run(tmp_path / "run", tiny_model)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"file/\.out.*: Not a directory"):
        export(root, tmp_path / "file/out")


def test_the_checkpoint_says_what_it_needs_whatever_became_of_the_config(
    tmp_path: Path, tiny_model: Path
) -> None:
    root = trained_run(tmp_path / "run", tiny_model, lora=LoraConfig(rank=4, alpha=8))
    config = {"run_dir": str(root), "term": 0, "lora": {"rank": 4, "alpha": 80}}
    write_json(root / "config/run.json", config)
    export(root, tmp_path / "out")
    final = load_file(root / "model/model.safetensors")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert [name for name in final if not torch.equal(final[name], exported[name])] == []


def test_adapters_are_not_merged_into_another_model(tmp_path: Path, tiny_model: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    root = trained_run(tmp_path / "run", model, lora=LoraConfig(rank=4))
    weights = load_file(model / "model.safetensors")
    rewritten = {name: tensor + 1 for name, tensor in weights.items()}
    save_file(rewritten, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="the base of its adapters"):
        export(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export(tmp_path, tmp_path / "empty")
    with pytest.raises(ConfigError, match="not a committed checkpoint"):
        export(tmp_path / "checkpoints/none", tmp_path / "out")


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ([], "it is not a run of gradus"),
        ([".gradus-run"], "the run has not saved one; checkpoint.interval_minutes"),
        ([".gradus-run", "model/config.json"], "run/model is its final model"),
        (["config.json"], "it is a model directory already"),
    ],
)
def test_a_folder_without_checkpoints_says_what_to_use_instead(
    tmp_path: Path, made: list[str], named: str
) -> None:
    root = tmp_path / "run"
    (root / "model").mkdir(parents=True)
    for name in made:
        (root / name).write_text('{"run_id": "run", "kind": "rl", "format": 3}')
    with pytest.raises(ConfigError, match=named):
        export(root, tmp_path / "out")


@pytest.mark.parametrize("words", [[], ["a"], ["a", "b", "c"], ["a", "--push"], ["none", "out"]])
def test_the_command_says_what_it_expects(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *words]) == ExitCode.CONFIG
    assert "export" in capsys.readouterr().err


def kept_best(run_dir: RunDirectory, version: int, average: float = 0.5) -> None:
    """Keep a published version as the best."""
    keeper = BestKeeper.open(run_dir, 0)
    keeper.stage(version)
    keeper.settle(BestVersion(version, average, 0.4, 0.6, {"words": 8}), version)


def exported_best(run_dir: RunDirectory, out: Path) -> int:
    return main(["export", str(run_dir.root), str(out), "--best"])


def test_the_best_version_is_exported_and_says_what_it_earned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = new_run(tmp_path)
    files = {"config.json": b"{}"}
    weights = FilesystemWeights(run_dir, term=0, extra_files=files, keep_published=1)
    for version, average in ((1, 0.5), (2, 0.4), (3, 0.3)):
        weights.publish_version(version, [("a", torch.full((2,), float(version)))])
        kept_best(run_dir, version, average)
    assert exported_best(run_dir, tmp_path / "out") == ExitCode.DONE
    said = capsys.readouterr().out
    assert "best: version 1 earned 0.5 (0.4 to 0.6) in 8 episodes of words" in said
    assert "holds the weights after 1 steps" in said
    assert load_file(tmp_path / "out/model.safetensors")["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "change", ["nothing", "start", "broadcast", "deleted", "no run", "exists", "damaged"]
)
def test_a_best_version_that_cannot_be_exported_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    run_dir, out, code, word = new_run(tmp_path), tmp_path / "out", ExitCode.CONFIG, change
    weights = FilesystemWeights(run_dir, term=0, extra_files={"config.json": b"{}"})
    weights.publish_version(1, [("a", torch.zeros(2))])
    if change == "nothing":
        word = "no evaluation"
    elif change == "start":
        kept_best(run_dir, 0)
        word = "version 0 earned 0.5 (0.4 to 0.6) in 8 episodes of words, the most of all"
    else:
        if change == "broadcast":
            (run_dir.version(1) / "model.safetensors").unlink()
            word = "its weights were broadcast, which leaves no files"
        kept_best(run_dir, 1)
    folder = run_dir.best / "version_00000001.term_00000000"
    if change == "deleted":
        shutil.rmtree(folder)
        word = "was deleted"
    elif change == "no run":
        run_dir = RunDirectory(tmp_path)
        word = "is not a run"
    elif change == "exists":
        out.mkdir()
        word = "exists already"
    elif change == "damaged":
        (folder / "config.json").unlink()
        (folder / "config.json").write_bytes(b"[]")
        code, word = ExitCode.CORRUPT_STATE, "the manifest says"
    assert exported_best(run_dir, out) == code
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["read", "copied"])
def test_a_best_version_that_a_better_one_replaces_meanwhile_is_not_called_deleted(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(tmp_path)
    weights = FilesystemWeights(run_dir, term=0, extra_files={"config.json": b"{}"})
    for version in (1, 2):
        weights.publish_version(version, [("a", torch.full((2,), float(version)))])
    kept_best(run_dir, 1)
    place = {"read": "_best_of", "copied": "_copy_sealed"}[moment]
    own = getattr(module, place)

    def late(*arguments: Any) -> Any:
        """The run finds a better version between its choice and its use."""
        found = own(*arguments) if moment == "read" else None
        if read_best(run_dir).version == 1:
            kept_best(run_dir, 2, average=0.9)
        return found if moment == "read" else own(*arguments)

    monkeypatch.setattr(module, place, late)
    assert export_best(run_dir.root, tmp_path / "out").version == 2
    assert load_file(tmp_path / "out/model.safetensors")["a"].tolist() == [2.0, 2.0]


def test_the_best_adapter_is_added_into_its_base(tmp_path: Path, tiny_model: Path) -> None:
    run_dir, base = new_run(tmp_path), ModelConfig(name=str(tiny_model))
    lora, dtype = LoraConfig(rank=4), torch.float32
    model = load_model(base, CPU)
    add_adapters(model, lora, dtype)
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B)
    weights = FilesystemWeights(
        run_dir,
        term=0,
        extra_files=adapter_files(model, lora, base.name, base_digest(model)),
        write=partial(write_tensors, stem=ADAPTER_STEM),
    )
    weights.publish_version(1, adapter_tensors(model, dtype))
    kept_best(run_dir, 1)
    with pytest.raises(CorruptStateError, match=r"launched\.json does not name the model"):
        export_best(run_dir.root, tmp_path / "out")
    settings = {"model": base.model_dump(), "trainer": {"compute_dtype": "float32"}}
    note_launched(run_dir, "rl", settings)
    assert export_best(run_dir.root, tmp_path / "out").version == 1
    with join_world(CPU) as world:
        save_model(model, world, dtype, tmp_path / "expected", {})
    exported = load_file(tmp_path / "out/model.safetensors")
    expected = load_file(tmp_path / "expected/model.safetensors")
    assert [name for name in expected if not torch.equal(expected[name], exported[name])] == []
