"""Compares ranks that share the tokens of a row with one rank that has it whole.

    python context_ranks.py STYLE CASE...

Each rank runs it. For each case of `model_families` the first prints one line of JSON: how far the
logprobs of one row are from those of one rank, in nats, and the gradients, relative to their norm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_stand_in import stand_in_gpu
from model_families import (
    CPU,
    LENGTHS,
    distance,
    family_config,
    family_folder,
    gradients,
    packed_logprobs,
    samples,
)

from gradus.config import LoraConfig
from gradus.errors import ConfigError
from gradus.trainer.distributed import ContextGroup, join_world
from gradus.trainer.model.cpu.fused import fuse_layers
from gradus.trainer.model.layers import decoder_layers, recompute_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import adapted_layers, add_adapters
from gradus.trainer.model.policy_model import PolicyModel

WORDS = ("gpu", "full", "selective", "adapters")
"""What may stand behind a case, after a +: the GPU's code, recomputed layers, adapters."""


def policy_of(case: str, words: list[str], context: ContextGroup | None) -> PolicyModel:
    model = load_model(family_config(family_folder(case)), CPU)
    if "adapters" in words:
        torch.manual_seed(7)
        add_adapters(model, LoraConfig(rank=2), torch.float32)
        for layer in adapted_layers(model).values():
            torch.nn.init.normal_(layer.lora_B, std=0.02)
    platform = stand_in_gpu(takes_float32=True)[0] if "gpu" in words else None
    policy = PolicyModel(model, context, platform=platform)
    fuse_layers(policy.model)
    for mode in ("full", "selective"):
        if mode in words:
            recompute_layers(decoder_layers(model), mode)
    return policy


def compared(name: str, context: ContextGroup) -> dict[str, Any]:
    case, *words = name.split("+")
    found = samples(LENGTHS)
    shared = policy_of(case, words, context)
    ours = packed_logprobs(shared, found)
    gradients(shared.model, ours)  # of this rank's tokens
    grads = dict(_summed(shared, context))
    if context.rank:
        return {}
    whole = policy_of(case, words, None)
    own = packed_logprobs(whole, found)
    wanted = gradients(whole.model, own)
    norm = torch.stack([it.norm() for it in grads.values()]).norm()
    apart = max(float((grads[key] / norm - it).abs().max()) for key, it in wanted.items())
    return {"case": name, "logprobs": distance(ours, own), "gradient": apart}


def _summed(policy: PolicyModel, context: ContextGroup) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.clone()
            dist.all_reduce(gradient, group=context.group)
            yield name, gradient


def main(style: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    for case in cases:
        family_folder(case.partition("+")[0])  # before there are ranks
    with join_world(CPU) as alone:
        size = alone.size
        assert dist.group.WORLD is not None
        context = ContextGroup(alone.rank, size, dist.group.WORLD, style == "ring")
        for case in cases:
            try:
                found = compared(case, context)
            except ConfigError as error:
                found = {"case": case, "error": str(error)}
            if alone.is_first:
                sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
