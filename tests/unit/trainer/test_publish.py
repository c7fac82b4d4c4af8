"""What is published loads as a Hugging Face model and equals the trained weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample
from model_families import our_policy
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from gradus.config import ModelConfig, learning
from gradus.errors import ConfigError, CorruptStateError, StorageError
from gradus.run.paths import RunDirectory
from gradus.testing.tiny_model import build_tiny_model
from gradus.tokenizing import reply_end
from gradus.trainer.distributed import World
from gradus.trainer.losses import Dppo
from gradus.trainer.model.load import load_model, load_tokenizer
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.model.stored import layer_of
from gradus.trainer.publish import (
    PolicyCopy,
    PolicyPublisher,
    WeightSnapshot,
    model_files,
    save_model,
    serving_tensors,
)
from gradus.trainer.step import GradientStep
from gradus.weights.broadcast import BroadcastSettings, BroadcastWeights
from gradus.weights.buckets import PackedSnapshot
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import Published, verify_version
from gradus.weights.publishing_thread import PublishingThread
from gradus.weights.receiver import StreamReceiver

pytestmark = pytest.mark.torch


def config_of(directory: Path) -> ModelConfig:
    return ModelConfig(name=str(directory))


@contextlib.contextmanager
def build_publisher(
    policy: PolicyModel, world: World, weights: Any, dtype: torch.dtype = torch.float32
) -> Iterator[PolicyPublisher]:
    with PublishingThread() as thread:
        yield PolicyPublisher(policy.model, world, dtype=dtype, weights=weights, thread=thread)


def test_a_published_version_is_the_model_in_the_serving_dtype(
    build_policy: Callable[..., PolicyModel], tiny_model: Path, world: World, tmp_path: Path
) -> None:
    policy = build_policy(torch.bfloat16)
    files = model_files(policy.model, load_tokenizer(config_of(tiny_model)), torch.bfloat16)
    weights = FilesystemWeights(RunDirectory(tmp_path), term=0, extra_files=files)
    with build_publisher(policy, world, weights, torch.bfloat16) as publisher:
        pending = publisher.publish_version(1)
        publisher.thread.wait()
    assert pending is not None
    published = pending.published
    verify_version(published.directory, published.digest)
    stored = load_file(published.directory / "model.safetensors")
    trained = dict(policy.model.named_parameters())
    assert stored.keys() == trained.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, trained[name].full_tensor().bfloat16())


@pytest.mark.parametrize("snapshot", [WeightSnapshot(), PackedSnapshot(torch.device("cpu"), 4096)])
def test_what_is_broadcast_is_bit_by_bit_what_would_be_written(
    snapshot: PolicyCopy, build_policy: Callable[..., PolicyModel], world: World, tmp_path: Path
) -> None:
    policy = build_policy(torch.bfloat16)
    settings = BroadcastSettings(
        num_receivers=1, device=world.device, timeout_seconds=20.0, bucket_bytes=4096
    )
    assert settings.snapshot() is None
    run_dir = RunDirectory(tmp_path)
    with (
        closing(BroadcastWeights(run_dir, term=0, extra_files={}, settings=settings)) as weights,
        PublishingThread() as thread,
    ):
        publisher = PolicyPublisher(
            *(policy.model, world, torch.bfloat16, weights, thread), snapshot=snapshot
        )
        pending = publisher.publish_version(1)
        thread.wait()
        assert pending is not None
        receiver = StreamReceiver(0, world.device, timeout_seconds=20.0)
        received = dict(receiver.receive(pending.published.directory))
    written = dict(serving_tensors(policy.model, torch.bfloat16))
    assert received.keys() == written.keys()
    assert all(torch.equal(received[name], value) for name, value in written.items())


def test_a_saved_model_loads_with_its_tokenizer(
    build_policy: Callable[..., PolicyModel], tiny_model: Path, world: World, tmp_path: Path
) -> None:
    policy = build_policy()
    files = model_files(policy.model, load_tokenizer(config_of(tiny_model)), torch.float32)
    for _ in range(2):  # The second time replaces the first.
        save_model(policy.model, world, torch.float32, tmp_path / "model", files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32
    original = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert all(torch.equal(value, original[name]) for name, value in loaded.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_models_and_versions_are_written_where_a_link_to_another_disk_leads(
    build_policy: Callable[..., PolicyModel], world: World, tmp_path: Path
) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.root.mkdir()
    for folder in (run_dir.model, run_dir.weights):
        (tmp_path / "large" / folder.name).mkdir(parents=True)
        folder.symlink_to(tmp_path / "large" / folder.name)
    for _ in range(2):
        save_model(build_policy().model, world, torch.float32, run_dir.model, {})
    weights = FilesystemWeights(run_dir, term=0, extra_files={})
    weights.publish_version(1, [("w", torch.zeros(2))])
    assert run_dir.model.is_symlink()
    assert (tmp_path / "large" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "large" / "weights" / "version_00000001" / "manifest.json").is_file()


def test_tied_embeddings_are_stored_once(world: World, tmp_path: Path) -> None:
    directory = build_tiny_model(
        tmp_path / "tied", hidden_size=32, num_layers=1, tie_word_embeddings=True
    )
    policy = shard_model(
        PolicyModel(load_model(config_of(directory), world.device)), world.mesh, torch.float32
    )
    names = {name for name, _ in serving_tensors(policy.model, torch.bfloat16)}
    assert names == set(load_file(directory / "model.safetensors"))
    assert "lm_head.weight" not in names


def test_ranks_that_do_not_write_keep_nothing(
    build_policy: Callable[..., PolicyModel],
) -> None:
    assert list(serving_tensors(build_policy().model, torch.bfloat16, keep=False)) == []


class GatedWeights:
    """Writes a version once it is let; keeps what it was given as numbers."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.may_write = threading.Event()
        self.error = error
        self.written: list[tuple[int, dict[str, Tensor]]] = []
        self.num_written_before: list[int] = []
        """Versions that were written whenever the next one asked for room."""
        self.is_closed = False

    def wait_for_room(self) -> None:
        self.num_written_before.append(len(self.written))

    def publish_version(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        assert self.may_write.wait(timeout=60)
        if self.error is not None:
            raise self.error
        self.written.append((version, {name: tensor.clone() for name, tensor in tensors}))
        return Published(version, Path("weights"), "digest")

    def drain(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def test_a_version_is_of_its_step_whatever_the_next_one_does_to_the_weights(
    build_policy: Callable[..., PolicyModel], world: World
) -> None:
    policy, weights = build_policy(), GatedWeights()
    with build_publisher(policy, world, weights) as publisher:
        before = {name: p.full_tensor().clone() for name, p in policy.model.named_parameters()}
        publisher.publish_version(1)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1.0)
        weights.may_write.set()
        publisher.publish_version(2)
        publisher.finish()
    assert [version for version, _ in weights.written] == [1, 2]
    (_, first), (_, second) = weights.written
    assert first.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(first[name], tensor)
        assert torch.equal(second[name], tensor + 1.0)
    assert weights.is_closed


def test_a_step_goes_on_while_its_version_is_written_and_waits_for_it_with_the_next(
    build_policy: Callable[..., PolicyModel], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = GatedWeights()
    with build_publisher(build_policy(), world, weights) as publisher:
        publisher.publish_version(1)
        wait = publisher.thread.wait

        def let_it_write_and_wait() -> None:
            assert weights.written == []
            weights.may_write.set()
            wait()

        monkeypatch.setattr(publisher.thread, "wait", let_it_write_and_wait)
        publisher.publish_version(2)
        monkeypatch.undo()
        publisher.finish()
    assert weights.num_written_before == [0, 1]
    assert [version for version, _ in weights.written] == [1, 2]


@pytest.mark.parametrize("where", ["next version", "end"])
def test_a_write_that_fails_is_raised_by_what_comes_next(
    build_policy: Callable[..., PolicyModel], world: World, where: str
) -> None:
    weights = GatedWeights(error=StorageError("disk full"))
    weights.may_write.set()
    told: list[int] = []
    with build_publisher(build_policy(), world, weights) as publisher:
        pending = publisher.publish_version(1)
        assert pending is not None
        with contextlib.suppress(StorageError):  # It may have failed already.
            publisher.thread.submit(lambda: told.append(pending.published.version))
        with pytest.raises(StorageError, match="disk full"):
            publisher.finish() if where == "end" else publisher.publish_version(2)
    assert told == [], "nobody hears of what is not there"


def test_weights_that_cannot_be_gathered_end_the_step(
    build_policy: Callable[..., PolicyModel], world: World
) -> None:
    def broken(*_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.zeros(1)
        raise RuntimeError("a rank died")

    weights = GatedWeights()
    with build_publisher(build_policy(), world, weights) as publisher:
        publisher = dataclasses.replace(publisher, served=broken)
        with pytest.raises(RuntimeError, match="a rank died"):
            publisher.publish_version(1)
        publisher.thread.wait()
    assert weights.written == []


def test_files_beside_the_weights_say_the_serving_dtype(tiny_model: Path, world: World) -> None:
    model = load_model(config_of(tiny_model), world.device)
    files = model_files(model, load_tokenizer(config_of(tiny_model)), torch.bfloat16)
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files.keys()
    assert b'"bfloat16"' in files["config.json"]
    assert b"gradus" not in files["config.json"]


def test_a_llama_trains_like_any_other_model(world: World, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    policy = shard_model(
        PolicyModel(load_model(config_of(tmp_path), world.device)), world.mesh, torch.float32
    )
    samples = [build_sample(9, seed=1), build_sample(5, seed=2)]
    step = GradientStep(policy, Dppo(learning.DppoConfig()), world)
    together = step.run([build_micro_batch(samples)])
    packed = {n: p.grad.full_tensor().clone() for n, p in policy.named_parameters()}
    policy.zero_grad()
    apart = step.run([build_micro_batch([sample]) for sample in samples])
    assert together.total == pytest.approx(apart.total, rel=1e-5)
    for name, parameter in policy.named_parameters():
        np.testing.assert_allclose(parameter.grad.full_tensor(), packed[name], rtol=1e-3, atol=1e-6)


def test_a_missing_model_is_a_config_error(tmp_path: Path, world: World) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(config_of(tmp_path / "nothing"), world.device)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(config_of(tmp_path / "nothing"))


def test_damaged_or_incomplete_weights_are_refused(
    tiny_model: Path, tmp_path: Path, world: World
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptStateError, match=r"model\.norm\.weight"):
        load_model(config_of(directory), world.device)
    os.truncate(directory / "model.safetensors", 1000)
    with pytest.raises(CorruptStateError, match="damaged"):
        load_model(config_of(directory), world.device)


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_what_lies_beside_the_weights_is_the_base_models_own(
    kind: str, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    """Keys and files of an older transformers; only the dtype, and a class that misreads
    tokenizer.json, are written anew."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    old = {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "float16", "of_others": [1]}
    kept = {key: it for key, it in config.items() if key not in ("dtype", "layer_types")} | old
    (folder / "config.json").write_text(json.dumps(kept, indent=1))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    written = json.dumps({**settings, "tokenizer_class": kind, "of_others": 1})
    (folder / "tokenizer_config.json").write_text(written)
    odd = {"eos_token_id": [99, 97], "temperature": 0.6, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(odd))
    for name in ("vocab.json", "merges.txt", "special_tokens_map.json", "preprocessor_config.json"):
        (folder / name).write_text(f'{{"{name}": 1}}')
    model = load_model(config_of(folder), world.device)
    files = model_files(model, load_tokenizer(config_of(folder)), torch.bfloat16)
    assert rope["rope_theta"] != model.config.rope_parameters["rope_theta"] == 5e5
    found = json.loads(files["config.json"])
    assert found == {**kept, "torch_dtype": "bfloat16"}
    assert files.keys() == {it.name for it in folder.iterdir()} - {"model.safetensors"}
    changed = {"config.json"}
    if kind.startswith("Llama"):  # 4.57 and 5 read the file by this name, whatever the model.
        changed |= {"tokenizer_config.json"}
        expected = {**json.loads(written), "tokenizer_class": "PreTrainedTokenizerFast"}
        assert json.loads(files["tokenizer_config.json"]) == expected
    assert {it for it in files if files[it] != (folder / it).read_bytes()} == changed


def test_an_end_that_the_template_teaches_stands_beside_those_of_the_base(
    tiny_model: Path, tmp_path: Path, world: World
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    for name, change in {
        "generation_config.json": {"eos_token_id": 97},
        "config.json": {"eos_token_id": 97},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }.items():
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    model, tokenizer = (
        load_model(config_of(folder), world.device),
        load_tokenizer(config_of(folder)),
    )
    assert reply_end(tokenizer, [97]).warning
    files = model_files(model, tokenizer, torch.bfloat16)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [97, 99]
    assert not reply_end(tokenizer, [97, 99]).warning
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n{% endfor %}"
    none = reply_end(tokenizer, [97, 99])
    assert (none.new, bool(none.warning)) == (None, True)


@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe", "granitemoe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_taken_apart_without_a_copy_before_that_of_the_version(
    case: str, dtype: torch.dtype
) -> None:
    """What is placed are parts of the trained weights themselves, in the names of the files."""
    model = our_policy(case).model
    state = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    masters = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    seen: dict[str, tuple[torch.dtype, bool]] = {}

    def place(name: str, tensor: Tensor, served: torch.dtype) -> Tensor:
        seen[name] = served, tensor.untyped_storage().data_ptr() in masters
        return tensor.to(served, copy=True)

    placed = dict(serving_tensors(model, dtype, place=place))
    buffers = {name for name in seen if name.endswith("e_score_correction_bias")}
    assert {name for name, (served, _) in seen.items() if served != dtype} <= buffers
    assert all(is_part for _, is_part in seen.values())
    together = revert_weight_conversion(model, {name: it.clone() for name, it in state.items()})
    assert placed.keys() == together.keys()
    for name, tensor in placed.items():
        assert torch.equal(tensor, together[name].to(tensor.dtype)), name


def test_layers_are_gathered_one_after_the_other() -> None:
    """No more of them is whole at a time, which one GPU may have no room for."""
    model = our_policy("qwen3_moe").model
    layers = [layer_of(name) for name, _ in serving_tensors(model, torch.bfloat16)]
    assert [layer for layer, _ in groupby(layers)] == [None, "0", "1", "2", "3", None]
