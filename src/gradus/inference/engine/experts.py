"""The experts of tokens, kept beside the KV cache: what was computed with an entry chose these.

A token that is found in the prefix cache is not computed again. Its experts are those of whoever
computed it, so they are kept by the cache's own slots, as vLLM does on GPUs. Shapes: N tokens of a
step, L layers, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gradus.inference.settings import RECORDS_EXPERTS
from gradus.wire.tokens import ExpertArray


def records_experts(vllm_config: Any) -> bool:
    return bool((vllm_config.additional_config or {}).get(RECORDS_EXPERTS))


def slots_group(kv_cache_config: Any) -> int:
    """The group of layers whose slots hold every token of a request, not those of a window."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return next(number for number, it in enumerate(specs) if isinstance(it, FullAttentionSpec))


@dataclass(frozen=True)
class StepExperts:
    """What the routers chose in one step."""

    slots: np.ndarray[Any, Any]
    """[N]: where the cache keeps each token."""
    experts: ExpertArray
    """[N, L, k]"""

    def put_into(self, output: Any) -> None:
        """Let a step's output carry it to the scheduler, in a field that vLLM uses on GPUs."""
        output.aux_output_connector_output = {RECORDS_EXPERTS: self}

    @classmethod
    def taken_from(cls, output: Any) -> StepExperts | None:
        carried = output.aux_output_connector_output
        return None if carried is None else carried.get(RECORDS_EXPERTS)


class ExpertSlots:
    """Owns the experts of every token in the cache.

    >>> slots = ExpertSlots(num_slots=64, block_tokens=32)
    >>> slots.note(StepExperts(np.array([32, 33]), np.array([[[5]], [[7]]], np.int16)))
    >>> slots.of_blocks([1], 0, 2).tolist(), slots.of_blocks([1], 0, 3)
    ([[[5]], [[7]]], None)
    """

    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self._num_slots, self._block_tokens = num_slots, block_tokens
        self._noted: ExpertArray | None = None
        """One more than the number of an expert: zeros take no memory until they are written."""

    def note(self, step: StepExperts) -> None:
        if self._noted is None:
            self._noted = np.zeros((self._num_slots, *step.experts.shape[1:]), np.int16)
        self._noted[step.slots] = step.experts + 1

    def of_blocks(self, blocks: Sequence[int], start: int, stop: int) -> Any:
        """[stop - start, L, k] of a request with these blocks, in the dtypes in which vLLM tells
        them; None where one of its tokens was not noted."""
        if self._noted is None:
            return None
        first = np.asarray(blocks, np.int64)[:, None] * self._block_tokens
        slots = (first + np.arange(self._block_tokens)).ravel()[start:stop]
        found = self._noted[slots]
        if len(slots) < stop - start or not found.all():
            return None
        return (found - 1).astype(np.uint8 if found.max(initial=1) <= 256 else np.uint16)
