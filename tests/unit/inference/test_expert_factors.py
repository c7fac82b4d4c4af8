"""What vLLM's own loader makes of adapters on experts, though its build for CPUs applies none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_families import family_folder, our_policy
from safetensors.torch import save_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper

from gradus.config import LoraConfig
from gradus.trainer.model.lora import (
    LoraExperts,
    adapted_layers,
    adapter_files,
    adapter_tensors,
    add_adapters,
)

pytestmark = pytest.mark.torch

LORA = LoraConfig(rank=2, alpha=6, target_modules=["experts"])
EXPERTS = 8


@pytest.mark.parametrize(
    ("case", "architecture", "is_split"),
    [
        ("gpt_oss", "GptOssForCausalLM", False),
        ("gpt_oss", "GptOssForCausalLM", True),
        ("qwen3_moe", "Qwen3MoeForCausalLM", True),
        ("glm4_moe", "Glm4MoeForCausalLM", True),
    ],
)
def test_vllm_reads_the_factors_of_each_expert(
    tmp_path: Path, case: str, architecture: str, is_split: bool
) -> None:
    """Split into gate and up, as it does with `enable_mixed_moe_lora_format`, or as one."""
    policy = our_policy(case)
    add_adapters(policy.model, LORA, torch.float32)
    factors: dict[str, Any] = {
        name: layer
        for name, layer in adapted_layers(policy.model).items()
        if isinstance(layer, LoraExperts)
    }
    for layer in factors.values():
        torch.nn.init.normal_(layer.lora_B)
    files = adapter_files(policy.model, LORA, str(family_folder(case)), "0ff1ce")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    stored = dict(adapter_tensors(policy.model, torch.float32))
    save_file(stored, tmp_path / "adapter_model.safetensors")
    helper = PEFTHelper.from_local_dir(str(tmp_path), None)
    read = LoRAModel.from_local_checkpoint(
        str(tmp_path), {"experts"}, helper, lora_model_id=1, device="cpu"
    )
    manager: Any = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(architectures=[architecture])),
        _is_3d_moe_model=True,
        _get_lora_layer_weights=lambda lora, name: lora.get_lora(name),
    )
    stack = torch.empty(1, EXPERTS, 2, 1)
    module: Any = SimpleNamespace(
        local_num_experts=EXPERTS, global_num_experts=EXPERTS, ep_rank=0, w13_lora_a_stacked=[stack]
    )
    way: Any = LoRAModelManager
    change = way._convert_3d_to_2d_moe_lora if is_split else way._stack_moe_lora_weights
    owners = {name.rpartition(".")[0] for name in factors}
    for owner in owners:
        change(manager, read, module, owner)
        loaded: Any = read.get_lora(owner)
        assert loaded.lora_alpha / loaded.rank == 3
        a, b = (factors[f"{owner}.{leaf}"] for leaf in ("gate_up_proj", "down_proj"))
        expected_a, expected_b = [a.lora_A, b.lora_A], [a.lora_B, b.lora_B]
        if is_split:
            is_interleaved = case == "gpt_oss"
            size = a.lora_B.shape[1] // 2
            halves = (
                (a.lora_B[:, ::2], a.lora_B[:, 1::2]) if is_interleaved else a.lora_B.split(size, 1)
            )
            expected_a = [a.lora_A, b.lora_A, a.lora_A]
            expected_b = [halves[0], b.lora_B, halves[1]]
        for found, expected in ((loaded.lora_a, expected_a), (loaded.lora_b, expected_b)):
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
