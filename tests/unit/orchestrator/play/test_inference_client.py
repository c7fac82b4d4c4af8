"""A version goes live through the inference server's routes, when the engine itself says so."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gradus.errors import (
    ConfigError,
    CorruptStateError,
    DeadlineError,
    FencedError,
    ProcessError,
    ProtocolError,
)
from gradus.files import write_json
from gradus.orchestrator.play.inference_client import InferenceClient
from gradus.run.paths import RunDirectory
from gradus.run.ready import EnvironmentReady, read_ready, wait_for_exit
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reset, Status, Stuck
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import ServedPolicy


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedEngine]:
    """An engine in the inference role that believes every directory of weights."""
    monkeypatch.setattr("gradus.orchestrator.play.inference_client.LEAVE_SECONDS", 0.05)
    monkeypatch.setattr("gradus.orchestrator.play.inference_client._LOOK_SECONDS", 0.01)
    root = tmp_path / "demo"
    run_dir = RunDirectory(root)
    run_dir.secrets.mkdir(parents=True)
    run_dir.admin_token.write_text("admin\n")
    run_dir.inference_token.write_text("data\n")
    async with ScriptedEngine(run_dir=root, term=1) as engine:
        engine.check_weights = None
        write_json(run_dir.ready_file("inference"), {"base_url": engine.base_url, "pid": 1})
        yield engine


def published(engine: ScriptedEngine, version: int) -> PolicyPublished:
    assert engine.run_dir is not None
    directory = engine.run_dir.version(version)
    directory.mkdir(parents=True, exist_ok=True)
    return PolicyPublished(version, 1, str(directory), f"digest-{version}")


async def connect(engine: ScriptedEngine, *, term: int = 1, seconds: float = 60.0) -> Any:
    assert engine.run_dir is not None
    return await InferenceClient.connect(engine.run_dir, term=term, apply_seconds=seconds)


async def test_a_published_version_goes_live_and_the_engine_confirms_it(
    engine: ScriptedEngine,
) -> None:
    client = await connect(engine)
    assert client.version == 0
    applied = await client.apply(published(engine, 1))
    assert (client.version, applied.version, applied.status.version) == (1, 1, 1)
    assert engine.applied[0].run_id == "demo"
    assert engine.applied[0].digest == "digest-1"
    await client.close()


async def test_the_newest_version_is_known_while_it_is_being_applied(
    engine: ScriptedEngine,
) -> None:
    client = await connect(engine)
    engine.inject(Stuck(), path="/gradus/apply")
    applying = asyncio.create_task(client.apply(published(engine, 1)))
    await asyncio.sleep(0)
    assert (client.version, client.newest_version) == (0, 1)
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    await client.close()


@pytest.mark.shows("I3")
async def test_an_engine_that_serves_another_version_is_not_believed(
    engine: ScriptedEngine,
) -> None:
    client = await connect(engine)
    engine.reported_version = 7
    with pytest.raises(ProtocolError, match="serves version 7 after it was asked for 1"):
        await client.apply(published(engine, 1))
    assert client.version == 0
    await client.close()


@pytest.mark.shows("F72", "I8")
async def test_an_apply_that_never_ends_is_a_named_deadline(engine: ScriptedEngine) -> None:
    client = await connect(engine, seconds=0.05)
    engine.inject(Stuck(), path="/gradus/apply")
    with pytest.raises(DeadlineError, match="did not apply version 1"):
        await client.apply(published(engine, 1))
    await client.close()


@dataclass
class Door:
    """What stands before an engine, and breaks the next exchanges about `path`."""

    port: int
    path: bytes = b""
    faults: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with server:
            yield "http://{}:{}".format(*server.sockets[0].getsockname())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"Content-Length: (\d+)", head)
        body = await reader.readexactly(int(size[1]) if size else 0)
        fault = self.faults.pop(0) if self.faults and self.path in head else ""
        answer = f"HTTP/1.1 {fault} Away\r\nContent-Length: 0\r\n\r\n".encode()
        if not fault.isdecimal() and fault != "before":
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
            far_writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
            answer = await far_reader.read()
            far_writer.close()
        if fault == "no length":
            answer = re.sub(rb"Content-Length: \d+\r\n", b"", answer)
        if fault in ("before", "after"):
            writer.transport.abort()
        else:
            writer.write(answer[:-5] if fault in ("half", "no length") else answer)
            writer.close()


@pytest.mark.shows("F72")
@pytest.mark.parametrize("path", ["/gradus/apply", "/gradus/status"])
@pytest.mark.parametrize("fault", ["before", "after", "half", "no length", "502", "503", "504"])
async def test_what_a_broken_connection_left_open_is_asked_again_and_applied_once(
    engine: ScriptedEngine, fault: str, path: str
) -> None:
    assert engine.run_dir is not None
    door = Door(int(engine.base_url.rpartition(":")[2]), path.encode())
    async with door.open() as base_url:
        write_json(engine.run_dir.ready_file("inference"), {"base_url": base_url, "pid": 1})
        client = await connect(engine)
        for version in (1, 2):
            door.faults = [fault, fault]
            async with asyncio.timeout(60):
                applied = await client.apply(published(engine, version))
            assert (applied.version, door.faults) == (version, [])
        assert [asked.version for asked in engine.applied] == [1, 2]
        await client.close()


async def test_an_engine_that_refuses_connections_for_a_while_is_asked_until_it_answers(
    engine: ScriptedEngine,
) -> None:
    client = await connect(engine)
    await engine.close()
    applying = asyncio.create_task(client.apply(published(engine, 1)))
    await asyncio.wait([applying], timeout=0.2)
    await engine.start(port=int(engine.base_url.rpartition(":")[2]))
    async with asyncio.timeout(60):
        assert (await applying).version == 1
    await client.close()


async def test_a_connection_that_stays_broken_says_which_process_to_look_at(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.orchestrator.play.inference_client.ASK_AGAIN_SECONDS", 0.1)
    client = await connect(engine)
    engine.inject(Reset(), path="/gradus/apply", times=99)
    with pytest.raises(ProcessError, match=r"inference: POST .*/gradus/apply failed"):
        await client.apply(published(engine, 1))
    await client.close()


async def test_an_error_of_the_engine_carries_its_status(engine: ScriptedEngine) -> None:
    client = await connect(engine)
    engine.inject(Status(500), path="/gradus/apply")
    with pytest.raises(ProtocolError, match="answered 500"):
        await client.apply(published(engine, 1))
    await client.close()


@pytest.mark.shows("F30")
async def test_weights_that_were_damaged_on_the_way_are_named_and_the_old_version_serves(
    engine: ScriptedEngine,
) -> None:
    def damaged(directory: Path, _: str) -> None:
        raise CorruptStateError(f"{directory}/model.safetensors has 7 bytes, not 9")

    client = await connect(engine)
    engine.check_weights = damaged
    with pytest.raises(CorruptStateError, match=r"refused the new one.*has 7 bytes.*--resume"):
        await client.apply(published(engine, 1))
    assert (engine.version, client.version) == (0, 0)
    await client.close()


@pytest.mark.shows("I6", "SEC4")
async def test_a_stale_term_is_fenced(engine: ScriptedEngine) -> None:
    client = await connect(engine, term=0)
    with pytest.raises(FencedError, match="term 1 owns the run"):
        await client.apply(published(engine, 1))
    await client.close()


@pytest.mark.shows("F16", "F58")
async def test_a_server_of_another_run_fences_nobody_whatever_its_name(
    engine: ScriptedEngine,
) -> None:
    client = await connect(engine)
    engine.served = ServedPolicy(run_id="terminal", term=1, version=0, digest=None)
    with pytest.raises(ProtocolError, match="serves run 'terminal', not 'demo'"):
        await client.apply(published(engine, 1))
    await client.close()


async def test_a_run_without_an_inference_server_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="'inference' is not ready"):
        await InferenceClient.connect(RunDirectory(tmp_path), term=1)


@pytest.mark.shows("F05", "F09")
async def test_an_orchestrator_that_starts_beside_its_server_waits_for_it(
    engine: ScriptedEngine,
) -> None:
    assert engine.run_dir is not None
    ready = engine.run_dir.ready_file("inference")
    ready.unlink()
    connecting = asyncio.create_task(
        InferenceClient.connect(engine.run_dir, term=1, start_seconds=9)
    )
    await asyncio.sleep(0)
    assert not connecting.done()
    engine.inject(Status(500), path="/gradus/status")
    write_json(ready, {"base_url": engine.base_url, "pid": 1})
    async with asyncio.timeout(60):
        client = await connecting
    await client.close()


async def test_what_an_engine_generated_before_is_not_counted(engine: ScriptedEngine) -> None:
    """An orchestrator in place of another would say that its first step generated all of it."""
    engine.load = {"generated_tokens": 1000}
    client = await connect(engine)
    engine.load = {"generated_tokens": 1007}
    assert (await client.status()).generated_tokens == 7
    await client.close()


async def test_a_run_without_tokens_says_who_makes_them(engine: ScriptedEngine) -> None:
    assert engine.run_dir is not None
    engine.run_dir.admin_token.unlink()
    with pytest.raises(ConfigError, match="makes a run's tokens"):
        await connect(engine)


def test_a_ready_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    write_json(run_dir.ready_file("env_words"), {"pid": 1})
    with pytest.raises(ProtocolError, match="run_address"):
        read_ready(run_dir, "env_words", EnvironmentReady)


async def test_the_end_of_a_process_is_noticed_without_asking() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    waiting = asyncio.create_task(wait_for_exit(process.pid))
    await asyncio.sleep(0)
    assert not waiting.done()
    process.kill()
    async with asyncio.timeout(60):
        await waiting
    await process.wait()
    await wait_for_exit(process.pid)


@asynccontextmanager
async def replaced(engine: ScriptedEngine, pid: int = 2) -> AsyncIterator[ScriptedEngine]:
    """A stale engine at the address of one that is gone."""
    assert engine.run_dir is not None
    await engine.close()
    again = ScriptedEngine(run_dir=engine.run_dir.root, term=1).await_version()
    again.check_weights = None
    port = int(engine.base_url.rsplit(":", 1)[1])
    await again.start(port=port)
    write_json(engine.run_dir.ready_file("inference"), {"base_url": again.base_url, "pid": pid})
    yield again
    await again.close()


@pytest.mark.shows("F09", "I3")
async def test_a_new_server_serves_the_last_version_before_it_is_open(
    engine: ScriptedEngine,
) -> None:
    client = await connect(engine)
    await client.apply(published(engine, 1))
    engine.load = {"generated_tokens": 100}
    await client.apply(published(engine, 2))
    async with replaced(engine) as again:
        again.load = {"generated_tokens": 7}
        assert (await client.status()).is_stale
        status = await client.serve_again()
        assert (status.is_stale, status.version, status.generated_tokens) == (False, 2, 107)
        assert [asked.digest for asked in again.applied] == ["digest-2"]
        assert (await client.serve_again()).version == 2
        assert len(again.applied) == 1
    await client.close()


async def test_a_new_server_opens_with_the_initial_weights_only_when_these_were_served(
    engine: ScriptedEngine,
) -> None:
    client = await connect(engine)
    async with replaced(engine) as again:
        assert (await client.serve_again()).is_stale, "nobody said yet what is served"
        await client.serve_initial()
        assert not again.served.is_stale
    async with replaced(engine, pid=3) as third:
        assert (await client.serve_again()).version == 0
        assert (third.served.is_stale, third.applied) == (False, [])
    await client.close()


@pytest.mark.shows("F09")
async def test_a_version_whose_server_ended_meanwhile_is_applied_by_the_next(
    engine: ScriptedEngine,
) -> None:
    client = await connect(engine)
    assert engine.run_dir is not None
    engine.inject(Stuck(), path="/gradus/apply")
    applying = asyncio.create_task(client.apply(published(engine, 1)))
    await asyncio.sleep(0)
    engine.run_dir.ready_file("inference").unlink()
    async with replaced(engine) as again:
        async with asyncio.timeout(60):
            applied = await applying
        assert (applied.version, client.version, again.version) == (1, 1, 1)
    await client.close()


@pytest.mark.shows("F09", "I8")
async def test_a_server_that_does_not_come_back_is_not_awaited_forever(
    engine: ScriptedEngine,
) -> None:
    assert engine.run_dir is not None
    client = await InferenceClient.connect(engine.run_dir, term=1, away_seconds=0.05)
    engine.run_dir.ready_file("inference").unlink()
    await engine.close()
    with pytest.raises(ProcessError, match="failed"):
        await client.apply(published(engine, 1))
    await client.close()
