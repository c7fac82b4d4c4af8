"""A loaded model reads a few tokens twice: packed as in training, and by its own forward.

Training takes a model apart: attention runs packed, and logprobs come from the last hidden states
without the model's own head code. Anything else that an architecture does (caps on logits, state
between tokens, special masks, layers after the last hidden state) would be silently left out; here
it shows as a different logprob.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradus.errors import ConfigError, GradusError
from gradus.trainer.model.attention import ATTENTION_NAME
from gradus.trainer.model.policy_model import PolicyModel, vocabulary_size
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.tokens import TokenArrays

_LENGTHS = (9, 7)
"""Tokens of the two samples; the second would see what leaks out of the first."""
_LARGEST_DISTANCE = 1e-3
"""Nats between logprobs of the median token. Float32 moves them by 1e-5; one token may move more,
where it changes the experts that a router chooses."""


def refuse_inexact(model: PreTrainedModel) -> None:
    """ConfigError when packed logprobs are not those of the model's own forward."""
    name = model.config.name_or_path
    micro_batch = _probe(vocabulary_size(model))
    try:
        packed = _packed_logprobs(model, micro_batch)
    except GradusError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model {name!r} ({type(model).__name__}) cannot read packed samples "
            f"({type(error).__name__}: {error}); use another model"
        ) from error
    own = _own_logprobs(model, micro_batch)
    for mine, theirs in zip(packed, own, strict=True):
        distance = float((mine - theirs).abs().median())
        # Written so that NaN is refused.
        if not distance <= _LARGEST_DISTANCE:
            raise ConfigError(
                f"model {name!r} ({type(model).__name__}) computes something that packed training "
                f"leaves out: logprobs differ by {distance:.2g} nats; use another model"
            )


def _probe(vocabulary: int) -> MicroBatch:
    """Two samples of tokens from the middle of the vocabulary, away from special tokens."""
    first, count = vocabulary // 4, max(1, vocabulary // 2)
    num_tokens = sum(_LENGTHS)
    token_ids = first + (np.arange(num_tokens) * 7919) % count
    weights = {"ce": np.ones(num_tokens, np.float32)}
    return MicroBatch(["probe/0", "probe/1"], list(_LENGTHS), TokenArrays.build(token_ids, weights))


@torch.no_grad()
def _packed_logprobs(model: PreTrainedModel, micro_batch: MicroBatch) -> list[Tensor]:
    """Of each sample, without its first token."""
    tensors = TrainTensors.build(micro_batch, model.device)
    logprobs = PolicyModel(model)(tensors).logprobs
    return [sample[1:] for sample in torch.split(logprobs, list(_LENGTHS))]


@torch.no_grad()
def _own_logprobs(model: PreTrainedModel, micro_batch: MicroBatch) -> list[Tensor]:
    """The same by transformers alone, one sample after the other."""
    token_ids = torch.tensor(micro_batch.arrays.token_ids, dtype=torch.int64, device=model.device)
    model.set_attn_implementation("eager")
    try:
        return [_alone(model, sample) for sample in torch.split(token_ids, list(_LENGTHS))]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _alone(model: PreTrainedModel, sample: Tensor) -> Tensor:
    logits = model(input_ids=sample[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, sample[1:, None])[:, 0]
