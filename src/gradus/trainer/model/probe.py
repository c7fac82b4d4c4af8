"""A policy that is ready to train reads a few tokens twice: packed, and by the model's own forward.

Training takes a model apart: attention runs packed in its own kernel, layers are fused or
compiled, and logprobs come from the last hidden states without the model's own head code. Anything
else that an architecture does (caps on logits, state between tokens, special masks, layers after
the last hidden state) would be silently left out; here it shows as a different logprob. The probe
runs where training will, on the shards, in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gradus.errors import ConfigError, GradusError
from gradus.heartbeat import FIRST_STEP_SECONDS, busy
from gradus.log import get_logger
from gradus.trainer.distributed import World, named_failures
from gradus.trainer.images.tower import packed_attention_of
from gradus.trainer.model.experts.products import (
    EXPERTS_NAME,
    OWN_EXPERTS_NAME,
    expert_modules,
)
from gradus.trainer.model.policy_model import PolicyModel, output_head, vocabulary_size
from gradus.trainer.model.shard import release_gathered
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.tokens import TokenArrays

logger = get_logger(__name__)

_LENGTHS = (9, 7)
"""Tokens of the two samples; the second would see what leaks out of the first."""
_LARGEST_DISTANCE = 1e-3
"""Nats between logprobs of the median token in float32, which moves them by 1e-5; one token may
move more, where it changes the experts that a router chooses."""
_USUAL_LOGPROB = 100.0
"""Nats below 0; where one lies lower, all of them are rounded as much more."""
_ROUNDING = 6.0
"""In a shorter dtype, the distance allowed over that between two of the model's own forwards, which
differ by rounding alone."""
_LARGEST_ROUNDING = 0.25
"""Nats; a model whose own forwards differ by more could hide anything behind its rounding, so that
nothing is decided. Allowed where a model has one forward alone."""
_WORDS = 16384
"""Words whose logits the reference computes at once."""
_LEAST_ROUNDING = 0.05
"""Nats that are always allowed in a shorter dtype: two forwards may round alike by chance."""


@busy("the first forward", FIRST_STEP_SECONDS)
def refuse_inexact(policy: PolicyModel, world: World) -> None:
    """ConfigError when packed logprobs are not those of the model's own forward.

    A collective: all ranks call it, and all come to the same answer.
    """
    model, device = policy.model, world.device
    name = model.config.name_or_path
    micro_batch = _probe(vocabulary_size(model))
    try:
        with named_failures("compare the sharded model with its own forward"):
            packed = _packed_logprobs(policy, micro_batch, device)
    except (GradusError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"model {name!r} ({type(model).__name__}) cannot read packed samples "
            f"({type(error).__name__}: {error}); use another model"
        ) from error
    token_ids = _rows(micro_batch).to(device)
    with _by_itself(policy) as dtype:
        own = _own_logprobs(policy, token_ids, "eager")
        if not world.all_agree(all(bool(row.isfinite().all()) for row in own)):
            raise ConfigError(
                f"model {name!r} ({type(model).__name__}) by itself gives logprobs that are not "
                f"numbers on {device} in {_word(dtype)}: its weights hold NaN, or numbers too "
                "large for that dtype; fetch it again, or use another compute_dtype"
            )
        found = world.maxima({"found": _distance(packed, own)})["found"]
        allowed = _LEAST_ROUNDING
        if dtype == torch.float32:
            largest = max(float(row.abs().max()) for row in own)
            largest = world.maxima({"largest": largest})["largest"]
            allowed = _LARGEST_DISTANCE * max(1.0, largest / _USUAL_LOGPROB)
        elif found > allowed:
            allowed = max(allowed, _rounding(policy, token_ids, own, world))
    if _LARGEST_ROUNDING < found <= allowed and world.is_first:
        logger.warning(
            "packed logprobs of model %r differ from those of its own forward by %.2g nats on %s "
            "in %s, and so do two of its own forwards: rounding could hide anything in this dtype, "
            "so look at mismatch_kl",
            name,
            found,
            device,
            _word(dtype),
        )
    if found > allowed:
        raise ConfigError(
            f"model {name!r} ({type(model).__name__}) computes something that packed training "
            f"leaves out: logprobs differ by {found:.2g} nats on {device} in {_word(dtype)}, where "
            f"{allowed:.2g} may be rounding; use another model"
        )
    logger.info(
        "packed logprobs are those of the model's own forward: within %.2g nats on %s in %s",
        found,
        device,
        _word(dtype),
    )


def _probe(vocabulary: int) -> MicroBatch:
    """Two samples of tokens from the middle of the vocabulary, away from special tokens."""
    first, count = vocabulary // 4, max(1, vocabulary // 2)
    num_tokens = sum(_LENGTHS)
    token_ids = first + (np.arange(num_tokens) * 7919) % count
    weights = {"ce": np.ones(num_tokens, np.float32)}
    return MicroBatch(["probe/0", "probe/1"], list(_LENGTHS), TokenArrays.build(token_ids, weights))


@torch.no_grad()
def _packed_logprobs(
    policy: PolicyModel, micro_batch: MicroBatch, device: torch.device
) -> list[Tensor]:
    """Of each sample, without its first token; through everything that training runs through."""
    logprobs = policy(TrainTensors.build(micro_batch, device)).logprobs
    return [sample[1:] for sample in torch.split(logprobs, list(_LENGTHS))]


@contextmanager
def _by_itself(policy: PolicyModel) -> Iterator[torch.dtype]:
    """The model with its own code, parameters gathered; gives the dtype that it computes in.

    Fused, compiled and recomputing forwards stand in the modules' own dictionaries, in front of
    those of their classes.
    """
    replaced = [
        (module, module.__dict__.pop("forward"))
        for module in policy.model.modules()
        if "forward" in module.__dict__
    ]
    if isinstance(policy, FSDPModule):
        # The root gathers what lies outside of layers only in its own forward.
        policy.unshard()
    has_experts = bool(expert_modules(policy))
    if has_experts:
        policy.model.set_experts_implementation(OWN_EXPERTS_NAME)
    try:
        yield output_head(policy.model).weight.dtype
    finally:
        release_gathered(policy)
        for module, forward in replaced:
            module.forward = forward
        policy.model.set_attn_implementation(packed_attention_of(policy.model.config))
        if has_experts:
            policy.model.set_experts_implementation(EXPERTS_NAME)


@torch.no_grad()
def _own_logprobs(policy: PolicyModel, token_ids: Tensor, attention: str) -> list[Tensor]:
    """The same by transformers alone, each sample in a separate row."""
    model = policy.model
    model.set_attn_implementation(attention)
    # Training does not round its logits either.
    hook = output_head(model).register_forward_hook(_unrounded)
    try:
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
    finally:
        hook.remove()
    logprobs = torch.log_softmax(logits.float(), dim=-1).gather(2, token_ids[:, 1:, None])[..., 0]
    return [row[: length - 1] for row, length in zip(logprobs, _LENGTHS, strict=True)]


def _rounding(policy: PolicyModel, token_ids: Tensor, own: list[Tensor], world: World) -> float:
    """Nats that rounding explains: as far as another attention of the model's own goes."""
    if not policy.model._supports_sdpa:
        return _LARGEST_ROUNDING
    other = _own_logprobs(policy, token_ids, "sdpa")
    rounding = world.maxima({"rounding": _distance(own, other)})["rounding"]
    return _ROUNDING * rounding


def _rows(micro_batch: MicroBatch) -> Tensor:
    """Token ids [samples, longest]; what fills up a row comes after all that could see it."""
    token_ids = torch.tensor(micro_batch.arrays.token_ids, dtype=torch.int64)
    samples = list(torch.split(token_ids, list(_LENGTHS)))
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def _unrounded(head: torch.nn.Module, inputs: tuple[Tensor], _: Tensor) -> Tensor:
    """The head's logits in float32, some words at a time."""
    assert isinstance(head, torch.nn.Linear)
    hidden = inputs[0].float()
    parts = [hidden @ words.float().T for words in torch.split(head.weight, _WORDS)]
    logits = torch.cat(parts, dim=-1)
    return logits if head.bias is None else logits + head.bias.float()


def _distance(ones: list[Tensor], others: list[Tensor]) -> float:
    """Nats, of the median token of the sample where it is larger; infinite for NaN, which a maximum
    over ranks would ignore."""
    pairs = zip(ones, others, strict=True)
    medians = [float((one - other).abs().median()) for one, other in pairs]
    return max(median if math.isfinite(median) else math.inf for median in medians)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
