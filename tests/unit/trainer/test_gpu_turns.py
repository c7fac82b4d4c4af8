"""A rank takes turns with an engine over HTTP; the engine is scripted, the world has one rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from builders import build_sample
from configs import build_run_process

from gradus.errors import DeadlineError, FencedError, ProcessError, ProtocolError
from gradus.files import write_json
from gradus.orchestrator.play.inference_client import InferenceClient
from gradus.run.paths import RunDirectory
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import AnyBody, Reset, Status
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.entry.rl import run
from gradus.trainer.entry.turns import GpuTurns
from gradus.transport import SpoolSender
from gradus.wire.events import PolicyPublished, TrainerDone
from gradus.wire.micro_batch import Batch
from gradus.wire.packing import pack
from gradus.wire.versions import VersionSpan

pytestmark = pytest.mark.torch


@asynccontextmanager
async def scripted(tmp_path: Path, *, term: int = 0) -> AsyncIterator[ScriptedEngine]:
    """An engine that a trainer finds through its run directory."""
    run_dir = RunDirectory(tmp_path / "run")
    for folder in (run_dir.secrets, run_dir.ready):
        folder.mkdir(parents=True)
    for token in (run_dir.admin_token, run_dir.inference_token):
        token.write_text(f"{token.name}-token")
    async with ScriptedEngine(run_dir=run_dir.root, term=term) as engine:
        write_json(run_dir.ready_file("inference"), {"base_url": engine.base_url, "pid": 1})
        yield engine


def learn(
    tmp_path: Path,
    step: int,
    *,
    wait_seconds: float = 5.0,
    error: Exception | None = None,
    settle: Callable[[], None] | None = None,
) -> None:
    """One step in a world of one."""
    with join_world(CPU) as world:
        run_dir = RunDirectory(tmp_path / "run")
        limits = {"wait_seconds": wait_seconds, "sleep_seconds": 60.0}
        turns = GpuTurns(run_dir, 0, world, **limits)
        with turns.taken(step, settle):
            if error is not None:
                raise error


async def test_a_step_learns_between_sleep_and_wake(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        await asyncio.to_thread(learn, tmp_path, 0)
        assert engine.turns == ["sleep 0", "wake 0"]


@pytest.mark.parametrize("what", ["sleep", "wake"])
@pytest.mark.parametrize("fault", [Reset(), Status(503)])
async def test_a_turn_whose_connection_broke_is_asked_for_again(
    tmp_path: Path, what: str, fault: Reset | Status
) -> None:
    async with scripted(tmp_path) as engine:
        engine.inject(fault, path=f"/gradus/{what}")
        await asyncio.to_thread(learn, tmp_path, 0)
        assert engine.turns[-2:] == ["sleep 0", "wake 0"]


async def test_a_step_that_fails_wakes_the_engine(tmp_path: Path) -> None:
    async with scripted(tmp_path) as engine:
        with pytest.raises(MemoryError):
            await asyncio.to_thread(learn, tmp_path, 0, error=MemoryError())
        assert engine.turns == ["sleep 0", "wake 0"]


async def test_a_version_that_cannot_be_published_is_not_waited_for(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no space left on device")

    async with scripted(tmp_path) as engine:
        with pytest.raises(OSError, match="no space left"):
            await asyncio.to_thread(learn, tmp_path, 1, settle=fail)
        assert engine.turns == []


async def test_a_version_that_is_not_served_in_time_is_a_deadline(tmp_path: Path) -> None:
    async with scripted(tmp_path):
        with pytest.raises(DeadlineError, match="version 1 was not served"):
            await asyncio.to_thread(learn, tmp_path, 1, wait_seconds=0.1)


async def test_an_engine_of_a_newer_launch_fences_the_trainer(tmp_path: Path) -> None:
    async with scripted(tmp_path, term=2):
        with pytest.raises(FencedError, match="term 0 is stale"):
            await asyncio.to_thread(learn, tmp_path, 0)


@pytest.mark.parametrize(
    ("fault", "error"),
    [(Reset(), ProcessError), (Status(500), ProtocolError), (AnyBody(b"<html>"), ProtocolError)],
)
async def test_an_engine_that_answers_nonsense_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Reset | Status | AnyBody,
    error: type[Exception],
) -> None:
    monkeypatch.setattr("gradus.trainer.entry.turns.ASK_AGAIN_SECONDS", 0.0)
    async with scripted(tmp_path) as engine:
        engine.inject(fault, path="/gradus/sleep")
        with pytest.raises(error, match="inference"):
            await asyncio.to_thread(learn, tmp_path, 0)


async def test_a_run_loads_learns_and_saves_only_while_the_engine_sleeps(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with scripted(tmp_path) as engine:
        run_dir = RunDirectory(tmp_path / "run")
        sender = SpoolSender(run_dir, 0)
        for step in range(2):
            samples = [build_sample(12, seed=step, advantage=1.0), build_sample(9, seed=step + 7)]
            ranks = pack(samples, max_tokens=40, num_ranks=1)
            await sender.send(Batch(step, 0, VersionSpan(0, step), ranks))
        changes = {
            "model": {"name": str(tiny_model)},
            "max_steps": 2,
            "inference": {"gpu_sharing": "turns"},
            "trainer": {"compute_dtype": "float32"},
        }
        config = build_run_process(run_dir.root, changes)
        training = asyncio.ensure_future(asyncio.to_thread(run, config))
        client = await InferenceClient.connect(run_dir, term=0)
        async with asyncio.timeout(120):
            while not isinstance(event := await sender.receive_event(), TrainerDone):
                if isinstance(event, PolicyPublished):
                    await client.apply(event)
            await training
        await client.close()
        steps = ["sleep 0", "wake 0", "apply 1", "sleep 1", "wake 1"]
        assert engine.turns[:7] == ["sleep 0", "wake 0", *steps]
        assert sorted(engine.turns[7:]) == ["apply 2", "sleep 0", "wake 0"]
        assert (run_dir.model / "config.json").is_file()
