"""The policy as the trainer sees it: tokens in, logprobs and entropies of the tokens out.

Shapes: T tokens of a packed row, N target tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradus.errors import ConfigError
from gradus.trainer.logprobs import chosen_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gradus.trainer.tensors import TrainTensors

_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True)
class TokenScores:
    """What the model says about each token of a micro batch; float32 [T], with gradient."""

    logprobs: Tensor
    """Nats at the token's temperature; -ln V on tokens that are no target."""
    entropies: Tensor
    """Nats, of the distribution that the token was chosen from; 0 on tokens that are no target."""


class PolicyModel(torch.nn.Module):
    """Wraps any transformers causal language model; owns no parameters of its own.

    >>> scores = PolicyModel(model)(tensors)  # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        _refuse_changed_logits(model)
        self.model = model

    def forward(self, tensors: TrainTensors) -> TokenScores:
        """Scores of every target token of `tensors`; each sample is read by itself."""
        backbone = self.model.base_model(
            input_ids=tensors.token_ids[None],
            position_ids=tensors.position_ids[None],
            use_cache=False,
            packed_layout=tensors.layout,
        )
        hidden = backbone.last_hidden_state[0]  # [T, H]
        head = output_head(self.model)
        # Labels are inputs shifted left: the state before a target predicts it.
        logprobs, entropies = chosen_logprobs(
            hidden.index_select(0, tensors.targets - 1),
            head.weight,
            tensors.token_ids[tensors.targets],
            tensors.temperatures[tensors.targets],
            bias=head.bias,
        )
        uniform = torch.full_like(tensors.temperatures, -math.log(head.weight.shape[0]))
        return TokenScores(
            logprobs=uniform.index_copy(0, tensors.targets, logprobs),
            entropies=torch.zeros_like(uniform).index_copy(0, tensors.targets, entropies),
        )


def output_head(model: PreTrainedModel) -> torch.nn.Linear:
    """The layer that turns hidden states into logits; ConfigError when it is not a linear one."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(
            f"model {model.config.name_or_path!r} has a {type(head).__name__} where a linear "
            "output layer was expected; use a causal language model"
        )
    return head


def vocabulary_size(model: PreTrainedModel) -> int:
    """Tokens that the model knows: rows of its output layer."""
    return output_head(model).out_features


def _refuse_changed_logits(model: PreTrainedModel) -> None:
    for name in _LOGIT_CHANGES:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"model {model.config.name_or_path!r} changes its logits by {name!r}, which the "
                "chunked logprobs do not compute; use another model"
            )
