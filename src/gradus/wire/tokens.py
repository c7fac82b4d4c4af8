"""What is known about each token of a sample: arrays of one length, cut and joined together.

A new value per token gets its field, its neutral value in `build` and its check here, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradus.errors import ProtocolError

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ExpertArray = NDArray[np.int16]

LOSS_NAMES = ("rl", "ce", "ref_kl", "ce_batch", "ce_trace")
"""The loss components; the trainer refuses a loss weight with another name. `ce_batch` and
`ce_trace` are the loss of `ce`: one is divided together with `rl` by the tokens of both, the other
by the number of traces that have any. The others have their own count."""
COUNTED_BY_TRACE = {"joint": ("rl", "ce_batch"), "ce_trace": ("ce_trace",)}
"""Components whose tokens are counted together over a whole trace, by the name of the count."""
LOWEST_LOGPROB, HIGHEST_LOGPROB = -1e4, 1e-3
"""Of a sampled token, in nats: vLLM says -9999 for -inf, and rounding may add a little to 0. Beyond
them a ratio to the policy means nothing."""
LARGEST_VOCABULARY = 1 << 31
"""Tokens that an id of `token_ids` can name."""
NOT_CHOSEN = -1
"""In the place of an expert: the engine chose none for this token; the trainer's router does."""
SAMPLED_ONLY = frozenset({"rl", "ref_kl"})
"""Components with a ratio to the policy that sampled; they weigh no other token."""


class TokenArrays(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """T tokens; every array has shape [T].

    >>> arrays = TokenArrays.build(np.arange(3), {"rl": np.array([0.0, 1.0, 1.0])})
    >>> arrays.loss_mask.tolist(), len(arrays.cut(2))
    ([False, True, True], 2)
    """

    token_ids: IntArray
    loss_mask: BoolArray
    """True where a token may enter a loss (sampled, or chosen by the algorithm)."""
    sampling_logprobs: FloatArray
    """Nats, at the sampling temperature; 0.0 on tokens that were not sampled."""
    temperatures: FloatArray
    """Sampling temperature of each token; 1.0 where nothing was sampled."""
    advantages: FloatArray
    reference_logprobs: FloatArray
    """Nats; NaN where no reference model scored."""
    loss_weights: dict[str, FloatArray]
    """Per loss component, the factor of each token: 0 removes it from the sum and from the count.
    Components that are absent weigh 0 everywhere."""
    experts: ExpertArray | None = None
    """[T, layers, k]: the experts that the engine chose for each token in each layer, NOT_CHOSEN
    where it read the token without telling; None where it told nothing."""

    @classmethod
    def build(
        cls,
        token_ids: NDArray[np.integer],
        loss_weights: Mapping[str, NDArray[np.floating]],
        *,
        sampling_logprobs: NDArray[np.floating] | None = None,
        temperatures: NDArray[np.floating] | None = None,
        advantages: NDArray[np.floating] | None = None,
        reference_logprobs: NDArray[np.floating] | None = None,
        experts: ExpertArray | None = None,
    ) -> TokenArrays:
        """The arrays of these tokens, neutral where nothing is given; the loss mask marks those
        with a weight."""
        length = len(token_ids)

        def filled(given: NDArray[np.floating] | None, otherwise: float) -> FloatArray:
            if given is None:
                return np.full(length, otherwise, np.float32)
            return given.astype(np.float32, copy=False)

        loss_mask = np.zeros(length, np.bool_)
        for weights in loss_weights.values():
            loss_mask |= weights != 0
        return cls(
            token_ids=token_ids.astype(np.int32, copy=False),
            loss_mask=loss_mask,
            sampling_logprobs=filled(sampling_logprobs, 0.0),
            temperatures=filled(temperatures, 1.0),
            advantages=filled(advantages, 0.0),
            reference_logprobs=filled(reference_logprobs, np.nan),
            loss_weights={name: filled(weights, 0.0) for name, weights in loss_weights.items()},
            experts=experts,
        )

    @classmethod
    def concat(cls, parts: Sequence[TokenArrays]) -> TokenArrays:
        """The parts end to end; a component that a part lacks weighs 0 there."""
        names = sorted({name for part in parts for name in part.loss_weights})

        def joined_weights(name: str) -> FloatArray:
            nothing = np.zeros(max(map(len, parts)), np.float32)
            return np.concatenate([p.loss_weights.get(name, nothing[: len(p)]) for p in parts])

        arrays: dict[str, Any] = {
            field: np.concatenate([getattr(part, field) for part in parts]) for field in _FIELDS
        }
        weights = {name: joined_weights(name) for name in names}
        return cls(**arrays, loss_weights=weights, experts=_joined_experts(parts))

    def cut(self, length: int) -> TokenArrays:
        """The first `length` tokens."""
        arrays = {field: getattr(self, field)[:length] for field in _FIELDS}
        weights = {name: weights[:length] for name, weights in self.loss_weights.items()}
        experts = None if self.experts is None else self.experts[:length]
        return TokenArrays(**arrays, loss_weights=weights, experts=experts)

    def frozen(self) -> TokenArrays:
        """Views of the same arrays that cannot be written; a deep copy can."""
        weights = _FrozenWeights({name: _frozen(it) for name, it in self.loss_weights.items()})
        arrays: dict[str, Any] = {field: _frozen(getattr(self, field)) for field in _FIELDS}
        experts = None if self.experts is None else _frozen(self.experts)
        return TokenArrays(**arrays, loss_weights=weights, experts=experts)

    def num_members(self, names: Sequence[str]) -> int:
        """Tokens of one sample that train in any of these components."""
        found = [self.loss_weights[name] != 0 for name in names if name in self.loss_weights]
        # The first token has no predecessor that could predict it.
        return int(np.count_nonzero(np.any(found, axis=0)[1:] & self.loss_mask[1:])) if found else 0

    def by_name(self) -> dict[str, NDArray[np.generic]]:
        """Every array that is there; loss weights as `loss_weights.<component>`."""
        arrays = {field: getattr(self, field) for field in _FIELDS}
        if self.experts is not None:
            arrays["experts"] = self.experts
        return arrays | {f"loss_weights.{name}": w for name, w in self.loss_weights.items()}

    def check(self, what: str) -> None:
        """ProtocolError, with the array of `what`, for ragged, non-finite or impossible content."""
        length = len(self)
        for name, array in self.by_name().items():
            if name == "experts":
                if array.ndim != 3 or len(array) != length or array.dtype != np.int16:
                    raise ProtocolError(
                        f"{what}: experts is {array.dtype} of shape {array.shape}, expected int16 "
                        f"({length}, layers, experts of a token)"
                    )
                continue
            if array.shape != (length,):
                raise ProtocolError(f"{what}: {name} has shape {array.shape}, expected ({length},)")
            if array.dtype.kind != "f":
                continue
            is_known = np.isfinite(array)
            if name == "reference_logprobs":
                is_known |= np.isnan(array)
            if not bool(is_known.all()):
                raise ProtocolError(f"{what}: {name} holds a value that is not finite")
        if bool((self.temperatures <= 0).any()):
            raise ProtocolError(f"{what}: temperatures must be positive")
        if unknown := self.loss_weights.keys() - set(LOSS_NAMES):
            raise ProtocolError(
                f"{what}: unknown loss weights {sorted(unknown)}; known: {LOSS_NAMES}"
            )
        if bool((self.reference_logprobs > HIGHEST_LOGPROB).any()):
            raise ProtocolError(f"{what}: reference_logprobs holds a value above 0")
        sampling = self.sampling_logprobs
        if bool(((sampling > HIGHEST_LOGPROB) | (sampling < LOWEST_LOGPROB)).any()):
            raise ProtocolError(
                f"{what}: sampling_logprobs holds a value beyond {LOWEST_LOGPROB:g} to 0"
            )
        weights = self.loss_weights.get("ref_kl")
        if weights is not None and bool(((weights != 0) & np.isnan(self.reference_logprobs)).any()):
            raise ProtocolError(f"{what}: ref_kl weighs a token without a reference logprob")

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])


class _FrozenWeights(dict[str, FloatArray]):
    """Unlike a mappingproxy it can be copied and sent to another process, as a plain dict."""

    def __setitem__(self, name: str, _: FloatArray) -> None:
        raise TypeError(f"loss_weights does not support item assignment ({name!r})")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _joined_experts(parts: Sequence[TokenArrays]) -> ExpertArray | None:
    """Of all parts; NOT_CHOSEN in those that have none. ProtocolError where their shapes differ."""
    shapes = {part.experts.shape[1:] for part in parts if part.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ProtocolError(f"samples of one batch have experts [layers, k] of {sorted(shapes)}")
    shape = shapes.pop()
    return np.concatenate(
        [
            np.full((len(part), *shape), NOT_CHOSEN, np.int16)
            if part.experts is None
            else part.experts
            for part in parts
        ]
    )


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


_FIELDS = tuple(
    name for name in TokenArrays.__struct_fields__ if name not in ("loss_weights", "experts")
)
