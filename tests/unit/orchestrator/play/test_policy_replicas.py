"""Replicas go to a version together, or are left out until they are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gradus.errors import CorruptStateError, FencedError, ProcessError, ProtocolError
from gradus.files import write_json
from gradus.orchestrator.play import replicas as policy_replicas
from gradus.orchestrator.play.replicas import PolicyReplicas, connect_policy
from gradus.run.paths import RunDirectory
from gradus.run.ready import note_left_out
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reset, Status, Stuck
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import ServedPolicy

NAMES = ["inference_0", "inference_1", "inference_2"]


class Served:
    """Three engines of one run, its client of all, and what it told the user."""

    def __init__(self, run_dir: RunDirectory, engines: list[ScriptedEngine]) -> None:
        self.run_dir = run_dir
        self.engines = engines
        self.told: list[str] = []

    def ready(self, number: int, pid: int = 1) -> dict[str, str | int]:
        return {"base_url": self.engines[number].base_url, "pid": pid}

    async def connect(self, pids: Sequence[int] = (1, 1, 1)) -> PolicyReplicas:
        for number, (name, pid) in enumerate(zip(NAMES, pids, strict=True)):
            write_json(self.run_dir.ready_file(name), self.ready(number, pid))
        policy = await connect_policy(self.run_dir, NAMES, term=1, tell=self.told.append)
        assert isinstance(policy, PolicyReplicas)
        return policy

    def published(self, version: int) -> PolicyPublished:
        directory = self.run_dir.version(version)
        directory.mkdir(parents=True, exist_ok=True)
        return PolicyPublished(version, 1, str(directory), f"digest-{version}")

    def versions(self) -> list[int]:
        return [engine.version for engine in self.engines]


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(policy_replicas, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(policy_replicas, "LONGEST_DELAY_SECONDS", 0.02)
    run_dir = RunDirectory(tmp_path / "demo")
    run_dir.secrets.mkdir(parents=True)
    run_dir.admin_token.write_text("admin\n")
    run_dir.inference_token.write_text("data\n")
    async with AsyncExitStack() as stack:
        made = [ScriptedEngine(run_dir=run_dir.root, term=1) for _ in NAMES]
        for engine in made:
            engine.check_weights = None
            await stack.enter_async_context(engine)
        yield Served(run_dir, made)


@pytest.fixture
async def policy(served: Served) -> AsyncIterator[PolicyReplicas]:
    connected = await served.connect()
    yield connected
    await connected.close()


async def returned(policy: PolicyReplicas) -> None:
    async with asyncio.timeout(60), policy._returned:
        await policy._returned.wait_for(lambda: len(policy.addresses()) == len(NAMES))


def damaged(*_: object) -> None:
    raise CorruptStateError("damaged")


@pytest.mark.shows("F66")
async def test_every_replica_serves_a_version_before_it_is_live(
    served: Served, policy: PolicyReplicas
) -> None:
    applied = await policy.apply(served.published(1))
    assert (policy.version, applied.version, applied.status.version) == (1, 1, 1)
    assert served.versions() == [1, 1, 1]
    assert not served.told


@pytest.mark.shows("F66")
async def test_a_replica_that_ends_before_it_is_told_the_initial_weights_is_left_out(
    served: Served, policy: PolicyReplicas
) -> None:
    served.engines[1].inject(Reset(), path="/gradus/apply")
    await policy.serve_initial()
    (line,) = served.told
    assert line.startswith("inference_1 is left out, 2 of 3 replicas serve the policy")
    await returned(policy)
    assert served.told[1] == (
        "inference_1 serves version 0 again, 3 of 3 replicas serve the policy"
    )


@pytest.mark.shows("F30", "F66")
async def test_no_replica_changes_before_all_have_checked_the_weights(
    served: Served, policy: PolicyReplicas
) -> None:
    first, *_, last = served.engines
    seen: list[list[int]] = []
    first.check_weights = lambda *_: seen.append(served.versions())
    last.check_weights = lambda *_: seen.append(served.versions())
    await policy.apply(served.published(1))
    # Asked twice of each: to check, and to serve.
    assert seen[:2] == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.shows("F30", "F66")
async def test_weights_that_every_replica_refuses_change_none_and_are_the_trainer_s_fault(
    served: Served, policy: PolicyReplicas
) -> None:
    for engine in served.engines:
        engine.check_weights = damaged
    with pytest.raises(CorruptStateError, match="damaged"):
        await policy.apply(served.published(1))
    assert (policy.version, served.versions(), served.told) == (0, [0, 0, 0], [])


@pytest.mark.shows("F66")
@pytest.mark.parametrize("path", ["/gradus/apply", "/gradus/status"])
@pytest.mark.parametrize("fault", [Reset(), Status(500)], ids=["reset", "500"])
async def test_a_replica_that_fails_is_out_until_it_serves_the_version(
    served: Served, policy: PolicyReplicas, path: str, fault: Status | Reset
) -> None:
    served.engines[1].inject(fault, path=path, times=2)  # a GET is sent again by itself
    await policy.status() if path.endswith("status") else None
    await policy.apply(served.published(1))
    assert policy.version == 1
    assert "inference_1 is left out, 2 of 3 replicas serve the policy" in served.told[0]
    await returned(policy)
    assert served.versions() == [1, 1, 1]
    assert served.told[1] == "inference_1 serves version 1 again, 3 of 3 replicas serve the policy"


@pytest.mark.shows("F66")
async def test_one_replica_s_damaged_disk_takes_that_replica_out_and_no_other(
    served: Served, policy: PolicyReplicas
) -> None:
    served.engines[2].check_weights = damaged
    await policy.apply(served.published(1))
    assert served.versions() == [1, 1, 0]
    assert policy.addresses() == [engine.base_url for engine in served.engines[:2]]
    served.engines[2].check_weights = None
    await returned(policy)
    assert served.versions() == [1, 1, 1]


@pytest.mark.shows("F09")
async def test_a_replica_that_came_back_with_its_first_weights_is_found_and_brought_along(
    served: Served, policy: PolicyReplicas
) -> None:
    await policy.apply(served.published(1))
    served.engines[0].served = ServedPolicy("demo", 1, 0, None)
    status = await policy.status()
    assert status.version == 1
    assert "it serves version 0, and 1 is live" in served.told[0]
    await returned(policy)
    assert served.versions() == [1, 1, 1]


@pytest.mark.shows("F11")
async def test_a_replica_that_hangs_holds_no_version_up(
    served: Served, policy: PolicyReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_replicas, "STATUS_SECONDS", 0.1)
    hung = served.engines[1]
    hung.inject(Stuck(), path="/gradus/status", times=3)
    await policy.status()
    await policy.apply(served.published(1))
    assert served.versions() == [1, 0, 1]
    await returned(policy)
    assert served.versions() == [1, 1, 1]


async def test_a_replica_whose_process_ends_is_left_out_before_anything_is_asked_of_it(
    served: Served,
) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    connected = await served.connect(pids=[1, process.pid, 1])
    served.engines[1].inject(Stuck(), path="/gradus/apply")  # as a port whose process is gone
    applying = asyncio.ensure_future(connected.apply(served.published(1)))
    await asyncio.sleep(0)
    process.kill()
    await process.wait()
    async with asyncio.timeout(60):
        await applying
    assert served.versions() == [1, 0, 1]
    assert "inference_1 is left out, 2 of 3 replicas serve the policy: its process ended" in (
        served.told
    )
    write_json(served.run_dir.ready_file("inference_1"), served.ready(1))
    await returned(connected)
    assert served.versions() == [1, 1, 1]
    await connected.close()


async def test_a_version_waits_for_a_replica_to_return_when_all_are_gone(
    served: Served, policy: PolicyReplicas
) -> None:
    for engine in served.engines:
        engine.inject(Reset(), path="/gradus/apply")
    applied = await policy.apply(served.published(1))
    assert (applied.version, policy.version) == (1, 1)
    await returned(policy)
    assert served.versions() == [1, 1, 1]


@pytest.mark.shows("I6")
async def test_a_newer_owner_of_the_run_is_told_and_nobody_is_left_out(
    served: Served, policy: PolicyReplicas
) -> None:
    served.engines[1].served = ServedPolicy("demo", 2, 0, None)
    with pytest.raises(FencedError):
        await policy.apply(served.published(1))
    assert not served.told


async def test_loads_are_added_and_no_counter_falls_with_a_replica(
    served: Served, policy: PolicyReplicas
) -> None:
    for number, engine in enumerate(served.engines, 1):
        engine.load = {"running": number, "kv_usage": number / 10, "generated_tokens": 100}
    status = await policy.status()
    assert (status.running, status.kv_usage, status.generated_tokens) == (6, 0.3, 300)
    served.engines[0].load["generated_tokens"] = 5  # it started again
    served.engines[2].inject(Status(500), path="/gradus/status")
    status = await policy.status()
    assert (status.running, status.generated_tokens) == (3, 305)
    assert status.parts is not None
    assert status.parts.keys() == {"inference_0", "inference_1"}


async def test_an_answer_is_an_error_where_no_replica_gives_one(
    served: Served, policy: PolicyReplicas
) -> None:
    for engine in served.engines:
        await engine.close()
    with pytest.raises(ProcessError, match="none of 3 replicas"):
        await policy.status()


@pytest.mark.shows("I3")
async def test_a_new_orchestrator_takes_replicas_that_differ_to_the_newest_version(
    served: Served,
) -> None:
    served.engines[1].served = ServedPolicy("demo", 1, 3, "digest-3")
    connected = await served.connect()
    assert connected.version == 3
    await connected.apply(served.published(3))
    assert (served.versions(), served.told) == ([3, 3, 3], [])
    await connected.close()


@pytest.mark.shows("F09")
async def test_a_new_orchestrator_does_not_wait_for_a_replica_that_stays_out(
    served: Served,
) -> None:
    served.run_dir.ready.mkdir(exist_ok=True)
    note_left_out(served.run_dir, NAMES, {"inference_0", "inference_2"})
    connected = await served.connect()
    assert connected.addresses() == [served.engines[1].base_url]
    await connected.close()


@pytest.mark.shows("F16", "F58", "F68")
async def test_a_server_of_another_run_is_refused(served: Served) -> None:
    served.engines[1].served = ServedPolicy("another", 1, 0, None)
    with pytest.raises(ProtocolError, match="serves run 'another', not 'demo'"):
        await served.connect()
