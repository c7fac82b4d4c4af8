"""The directory of the sockets."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gradus.environments.process import private_directory
from gradus.errors import ConfigError


def test_only_the_owner_can_enter_it_and_it_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_directory() as directory:
        (directory / "socket").touch()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []


def test_a_path_too_long_for_a_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter directory"), private_directory():
        pass
    assert list(folder.iterdir()) == []
