"""What takes longer to read than a connection waits arrives all the same."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import wait_until
from mirrored import Ends

from gradus.nodes import folder as folder_module
from gradus.nodes import folder_server as server_module
from gradus.nodes import mirror as mirror_module
from gradus.run.ready import hand_over
from gradus.sealed import FileEntry, file_entry


def slowly(*words: Any) -> FileEntry:
    time.sleep(1.2)
    return file_entry(*words)


@pytest.mark.parametrize("slow", [mirror_module, server_module], ids=["node", "launcher"])
def test_a_model_on_a_slow_disk_arrives(
    slow: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_TRY_SECONDS", 0.01)
    monkeypatch.setattr(mirror_module, "_LISTING_SECONDS", 0.05)
    monkeypatch.setattr(folder_module, "QUIET_SECONDS", 0.4)
    monkeypatch.setattr(slow, "file_entry", slowly)
    ends = Ends.below(tmp_path)
    ends.mirror()
    ends.there.model.mkdir()
    (ends.there.model / "config.json").write_text("{}")
    threading.Thread(target=partial(hand_over, ends.there, ends.there.model), daemon=True).start()
    try:
        what = "the model"
        wait_until((ends.here.model / "config.json").exists, timeout_seconds=20, what=what)
        wait_until(
            lambda: not list(ends.there.handed_over.iterdir()), timeout_seconds=20, what=what
        )
    finally:
        ends.close()
