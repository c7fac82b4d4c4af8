"""A checkpoint of both roles is there whole or not at all, whenever the orchestrator is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from checkpoints import Crash, FaultyFiles, new_run

from gradus.config import CheckpointConfig
from gradus.orchestrator.records.journal import Journal
from gradus.orchestrator.resume.checkpoint import (
    FORMAT,
    CheckpointWriter,
    OrchestratorState,
    SavedPieces,
    Snapshot,
    load_orchestrator,
)
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.wire.codec import encode


def snapshot_of(step: int) -> Snapshot:
    sizes: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
    sizes.set_result({})
    numbers = {"max_steps": 9, "journal_lines": 0, "num_drawn": 0}
    lists = {"open_groups": [], "cut_off": [], "plugins": {}}
    state = msgspec.convert({"format": FORMAT, "step": step, **numbers, **lists}, OrchestratorState)
    return Snapshot(step, msgspec.json.encode(state), encode(SavedPieces({}, [], [])), sizes)


async def commit(run_dir: RunDirectory, step: int, files: FaultyFiles) -> None:
    """What the trainer staged becomes a checkpoint; two are kept."""
    part = CheckpointStore(run_dir, 1).staging(step) / "trainer"
    part.mkdir(exist_ok=True)
    (part / "weights").write_text("w")
    config = CheckpointConfig(interval_steps=2, keep_last=2)
    with Journal(run_dir.journal, term=1, now=lambda: 0.0) as journal:
        store = CheckpointStore(run_dir, 1, files)
        writer = CheckpointWriter(store, config, journal=journal, files=files)
        writer.take(step, snapshot_of(step))
        await writer.commit(step)


@pytest.mark.shows("F17", "F18", "I4")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_kill_at_any_operation_of_a_commit_leaves_a_whole_checkpoint(
    tmp_path: Path, after: bool
) -> None:
    counted = FaultyFiles()
    undisturbed = new_run(tmp_path, "undisturbed")
    for step in (2, 4):
        await commit(undisturbed, step, FaultyFiles())
    await commit(undisturbed, 6, counted)
    assert {"write", "stage", "rename", "delete"} <= set(counted.operations)
    renamed = counted.operations.index("rename")
    for at in range(len(counted.operations)):
        run_dir = new_run(tmp_path, f"killed-{at}")
        for step in (2, 4):
            await commit(run_dir, step, FaultyFiles())
        with pytest.raises(Crash):
            await commit(run_dir, 6, FaultyFiles(at, after=after))
        step = 6 if at + after > renamed else 4
        # Another orchestrator in the term is told of it once more, and has no snapshot of it.
        with Journal(run_dir.journal, term=1, now=lambda: 0.0) as journal:
            again = CheckpointWriter(CheckpointStore(run_dir, 1), CheckpointConfig(), journal)
            await again.commit(6)
        found = CheckpointStore(run_dir, 2).latest()
        assert found is not None
        assert (found.step, load_orchestrator(found).state.step) == (step, step)
        assert found.label.parts == ["trainer", "orchestrator"]
        await commit(run_dir, 8, FaultyFiles())
        assert CheckpointStore(run_dir, 2).newest_step() == 8
