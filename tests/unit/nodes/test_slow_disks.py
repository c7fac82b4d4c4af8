"""What takes long to read arrives all the same, but not from a node that was given up meanwhile."""

from __future__ import annotations

import threading
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
from gradus.nodes.folder import Done, Finish, PutPiece
from gradus.run.ready import hand_over
from gradus.sealed import FileEntry, content_entry, file_entry

SLOW_SECONDS = 1.2
"""Three times as long as a connection may be quiet here."""


def slowly(*words: Any) -> FileEntry:
    threading.Event().wait(SLOW_SECONDS)
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


def test_a_node_that_is_given_up_while_its_folder_is_compared_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends.below(tmp_path)
    talk = ends.connect()

    def compared(path: Path, *by: Any) -> FileEntry:
        ends.is_joined = False
        ends.here.model.mkdir()
        (ends.here.model / "a").write_bytes(b"newer")
        return file_entry(path, *by)

    files = {"a": content_entry(b"older")}
    talk.ask(PutPiece("model", "a", 0, b"older"), Done)
    monkeypatch.setattr(server_module, "file_entry", compared)
    with pytest.raises(ConnectionError):
        talk.ask(Finish("model", files), Done)
    talk.close()
    ends.close()
    assert (ends.here.model / "a").read_bytes() == b"newer"
