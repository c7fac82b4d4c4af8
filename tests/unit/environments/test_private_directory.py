"""The directory of the sockets."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradus.environments.process import private_directory
from gradus.errors import ConfigError
from gradus.processes.table import read_process


@pytest.mark.shows("SEC36")
def test_only_the_owner_can_enter_it_and_it_goes_away(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    with private_directory("demo") as directory:
        (directory / "socket").touch()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(short_path.iterdir()) == []


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a socket, unlike that of a test."""
    with tempfile.TemporaryDirectory(prefix="g-") as folder:
        yield Path(folder)


@pytest.mark.shows("F15")
def test_its_name_carries_the_run_unless_its_parent_does(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    with private_directory("a-run-with-a-very-long-name") as directory:
        assert directory.name.startswith("gradus-env-a-run-with-a-ver-")
    entry = read_process(os.getpid())
    assert entry is not None
    monkeypatch.setenv("GRADUS_LAUNCH", f"{os.getpid()}.{entry.start_time}")
    with private_directory("a-run-with-a-very-long-name") as directory:
        assert directory.name.startswith("env-")
    assert short_path.is_dir()


@pytest.mark.shows("F15")
def test_the_last_process_of_a_killed_launcher_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gradus-demo-1"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("GRADUS_LAUNCH", f"{os.getpid()}.1")
    with private_directory("demo"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.shows("F33")
def test_a_path_too_long_for_a_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    refused = pytest.raises(ConfigError, match="set TMPDIR to a shorter directory")
    with refused, private_directory("demo"):
        pass
    assert list(folder.iterdir()) == []
