"""Files of tensors are those of safetensors, with digests for which nothing is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradus import sealed
from gradus.errors import ConfigError
from gradus.files import DurableFiles
from gradus.sealed import file_entries, file_entry
from gradus.weights import tensor_files
from gradus.weights.tensor_files import write_tensor_file, write_tensors

pytestmark = pytest.mark.torch

TENSORS = {
    "flag": torch.tensor([True, False, True]),
    "half": torch.randn(5, 3).bfloat16(),
    "scalar": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
    "tiny": torch.randn(3).to(torch.float8_e4m3fn),
    "wide": torch.randn(40, 50),
}


def test_a_file_is_the_one_that_safetensors_reads(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "ours", TENSORS)
    found = load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float()), name
    save_file(TENSORS, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size


@pytest.mark.parametrize("block_bytes", [7, 64, 4096, 16 << 20])
def test_the_digest_of_what_is_written_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)  # Several threads also on a small machine.
    monkeypatch.setattr(sealed, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block_bytes)
    entries = write_tensors(tmp_path, TENSORS.items(), DurableFiles(), shard_bytes=500)
    assert entries == file_entries(tmp_path)
    assert len(entries) == 3, "two shards and their index"
    for name, entry in entries.items():
        assert sealed.content_entry((tmp_path / name).read_bytes()) == entry


def test_one_changed_value_changes_the_digest(tmp_path: Path) -> None:
    before = write_tensor_file(tmp_path / "before", TENSORS)
    changed = {**TENSORS, "wide": TENSORS["wide"].clone()}
    changed["wide"][39, 49] += 1
    after = write_tensor_file(tmp_path / "after", changed)
    assert before.sha256 != after.sha256


def test_a_second_try_leaves_nothing_of_a_longer_first_one(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "x", TENSORS)
    entry = write_tensor_file(tmp_path / "x", {"half": TENSORS["half"]})
    assert file_entry(tmp_path / "x") == entry
    assert load_file(tmp_path / "x").keys() == {"half"}


def test_a_dtype_that_no_reader_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"odd is torch\.complex64"):
        write_tensor_file(tmp_path / "x", {"odd": torch.zeros(2, dtype=torch.complex64)})
