"""The records of trained tokens are read back as they were written, or say why not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradus.errors import ConfigError, CorruptStateError
from gradus.monitor.token_record import TokenRecord, pack_records, read_records, record_file
from gradus.run.paths import RunDirectory


def record(sample_id: str, numbers: int = 2) -> TokenRecord:
    some = np.arange(numbers, dtype=np.float32)
    return TokenRecord(
        sample_id=sample_id,
        term=1,
        versions=[(-1, 1), (8, 1), (9, numbers - 1)],
        token_ids=np.arange(numbers + 1, dtype=np.int32),
        is_trained=np.arange(numbers + 1) > 0,
        sampling_logprobs=-some,
        policy_logprobs=-2 * some,
        entropies=some,
        advantages=some + 1,
        loss_weights={"rl": some},
        pushes=some / 2,
    )


def write(root: Path, *records: TokenRecord, step: int = 3, rank: int = 0) -> Path:
    path = record_file(RunDirectory(root), step, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack_records(records))
    return path


def ids(root: Path, episode: str = "g1.0", step: int = 3) -> list[str]:
    return [it.sample_id for it in read_records(RunDirectory(root), step, episode)]


def test_an_episode_has_the_samples_of_all_its_traces_branches_and_ranks(tmp_path: Path) -> None:
    write(tmp_path, record("g1.0/0/0"), record("g1.00/0/0"), record("g1.0/1/0"))
    write(tmp_path, record("g1.0/0/1"), record("g1.1/0/0"), rank=1)
    assert ids(tmp_path) == ["g1.0/0/0", "g1.0/1/0", "g1.0/0/1"]
    first = next(read_records(RunDirectory(tmp_path), 3, "g1.0"))
    assert first.versions == [(-1, 1), (8, 1), (9, 1)]
    assert first.policy_logprobs.tolist() == [0.0, -2.0]
    assert first.loss_weights["rl"].tolist() == [0.0, 1.0]
    assert ids(tmp_path, step=4) == []


def test_every_length_of_a_cut_file_gives_its_whole_entries(tmp_path: Path) -> None:
    path = write(tmp_path, record("g1.0/0/0"), record("g1.0/1/0"))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = ids(tmp_path)
        assert found == ["g1.0/0/0", "g1.0/1/0"][: len(found)]
        assert len(found) < 2
    path.write_bytes(whole)
    assert len(ids(tmp_path)) == 2


def test_a_file_of_a_newer_gradus_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, record("g1.0/0/0"))
    path.write_bytes(path.read_bytes().replace(b"gradus-tokens 2\n", b"gradus-tokens 3\n"))
    with pytest.raises(ConfigError, match=r"rank_0\.bin was written by a newer gradus, in form 3"):
        ids(tmp_path)


@pytest.mark.parametrize("content", [b"\0" * 100, b"gradus-tokens one\n", b"x"])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path).write_bytes(content)
    with pytest.raises(CorruptStateError, match=r"rank_0\.bin does not begin as a record"):
        ids(tmp_path)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, record("g1.0/0/0"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptStateError, match="damaged"):
        ids(tmp_path)
