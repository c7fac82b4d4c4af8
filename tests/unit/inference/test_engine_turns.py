"""Engine and trainer take turns over a fake engine: order, refusals, and who is left asleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gradus.inference.admin import WeightAdmin
from gradus.inference.gpu.turns import EngineTurns
from gradus.wire.inference import ApplyRefusal, ApplyRequest, ServedPolicy, TurnRequest, TurnResult

RUN, TERM = "demo", 3


@dataclass
class RecordedEngine:
    """Remembers what it was told; fails or waits where a test says so."""

    calls: list[str] = field(default_factory=list)
    failing: str | None = None
    stuck: str | None = None
    version: int = 0

    async def _step(self, name: str) -> None:
        self.calls.append(name)
        if name == self.stuck:
            await asyncio.Event().wait()
        if name == self.failing:
            raise RuntimeError("CUDA error: out of memory")

    async def sleep(self) -> None:
        await self._step("sleep")

    async def wake(self) -> None:
        await self._step("wake")

    async def pause(self) -> None:
        await self._step("pause")

    async def resume(self) -> None:
        await self._step("resume")

    async def load(self, directory: Path) -> None:
        await self._step(f"load {directory.name}")

    async def set_version(self, version: int) -> None:
        self.version = version

    async def get_version(self) -> int:
        return self.version


@dataclass
class Setup:
    """Turns and the admin that they hold, over one engine."""

    engine: RecordedEngine
    admin: WeightAdmin
    turns: EngineTurns
    weights: Path
    broken: list[str]

    def apply(self, version: int) -> asyncio.Task[object]:
        """Ask for a version as the orchestrator does."""
        directory = self.weights / f"version_{version}"
        directory.mkdir(parents=True, exist_ok=True)
        request = ApplyRequest(RUN, TERM, version, str(directory), f"digest-{version}")
        return asyncio.ensure_future(self.admin.apply(request))

    async def sleep(self, version: int, **changes: object) -> TurnResult:
        return await self.turns.sleep(turn(version, **changes))

    async def wake(self, version: int, **changes: object) -> TurnResult:
        return await self.turns.wake(turn(version, **changes))


def turn(version: int, **changes: object) -> TurnRequest:
    fields = {"run_id": RUN, "term": TERM, "version": version}
    limits = {"wait_seconds": 10.0, "sleep_seconds": 60.0}
    return TurnRequest(**(fields | limits | changes))  # type: ignore[arg-type]


Build = Callable[..., Setup]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def build_setup(deadline_seconds: float = 60.0) -> Setup:
        engine, broken, weights = RecordedEngine(), [], tmp_path / RUN / "weights"
        admin = WeightAdmin(
            engine,
            served=ServedPolicy(run_id=RUN, term=TERM, version=0, digest=None),
            initial_weights=tmp_path,
            weights_root=weights,
            verify=lambda *_: None,
            on_broken=broken.append,
        )
        turns = EngineTurns(
            engine, admin, on_broken=broken.append, deadline_seconds=deadline_seconds
        )
        return Setup(engine, admin, turns, weights, broken)

    return build_setup


async def settle() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_step_sleeps_and_wakes_and_its_version_is_applied_after_it(build: Build) -> None:
    setup = build()
    await setup.sleep(0)
    assert setup.admin.is_paused
    applying = setup.apply(1)
    await settle()
    assert setup.engine.calls == ["sleep"]
    assert (await setup.wake(0)).was_in_time
    assert not setup.admin.is_paused or setup.engine.calls[-1] == "pause"
    await applying
    assert setup.engine.calls == ["sleep", "wake", "pause", "load version_1", "resume"]
    assert not setup.admin.is_paused


async def test_the_engine_stays_awake_until_it_serves_the_version_that_is_trained(
    build: Build,
) -> None:
    setup = build()
    asking = asyncio.ensure_future(setup.sleep(1))
    await settle()
    assert setup.engine.calls == []
    await setup.apply(1)
    await asking
    assert setup.engine.calls == ["pause", "load version_1", "resume", "sleep"]


async def test_a_version_that_never_comes_ends_the_wait_with_its_number(build: Build) -> None:
    setup = build()
    with pytest.raises(ApplyRefusal, match=r"version 2 was not served in .* only 0") as caught:
        await setup.sleep(2, wait_seconds=0.05)
    assert caught.value.status == 504
    await setup.apply(1)
    assert setup.engine.calls == ["pause", "load version_1", "resume"]


async def test_a_trainer_that_dies_does_not_leave_the_engine_asleep(build: Build) -> None:
    setup = build()
    await setup.sleep(0, sleep_seconds=0.01)
    applying = setup.apply(1)
    async with asyncio.timeout(60):
        await applying
    assert setup.engine.calls == ["sleep", "wake", "pause", "load version_1", "resume"]
    assert setup.broken == []


async def test_a_wake_that_comes_too_late_is_told_so(build: Build) -> None:
    setup = build()
    await setup.sleep(0, sleep_seconds=0.01)
    await setup.apply(1)
    assert not (await setup.wake(0)).was_in_time
    assert setup.engine.calls.count("wake") == 1


async def test_a_wake_in_time_takes_the_alarm_away(build: Build) -> None:
    setup = build()
    await setup.sleep(0, sleep_seconds=0.02)
    await setup.wake(0)
    await setup.apply(1)
    await setup.sleep(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await setup.apply(2)
    assert setup.engine.calls.count("wake") == 1


async def test_a_caller_that_goes_away_leaves_a_wake_that_has_begun(build: Build) -> None:
    setup = build()
    await setup.sleep(0)
    waking = asyncio.ensure_future(setup.wake(0))
    await asyncio.sleep(0)
    waking.cancel()
    await setup.apply(1)
    assert setup.engine.calls[:2] == ["sleep", "wake"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"run_id": "other"}, "serves run 'demo'"), ({"term": TERM - 1}, "term 2 is stale")],
)
async def test_a_stranger_gets_no_turn(build: Build, changes: dict[str, object], text: str) -> None:
    setup = build()
    with pytest.raises(ApplyRefusal, match=text):
        await setup.sleep(0, **changes)
    await setup.sleep(0)
    with pytest.raises(ApplyRefusal, match=text):
        await setup.wake(0, **changes)
    assert setup.engine.calls == ["sleep"]


async def test_nobody_sleeps_twice_and_one_request_may_come_twice(build: Build) -> None:
    setup = build()
    await setup.sleep(0)
    await setup.sleep(0)
    assert setup.engine.calls == ["sleep"]
    with pytest.raises(ApplyRefusal, match="sleeps already"):
        await setup.sleep(1)
    assert (await setup.wake(0)).was_in_time


@pytest.mark.parametrize("what", ["sleep", "wake"])
@pytest.mark.parametrize("how", ["failing", "stuck"])
async def test_an_engine_that_cannot_move_its_memory_ends_the_server(
    build: Build, what: str, how: str
) -> None:
    setup = build(deadline_seconds=0.05)
    setattr(setup.engine, how, what)
    if what == "wake":
        await setup.sleep(0)
    with pytest.raises(ApplyRefusal, match=r"the engine could not (go to sleep|wake up)"):
        await (setup.sleep if what == "sleep" else setup.wake)(0)
    assert len(setup.broken) == 1
