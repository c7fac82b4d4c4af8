"""Each shortcut gives what the library gives, and is left out when the library is another."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import renderers.base
import verifiers.v1 as vf
from verifiers.v1 import env, rollout, task
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.runtimes.docker import DockerRuntime, PodmanConfig, PodmanRuntime
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils import decorators, memory

from gradus.environments.verifiers import shortcuts, table
from gradus.environments.verifiers.patch import source_digest
from gradus.environments.verifiers.table import Patch


@pytest.fixture(autouse=True)
def _undone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decorators, rollout, task):
        # Another test of this process may have installed the shortcut for good.
        plain = inspect.unwrap(module.discover_decorated)
        monkeypatch.setattr(module, "discover_decorated", plain)
    monkeypatch.setattr(decorators, "inspect", decorators.inspect)
    monkeypatch.setattr(env, "trim_memory_periodically", env.trim_memory_periodically)
    monkeypatch.setattr(SubprocessRuntime, "teardown", SubprocessRuntime.teardown)
    monkeypatch.setattr(InterceptionServer, "start", InterceptionServer.start)
    monkeypatch.setattr(DockerRuntime, "cleanup", inspect.unwrap(DockerRuntime.cleanup))


def broken_promise(a: int) -> int:
    """Something that a patch might rely on."""
    return a


def test_a_shortcut_whose_code_changed_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed = []
    name = f"{__name__}:broken_promise"

    def row(word: str, digest: str) -> Patch:
        return Patch(lambda _: installed.append(word), "slower", "", {name: digest}, saves="1 %")

    rows = {"changed": row("changed", "0" * 16), "same": row("same", source_digest(name))}
    monkeypatch.setattr(table, "TABLE", rows)
    assert table.apply(table.ProcessSettings()) == ["changed"]
    assert installed == ["same"]
    assert f"{name} changed" in caplog.text


@pytest.mark.parametrize("name", ["verifiers.v1.nothing:a", "verifiers.v1.env:Env.nothing"])
def test_code_that_is_gone_counts_as_changed(name: str) -> None:
    assert Patch(None, "", "", {name: "0" * 16}).changed() == [name]


def test_a_server_that_starts_in_another_way_is_asked_over_http(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(server: InterceptionServer) -> None:
        """A newer version."""

    monkeypatch.setattr(InterceptionServer, "start", start)
    rows = {"serve_in_process": table.TABLE["serve_in_process"]}
    monkeypatch.setattr(table, "TABLE", rows)
    assert table.apply(table.ProcessSettings()) == ["serve_in_process"]
    assert InterceptionServer.start is start


class Base(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Hooks of all kinds."""

    @vf.reward(priority=2)  # type: ignore[untyped-decorator]
    async def last(self, trace: vf.Trace) -> float:
        return 1.0

    @vf.reward(priority=5)  # type: ignore[untyped-decorator]
    async def first(self) -> float:
        return 2.0

    @vf.reward  # type: ignore[untyped-decorator]
    async def gone(self) -> float:
        return 3.0

    @vf.metric  # type: ignore[untyped-decorator]
    async def counted(self, trace: vf.Trace, runtime: Any = None) -> float:
        return 4.0

    alias = first


class Derived(Base):
    """Overrides one with a mark and one without."""

    @vf.reward(priority=9)  # type: ignore[untyped-decorator]
    async def last(self, trace: vf.Trace) -> float:
        return 5.0

    async def gone(self) -> float:
        return 6.0


@pytest.mark.parametrize("of_class", [Base, Derived])
@pytest.mark.parametrize("mark", ["reward", "metric", "stop"])
def test_the_same_hooks_are_found_in_the_same_order(of_class: type[Base], mark: str) -> None:
    plain = decorators.discover_decorated
    shortcuts.remember_hooks()
    assert task.discover_decorated is decorators.discover_decorated is not plain
    for _ in range(2):
        played = of_class(vf.TaskData())
        found = task.discover_decorated(played, mark)
        assert found == plain(played, mark)
        assert all(method.__self__ is played for method in found)


def test_a_hook_that_is_no_method_is_found_each_time() -> None:
    class Marked:
        def __init__(self, name: str) -> None:
            self.__name__ = name
            self.reward = True

        def __call__(self) -> float:
            return 1.0

    class Odd(Base):
        b = Marked("b")
        c = Marked("c")

    plain = decorators.discover_decorated
    shortcuts.remember_hooks()
    for _ in range(2):
        odd = Odd(vf.TaskData())
        assert decorators.discover_decorated(odd, "reward") == plain(odd, "reward")
        assert Odd.b in decorators.discover_decorated(odd, "reward")


def test_a_hook_that_one_object_replaces_is_not_taken_for_that_of_its_class() -> None:
    plain = decorators.discover_decorated
    shortcuts.remember_hooks()
    for is_replaced in (True, False, True):
        played: Any = Base(vf.TaskData())
        if is_replaced:
            played.last = lambda trace: 0.0
        found = decorators.discover_decorated(played, "reward")
        assert found == plain(played, "reward")
        assert ("last" in {method.__name__ for method in found}) is not is_replaced


def test_signatures_are_those_of_inspect() -> None:
    played, other = Base(vf.TaskData()), Derived(vf.TaskData())
    for function in (played.last, other.last, played.counted, broken_promise, print, Base.last):
        for _ in range(2):
            assert shortcuts.signature_of(function) == inspect.signature(function)


async def test_a_hook_gets_what_it_names() -> None:
    shortcuts.remember_hook_signatures()
    shortcuts.remember_hook_signatures()
    played: Any = Base(vf.TaskData())
    assert await decorators.invoke(played.last, {"trace": None, "runtime": 3}) == 1.0
    assert await decorators.invoke(Derived(vf.TaskData()).last, {"trace": None}) == 5.0


async def test_the_heap_is_trimmed_by_time_and_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(memory, "trim_memory", lambda: threads.append(threading.get_ident()))
    seconds = iter((0.0, 1.0, 9.9, 10.0, 12.0, 19.9, 20.0))
    trimming = shortcuts._Trimming(lambda: next(seconds))
    for _ in range(6):
        await trimming.after_episode()
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_the_folder_of_an_episode_goes_whether_or_not_it_holds_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)
    shortcuts.remove_empty_folders_inline()
    for name in ("empty", "full", "gone"):
        runtime = SubprocessRuntime(vf.SubprocessConfig(), name=name)
        await runtime.start()
        if name == "full":
            await runtime.write("folder/file", b"left behind")
        if name == "gone":
            runtime.workdir.rmdir()
        await runtime.teardown()
        assert not runtime.workdir.exists()
    runtime = SubprocessRuntime(vf.SubprocessConfig(), name="never started")
    await runtime.teardown()


def test_a_container_is_killed_before_it_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = tmp_path / "podman"
    engine.write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/asked\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shortcuts.kill_containers()
    runtime = PodmanRuntime(PodmanConfig())
    runtime.cleanup()
    runtime._container = "a-container"
    runtime.cleanup()
    runtime.cleanup()
    assert (tmp_path / "asked").read_text().split() == ["kill", "rm"]


def test_only_short_texts_without_special_tokens_are_remembered() -> None:
    asked: list[Any] = []

    def encode(text: Any, **options: Any) -> list[int]:
        asked.append((text, options))
        return [len(text)]

    once = shortcuts.remembering(encode)
    plain = {"add_special_tokens": False}
    first = once("<|im_start|>", **plain)
    first.append(9)
    assert once("<|im_start|>", **plain) == [12]
    once("<|im_start|>")
    once("x" * 65, **plain)
    once("x" * 65, **plain)
    once(["a"], **plain)
    assert asked == [
        ("<|im_start|>", plain),
        ("<|im_start|>", {}),
        ("x" * 65, plain),
        ("x" * 65, plain),
        (["a"], plain),
    ]


def test_a_tokenizer_without_offsets_stays_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderers.base, "load_tokenizer", renderers.base.load_tokenizer)
    find = renderers.base._get_offset_tokenizer
    monkeypatch.setattr(renderers.base, "_get_offset_tokenizer", find)
    shortcuts.remember_short_texts()

    class Plain:
        def encode(self, text: str) -> list[int]:
            return [len(text)]

    class Unhashable(Plain):
        __hash__ = None  # type: ignore[assignment]

    for tokenizer in (Plain(), Unhashable()):
        for _ in range(2):
            assert renderers.base._get_offset_tokenizer(tokenizer) is None
