"""What is packed comes out as it went in, in buckets of bounded size, on its own device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradus.errors import CorruptStateError
from gradus.weights.buckets import PackedSnapshot, bucket_sizes, checksum, pack, unpack

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=6),
    st.sampled_from([16, 48, 64, 1024]),
)
def test_tensors_of_any_size_come_out_bit_by_bit(
    sizes: list[tuple[int, torch.dtype]], bucket_bytes: int
) -> None:
    tensors = [(f"t{i}", torch.arange(n).to(dtype)) for i, (n, dtype) in enumerate(sizes)]
    packed = pack(tensors, CPU, bucket_bytes)
    entries = packed.entries()
    assert [bucket.numel() for bucket in packed.buckets] == bucket_sizes(entries, bucket_bytes)
    assert all(bucket.numel() <= bucket_bytes for bucket in packed.buckets)
    found = list(unpack(entries, iter(packed.buckets), bucket_bytes))
    for (name, tensor), entry, same in zip(tensors, entries, found, strict=True):
        assert (entry.name, entry.checksum) == (name, checksum(tensor))
        assert same.dtype == tensor.dtype
        assert torch.equal(same, tensor)


def test_a_bucket_is_asked_for_only_when_a_tensor_needs_it() -> None:
    packed = pack([(str(i), torch.ones(4)) for i in range(3)], CPU, 16)
    asked: list[int] = []

    def buckets() -> Any:
        for number, bucket in enumerate(packed.buckets):
            asked.append(number)
            yield bucket

    arriving = unpack(packed.entries(), buckets(), 16)
    next(arriving)
    assert asked == [0]
    list(arriving)
    assert asked == [0, 1, 2]


def test_what_was_packed_does_not_follow_the_weights() -> None:
    weight = torch.ones(3)
    snapshot = PackedSnapshot(CPU, 64)
    snapshot.take([("w", weight)])
    weight.zero_()
    assert torch.equal(dict(snapshot.tensors())["w"], torch.ones(3))


def test_the_tensor_that_is_not_finite_is_named() -> None:
    packed = pack([("good", torch.ones(2)), ("bad", torch.tensor([torch.inf]))], CPU, 64)
    with pytest.raises(CorruptStateError, match="bad holds a value that is not finite"):
        packed.entries()


class Devices(TorchDispatchMode):
    """Notes on which devices the results of all operations lie."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.add(result.device.type)
        return result


def test_tensors_of_a_gpu_are_packed_and_unpacked_on_it() -> None:
    # The meta device stands for the GPU: it has no values, so that a read by the host is an error.
    gpu = torch.device("meta")
    with Devices() as devices:
        weights = [torch.empty(5, 7, device=gpu, dtype=kind) for kind in DTYPES]
        packed = pack([(str(i), weight) for i, weight in enumerate(weights)], gpu, 64)
        found = [tensor for _, tensor in packed]
    assert devices.seen == {"meta"}
    assert {it.device for it in (*packed.buckets, packed.checks, *found)} == {gpu}
    assert len(packed.buckets) > 2
