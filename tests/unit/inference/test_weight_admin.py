"""Weight changes over a fake engine: order, refusals, and what happens when something fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gradus.errors import CorruptStateError
from gradus.inference.admin import WeightAdmin
from gradus.wire.inference import ApplyRefusal, ApplyRequest, ServedPolicy

RUN, TERM = "demo", 3


@dataclass
class FakeEngine:
    """Remembers what it was told; fails or waits where a test says so."""

    calls: list[str] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    stuck: str | None = None
    is_paused: bool = False
    loaded: str = "initial"
    version: int = 0
    reported: int | None = None
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    may_load: asyncio.Event | None = None

    async def _step(self, name: str) -> None:
        self.calls.append(name)
        if name == self.stuck:
            await asyncio.Event().wait()
        if name in self.failing:
            raise RuntimeError(f"{name} failed")

    async def pause(self) -> None:
        self.is_paused = True
        await self._step("pause")

    async def resume(self) -> None:
        await self._step("resume")
        self.is_paused = False

    async def load(self, directory: Path) -> None:
        self.loading.set()
        if self.may_load is not None:
            await self.may_load.wait()
        await self._step(f"load {directory.name}")
        self.loaded = directory.name

    async def set_version(self, version: int) -> None:
        await self._step(f"set {version}")
        self.version = version

    async def get_version(self) -> int:
        return self.version if self.reported is None else self.reported


@dataclass
class Setup:
    """A WeightAdmin over a fake engine, in a run directory."""

    engine: FakeEngine
    admin: WeightAdmin
    weights: Path
    broken: list[str]
    checked: list[str]

    def request(self, version: int, /, **changes: object) -> ApplyRequest:
        directory = self.weights / f"version_{version}"
        directory.mkdir(parents=True, exist_ok=True)
        fields: dict[str, object] = {
            "run_id": RUN,
            "term": TERM,
            "version": version,
            "directory": str(directory),
            "digest": f"digest-{version}",
        }
        return ApplyRequest(**(fields | changes))  # type: ignore[arg-type]


Build = Callable[..., Setup]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def build_setup(
        *, corrupt: bool = False, initial: str | None = "initial", deadline_seconds: float = 60.0
    ) -> Setup:
        def verify(directory: Path, digest: str) -> None:
            if corrupt:
                raise CorruptStateError(f"{directory} has another digest")
            checked.append(digest)

        engine, weights = FakeEngine(), tmp_path / RUN / "weights"
        broken: list[str] = []
        checked: list[str] = []
        admin = WeightAdmin(
            engine,
            served=ServedPolicy(run_id=RUN, term=TERM, version=0, digest=None),
            initial_weights=None if initial is None else tmp_path / initial,
            weights_root=weights,
            verify=verify,
            on_broken=broken.append,
            deadline_seconds=deadline_seconds,
        )
        return Setup(engine, admin, weights, broken, checked)

    return build_setup


async def refusal(setup: Setup, request: ApplyRequest) -> ApplyRefusal:
    with pytest.raises(ApplyRefusal) as caught:
        await setup.admin.apply(request)
    return caught.value


async def test_a_change_pauses_loads_tells_the_version_and_resumes(build: Build) -> None:
    setup = build()
    result = await setup.admin.apply(setup.request(1))
    assert setup.engine.calls == ["pause", "load version_1", "set 1", "resume"]
    assert (result.version, setup.engine.is_paused, setup.admin.is_paused) == (1, False, False)
    assert setup.admin.served == ServedPolicy(RUN, TERM, 1, "digest-1")


@pytest.mark.shows("SEC4")
async def test_the_same_change_twice_touches_the_engine_once(build: Build) -> None:
    setup = build()
    await setup.admin.apply(setup.request(1))
    again = await setup.admin.apply(setup.request(1))
    assert (again.version, again.load_seconds) == (1, 0.0)
    assert setup.engine.calls.count("pause") == 1


async def test_two_changes_at_once_are_made_one_after_the_other(build: Build) -> None:
    setup = build()
    await asyncio.gather(*[setup.admin.apply(setup.request(v)) for v in (1, 2)])
    assert setup.engine.calls == [
        *("pause", "load version_1", "set 1", "resume"),
        *("pause", "load version_2", "set 2", "resume"),
    ]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"run_id": "another"}, 409),
        ({"term": TERM - 1}, 409),
        ({"version": -1}, 400),
        ({"directory": "/etc"}, 403),
        ({"directory": ""}, 403),
        ({"directory": "a\0b"}, 403),
    ],
)
async def test_what_must_not_be_served_is_refused_before_anything_stops(
    build: Build, changes: dict[str, object], status: int
) -> None:
    setup = build()
    assert (await refusal(setup, setup.request(1, **changes))).status == status
    assert (setup.engine.calls, setup.admin.served.version) == ([], 0)


@pytest.mark.shows("SEC14")
async def test_the_weights_root_itself_and_paths_out_of_it_are_refused(build: Build) -> None:
    setup = build()
    for directory in (setup.weights, setup.weights / "version_1" / ".." / ".." / "secrets"):
        request = setup.request(1, directory=str(directory))
        assert (await refusal(setup, request)).status == 403


@pytest.mark.shows("SEC14")
async def test_a_link_out_of_the_weights_root_is_refused(build: Build, tmp_path: Path) -> None:
    setup = build()
    setup.request(1)
    (tmp_path / "elsewhere").mkdir()
    link = setup.weights / "version_2"
    link.symlink_to(tmp_path / "elsewhere")
    assert (await refusal(setup, setup.request(1, directory=str(link)))).status == 403


@pytest.mark.shows("F30")
async def test_corrupt_weights_are_refused_without_a_pause(build: Build) -> None:
    setup = build(corrupt=True)
    answer = await refusal(setup, setup.request(1))
    assert answer.status == 422
    assert "another digest" in answer.message
    assert setup.engine.calls == []


@pytest.mark.shows("F66")
async def test_weights_can_be_checked_before_they_are_served_and_are_not_read_twice(
    build: Build,
) -> None:
    setup = build()
    result = await setup.admin.apply(setup.request(1, only_verifies=True))
    assert (result.version, setup.admin.served.version, setup.engine.calls) == (0, 0, [])
    await setup.admin.apply(setup.request(1))
    assert (setup.admin.served.version, setup.checked) == (1, ["digest-1"])
    await setup.admin.apply(setup.request(2, only_verifies=True))
    await setup.admin.apply(setup.request(2, digest="another"))
    assert setup.checked == ["digest-1", "digest-2", "another"]
    refused = await refusal(build(corrupt=True), setup.request(3, only_verifies=True))
    assert refused.status == 422


@pytest.mark.shows("I3")
async def test_versions_of_one_term_never_go_back(build: Build) -> None:
    setup = build()
    await setup.admin.apply(setup.request(5))
    assert (await refusal(setup, setup.request(4))).status == 409
    assert (await refusal(setup, setup.request(5, digest="other"))).status == 409
    assert setup.admin.served.version == 5


@pytest.mark.shows("I6", "SEC4")
async def test_a_newer_owner_may_go_back_and_shuts_the_older_out(build: Build) -> None:
    setup = build()
    await setup.admin.apply(setup.request(5))
    await setup.admin.apply(setup.request(2, term=TERM + 1))
    assert setup.admin.served == ServedPolicy(RUN, TERM + 1, 2, "digest-2")
    assert (await refusal(setup, setup.request(6))).status == 409


async def test_a_newer_owner_that_confirms_the_served_version_takes_over(build: Build) -> None:
    setup = build()
    await setup.admin.apply(setup.request(5))
    await setup.admin.apply(setup.request(5, term=TERM + 1))
    assert setup.admin.served.term == TERM + 1
    assert setup.engine.calls.count("pause") == 1


@pytest.mark.shows("F30", "F66")
@pytest.mark.parametrize("step", ["load version_1", "set 1"])
async def test_a_failed_load_puts_the_served_weights_back_and_resumes(
    build: Build, step: str
) -> None:
    setup = build()
    setup.engine.failing = {step}
    assert (await refusal(setup, setup.request(1))).status == 500
    assert setup.engine.calls[-3:] == ["load initial", "set 0", "resume"]
    assert (setup.engine.loaded, setup.admin.served.version) == ("initial", 0)
    assert setup.broken == []
    setup.engine.failing = set()
    assert (await setup.admin.apply(setup.request(1))).version == 1


async def test_the_version_served_last_is_put_back_not_the_initial_one(build: Build) -> None:
    setup = build()
    await setup.admin.apply(setup.request(1))
    setup.engine.failing = {"load version_2"}
    await refusal(setup, setup.request(2))
    assert setup.engine.calls[-3:] == ["load version_1", "set 1", "resume"]


async def test_weights_that_cannot_be_put_back_end_the_server_and_never_answer(
    build: Build,
) -> None:
    setup = build()
    setup.engine.failing = {"load version_1", "load initial"}
    assert (await refusal(setup, setup.request(1))).status == 500
    assert (len(setup.broken), setup.admin.is_broken) == (1, True)
    assert setup.engine.calls == ["pause", "load version_1", "load initial"]
    assert (setup.engine.is_paused, setup.admin.is_paused) == (True, True)


async def test_initial_weights_that_are_not_on_disk_end_the_server_when_needed(
    build: Build,
) -> None:
    setup = build(initial=None)
    setup.engine.failing = {"load version_1"}
    await refusal(setup, setup.request(1))
    assert len(setup.broken) == 1


async def test_a_failed_pause_is_told_and_resumed(build: Build) -> None:
    setup = build()
    setup.engine.failing = {"pause"}
    assert (await refusal(setup, setup.request(1))).status == 500
    assert setup.engine.calls == ["pause", "resume"]
    assert setup.broken == []


@pytest.mark.shows("F11", "I8")
@pytest.mark.parametrize("step", ["pause", "load version_1", "set 1"])
async def test_a_stuck_engine_ends_the_server_after_the_deadline(build: Build, step: str) -> None:
    setup = build(deadline_seconds=0.02)
    setup.engine.stuck = step
    assert (await refusal(setup, setup.request(1))).status == 500
    assert len(setup.broken) == 1
    assert (setup.engine.calls[-1], setup.admin.served.version) == (step, 0)
    assert setup.admin.is_broken


async def test_an_engine_that_cannot_be_resumed_ends_the_server(build: Build) -> None:
    setup = build()
    setup.engine.failing = {"resume"}
    assert (await refusal(setup, setup.request(1))).status == 500
    assert (len(setup.broken), setup.admin.is_paused) == (1, True)


async def test_an_engine_that_reports_another_version_ends_the_server(build: Build) -> None:
    setup = build()
    setup.engine.reported = 7
    answer = await refusal(setup, setup.request(1))
    assert (answer.status, len(setup.broken)) == (500, 1)
    assert setup.engine.is_paused
    assert "reports version 7" in answer.message


@pytest.mark.shows("F67", "SEC5")
async def test_a_caller_that_goes_away_does_not_leave_the_engine_paused(build: Build) -> None:
    setup = build()
    setup.engine.may_load = asyncio.Event()
    call = asyncio.create_task(setup.admin.apply(setup.request(1)))
    await setup.engine.loading.wait()
    assert setup.admin.is_paused
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    setup.engine.may_load.set()
    await setup.admin.apply(setup.request(1))  # waits for the change under way, then agrees
    assert setup.engine.calls == ["pause", "load version_1", "set 1", "resume"]
