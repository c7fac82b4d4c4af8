"""What some ranks wrote, any number of ranks can read; nothing is read twice or left out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gradus.errors import ConfigError, CorruptStateError, StorageError
from gradus.files import DurableFiles
from gradus.trainer.checkpoint.shards import (
    Box,
    Piece,
    ShardReader,
    box_of,
    num_bytes,
    open_shards,
    own_pieces,
    write_shard,
)

pytestmark = pytest.mark.torch


def rows_of(tensor: torch.Tensor, first: int, last: int) -> Piece:
    """Rows [first, last) of a tensor, as a rank that holds them writes them."""
    size = [last - first, *tensor.shape[1:]]
    offset = [first] + [0] * (tensor.ndim - 1)
    return Piece(Box(list(tensor.shape), offset, size), tensor[first:last].clone())


def write_rows(folder: Path, tensor: torch.Tensor, cuts: Sequence[int]) -> None:
    """One file for each pair of neighbouring cuts."""
    for rank, (first, last) in enumerate(itertools.pairwise(cuts)):
        write_shard(folder, rank, {"w": rows_of(tensor, first, last)}, DurableFiles())


def read_box(reader: ShardReader, box: Box) -> torch.Tensor:
    """The part of `w` that a rank with this box reads."""
    pieces = [
        (common, reader._read("w", stored, common))
        for stored in reader._stored["w"]
        if (common := stored.box.overlap(box)) is not None
    ]
    result = torch.zeros(box.size)
    for common, values in pieces:
        result[common.inside(box)] = values
    return result


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 12),
    width=st.integers(1, 4),
    written=st.lists(st.integers(0, 12), max_size=4),
    wanted=st.tuples(st.integers(0, 11), st.integers(1, 12)),
)
def test_any_rows_are_read_from_any_split(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    width: int,
    written: list[int],
    wanted: tuple[int, int],
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensor = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width)
    cuts = sorted({0, rows, *(cut for cut in written if cut < rows)})
    write_rows(folder, tensor, cuts)
    first = min(wanted[0], rows - 1)
    count = min(wanted[1], rows - first)
    with open_shards(folder) as reader:
        part = read_box(reader, Box([rows, width], [first, 0], [count, width]))
        whole = torch.empty(rows, width)
        reader.fill("w", whole)
    assert torch.equal(part, tensor[first : first + count])
    assert torch.equal(whole, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_whole_tensor_comes_back_in_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {"scalar": torch.tensor(7, dtype=dtype), "line": torch.arange(5).to(dtype)}
    pieces = own_pieces(values, {}, is_first=True)
    assert num_bytes(pieces) == 6 * dtype.itemsize
    write_shard(tmp_path, 0, pieces, DurableFiles())
    with open_shards(tmp_path) as reader:
        assert reader.names == {"scalar", "line"}
        for name, value in values.items():
            assert torch.equal(reader.whole(name), value)
            assert reader.whole(name).dtype == dtype


def test_copies_do_not_change_with_the_live_tensor() -> None:
    live = torch.zeros(3)
    pieces = own_pieces({"w": live}, {}, is_first=True)
    live.fill_(1.0)
    assert torch.equal(pieces["w"].values, torch.zeros(3))


def test_what_all_ranks_hold_is_written_by_the_first_alone() -> None:
    shared, own = {"w": torch.zeros(3)}, {"random.1": torch.ones(2)}
    assert own_pieces(shared, own, is_first=False).keys() == {"random.1"}
    assert own_pieces(shared, own, is_first=True).keys() == {"w", "random.1"}


def test_boxes_that_only_touch_have_nothing_in_common() -> None:
    first, second = Box([4, 4], [0, 0], [2, 4]), Box([4, 4], [2, 0], [2, 4])
    assert first.overlap(second) is None
    assert first.overlap(Box([4, 4], [1, 1], [2, 2])) == Box([4, 4], [1, 1], [1, 2])
    assert box_of(torch.zeros(2, 3)) == Box([2, 3], [0, 0], [2, 3])


def test_rows_that_nobody_wrote_are_missed(tmp_path: Path) -> None:
    tensor = torch.ones(4, 2)
    write_shard(tmp_path, 0, {"w": rows_of(tensor, 0, 3)}, DurableFiles())
    with (
        open_shards(tmp_path) as reader,
        pytest.raises(CorruptStateError, match="6 of 8 values of w"),
    ):
        reader.fill("w", torch.empty(4, 2))


def test_rows_that_were_written_twice_are_refused(tmp_path: Path) -> None:
    tensor = torch.ones(4, 2)
    for rank in (0, 1):
        write_shard(tmp_path, rank, {"w": rows_of(tensor, 0, 4)}, DurableFiles())
    with (
        open_shards(tmp_path) as reader,
        pytest.raises(CorruptStateError, match="16 of 8 values"),
    ):
        reader.fill("w", torch.empty(4, 2))


@pytest.mark.shows("SEC26")
@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("v", torch.empty(4, 2), "holds no 'v'"),
        ("w", torch.empty(5, 2), r"has shape \[4, 2\], the model has \[5, 2\]"),
        ("w", torch.empty(4, 2, dtype=torch.bfloat16), "torch.float32, the run now wants"),
    ],
)
def test_another_model_is_refused(
    tmp_path: Path, name: str, target: torch.Tensor, reason: str
) -> None:
    write_rows(tmp_path, torch.ones(4, 2), [0, 4])
    with open_shards(tmp_path) as reader, pytest.raises(ConfigError, match=reason):
        reader.fill(name, target)


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptStateError, match="holds no"), open_shards(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank_00000.safetensors").write_bytes(content)
    with pytest.raises(CorruptStateError, match="is not part of a checkpoint"):
        open_shards(tmp_path).__enter__()


def test_safetensors_without_our_header_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "rank_00000.safetensors")
    with pytest.raises(CorruptStateError, match="is not part of a checkpoint"):
        open_shards(tmp_path).__enter__()


@pytest.mark.shows("SEC24")
@pytest.mark.parametrize("box", [Box([4], [0], [3]), Box([2], [0, 0], [2]), Box([2], [-1], [2])])
def test_a_header_that_lies_is_refused(tmp_path: Path, box: Box) -> None:
    header = {"boxes": msgspec.json.encode({"w": box}).decode()}
    save_file({"w": torch.ones(2)}, tmp_path / "rank_00000.safetensors", metadata=header)
    with pytest.raises(CorruptStateError, match="the place of w"):
        open_shards(tmp_path).__enter__()


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    pieces = own_pieces({"w": torch.zeros(3)}, {}, is_first=True)
    with pytest.raises(StorageError, match="12 bytes needed"):
        write_shard(tmp_path / "gone", 0, pieces, DurableFiles())
