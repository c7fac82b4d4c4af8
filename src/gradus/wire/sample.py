"""A sample is one branch of a trace as aligned per-token arrays, ready to train."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradus.errors import ProtocolError
from gradus.wire.versions import VersionSpan

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

LOSS_NAMES = ("rl", "ce", "ref_kl", "ce_batch")
"""The loss components; the trainer refuses a loss weight with another name. `ce_batch` is the loss
of `ce`, divided together with `rl` by the tokens of both; the others have a count of their own."""
SAMPLED_ONLY = frozenset({"rl", "ref_kl"})
"""Components with a ratio to the policy that sampled; they weigh no other token."""
LARGEST_REFERENCE_LOGPROB = 1e-3
"""Above 0 by what rounding may add; more is no logprob."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One branch, T tokens. All arrays have shape [T].

    `loss_weights` holds, per loss component, the factor of each token: 0 removes the token from the
    sum and from the count. Names that are absent weigh 0 everywhere.
    """

    id: str
    """`<episode id>/<trace index>/<branch index>`; unique in a run."""
    environment: str
    group_id: str
    episode_id: str
    reward: float
    """Reward of the trace, for metrics; credit is in `advantages`."""
    versions: VersionSpan
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

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    def arrays(self) -> dict[str, np.ndarray]:
        """Every per-token array by name, for code that must move them together."""
        per_token = {
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "sampling_logprobs": self.sampling_logprobs,
            "temperatures": self.temperatures,
            "advantages": self.advantages,
            "reference_logprobs": self.reference_logprobs,
        }
        return per_token | {f"loss_weights.{name}": w for name, w in self.loss_weights.items()}

    def check(self) -> None:
        """Refuse ragged, negative or non-finite content; the ProtocolError names the field."""
        length = len(self)
        if length == 0:
            raise ProtocolError(f"sample {self.id}: has no tokens")
        if not math.isfinite(self.reward):
            raise ProtocolError(f"sample {self.id}: reward is {self.reward}")
        check_arrays(f"sample {self.id}", self.arrays(), length)
        if bool((self.token_ids < 0).any()):
            raise ProtocolError(f"sample {self.id}: token_ids holds a negative id")
        if bool((self.temperatures <= 0).any()):
            raise ProtocolError(f"sample {self.id}: temperatures must be positive")
        check_loss_names(f"sample {self.id}", self.loss_weights)
        check_reference(f"sample {self.id}", self.reference_logprobs, self.loss_weights)


def check_arrays(what: str, arrays: Mapping[str, np.ndarray], length: int) -> None:
    """ProtocolError that names the array of `what` that is ragged or holds a non-finite number."""
    for name, array in arrays.items():
        if array.shape != (length,):
            raise ProtocolError(f"{what}: {name} has shape {array.shape}, expected ({length},)")
        if array.dtype.kind != "f":
            continue
        is_known = np.isfinite(array)
        if name == "reference_logprobs":
            is_known |= np.isnan(array)
        if not bool(is_known.all()):
            raise ProtocolError(f"{what}: {name} holds a value that is not finite")


def check_reference(
    what: str, reference_logprobs: FloatArray, loss_weights: Mapping[str, FloatArray]
) -> None:
    """ProtocolError for reference logprobs that are none, or that a member of ref_kl lacks."""
    if bool((reference_logprobs > LARGEST_REFERENCE_LOGPROB).any()):
        raise ProtocolError(f"{what}: reference_logprobs holds a value above 0")
    weights = loss_weights.get("ref_kl")
    if weights is not None and bool(((weights != 0) & np.isnan(reference_logprobs)).any()):
        raise ProtocolError(f"{what}: ref_kl weighs a token without a reference logprob")


def check_loss_names(what: str, names: Iterable[str]) -> None:
    """ProtocolError for weights of a loss that nobody computes."""
    unknown = set(names) - set(LOSS_NAMES)
    if unknown:
        raise ProtocolError(f"{what}: unknown loss weights {sorted(unknown)}; known: {LOSS_NAMES}")
