"""Each patch of a library keeps what the library promises."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field
from pydantic._internal import _fields
from renderers import parsing
from renderers.base import ParsedToolCall
from verifiers.v1 import env, harness, rollout, task
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.clients import train
from verifiers.v1.clients.base import build_async_openai
from verifiers.v1.errors import EnvError, ProviderError
from verifiers.v1.interception import server
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import provision_runtime, subprocess
from verifiers.v1.serve.delta import DeltaStreamer

from gradus.environments.verifiers import (
    engine_client,
    exits,
    replies,
    shortcuts,
    table,
    tool_servers,
)
from gradus.environments.verifiers.engine_client import EngineClient
from gradus.environments.verifiers.tool_servers import ToolServerLimits
from gradus.errors import ConfigError

RUN_ON_THREAD = train.RendererSlot.run
CHANGED = DeltaStreamer._changed
ALL = dict(table.TABLE)
GLOBAL = {
    *("serve_in_process", "trim_memory_by_time", "remove_empty_folders_inline", "remember_hooks"),
    *("remember_hook_signatures", "remember_short_texts", "kill_containers"),
}
PAGE = Path(__file__).parents[3] / "docs" / "upstream.md"
SEND = eval_client.EvalClient._request
READ = train.response_from_generate


@pytest.fixture(autouse=True)
def _undone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "build_async_openai", build_async_openai)
    monkeypatch.setattr(train.RendererSlot, "run", RUN_ON_THREAD)
    monkeypatch.setattr(DeltaStreamer, "_changed", CHANGED)
    monkeypatch.setattr(eval_client.EvalClient, "_request", SEND)
    monkeypatch.setattr(train, "response_from_generate", READ)
    monkeypatch.setattr(train.TrainClient, "get_response", train.TrainClient.get_response)
    monkeypatch.setattr(server, "web", server.web)
    monkeypatch.setattr(parsing, "json", json)
    monkeypatch.setattr(launch, "_read_back_port", launch._read_back_port)
    monkeypatch.setattr(launch, "serve_in_runtime", launch.serve_in_runtime)
    monkeypatch.setattr(rollout, "serve_tools", rollout.serve_tools)
    monkeypatch.setattr(subprocess, "CACHE_DIR", subprocess.CACHE_DIR)
    monkeypatch.setattr(InterceptionServer, "register", InterceptionServer.register)
    # They change what other tests use for good, and have tests of their own.
    needed = {name: row for name, row in table.TABLE.items() if name not in GLOBAL}
    monkeypatch.setattr(table, "TABLE", needed)
    runtime_class = subprocess.SubprocessRuntime
    monkeypatch.setattr(runtime_class, "run_background", runtime_class.run_background)
    for module in (env, harness, rollout, task):
        monkeypatch.setattr(module, "boundary", module.boundary)
    for module in (harness, task):
        monkeypatch.setattr(module, "invoke_all", module.invoke_all)
    inspect_factory = _fields.takes_validated_data_argument
    monkeypatch.setattr(_fields, "takes_validated_data_argument", inspect_factory)


def test_the_known_version_is_patched() -> None:
    table.apply(table.ProcessSettings())
    table.apply(table.ProcessSettings())
    assert train.build_async_openai.func is EngineClient
    assert eval_client.EvalClient._request is not SEND
    assert train.RendererSlot.run is not RUN_ON_THREAD
    assert DeltaStreamer._changed is not CHANGED


def test_every_patch_fits_the_installed_libraries() -> None:
    assert {name: row.changed() for name, row in ALL.items() if row.changed()} == {}


@pytest.mark.parametrize("name", [name for name, row in ALL.items() if row.install is not None])
def test_a_row_installs_what_it_is_named_after(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    owners = [it for it in (exits, replies, shortcuts, table) if hasattr(it, name)]
    for owner in owners:
        monkeypatch.setattr(owner, name, lambda *given: called.append(given))
    install = ALL[name].install
    assert install is not None
    install(table.ProcessSettings(headers_from="headers"))
    assert len(called) == 1


@pytest.mark.parametrize("field", [None, "headers"])
def test_headers_of_a_task_are_sent_where_its_source_asks_for_them(
    field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str | None] = []
    monkeypatch.setattr(table, "send_task_headers", sent.append)
    table.apply(table.ProcessSettings(headers_from=field))
    assert sent == ([field] if field else [])


def test_the_page_reports_each_patch() -> None:
    assert re.findall(r"^## `(\w+)`$", PAGE.read_text(), re.M) == list(ALL)


async def changed(*_: object) -> None:
    """A newer version."""


def test_another_library_keeps_everything_from_starting_and_says_what_would_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eval_client.EvalClient, "_request", changed)
    text = r"EvalClient._request changed, so that all requests .* share one seed. Install gradus"
    with pytest.raises(ConfigError, match=text):
        table.check_libraries()
    with pytest.raises(ConfigError, match=text):
        table.apply(table.ProcessSettings())
    assert train.build_async_openai is build_async_openai


def test_a_patch_that_only_saves_time_is_left_out_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DeltaStreamer, "_changed", changed)
    table.check_libraries()
    table.apply(table.ProcessSettings())
    assert DeltaStreamer._changed is changed
    assert train.build_async_openai.func is EngineClient
    assert "gather_changes is not used, episodes cost more" in caplog.text


@pytest.mark.shows("F51")
async def test_an_exit_in_a_reward_is_an_error_and_does_not_end_the_loop() -> None:
    async def leaves() -> float:
        raise SystemExit(3)

    exits.survive_exits()
    with pytest.raises(RuntimeError, match=r"asked the interpreter to exit \(SystemExit: 3\)"):
        await task.invoke_all([leaves], {})


@pytest.mark.shows("F51")
async def test_an_exit_in_code_of_an_environment_is_the_error_of_its_stage() -> None:
    exits.survive_exits()
    exits.survive_exits()
    with pytest.raises(EnvError, match=r"Duel.run\(\): RuntimeError: .*SystemExit: 2"):
        async with env.boundary(EnvError, "Duel.run()"):
            raise SystemExit(2)


async def test_scores_are_handed_on_as_before() -> None:
    async def reward(trace: str) -> float:
        return float(len(trace))

    exits.survive_exits()
    assert await task.invoke_all([reward, reward], {"trace": "four", "other": 1}) == [4.0, 4.0]


def test_factories_with_and_without_an_argument_are_still_told_apart() -> None:
    shortcuts.remember_signatures()

    class Model(BaseModel):
        first: int = 1
        plain: list[int] = Field(default_factory=list)
        from_data: int = Field(default_factory=lambda data: data["first"] + 1)

    assert Model().from_data == 2
    assert Model.model_construct().plain is not Model.model_construct().plain


async def test_the_first_render_runs_on_a_thread_and_quick_ones_inline() -> None:
    shortcuts.render_inline()
    slot = train.RendererSlot(renderer=object())  # type: ignore[arg-type]
    main = threading.get_ident()
    seen = [await slot.run(threading.get_ident) for _ in range(3)]
    assert seen[0] != main
    assert seen[1:] == [main, main]


async def test_a_render_that_was_slow_sends_the_next_ones_to_threads() -> None:
    shortcuts.render_inline()
    slot = train.RendererSlot(renderer=object())  # type: ignore[arg-type]
    await slot.run(lambda: sum(range(2_000_000)))
    main = threading.get_ident()
    seen = [await slot.run(threading.get_ident) for _ in range(40)]
    assert seen[0] != main
    assert seen[-1] == main


@pytest.mark.parametrize(("length", "is_inline"), [(100, True), (100_000, False)])
async def test_a_long_prompt_is_rendered_on_a_thread_however_quick_the_last_was(
    monkeypatch: pytest.MonkeyPatch, length: int, is_inline: bool
) -> None:
    async def get_response(client: Any, dialect: Any, body: Any) -> int:
        return await client.run(threading.get_ident)

    monkeypatch.setattr(train.TrainClient, "get_response", get_response)
    shortcuts.render_inline()
    slot = train.RendererSlot(renderer=object())  # type: ignore[arg-type]
    await slot.run(lambda: None)
    body = {"messages": [{"content": "x" * length}]}
    thread = await train.TrainClient.get_response(slot, None, body)  # type: ignore[arg-type]
    assert (thread == threading.get_ident()) == is_inline


async def test_a_render_never_waits_for_a_busy_renderer_on_the_event_loop() -> None:
    shortcuts.render_inline()
    slot = train.RendererSlot(renderer=object())  # type: ignore[arg-type]
    await slot.run(lambda: None)
    slot.lock.acquire()
    waiting = asyncio.create_task(slot.run(threading.get_ident))
    await asyncio.sleep(0)
    assert not waiting.done()
    slot.lock.release()
    assert await waiting != threading.get_ident()


async def test_a_render_that_raises_lets_go_of_the_renderer() -> None:
    shortcuts.render_inline()
    slot = train.RendererSlot(renderer=object())  # type: ignore[arg-type]

    def fail() -> None:
        raise ValueError("no such message")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such message"):
            await slot.run(fail)
        assert not slot.lock.locked()


class FakeTrace:
    """A trace that announces its changes."""

    def watch(self, on_change: Any) -> None:
        self.notify = lambda: on_change(self)


async def test_changes_close_to_each_other_are_one_flush_and_the_end_flushes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shortcuts.gather_changes()
    monkeypatch.setattr(shortcuts, "GATHER_SECONDS", 0.001)
    flushed = asyncio.Event()
    flushes: list[str] = []

    async def flush() -> None:
        flushes.append("flush")
        flushed.set()

    async with DeltaStreamer(list, lambda _: asyncio.sleep(0)) as streamer:
        streamer.flush = flush  # type: ignore[method-assign]
        trace = FakeTrace()
        streamer.watch(trace)  # type: ignore[arg-type]
        trace.notify()
        trace.notify()
        await asyncio.wait_for(flushed.wait(), 60)
        assert flushes == ["flush"]
        trace.notify()
    assert flushes == ["flush", "flush"]


@dataclass(frozen=True)
class FakeRuntime:
    """A runtime whose files are read by path."""

    type: str

    async def read(self, path: str) -> bytes:
        return Path(path).read_bytes()


@pytest.mark.parametrize(("kind", "is_left"), [("subprocess", False), ("docker", True)])
async def test_the_port_file_of_a_local_tool_server_is_removed(
    tmp_path: Path, kind: str, is_left: bool
) -> None:
    tool_servers.bound_tool_servers(ToolServerLimits())
    tool_servers.bound_tool_servers(ToolServerLimits())
    file = tmp_path / "port"
    file.write_text("8123\n")
    assert await launch._read_back_port(FakeRuntime(kind), str(file)) == 8123  # type: ignore[arg-type]
    assert file.exists() == is_left


async def test_the_folders_of_episodes_lie_in_the_given_directory(tmp_path: Path) -> None:
    exits.move_episode_folders(tmp_path)
    runtime = subprocess.SubprocessRuntime(subprocess.SubprocessConfig(), "episode")
    await runtime.start()
    assert runtime.workdir is not None
    assert runtime.workdir.is_relative_to(tmp_path)
    await runtime.stop()


async def test_a_background_program_has_the_death_signal_from_its_first_line() -> None:
    exits.end_servers_with_worker()
    exits.end_servers_with_worker()
    asked = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n))"
    program = [sys.executable, "-c", f"{asked}; print(n.value)"]
    async with provision_runtime(subprocess.SubprocessConfig()) as started, asyncio.timeout(60):
        await started.run_background(program, {}, "log")
        await started._background[-1].wait()
        assert await started.read("log") == b"9\n"


async def test_a_background_program_imports_what_the_environment_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits.end_servers_with_worker()
    (tmp_path / "of_the_reader.py").write_text("print('found')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    program = [sys.executable, "-m", "of_the_reader"]
    async with provision_runtime(subprocess.SubprocessConfig()) as started, asyncio.timeout(60):
        await started.run_background(program, {}, "log")
        await started._background[-1].wait()
        assert await started.read("log") == b"found\n"


@pytest.mark.parametrize(
    ("name", "arguments", "read"),
    [
        ("look", {"a": 1}, ("look", '{"a": 1}')),
        (["x"], {}, ('["x"]', "{}")),
        (True, None, ("true", "{}")),
        ("\ud800", "\udfff", ("?", "?")),
    ],
)
def test_a_tool_call_of_any_json_can_be_read(
    name: Any, arguments: Any, read: tuple[str, str]
) -> None:
    result = {"tool_calls": [ParsedToolCall("", name=name, arguments=arguments)]}
    replies.read_every_tool_call()
    calls = train.response_from_generate(result, "policy").message.tool_calls
    assert calls is not None
    assert [(call.name, call.arguments) for call in calls] == [read]


def test_the_ids_of_tool_calls_differ_by_request_and_place_and_repeat_with_its_seed() -> None:
    replies.read_every_tool_call()

    def ids(seed: int | None, *tokens: int) -> list[str]:
        calls = [ParsedToolCall("", name="look"), ParsedToolCall("", name="look")]
        engine_client._seed.set(seed)
        result = {"tool_calls": calls, "completion_ids": list(tokens)}
        return [c.id for c in train.response_from_generate(result, "policy").message.tool_calls]

    seen = [*ids(1), *ids(2), *ids(1, 9), *ids(None), *ids(None)]
    assert len(set(seen)) == len(seen)
    assert all(re.fullmatch("[a-z0-9]{9}", one) for one in seen)
    assert ids(1) == ids(1)


def test_the_id_that_a_model_wrote_stays() -> None:
    replies.read_every_tool_call()
    result = {"tool_calls": [ParsedToolCall("", name="look", id="functions.look:0")]}
    (call,) = train.response_from_generate(result, "policy").message.tool_calls
    assert call.id == "functions.look:0"


async def test_messages_that_no_template_takes_are_the_request_s_fault() -> None:
    shortcuts.render_inline()
    replies.refuse_what_no_template_takes()
    replies.refuse_what_no_template_takes()
    slot = train.RendererSlot(renderer=object())  # type: ignore[arg-type]

    def fail() -> None:
        raise KeyError("content")

    with pytest.raises(ProviderError, match="cannot be rendered: KeyError: 'content'") as raised:
        await slot.run(fail)
    assert raised.value.status_code == 400


def test_json_that_is_nested_too_deep_is_no_json() -> None:
    replies.read_every_tool_call()
    with pytest.raises(json.JSONDecodeError, match="nested too deep"):
        parsing.json.loads("[" * 100_000)
