"""Files of a run appear whole, and unreadable ones are named."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from gradus.errors import CorruptStateError
from gradus.files import file_digest, read_json, write_atomically, write_json
from gradus.run.paths import RunDirectory


def test_every_path_of_a_run_lies_below_its_root(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "demo")
    names = [name for name, value in vars(RunDirectory).items() if hasattr(value, "__get__")]
    names = [name for name in names if isinstance(getattr(run, name), Path)]
    assert len(names) > 10
    assert all(getattr(run, name).is_relative_to(run.root) for name in names)


def test_versions_sort_by_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert sorted([run.version(10), run.version(9)]) == [run.version(9), run.version(10)]


def test_json_is_read_back_as_written(tmp_path: Path) -> None:
    write_json(tmp_path / "sub" / "value.json", {"a": [1, 2.5, None]})
    assert read_json(tmp_path / "sub" / "value.json") == {"a": [1, 2.5, None]}


def test_nothing_but_the_file_is_left_after_writing(tmp_path: Path) -> None:
    write_atomically(tmp_path / "value", b"first")
    write_atomically(tmp_path / "value", b"second")
    assert [p.name for p in tmp_path.iterdir()] == ["value"]
    assert (tmp_path / "value").read_bytes() == b"second"


def test_a_secret_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    write_atomically(tmp_path / "token", b"x", mode=0o600)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(CorruptStateError, match=r"broken\.json is not JSON"):
        read_json(path)


def test_a_number_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "value.json", float("nan"))


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"ab" * 1_500_000)
    assert file_digest(path) == hashlib.sha256(b"ab" * 1_500_000).hexdigest()
