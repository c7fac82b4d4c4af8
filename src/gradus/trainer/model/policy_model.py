"""The policy as the trainer sees it: tokens in, logprobs and entropies of the tokens out.

Shapes: T tokens of a packed row, N target tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gradus.config import ParallelConfig
from gradus.errors import ConfigError
from gradus.plan.hardware import context_problem
from gradus.trainer.distributed import ContextGroup
from gradus.trainer.images.tower import RowImages, last_hidden, reads_images, text_part
from gradus.trainer.logprobs import chosen_logprobs
from gradus.trainer.model.context.parts import ContextPart, gather_targets
from gradus.trainer.model.cpu.routing import Routers
from gradus.trainer.model.kernels import Platform
from gradus.wire.tokens import NOT_CHOSEN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gradus.trainer.model.attention import PackedLayout
    from gradus.trainer.tensors import TrainTensors

_LOGIT_FACTORS = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
"""Numbers of configs by which logits are multiplied (1) or divided (-1)."""


@dataclass(frozen=True)
class TokenScores:
    """What the model says about each token of a micro batch; float32 [T], with gradient."""

    logprobs: Tensor
    """Nats at the token's temperature; -ln V on tokens that are not targets."""
    entropies: Tensor
    """Nats, of the distribution that the token was chosen from; 0 where a token is not a target."""


class PolicyModel(torch.nn.Module):
    """Wraps any transformers causal language model; has no other parameters.

    Computes by the kernels of the device, or of the `platform` that a test gives.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: ContextGroup | None = None,
        *,
        platform: Platform | None = None,
        routers: Routers | None = None,
    ) -> None:
        """With `routers`, which are those of the model, it takes the experts of its tensors."""
        super().__init__()
        if context is not None:
            _refuse_heads(model, context)
        self.model = model
        self._reads_images = reads_images(model)
        self._logit_factor = _logit_factor(model)
        self._context = context
        self._platform = platform
        self.routers = routers

    def platform_on(self, device: torch.device) -> Platform:
        return self._platform or Platform.of(device)

    def leave_uncompiled(self, platform: Platform) -> None:
        """Compute the output layer on `platform` without torch.compile."""
        self._platform = replace(platform, facts=replace(platform.facts, can_compile=False))

    def forward(self, tensors: TrainTensors) -> TokenScores:
        """Scores of every target token of `tensors`; each sample is read by itself."""
        # Labels are inputs shifted left: the state before a target predicts it.
        states = tensors.targets - 1  # [N], ascending
        part = self._part(tensors)
        experts = tensors.experts
        if part is not None and experts is not None:
            experts = part.own(experts, padding=NOT_CHOSEN)
        if self.routers is not None:
            self.routers.take(experts)
        if part is None:
            hidden = self._hidden(
                tensors.token_ids, tensors.position_ids, tensors.layout, tensors.images
            )
            logprobs, entropies = self._scores(tensors, hidden, states, tensors.targets)
        else:
            logprobs, entropies = self._shared_scores(tensors, states, part)
        uniform = torch.full_like(tensors.temperatures, -math.log(vocabulary_size(self.model)))
        return TokenScores(
            logprobs=uniform.index_copy(0, tensors.targets, logprobs),
            entropies=torch.zeros_like(uniform).index_copy(0, tensors.targets, entropies),
        )

    def _part(self, tensors: TrainTensors) -> ContextPart | None:
        if self._context is None:
            return None
        return ContextPart.of(tensors.layout.lengths, tensors.token_ids.device, self._context)

    def _hidden(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        images: RowImages | None,
    ) -> Tensor:
        """[T, H] last hidden states."""
        layout = replace(layout, platform=self._platform) if self._platform else layout
        if self._reads_images:
            return last_hidden(self.model, token_ids, position_ids, images, packed_layout=layout)
        assert images is None, "a model that reads text alone was given images"
        text = text_part(self.model)
        # The whole model would take a sampled placeholder for one.
        backbone = (self.model.base_model if text is self.model else text)(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            packed_layout=layout,
        )
        hidden: Tensor = backbone.last_hidden_state[0]
        return hidden

    def _scores(
        self, tensors: TrainTensors, hidden: Tensor, states: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logprobs [N] and entropies [N] of `targets`, read off the rows `states` of `hidden`."""
        head = output_head(self.model)
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        # A factor on logits is a temperature, of the cap too.
        return chosen_logprobs(
            # Some keep their residual stream in float32.
            hidden.index_select(0, states).to(head.weight.dtype),
            head.weight,
            tensors.token_ids[targets],
            tensors.temperatures[targets] / self._logit_factor,
            bias=head.bias,
            cap=cap and cap / self._logit_factor,
            platform=self._platform,
        )

    def _shared_scores(
        self, tensors: TrainTensors, states: Tensor, part: ContextPart
    ) -> tuple[Tensor, Tensor]:
        """The scores [N] of all targets on every rank, each rank computing those of its tokens."""
        hidden = self._hidden(
            part.own(tensors.token_ids),
            part.own(tensors.position_ids),
            tensors.layout.shared(part),
            tensors.images and tensors.images.shared(part),
        )
        mine, own_states = part.own_targets(states)
        logprobs, entropies = self._scores(tensors, hidden, own_states, tensors.targets[mine])
        count = tensors.targets.shape[0]
        return (
            gather_targets(logprobs, mine, count, part.group),
            gather_targets(entropies, mine, count, part.group),
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


def _refuse_heads(model: PreTrainedModel, context: ContextGroup) -> None:
    style: Literal["heads", "ring"] = "ring" if context.is_ring else "heads"
    parallel = ParallelConfig(context_parallel_size=context.size, context_parallel_style=style)
    if problem := context_problem(model.config.get_text_config().to_dict(), parallel):
        raise ConfigError(f"context_parallel_size = {context.size}: {problem}")


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer, where sizes of heads may differ between them."""
    num_layers = int(getattr(config, "num_hidden_layers", 1))
    return [*config.per_layer_config] if config.is_heterogeneous else [config] * num_layers


def _logit_factor(model: PreTrainedModel) -> float:
    """By what the model multiplies its logits."""
    config = model.config.get_text_config()
    found = {name: getattr(config, name, None) or 1.0 for name in _LOGIT_FACTORS}
    return math.prod(value ** _LOGIT_FACTORS[name] for name, value in found.items())
