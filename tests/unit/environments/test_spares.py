"""Containers that are started ahead: each is given to one episode, and a lost one to none."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Any

import pytest
from verifiers.v1.runtimes.docker import PodmanConfig, PodmanRuntime

from gradus.environments import spares
from gradus.environments.containers import LABEL, owner_label, remove_containers
from gradus.environments.spares import MAX_KINDS, SpareContainers

IMAGE = "localhost/gradus-sandbox:1"


class Engine:
    """Starts containers by number; `lost` are those that ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.lost, self.removed = 0, set[str](), list[str]()
        self.error: Exception | None = None
        self.images: dict[str, str] = {}
        self.pause: asyncio.Event | None = None
        monkeypatch.setattr(spares, "is_running", self.is_running)

    async def begin(self, runtime: Any) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error
        runtime._container = runtime.info.id = f"box-{self.count}"
        self.images[runtime._container] = runtime.config.image
        runtime._service_url = f"http://127.0.0.1:{self.count}"

    async def is_running(self, engine: str, container: str) -> bool:
        assert engine == "podman"
        if self.pause is not None:
            await self.pause.wait()
        return container not in self.lost

    def runtime(self, image: str = IMAGE, **env: str) -> Any:
        engine = self

        class Runtime(PodmanRuntime):
            async def stop(self) -> None:
                engine.removed.append(str(self._container))

        made: Any = Runtime(PodmanConfig(image=image))
        made.env = env
        return made


async def started(kept: SpareContainers, engine: Engine, *runtimes: Any) -> list[str]:
    """The containers that these runtimes got, one after the other, with time to start others."""
    for runtime in runtimes:
        await kept.start(engine.begin, runtime)
        await asyncio.gather(*kept._starting)
    return [runtime._container for runtime in runtimes]


async def test_an_episode_gets_a_container_that_was_started_before_and_nobody_gets_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(2)
    runtimes = [engine.runtime() for _ in range(4)]
    assert await started(kept, engine, *runtimes) == ["box-1", "box-2", "box-3", "box-4"]
    assert [it.info.id for it in runtimes] == ["box-1", "box-2", "box-3", "box-4"]
    assert runtimes[3]._service_url == "http://127.0.0.1:4"
    assert engine.count == 6
    assert engine.removed == []


async def test_episodes_at_once_never_share_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(2)
    runtimes = [engine.runtime() for _ in range(20)]
    await asyncio.gather(*(kept.start(engine.begin, runtime) for runtime in runtimes))
    assert len({runtime._container for runtime in runtimes}) == 20


async def test_a_container_that_ended_is_removed_and_given_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(1)
    await started(kept, engine, engine.runtime())
    engine.lost = {"box-2"}
    assert await started(kept, engine, engine.runtime()) == ["box-3"]
    assert engine.removed == ["box-2"]


@pytest.mark.parametrize("other", [{"image": "other"}, {"KEY": "x"}])
async def test_kinds_that_alternate_each_have_a_container_ready(
    other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(1)
    kinds: list[dict[str, str]] = [{}, other, {}, other]
    runtimes = [engine.runtime(**kind) for kind in kinds]
    assert await started(kept, engine, *runtimes) == ["box-1", "box-3", "box-2", "box-4"]
    assert engine.removed == []


@pytest.mark.parametrize(("num_others", "num_own"), [(1, 5), (MAX_KINDS + 1, 4)])
async def test_an_episode_gets_none_of_a_kind_that_became_ready_while_it_looked(
    num_others: int, num_own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(2)
    await started(kept, engine, engine.runtime())
    engine.lost, engine.pause = {"box-2"}, asyncio.Event()
    slow = asyncio.ensure_future(started(kept, engine, engine.runtime()))
    await asyncio.sleep(0)
    await started(kept, engine, *(engine.runtime(f"{n}") for n in range(num_others)))
    engine.pause.set()
    (got,) = await slow
    assert got not in engine.removed
    assert engine.images[got] == IMAGE
    assert [*engine.images.values()].count(IMAGE) == num_own, "a kind is forgotten, or filled up"


async def test_a_cancelled_episode_leaves_no_container_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(1)
    await started(kept, engine, engine.runtime())
    engine.pause = asyncio.Event()
    looking = asyncio.ensure_future(kept.start(engine.begin, engine.runtime()))
    await asyncio.sleep(0)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    await asyncio.gather(*kept._starting)
    assert engine.removed == ["box-2"]


async def test_episodes_with_an_image_each_start_no_more_ahead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(2)
    many = [engine.runtime(f"image-{number}") for number in range(3 * MAX_KINDS)]
    await started(kept, engine, *many)
    assert engine.count == len(many) + 2 * MAX_KINDS
    assert len(engine.removed) == 2 * MAX_KINDS
    assert caplog.text.count("kinds of container") == 1
    again = [engine.runtime("image-11") for _ in range(2)]
    first, second = await started(kept, engine, *again)
    assert (first, second) == ("box-21", "box-22")


async def test_an_engine_that_fails_ahead_of_an_episode_fails_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(1)
    runtime = engine.runtime()
    await kept.start(engine.begin, runtime)
    engine.error = RuntimeError("no space")
    await asyncio.gather(*kept._starting)
    with pytest.raises(RuntimeError, match="no space"):
        await kept.start(engine.begin, engine.runtime())


async def test_what_was_started_for_a_kind_that_is_forgotten_meanwhile_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, kept = Engine(monkeypatch), SpareContainers(1)
    for number in range(MAX_KINDS + 1):  # no spare has begun yet
        await kept.start(engine.begin, engine.runtime(f"image-{number}"))
    await asyncio.gather(*kept._starting)
    assert [engine.images[it] for it in engine.removed] == ["image-0"]


@pytest.mark.slow
async def test_podman_has_a_container_ready_and_loses_all_with_their_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exists = ["podman", "image", "exists", IMAGE]
    if shutil.which("podman") is None or subprocess.run(exists, check=False).returncode:
        pytest.skip(f"podman with the image {IMAGE} is not installed here")
    label = owner_label("spares")
    monkeypatch.setenv("VF_RUN_ID", label)
    kept, begin = SpareContainers(1), PodmanRuntime.start
    first, second = (PodmanRuntime(PodmanConfig(image=IMAGE)) for _ in range(2))
    try:
        assert LABEL in first._label_args[1]
        await kept.start(begin, first)
        await asyncio.gather(*kept._starting)
        await kept.start(begin, second)
        said = await second.run(["sh", "-c", "echo ready"], {})
        assert (said.exit_code, said.stdout.strip()) == (0, "ready")
        assert first._container != second._container
        await asyncio.gather(*kept._starting)
    finally:
        (kind,) = kept._kinds.values()
        for runtime in (first, second, *kind.ready):
            await runtime._proxy.stop()
        assert await remove_containers(["podman"], label.__eq__) == 3
