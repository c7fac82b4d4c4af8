"""Supervised runs that stop and continue: the same data in the same order, the same weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from gradus.config import (
    AdamWConfig,
    CheckpointConfig,
    ModelConfig,
    SftDataConfig,
    SftProcessConfig,
)
from gradus.config.schema.sft import SftValidationConfig
from gradus.errors import ConfigError
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.trainer.data.conversation_samples import ConversationEncoder
from gradus.trainer.data.conversations import PlainText
from gradus.trainer.data.stream import ConversationStream
from gradus.trainer.distributed import World
from gradus.trainer.entry.sft import ConversationBatches, run
from gradus.trainer.model.load import load_tokenizer

pytestmark = pytest.mark.torch


def write_rows(path: Path, letters: str = "abcdefg") -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": letter},
                {"role": "assistant", "content": letter * 3},
            ]
        }
        for letter in letters
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def build_config(
    root: Path, model: Path, data: Any, *, resume_step: int | None = None, **options: Any
) -> SftProcessConfig:
    settings = {
        "model": ModelConfig(name=str(model), max_length_tokens=64),
        "data": data if isinstance(data, SftDataConfig) else SftDataConfig(path=str(data)),
        "optimizer": AdamWConfig(lr=1e-2, warmup_steps=2, schedule="linear"),
        "max_steps": 6,
        "batch_conversations": 3,
        "micro_batch_tokens": 64,
        "compute_dtype": "bfloat16",
        "deterministic": True,
        "checkpoint": CheckpointConfig(interval_steps=2, keep_last=3),
        **options,
    }
    term = 0 if resume_step is None else 1
    return SftProcessConfig(run_dir=str(root), term=term, resume_step=resume_step, **settings)


def model_bytes(root: Path) -> bytes:
    return (root / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_resumed_run_ends_bit_by_bit_as_an_undisturbed_one(
    tmp_path: Path, tiny_model: Path, step: int
) -> None:
    """Batches of 3 out of 7 conversations: no checkpoint lies at the end of a pass."""
    data = write_rows(tmp_path / "data.jsonl")
    run(build_config(tmp_path / "run", tiny_model, data))
    expected = model_bytes(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")
    moved = data.rename(tmp_path / "moved.jsonl")
    run(build_config(tmp_path / "run", tiny_model, moved, resume_step=step))
    assert model_bytes(tmp_path / "run") == expected


def test_a_mixture_is_learned_by_weight_and_resumed_bit_by_bit(
    tmp_path: Path, tiny_model: Path
) -> None:
    """One of the first data set to three of the second, whose replies have one token more."""
    first = write_rows(tmp_path / "first.jsonl", "abcde")
    second = tmp_path / "second.jsonl"
    second.write_text(first.read_text().replace("aaa", "aaaa").replace("bbb", "bbbb"))
    second.write_text("\n".join(second.read_text().splitlines()[:2]))
    mix = [{"path": str(second), "weight": 3.0}]
    data = SftDataConfig.model_validate({"path": str(first), "mix": mix})
    run(build_config(tmp_path / "run", tiny_model, data, batch_conversations=4))
    lines = RunDirectory(tmp_path / "run").metrics.read_text().splitlines()
    records = map(json.loads, lines)
    tokens = {record["loss/ce/tokens/sum"] for record in records if "loss/ce/nll/mean" in record}
    assert tokens == {4 + 3 * 5}
    expected = model_bytes(tmp_path / "run")
    run(build_config(tmp_path / "run", tiny_model, data, resume_step=4, batch_conversations=4))
    assert model_bytes(tmp_path / "run") == expected


def test_a_checkpoint_behind_a_validation_holds_the_master_weights(
    tmp_path: Path, tiny_model: Path
) -> None:
    """A forward without a backward leaves embeddings and head gathered, in the compute dtype."""
    data = write_rows(tmp_path / "data.jsonl")
    validation = SftValidationConfig(path=str(data), interval_steps=1)
    run(build_config(tmp_path / "run", tiny_model, data, validation=validation))
    expected = model_bytes(tmp_path / "run")
    run(build_config(tmp_path / "run", tiny_model, data, validation=validation, resume_step=4))
    assert model_bytes(tmp_path / "run") == expected


def test_checkpoints_are_committed_and_pruned_by_the_run_itself(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = write_rows(tmp_path / "data.jsonl")
    settings = CheckpointConfig(interval_steps=1, keep_interval_steps=3)
    run(build_config(tmp_path / "run", tiny_model, data, checkpoint=settings))
    names = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step_00000003", "step_00000005", "step_00000006"]
    latest = CheckpointStore(RunDirectory(tmp_path / "run"), term=1).latest()
    assert latest is not None
    assert latest.label.parts == ["trainer"]


def test_a_row_that_was_drawn_may_not_change_and_another_may(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = write_rows(tmp_path / "data.jsonl")
    source = SftDataConfig(path=str(data), shuffle=False)
    run(build_config(tmp_path / "run", tiny_model, source, max_steps=2))
    write_rows(data, "xbcdefg")
    with pytest.raises(ConfigError, match="checkpoint 2"):
        run(build_config(tmp_path / "run", tiny_model, source, resume_step=2, max_steps=3))
    write_rows(data, "abcdefxy")
    run(build_config(tmp_path / "run", tiny_model, source, resume_step=2, max_steps=3))


@pytest.mark.shows("F36")
def test_a_stream_that_goes_on_with_another_number_of_ranks_gives_the_same_rows(
    tmp_path: Path, tiny_model: Path
) -> None:
    texts = [PlainText(str(n), letter, letter * 2) for n, letter in enumerate("abcdefg")]
    encoder = ConversationEncoder(load_tokenizer(ModelConfig(name=str(tiny_model))))
    config = build_config(tmp_path, tiny_model, tmp_path / "rows.jsonl")

    def rows(num_read: int, steps: int, num_ranks: int) -> list[list[str]]:
        """Of each step, over all ranks, from where `num_read` rows were read."""
        before = ConversationStream(texts, encoder, max_tokens=64, seed=5, shuffle=True)
        before.take(num_read)
        found: list[list[str]] = [[] for _ in range(steps)]
        for rank in range(num_ranks):
            stream = ConversationStream(texts, encoder, max_tokens=64, seed=5, shuffle=True)
            assert stream.resume_at(before.counters())
            world = World(rank, num_ranks, torch.device("cpu"), cast("DeviceMesh", None))
            batches = ConversationBatches(stream, config, world, 2000)
            for number, step in enumerate(found):
                micro_batches = batches.receive(number).micro_batches
                step += [name for it in micro_batches for name in it.sample_ids]
            assert batches.counters["conversations_read"] == num_read + 3 * steps
            batches.close()
        return [sorted(step) for step in found]

    assert rows(6, 4, 2) == rows(0, 6, 1)[2:]
    assert rows(6, 4, 1) == rows(0, 6, 2)[2:]


def test_the_loss_on_held_out_data_falls_and_is_not_trained_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = write_rows(tmp_path / "data.jsonl")
    held_out = write_rows(tmp_path / "held_out.jsonl", "hi")
    validation = SftValidationConfig(path=str(held_out), interval_steps=4)
    run(build_config(tmp_path / "with", tiny_model, data, validation=validation))
    run(build_config(tmp_path / "without", tiny_model, data))
    lines = (tmp_path / "with/metrics.jsonl").read_text().splitlines()
    records = {record["step"]: record for record in map(json.loads, lines)}
    measured = [step for step, record in records.items() if "validation/loss/mean" in record]
    assert measured == [3, 5]
    before = [record.get("validation/loss/before") for record in records.values()]
    assert before[0] == pytest.approx(math.log(100), abs=0.5), "of a model that knows nothing"
    assert before[1:] == [None] * 5
    assert records[3]["validation/tokens/sum"] == 2 * 4
    assert model_bytes(tmp_path / "with") == model_bytes(tmp_path / "without")


def test_a_run_ends_when_the_loss_on_held_out_data_no_longer_falls(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = write_rows(tmp_path / "data.jsonl", "aaaaaaa")
    validation = {"path": str(write_rows(tmp_path / "held_out.jsonl", "zy")), "interval_steps": 1}
    settings = {"max_steps": 40, "validation": SftValidationConfig(**validation, patience=2)}
    steps = {}
    for name, resumed in {"whole": (None,), "resumed": (None, 2)}.items():
        for resume_step in resumed:
            root = tmp_path / name
            if resume_step is not None:
                lines = (root / "metrics.jsonl").read_text().splitlines(keepends=True)
                (root / "metrics.jsonl").write_text("".join(lines[:resume_step]))
                shutil.rmtree(root / "model")
            run(build_config(root, tiny_model, data, resume_step=resume_step, **settings))
        losses = [
            json.loads(line)["validation/loss/mean"]
            for line in (root / "metrics.jsonl").read_text().splitlines()
        ]
        steps[name] = len(losses)
        assert 2 < len(losses) < 40
        assert min(losses[-2:]) > min(losses[:-2])
        assert RunDirectory(root).good_ends["stalled"].is_file()
    assert steps["whole"] == steps["resumed"]
    assert model_bytes(tmp_path / "whole") == model_bytes(tmp_path / "resumed")


def test_held_out_data_with_nothing_to_learn_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl")
    held_out = write_rows(tmp_path / "held_out.jsonl", ["h" * 100])  # type: ignore[arg-type]
    validation = SftValidationConfig(path=str(held_out))
    with pytest.raises(ConfigError, match=r"validation\.path"):
        run(build_config(tmp_path / "run", tiny_model, data, validation=validation))
