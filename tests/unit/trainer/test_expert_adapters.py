"""Adapters on the experts of a mixture: each expert has its own, and every reader finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_run
from model_families import (
    FAMILIES,
    adapted,
    distance,
    family_config,
    family_folder,
    our_policy,
    own_logprobs,
    packed_logprobs,
    plain_model,
    samples,
)
from ranked_families import told

from gradus.config import AdamWConfig, LoraConfig, ServedLoraConfig, TrainerConfig, learning
from gradus.config.families import ADAPTED_EXPERTS
from gradus.errors import ConfigError
from gradus.files import DurableFiles
from gradus.plan.memory import read_model_shape
from gradus.run.checkpoints import CheckpointStore
from gradus.trainer.checkpoint.saving import resume
from gradus.trainer.checkpoint.training_state import Origin, TrainingState
from gradus.trainer.distributed import CPU, World, whole_tensor
from gradus.trainer.losses import Dppo
from gradus.trainer.model.build import build_policy
from gradus.trainer.model.layers import compile_layers, decoder_layers, recompute_layers
from gradus.trainer.model.lora import (
    LoraExperts,
    adapted_layers,
    adapter_config,
    adapter_files,
    add_adapters,
    freeze,
    load_adapter,
)
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.probe import refuse_inexact
from gradus.trainer.model.reference import Reference
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.publish import save_model
from gradus.trainer.step import GradientStep
from gradus.trainer.throughput import ModelFlops
from gradus.wire.packing import pack

pytestmark = pytest.mark.torch

KINDS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "llama4")
"""Alone, with shared ones, after latent attention, transposed with biases, without a gate, with
weighted inputs."""
LORA = LoraConfig(rank=2, alpha=6, target_modules=["experts"])
DENSE = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"]


def with_adapters(case: str, targets: list[str] | None = None) -> PolicyModel:
    """Whose factors all differ from zero."""
    policy = our_policy(case)
    lora = LORA if targets is None else LORA.model_copy(update={"target_modules": targets})
    add_adapters(policy.model, lora, torch.float32)
    for layer in adapted_layers(policy.model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    return policy


def logprobs_of(policy: PolicyModel) -> list[torch.Tensor]:
    with torch.no_grad():
        return packed_logprobs(policy, samples((9, 70)))


@pytest.mark.parametrize("case", KINDS)
def test_a_model_with_trained_adapters_on_experts_is_its_own_forward(
    case: str, world: World
) -> None:
    """As the probe asks when a run resumes."""
    refuse_inexact(with_adapters(case), world)


def written(policy: PolicyModel, world: World, folder: Path, case: str) -> Path:
    files = adapter_files(policy.model, LORA, str(family_folder(case)), "0ff1ce")
    save_model(policy.model, world, torch.float32, folder, files, is_adapter=True)
    return folder


@pytest.mark.parametrize("case", KINDS)
def test_adapted_experts_compute_what_the_merged_ones_do_one_by_one(case: str) -> None:
    found, leaves = adapted(case, ["experts"])
    assert found <= 1e-5
    assert leaves[0] == "down_proj"
    assert len(leaves) == 2
    assert FAMILIES[case][0] in ADAPTED_EXPERTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "targets"),
    [
        *(("glm4_moe", DENSE), ("gpt_oss", ["q_proj", "experts"]), ("qwen3_moe", ["experts"])),
        ("llama4", ["experts"]),
    ],
)
def test_peft_reads_the_adapter_and_computes_the_same(
    tmp_path: Path, world: World, case: str, targets: list[str]
) -> None:
    peft = pytest.importorskip("peft")
    policy = with_adapters(case, targets)
    folder = written(policy, world, tmp_path / "adapter", case)
    with torch.no_grad():
        bare = own_logprobs(plain_model(case), samples((9, 70)))
        read = peft.PeftModel.from_pretrained(plain_model(case), str(folder))
        theirs = own_logprobs(read, samples((9, 70)))
    assert distance(logprobs_of(policy), theirs) <= 1e-5
    assert distance(bare, theirs) > 0.1


@pytest.mark.parametrize("case", ["nemotron_h", "gpt_oss", "glm4_moe", "llama4"])
def test_a_written_adapter_is_read_again_bit_by_bit(
    tmp_path: Path, world: World, case: str
) -> None:
    targets = ["experts", "q_proj", *(["up_proj"] if case != "gpt_oss" else [])]
    policy, again = with_adapters(case, targets), our_policy(case)
    folder = written(policy, world, tmp_path / "adapter", case)
    settings = json.loads((folder / "adapter_config.json").read_bytes())
    assert adapter_config(settings) == LORA.model_copy(update={"target_modules": sorted(targets)})
    add_adapters(again.model, adapter_config(settings), torch.float32)
    load_adapter(again.model, folder)
    found = again.model.state_dict()
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_experts_get_no_adapter_unless_they_are_named() -> None:
    policy = our_policy("qwen3_moe")
    add_adapters(policy.model, LoraConfig(rank=2), torch.float32)
    assert not any(isinstance(it, LoraExperts) for it in adapted_layers(policy.model).values())


def test_the_experts_of_a_dense_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['experts'\].*q_proj"):
        add_adapters(our_policy("llama").model, LORA, torch.float32)


def test_with_its_adapters_off_a_policy_is_its_base() -> None:
    policy = with_adapters("glm4_moe")
    expected = logprobs_of(our_policy("glm4_moe"))
    with Reference(policy, CPU)._without_adapters():
        assert distance(logprobs_of(policy), expected) <= 2e-6
    assert distance(logprobs_of(policy), expected) > 0.1


def test_gradients_are_those_of_the_stacked_weights() -> None:
    """At the start B = 0: dL/dB = scale · dL/dW Aᵀ of each expert, and dL/dA = 0."""
    full, policy = our_policy("qwen3_moe"), our_policy("qwen3_moe")
    add_adapters(policy.model, LORA, torch.float32)
    for it in (full, policy):
        torch.cat(packed_logprobs(it, samples((9, 70)))).sum().backward()
    for name, layer in adapted_layers(policy.model).items():
        dense = full.model.get_parameter(name).grad
        assert dense is not None
        assert layer.lora_B.grad is not None
        expected = layer.scale * dense @ layer.lora_A.detach().mT
        torch.testing.assert_close(layer.lora_B.grad, expected, atol=1e-5, rtol=1e-4)
        assert not torch.any(layer.lora_A.grad)  # type: ignore[arg-type]


def test_meter_and_memory_count_the_factors_of_the_chosen_experts() -> None:
    policy = our_policy("gpt_oss")
    freeze(policy.model.parameters(), torch.float32)
    base = ModelFlops.of(policy.model).per_token
    add_adapters(policy.model, LORA, torch.float32)
    factors = [p for p in policy.model.parameters() if p.requires_grad]
    used = sum(it.numel() for it in factors) * 2 / 8
    assert ModelFlops.of(policy.model).per_token - base == pytest.approx(6 * used)
    shape = read_model_shape(family_folder("gpt_oss"))
    assert shape is not None
    assert shape.num_adapter_parameters(2, ["experts"]) == sum(it.numel() for it in factors)


def state_of(world: World, *, is_resumed: bool = False) -> TrainingState:
    torch.manual_seed(1)
    settings = TrainerConfig(lora=ServedLoraConfig(**{**LORA.model_dump(), "serve": "merged"}))
    base = family_config(family_folder("glm4_moe"))
    policy = build_policy(base, settings, world, torch.float32, is_resumed=is_resumed)
    rule = PolicyOptimizer(
        policy, AdamWConfig(lr=1e-2), max_steps=4, max_skipped_steps=1, world=world
    )
    origin = Origin(model={}, compute_dtype="float32", lora=LORA.model_dump())
    return TrainingState(policy, rule, world, origin)


def weights_of(state: TrainingState) -> dict[str, torch.Tensor]:
    named = state.policy.model.named_parameters()
    return {name: whole_tensor(p).detach().clone() for name, p in named}


def test_training_moves_the_factors_alone_and_resumes_bit_by_bit(
    tmp_path: Path, world: World
) -> None:
    def learn(state: TrainingState, step: int) -> float:
        batch = [told(it) for it in samples((65, 9))]
        (micro_batches,) = pack(batch, max_tokens=128, num_ranks=1)
        loss = GradientStep(state.policy, Dppo(learning.DppoConfig()), world).run(micro_batches)
        state.optimizer.step(step)
        return loss.total

    checkpoints, state = CheckpointStore(new_run(tmp_path), 1), state_of(world)
    before = weights_of(state)
    losses = [learn(state, 0)]
    state.snapshot(1, {}).write(checkpoints.staging(1), 0, DurableFiles())
    checkpoints.commit(1, ["trainer"])
    losses += [learn(state, step) for step in (1, 2, 3)]
    assert losses[-1] < losses[0]
    found = weights_of(state)
    moved = {name for name in found if not torch.equal(found[name], before[name])}
    assert moved == {name for name in found if ".lora." in name}
    again: Any = state_of(world, is_resumed=True)
    resume(again, CheckpointStore(checkpoints.run_dir, 2), 1)
    assert [learn(again, step) for step in (1, 2, 3)] == losses[1:]
    resumed = weights_of(again)
    assert [name for name in found if not torch.equal(found[name], resumed[name])] == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("mode", ["full", "compiled"])
def test_layers_that_are_computed_again_or_compiled_have_them_too(mode: str) -> None:
    found = []
    for is_changed in (False, True):
        policy = our_policy("gpt_oss")
        torch.manual_seed(0)
        add_adapters(policy.model, LORA, torch.float32)
        layers = decoder_layers(policy.model)
        if is_changed and mode == "compiled":
            compile_layers(layers, backend="eager")
        elif is_changed:
            recompute_layers(layers, "full")
        torch.cat(packed_logprobs(policy, samples((9, 70)))).sum().backward()
        found.append([it.lora_B.grad for it in adapted_layers(policy.model).values()])
    assert all(map(torch.equal, *found))
    assert all(it is not None and it.any() for it in found[0])


def test_in_bfloat16_factors_stay_float32_and_learn(world: World) -> None:
    settings = TrainerConfig(lora=ServedLoraConfig(**{**LORA.model_dump(), "serve": "merged"}))
    base = family_config(family_folder("qwen3_moe"))
    policy = build_policy(base, settings, world, torch.bfloat16)
    batch = pack([told(it) for it in samples((65, 9))], max_tokens=128, num_ranks=1)[0]
    GradientStep(policy, Dppo(learning.DppoConfig()), world).run(batch)
    for name, parameter in policy.model.named_parameters():
        is_factor = ".lora." in name
        assert parameter.dtype == (torch.float32 if is_factor else torch.bfloat16), name
        assert (parameter.grad is not None) == is_factor, name
