"""What replaces vLLM's kernels on CPUs: rotary positions, convolutions, gated delta nets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from gradus.inference.engine import kernels
from gradus.inference.engine.states import GatedDelta

pytestmark = pytest.mark.torch
TOKENS, SIZE = 5, 8


def rotated(rotate: Any, heads: list[Tensor], is_neox: bool) -> list[Tensor]:
    current_platform.import_kernels()
    random = torch.Generator().manual_seed(1)
    table = torch.randn(TOKENS, SIZE, generator=random)
    query, key = [*heads, None][:2]
    rotate(torch.arange(TOKENS), query, key, SIZE, table, is_neox)
    return heads


def some_heads(*counts: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, count, 2 * SIZE, generator=random) for count in counts]


def test_vllm_alone_rotates_heads_of_their_own_dimension_wrongly() -> None:
    """Once this fails, `heads_in_one_row` can go."""
    rotate = getattr(ops.rotary_embedding, "__wrapped__", ops.rotary_embedding)
    rows = [it[..., SIZE:].flatten(1) for it in some_heads(4, 1)]
    heads = [it[..., SIZE:].contiguous() for it in some_heads(4, 1)]
    right, found = rotated(rotate, rows, False), rotated(rotate, heads, False)
    assert not torch.allclose(found[0].flatten(1), right[0])


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("counts", [(4, 1), (2, 2), (3,)])
def test_heads_of_their_own_dimension_are_rotated_as_in_one_row(
    counts: tuple[int, ...], is_neox: bool
) -> None:
    rotate = getattr(ops.rotary_embedding, "__wrapped__", ops.rotary_embedding)
    rows = rotated(rotate, [it[..., SIZE:].flatten(1) for it in some_heads(*counts)], is_neox)
    whole = some_heads(*counts)
    rotated(kernels.heads_in_one_row(rotate), [it[..., SIZE:] for it in whole], is_neox)
    for found, row, before in zip(whole, rows, some_heads(*counts), strict=True):
        assert torch.equal(found[..., SIZE:].flatten(1), row)
        assert torch.equal(found[..., :SIZE], before[..., :SIZE]), "beside the part that turns"


@pytest.mark.parametrize(
    ("dtype", "width", "is_taken"),
    [(torch.bfloat16, 4, True), (torch.bfloat16, 3, False), (torch.float32, 4, False)],
)
def test_only_what_the_kernel_takes_is_packed(
    dtype: torch.dtype, width: int, is_taken: bool
) -> None:
    weight = torch.ones(6, width, dtype=dtype)
    found = kernels.packed_where_taken(lambda _: torch.zeros(1))(weight)
    assert found.shape == ((1,) if is_taken else (6, 1, width))


class Engine:
    """One layer of vLLM with its cache: two heads of keys, four of values, all sizes different."""

    def __init__(self, width: int) -> None:
        random = torch.Generator().manual_seed(2)
        self.keys, self.values, self.key_size, self.size = 2, 4, 6, 3
        self.channels = 2 * self.keys * self.key_size + self.values * self.size
        self.layer = SimpleNamespace(
            num_k_heads=self.keys,
            num_v_heads=self.values,
            activation="silu",
            A_log=torch.randn(self.values, generator=random),
            dt_bias=torch.randn(self.values, generator=random),
            conv1d=SimpleNamespace(weight=torch.randn(self.channels, 1, width, generator=random)),
            # What a request before left in its slots.
            kv_cache=(
                torch.randn(8, width - 1, self.channels, generator=random),
                torch.randn(8, self.values, self.size, self.key_size, generator=random),
            ),
        )

    def inputs(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.Generator().manual_seed(length)
        shapes = (self.channels, self.values, self.values)
        mixed, a, b = (torch.randn(length, it, generator=random) for it in shapes)
        return mixed, a, b

    def alone(self, length: int) -> Tensor:
        """A text by itself, token by token."""
        mixed, a, b = self.inputs(length)
        weight = self.layer.conv1d.weight
        padded = functional.pad(mixed.T[None], (weight.shape[2] - 1, 0))
        convolved = functional.silu(functional.conv1d(padded, weight, groups=self.channels))[0].T
        keys = self.keys * self.key_size
        parts = torch.split(convolved, [keys, keys, self.values * self.size], dim=1)
        query, key = (it.view(1, length, self.keys, -1).repeat_interleave(2, 2) for it in parts[:2])
        found: Tensor
        found, _ = torch_recurrent_gated_delta_rule(
            query,
            key,
            parts[2].view(1, length, self.values, -1),
            g=-self.layer.A_log.exp() * functional.softplus(a + self.layer.dt_bias)[None],
            beta=b.sigmoid()[None],
            use_qk_l2norm_in_kernel=True,
        )
        return found.squeeze(0)

    def step(self, *parts: tuple[int, int, int, int]) -> list[Tensor]:
        """Tokens start to stop of texts (length, slot, start, stop), one-token parts first."""
        counts = [stop - start for _, _, start, stop in parts]
        decodes = sum(start > 0 and stop - start == 1 for _, _, start, stop in parts)
        of = [[it[start:stop] for it in self.inputs(n)] for n, _, start, stop in parts]
        mixed, a, b = (torch.cat(it) for it in zip(*of, strict=True))
        step = SimpleNamespace(
            num_decodes=decodes,
            num_decode_tokens=decodes,
            num_prefills=len(parts) - decodes,
            num_actual_tokens=sum(counts),
            non_spec_state_indices_tensor=torch.tensor([slot for _, slot, _, _ in parts]).int(),
            non_spec_query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            has_initial_state=torch.tensor([start > 0 for _, _, start, _ in parts]),
        )
        output = torch.full((len(mixed) + 1, self.values, self.size), torch.nan)
        GatedDelta(self.layer, step).write_to(output, mixed, a, b)
        assert output[-1].isnan().all(), "rows behind the last token are not its own"
        return list(torch.split(output[:-1], counts))


@pytest.mark.parametrize("width", [3, 4])
def test_texts_in_steps_and_in_one_batch_are_those_of_each_alone(width: int) -> None:
    """Prompts whole and in parts, tokens decoded beside prompts, slots that another left."""
    engine = Engine(width)
    (first,) = engine.step((70, 3, 0, 65))
    second = engine.step((70, 3, 65, 66), (9, 5, 0, 2), (64, 1, 0, 64))
    third = engine.step((70, 3, 66, 67), (9, 5, 2, 8))
    fourth = engine.step((9, 5, 8, 9), (70, 3, 67, 68))
    fifth = engine.step((70, 3, 68, 70), (8, 5, 0, 8))
    (sixth,) = engine.step((1, 5, 0, 1))
    found = {
        1: [sixth],
        70: [first, second[0], third[0], fourth[1], fifth[0]],
        9: [second[1], third[1], fourth[0]],
        64: [second[2]],
        8: [fifth[1]],
    }
    for length, parts in found.items():
        torch.testing.assert_close(torch.cat(parts), engine.alone(length), rtol=1e-5, atol=2e-6)
