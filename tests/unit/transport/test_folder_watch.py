"""A watch wakes its process when something appears in the folder."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from commands import wait_until, wait_until_async

from gradus.transport import watch
from gradus.transport.watch import FolderWatch


def test_a_new_file_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FALLBACK_SECONDS", 60.0)
    folder = FolderWatch(tmp_path)
    writer = threading.Thread(target=(tmp_path / "new").touch)
    writer.start()
    started = time.monotonic()
    folder.wait(60)
    writer.join()
    assert time.monotonic() - started < 30
    folder.close()


def test_a_change_before_the_wait_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "FALLBACK_SECONDS", 60.0)
    folder = FolderWatch(tmp_path)
    (tmp_path / "new").touch()
    started = time.monotonic()
    folder.wait(60)
    assert time.monotonic() - started < 30
    folder.close()


def test_a_wait_ends_at_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FALLBACK_SECONDS", 60.0)
    folder = FolderWatch(tmp_path)
    started = time.monotonic()
    folder.wait(0.01)
    assert time.monotonic() - started < 30
    folder.close()


async def test_all_waiting_coroutines_are_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "FALLBACK_SECONDS", 60.0)
    folder = FolderWatch(tmp_path)
    waiting = [asyncio.create_task(folder.wait_async()) for _ in range(3)]
    await asyncio.sleep(0)
    os.rename(_touched(tmp_path.parent / "outside"), tmp_path / "inside")
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    folder.close()
    folder.close()


@pytest.mark.shows("F31")
async def test_without_inotify_the_watch_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_open_inotify", lambda folders: None)
    folder = FolderWatch(tmp_path)
    (tmp_path / "new").touch()
    folder.wait(0.001)
    await asyncio.wait_for(folder.wait_async(), 60)
    folder.close()


@pytest.mark.shows("F31")
def test_a_folder_that_is_missing_is_polled(tmp_path: Path) -> None:
    folder = FolderWatch(tmp_path / "missing")
    folder.wait(0.001)
    folder.close()


def test_a_forgotten_watch_gives_its_descriptor_back(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    FolderWatch(tmp_path)
    wait_until(lambda: descriptors() <= before)


async def test_waiting_helper_reports_what_did_not_happen() -> None:
    with pytest.raises(AssertionError, match=r"the moon did not come true in 0\.01 s"):
        wait_until(lambda: False, timeout_seconds=0.01, what="the moon")
    with pytest.raises(AssertionError, match="the condition did not come true"):
        await wait_until_async(lambda: False, timeout_seconds=0.01)


def _touched(path: Path) -> Path:
    path.touch()
    return path
