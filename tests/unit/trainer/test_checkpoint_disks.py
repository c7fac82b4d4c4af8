"""Saves on a real small disk that fills up, and on one that cannot be written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from checkpoints import new_run

from gradus.errors import StorageError
from gradus.files import DurableFiles
from gradus.run.checkpoints import CheckpointStore
from gradus.trainer.checkpoint.shards import Piece, box_of
from gradus.trainer.checkpoint.training_state import Origin, StateSnapshot, TrainingProgress

pytestmark = pytest.mark.torch

ORIGIN = Origin(model={"name": "tiny"}, compute_dtype="float32")


def snapshot(step: int, num_bytes: int) -> StateSnapshot:
    values = torch.full((num_bytes // 4,), float(step))
    return StateSnapshot(
        TrainingProgress(step, 1, {}, ORIGIN), {"w": Piece(box_of(values), values)}
    )


def save(checkpoints: CheckpointStore, step: int, num_bytes: int) -> None:
    snapshot(step, num_bytes).write(checkpoints.staging(step), 0, DurableFiles())
    checkpoints.commit(step, ["trainer"])


@pytest.mark.shows("F23")
def test_a_disk_that_fills_up_keeps_the_checkpoint_before(small_disk: Path) -> None:
    checkpoints = CheckpointStore(new_run(small_disk), term=1)
    save(checkpoints, 1, 2 << 20)
    with pytest.raises(StorageError, match=r"rank_00000.*bytes needed.*bytes free"):
        save(checkpoints, 2, 3 << 20)
    checkpoints.discard(2)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1
    save(checkpoints, 2, 1 << 20)
    assert [path.name for path in sorted((small_disk / "demo/checkpoints").iterdir())] == [
        "step_00000001",
        "step_00000002",
    ]


@pytest.mark.shows("F26")
def test_a_disk_that_became_read_only_is_named_and_still_read(small_disk: Path) -> None:
    checkpoints = CheckpointStore(new_run(small_disk), term=1)
    save(checkpoints, 1, 1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="Read-only file system"):
        save(checkpoints, 2, 1 << 20)
    assert checkpoints.load(1).step == 1
