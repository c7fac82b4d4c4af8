"""Experts that the engine chose, in the place of the trainer's own choice (router replay).

Engine and trainer round differently, so their routers disagree about some tokens, and the ratio of
such a token says nothing about learning (arXiv:2510.11370). The trainer computes its own scores and
gathers those of the engine's experts; what the model does with them afterwards is its own code.
Shapes: T tokens, L layers of the model, E experts, k experts of a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from gradus.errors import ConfigError, ProtocolError
from gradus.trainer.distributed import named_failures
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.tokens import NOT_CHOSEN, ExpertArray

ROUTERS = frozenset(
    {
        *("MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter"),
        *("Qwen3_5MoeTopKRouter", "Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter"),
        *(
            "DeepseekV2TopkRouter",
            "DeepseekV3TopkRouter",
            "MiniMaxM2TopKRouter",
            "GptOssTopKRouter",
        ),
        *("GraniteMoeTopKRouter", "GraniteMoeHybridTopKRouter", "NemotronHTopkRouter"),
        *("Lfm2MoeTopKRouter", "Gemma4TextRouter", "Qwen3VLMoeTextTopKRouter", "Llama4Router"),
    }
)
"""Routers of transformers whose last choice is a `topk` of [T, E] scores."""
_BIASES = ("e_score_correction_bias", "expert_bias")
"""Buffers, of a router or of what holds it, that are added to scores for the choice alone."""
_TOPK = frozenset({torch.topk, Tensor.topk})


class ExpertLoad:
    """Counts the tokens of each expert in forwards that learn, on the device.

    >>> load = ExpertLoad.of(policy, device)  # doctest: +SKIP
    >>> load.take()  # doctest: +SKIP
    {'experts/load/max_over_mean': 1.6, 'experts/unused/share': 0.0}
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        routers: Sequence[Any],
        device: torch.device,
        biases: Sequence[Tensor] = (),
    ) -> None:
        """`biases` are those of the routers, where they learn."""
        # A tensor, so that compiled layers are not compiled again for the other number.
        self._each = torch.ones((), dtype=torch.int64, device=device)
        policy.register_forward_pre_hook(self._leave_out_dummies)
        shape = (len(routers), _sizes(routers[0])[0])
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._biases = biases
        for counts, router in zip(self._counts, routers, strict=True):
            router.register_forward_hook(partial(_count, counts, self._each))

    @classmethod
    def of(
        cls, policy: torch.nn.Module, device: torch.device, *, moves_biases: bool = False
    ) -> ExpertLoad | None:
        """Of a policy that is sharded already; None where it has no known router.

        With `moves_biases` ConfigError where a router has no bias.
        """
        found = [module for module in policy.modules() if _kind_of(module) in ROUTERS]
        biases = tuple(routing_biases(policy).values()) if moves_biases else ()
        if moves_biases and not 0 < len(biases) == len(found):
            raise ConfigError(
                "trainer.router_bias_rate: the model has no biases of routing (none of its routers "
                f"has {_BIASES[0]}); write 0"
            )
        return cls(policy, found, device, biases) if found else None

    def _leave_out_dummies(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._each.fill_(int(len(inputs[0].targets) > 0))

    @torch.no_grad()
    def take(self, bias_rate: float = 0.0) -> dict[str, float]:
        """Of the tokens of all ranks since the last call, which they make together.

        By `bias_rate` the bias of an expert with fewer tokens than the mean of its layer rises, and
        that of one with more falls (arXiv:2408.15664).
        """
        added = self._counts.double()  # [layers, E]
        self._counts.zero_()
        with named_failures("count the tokens of experts over ranks"):
            dist.all_reduce(added)
        mean = added.mean(dim=1, keepdim=True)
        for bias, missing in zip(self._biases, mean - added, strict=False):
            bias.add_(bias_rate * missing.sign().to(bias.dtype))
        over_mean = added.amax(dim=1) / mean[:, 0]
        found = torch.stack([over_mean.mean(), (added == 0).double().mean()]).tolist()
        return dict(zip(("experts/load/max_over_mean", "experts/unused/share"), found, strict=True))


def routing_biases(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every bias that decides which experts a token takes, by its name in the model's state."""
    return {name: buffer for name, buffer in model.named_buffers() if is_bias(name)}


def is_bias(name: str) -> bool:
    """Tell whether a tensor of this name decides which experts a token takes."""
    return name.endswith(_BIASES)


def _count(counts: Tensor, each: Tensor, router: Any, _: Any, outputs: Any) -> None:
    # What scores learns nothing. A layer that is computed again counts twice, all experts alike.
    if torch.is_grad_enabled():
        chosen = chosen_by(router, outputs).flatten()
        counts.scatter_add_(0, chosen, each.to(chosen.dtype).expand_as(chosen))


def chosen_by(router: Any, outputs: Sequence[Tensor]) -> Tensor:
    """[T, k], from what a router gave: the experts, or scores that are 0 for all others."""
    numbers = next((output for output in outputs if not output.is_floating_point()), None)
    return outputs[0].topk(_sizes(router)[1]).indices if numbers is None else numbers


@dataclass(frozen=True)
class Routers:
    """The routers of a model, each told which experts to take.

    >>> routers = Routers.of(model)  # doctest: +SKIP
    >>> routers.take(tensors.experts)  # doctest: +SKIP
    """

    by_layer: dict[int, Any]
    num_layers: int
    """Of the whole model, dense ones among them."""
    num_experts: int
    num_chosen: int
    """Experts of a token."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers:
        """Prepares the routers of the model; ConfigError where it has none that can be told."""
        found: dict[int, Any] = {}
        uncompiled: Any = torch.compiler.disable  # It has no types.
        for name, module in model.named_modules():
            kind = _kind_of(module)
            is_alike = hasattr(module, "top_k") and hasattr(module, "num_experts")
            if kind in ROUTERS or (is_alike and kind.lower().endswith("router")):
                _refuse_unknown(model, module)
                module.experts_given = None
                module.forward = uncompiled(partial(_routed, module))
                found[_layer_of(name)] = module
        if not found:
            raise ConfigError(
                f"trainer.router_replay = 'engine': model {model.config.name_or_path!r} "
                f"({type(model).__name__}) has no router that chooses experts; write 'off'"
            )
        layers = model.config.get_text_config().num_hidden_layers
        return cls(found, layers, *_sizes(next(iter(found.values()))))

    def take(self, experts: Tensor | None) -> None:
        """From now on, and when backward computes a layer again, route like `experts` [T, L, k];
        None lets each router choose."""
        for layer, router in self.by_layer.items():
            router.experts_given = None if experts is None else experts[:, layer]

    def check(self, micro_batch: MicroBatch) -> None:
        """ProtocolError, with the name of the sample, for experts that this model cannot take."""
        experts = micro_batch.arrays.experts
        if experts is None:
            return
        shape = (self.num_layers, self.num_chosen)
        names = micro_batch.sample_ids or ["of a dummy"]
        if experts.shape[1:] != shape:
            raise ProtocolError(
                f"sample {names[0]}: the engine chose experts [layers, k] of {experts.shape[1:]}, "
                f"this model has {shape}; engine and trainer must load the same model"
            )
        routed = experts[:, sorted(self.by_layer)]
        for is_wrong, what in (
            (self._is_unknown(routed), f"an expert that none of {self.num_experts} is"),
            (_is_twice(routed), "one expert twice for one token"),
        ):
            if is_wrong.any():
                token, column = map(int, np.argwhere(is_wrong)[0])
                ends = np.cumsum(micro_batch.sequence_lengths)
                sample = int(np.searchsorted(ends, token, side="right"))
                place = token - int(ends[sample] - micro_batch.sequence_lengths[sample])
                raise ProtocolError(
                    f"sample {names[sample]}: the engine chose {what}: "
                    f"{routed[token, column].tolist()} for token {place} in layer "
                    f"{sorted(self.by_layer)[column]}"
                )

    def told(self, micro_batches: Iterable[MicroBatch]) -> list[bool]:
        """Of each sample, whether the engine chose the experts of any of its tokens."""
        found: list[bool] = []
        for micro_batch in micro_batches:
            experts, lengths = micro_batch.arrays.experts, micro_batch.sequence_lengths
            if micro_batch.is_dummy or experts is None:
                found += [False] * len(micro_batch.sample_ids)
                continue
            is_told = experts[:, min(self.by_layer), 0] != NOT_CHOSEN
            found += np.logical_or.reduceat(is_told, np.cumsum([0, *lengths[:-1]])).tolist()
        return found

    def _is_unknown(self, experts: ExpertArray) -> Any:
        """[T, layers]: a number of no expert, or a choice with some experts alone."""
        is_chosen = experts != NOT_CHOSEN
        is_outside = is_chosen & ((experts < 0) | (experts >= self.num_experts))
        return is_outside.any(-1) | (is_chosen.any(-1) & ~is_chosen.all(-1))


def _is_twice(experts: ExpertArray) -> Any:
    """[T, layers]"""
    ordered = np.sort(experts, axis=-1)
    return ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NOT_CHOSEN)).any(-1)


def _refuse_unknown(model: PreTrainedModel, router: torch.nn.Module) -> None:
    kind = _kind_of(router)
    # The scores of a choice in two stages are 0 outside of the groups that it chose first.
    is_staged = getattr(router, "topk_method", None) == "group_limited_greedy"
    if kind not in ROUTERS or is_staged:
        raise ConfigError(
            f"trainer.router_replay = 'engine': model {model.config.name_or_path!r} routes by "
            f"{kind}{' in groups' if is_staged else ''}, which cannot be told its experts; write "
            "'off'"
        )


def _kind_of(module: torch.nn.Module) -> str:
    return type(module).__name__


def _sizes(router: Any) -> tuple[int, int]:
    """How many experts it knows, and how many of them a token takes."""
    if hasattr(router, "num_experts"):
        return router.num_experts, router.top_k
    return router.config.num_experts, chosen_experts(router.config)


def chosen_experts(config: Any) -> int:
    """Experts of a token; 0 where a config says none."""
    names = ("num_experts_per_tok", "top_k_experts")
    return next((it for name in names if (it := getattr(config, name, None))), 0)


def _layer_of(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    assert found is not None, name
    return int(found[1])


def _routed(router: Any, *inputs: Any, **options: Any) -> Any:
    """The router's own forward, with its last choice replaced."""
    if router.experts_given is None:
        return type(router).forward(router, *inputs, **options)
    with _GivenExperts(router.experts_given, _sizes(router)[0]):
        return type(router).forward(router, *inputs, **options)


class _GivenExperts(TorchFunctionMode):
    """While open, a `topk` of [T, E] takes the scores of the experts that were given."""

    def __init__(self, given: Tensor, num_experts: int) -> None:
        super().__init__()
        self._given = given
        self._shape = (len(given), num_experts)

    def __torch_function__(
        self, func: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].shape != self._shape:
            return result
        given = self._given.to(result.indices.dtype)
        chosen = torch.where(given == NOT_CHOSEN, result.indices, given)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))
