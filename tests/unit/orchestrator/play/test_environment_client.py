"""The client of an environment process, against sockets that this test scripts."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from commands import wait_until_async
from configs import build_algorithm_config
from verifiers.v1.episode import WireEpisode

from gradus.config import EvaluationSourceConfig, ModelConfig, SamplingConfig, SourceConfig
from gradus.config.schema.environment import EnvironmentTimeoutConfig
from gradus.errors import ConfigError, DeadlineError, EnvironmentFailure, ProtocolError
from gradus.files import write_json
from gradus.orchestrator.play import environment
from gradus.orchestrator.play.environment import (
    MAX_AGENT_CONFIGS,
    AgentConfigs,
    EnvironmentAddress,
    EnvironmentClient,
    TaskRefused,
    build_endpoint_settings,
    build_settings,
    find_environment,
)
from gradus.orchestrator.traces import cut_bytes, message_images
from gradus.orchestrator.types import EpisodeFailed, Task
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode

MODEL = ModelConfig(name="tiny", renderer="qwen3")


class Server:
    """A ROUTER that answers each message as the script says; None is silence."""

    def __init__(self, address: str, answer: Callable[[list[bytes]], list[bytes] | None]) -> None:
        self.received: list[list[bytes]] = []
        self.arrived = asyncio.Event()
        self._answer = answer
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            self.received.append(frames)
            self.arrived.set()
            reply = self._answer(frames)
            if reply is not None:
                await self._socket.send_multipart([identity, *reply])

    async def close(self) -> None:
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving
        self._socket.close()
        self._context.term()


def answer_tasks(frames: list[bytes]) -> list[bytes]:
    """As the environment process does."""
    request = msgpack.unpackb(frames[2])
    results: dict[str, Any] = {
        "info": {"num_tasks": 5, "taskset": "words"},
        "health": {},
        "task": {"task_data": {"idx": request.get("index")}, "key": "k"},
    }
    reply = {"success": True, "error": None, **results[frames[1].decode()]}
    if request.get("index") == 99:
        reply = {"success": False, "error": "has no task 99"}
    return [frames[0], b"reply", msgpack.packb(reply)]


def episode_reply(frames: list[bytes], **head: Any) -> list[bytes]:
    """The end of a run without traces."""
    payload: dict[str, Any] = {"success": True, "error": None, "head": head, "traces": []}
    return [frames[0], b"reply", msgpack.packb(payload)]


HEAD = {"id": "e", "task": {"type": "T", "data": {"idx": 0, "prompt": "a"}}, "ok": True}


def build_source(**changes: Any) -> SourceConfig:
    settings: dict[str, Any] = {
        "name": "words",
        "ratio": 1.0,
        "group_size": 2,
        "sampling": SamplingConfig(temperature=0.5, top_p=0.9, max_completion_tokens=7),
        "algo": build_algorithm_config("grpo"),
        "timeout": EnvironmentTimeoutConfig(),
        "address": None,
        "state_columns": [],
    }
    return SourceConfig(**(settings | changes))


class Servers:
    """Starts servers and clients in a short folder, and closes them in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._closing: list[Any] = []

    def start(self, name: str, answer: Callable[[list[bytes]], list[bytes] | None]) -> Server:
        server = Server(f"ipc://{self.folder}/{name}", answer)
        self._closing.append(server)
        return server

    def client(self, *, pid: int | None = None, seconds: float = 60.0) -> EnvironmentClient:
        source = build_source(timeout=EnvironmentTimeoutConfig(episode_seconds=seconds))
        address = EnvironmentAddress(f"ipc://{self.folder}/run", pid)
        client = EnvironmentClient("words", address, build_settings(source, MODEL, "http://x"))
        self._closing.append(client)
        return client

    async def close(self) -> None:
        for closing in reversed(self._closing):
            await closing.close()


@pytest.fixture
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    started = Servers(tmp_path_factory.mktemp("s"))
    yield started
    await started.close()


async def test_tasks_come_by_index(servers: Servers) -> None:
    servers.start("run", answer_tasks)
    client = servers.client()
    assert (await client.info()).num_tasks == 5
    assert await client.task(3) == Task({"idx": 3}, "k")


async def test_overlapping_requests_get_their_own_replies(servers: Servers) -> None:
    servers.start("run", answer_tasks)
    client = servers.client()
    tasks = await asyncio.gather(*(client.task(index) for index in range(20)))
    assert [task.task_data["idx"] for task in tasks] == list(range(20))


async def test_a_task_that_is_not_there_is_named(servers: Servers) -> None:
    servers.start("run", answer_tasks)
    with pytest.raises(TaskRefused, match="'words': has no task 99"):
        await servers.client().task(99)


@pytest.mark.shows("F72", "I8")
async def test_an_environment_that_does_not_answer_is_a_named_deadline(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.05)
    servers.start("run", lambda frames: None)
    with pytest.raises(DeadlineError, match="'words' did not answer 'info'"):
        await servers.client().info()


async def test_a_task_that_does_not_come_is_refused_when_the_environment_lives(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.5)
    servers.start("run", lambda frames: None if frames[1] == b"task" else answer_tasks(frames))
    with pytest.raises(TaskRefused, match=r"'words' did not answer 'task' in 0\.5 s"):
        await servers.client().task(3)


async def test_a_task_that_does_not_come_from_a_silent_environment_is_no_bad_task(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.05)
    servers.start("run", lambda frames: None)
    with pytest.raises(DeadlineError, match="did not answer 'health'"):
        await servers.client().task(3)


@pytest.mark.shows("F53")
@pytest.mark.parametrize("garbage", [b"\xc1", b"", b"\x90", msgpack.packb({"agents": 3})])
async def test_garbage_from_an_environment_is_refused(servers: Servers, garbage: bytes) -> None:
    servers.start("run", lambda frames: [frames[0], b"reply", garbage])
    with pytest.raises(ProtocolError, match="sent no valid"):
        await servers.client().info()


async def test_an_episode_is_asked_for_with_salt_sampling_and_the_name_of_the_token(
    servers: Servers,
) -> None:
    server = servers.start("run", lambda frames: episode_reply(frames, **HEAD))
    episode = await servers.client().run(Task({"idx": 1}, "k"), version=3)
    assert episode.ok
    request = msgpack.unpackb(server.received[0][2])
    assert request["model"] == "policy"
    assert request["task_data"] == {"idx": 1}
    assert request["sampling"]["cache_salt"] == "v3"
    assert request["sampling"]["temperature"] == 0.5
    assert request["sampling"]["max_tokens"] == 7
    assert request["client"]["api_key_var"] == "GRADUS_INFERENCE_TOKEN"
    assert request["client"]["renderer"]["name"] == "qwen3"
    assert request["client"]["renderer_model_name"] == "tiny"


@pytest.mark.parametrize(("num_tokens", "num_threads"), [(8, 0), (30_000, 1)])
async def test_only_a_long_episode_is_typed_on_a_thread(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_threads: int
) -> None:
    node = {"message": {"role": "user", "content": "a"}, "token_ids": [7] * num_tokens}
    trace = {"id": "t", "task": HEAD["task"], "agent": {"config": {}}, "verifiers": {"version": ""}}
    threads: list[object] = []
    to_thread = asyncio.to_thread

    async def counting(*arguments: Any) -> Any:
        threads.append(arguments)
        return await to_thread(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", counting)
    client = servers.client()
    record = {**HEAD, "traces": [{**trace, "nodes": [node]}]}
    episode = await client._socket._validate_episode(record)
    assert len(episode.traces[0].nodes[0].token_ids) == num_tokens
    assert len(threads) == num_threads


@pytest.mark.shows("F53")
async def test_a_huge_info_is_cut_at_the_door_and_the_rest_of_it_stays(servers: Servers) -> None:
    trace = {"id": "t", "task": HEAD["task"], "agent": {"config": {}}, "verifiers": {"version": ""}}
    info = {"dump": "x" * 50_000_000, "quarantined_turns": [0], "gradus_cut": "not ours"}
    record = {**HEAD, "traces": [{**trace, "nodes": [], "info": info}]}
    episode = await servers.client()._socket._validate_episode(record)
    kept = episode.traces[0].info
    assert kept["quarantined_turns"] == [0]
    assert "dump" not in kept
    assert cut_bytes(kept) == 50_000_002


@pytest.mark.shows("F52")
async def test_an_episode_beyond_its_deadline_is_cancelled_and_named(servers: Servers) -> None:
    server = servers.start("run", lambda frames: None)
    client = servers.client(seconds=0.05)
    with pytest.raises(EpisodeFailed) as caught:
        await client.run(Task({}, "k"), version=0)
    assert caught.value.failure.kind == "episode_timeout"
    async with asyncio.timeout(60):
        while len(server.received) < 2:
            server.arrived.clear()
            await server.arrived.wait()
    assert server.received[1][1] == b"cancel"


@pytest.mark.shows("F53")
@pytest.mark.parametrize("bound", ["MAX_EPISODE_BYTES", "MAX_EPISODE_MESSAGES"])
async def test_an_episode_that_sends_too_much_is_cancelled_and_named(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(environment, bound, 0)
    server = servers.start("run", lambda frames: [frames[0], b"delta", msgpack.packb({})])
    started = time.monotonic()
    with pytest.raises(EpisodeFailed) as caught:
        await servers.client(seconds=20.0).run(Task({}, "k"), version=0)
    assert time.monotonic() - started < 15.0
    assert caught.value.failure.kind == "episode_too_large"
    assert "agent.max_turns" in caught.value.failure.message
    async with asyncio.timeout(60):
        while len(server.received) < 2:
            server.arrived.clear()
            await server.arrived.wait()
    assert server.received[1][1] == b"cancel"


async def test_a_request_that_the_environment_refuses_is_called_by_its_error(
    servers: Servers,
) -> None:
    def refuse(frames: list[bytes]) -> list[bytes]:
        payload = {"success": False, "error": "ValidationError: answer: Field required"}
        return [frames[0], b"reply", msgpack.packb(payload)]

    servers.start("run", refuse)
    with pytest.raises(EpisodeFailed) as caught:
        await servers.client().run(Task({}, "k"), version=0)
    assert caught.value.failure.kind == "ValidationError"
    assert caught.value.failure.message == "answer: Field required"


@pytest.mark.shows("F53", "SEC25")
@pytest.mark.parametrize(
    "head", [{"id": 7}, {"task": None}, {"ok": "perhaps", "task": HEAD["task"]}]
)
async def test_an_episode_of_another_shape_is_an_invalid_episode(
    servers: Servers, head: dict[str, Any]
) -> None:
    servers.start("run", lambda frames: episode_reply(frames, **head))
    with pytest.raises(EpisodeFailed) as caught:
        await servers.client().run(Task({}, "k"), version=0)
    assert caught.value.failure.kind == "invalid_episode"


async def test_a_lost_process_ends_the_watch_at_once(servers: Servers) -> None:
    servers.start("run", answer_tasks)
    process = await asyncio.create_subprocess_exec("sleep", "60")
    watching = asyncio.create_task(servers.client(pid=process.pid).watch())
    await asyncio.sleep(0)
    process.kill()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(watching, 60)
    (error,) = caught.value.exceptions
    assert isinstance(error, EnvironmentFailure)
    assert f"'words' (pid {process.pid}) ended" in str(error)
    await process.wait()


async def test_an_environment_that_stops_answering_says_so_until_it_answers_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(environment, "ASK_SECONDS", 0.0)
    is_blocked = True
    servers.start("run", lambda frames: None if is_blocked else answer_tasks(frames))
    client = servers.client(pid=os.getpid())
    watching = asyncio.create_task(client.watch())
    await wait_until_async(lambda: not client.answers)
    is_blocked = False
    await wait_until_async(lambda: client.answers)
    watching.cancel()


def test_an_environment_is_found_by_its_ready_file(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    ready = {"run_address": "ipc:///a/run", "num_tasks": 1}
    write_json(run_dir.ready_file("env_words"), ready | {"pid": 7, "term": 1})
    write_json(run_dir.ready_file("env_words@2"), ready | {"pid": 8, "term": 1})
    found = [find_environment(run_dir, build_source(), number=number) for number in (0, 1)]
    assert found == [EnvironmentAddress("ipc:///a/run", pid) for pid in (7, 8)]


def test_an_environment_of_the_user_is_found_by_its_address(tmp_path: Path) -> None:
    found = find_environment(RunDirectory(tmp_path), build_source(address="ipc:///b/run"))
    assert found == EnvironmentAddress("ipc:///b/run", None)


def test_an_unknown_renderer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.renderer = 'nonsense'"):
        build_settings(build_source(), ModelConfig(name="tiny", renderer="nonsense"), "http://x")


def test_renderer_auto_leaves_the_choice_to_the_model() -> None:
    settings = build_settings(build_source(), ModelConfig(name="tiny"), "http://x")
    assert settings.client.renderer is None


def test_settings_of_a_renderer_reach_the_worker() -> None:
    table = {"name": "qwen3", "enable_thinking": False, "thinking_retention": "all"}
    settings = build_settings(build_source(), ModelConfig(name="tiny", renderer=table), "http://x")
    assert settings.client.renderer.model_dump(exclude_defaults=True) == {
        "enable_thinking": False,
        "thinking_retention": "all",
    }


def test_a_setting_that_the_renderer_does_not_take_is_refused_by_name() -> None:
    model = ModelConfig(name="tiny", renderer={"name": "qwen3", "enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"model\.renderer .*enable_thinkin: Extra inputs"):
        build_settings(build_source(), model, "http://x")


def test_configs_of_agents_are_parsed_once_and_say_what_each_trace_would() -> None:
    configs = AgentConfigs()
    records = [build_episode(reward=r).model_dump(mode="json") for r in (0.0, 1.0)]
    expected = [WireEpisode.model_validate(record).model_dump_json() for record in records]
    for record in records:
        (trace,) = record["traces"]
        trace["agent"]["config"] = configs.parsed(dict(trace["agent"]["config"]))
    episodes = [WireEpisode.model_validate(record) for record in records]
    assert [episode.model_dump_json() for episode in episodes] == expected
    first, second = (episode.traces[0].agent for episode in episodes)
    assert first.config is second.config
    assert first is not second


def test_another_config_of_an_agent_is_not_taken_for_one_that_was_seen() -> None:
    configs = AgentConfigs()
    for number in range(2 * MAX_AGENT_CONFIGS):
        assert configs.parsed({"max_turns": number + 1}).max_turns == number + 1
    assert configs.parsed(None) is None


async def test_images_shown_to_anothers_model_are_kept_once_and_named_in_its_records(
    tmp_path: Path,
) -> None:
    source = EvaluationSourceConfig(
        name="words",
        num_tasks=1,
        group_size=1,
        sampling=SamplingConfig(),
        timeout=EnvironmentTimeoutConfig(),
        address=None,
        state_columns=[],
    )
    settings = build_endpoint_settings(
        source, model="m", base_url="http://x", api_key_var="KEY", images=tmp_path
    )
    address = EnvironmentAddress("ipc://unused", None)
    client = EnvironmentClient("words", address, settings)
    url = "data:image/png;base64," + base64.b64encode(b"red").decode()
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    trace = {"id": "t", "task": HEAD["task"], "agent": {"config": {}}, "verifiers": {"version": ""}}
    record = {**HEAD, "traces": [{**trace, "nodes": [{"message": shown, "token_ids": []}] * 2}]}
    episode = await client._socket._validate_episode(record)
    await client.close()
    [kept] = tmp_path.iterdir()
    assert kept.read_bytes() == b"red"
    assert "base64" not in episode.model_dump_json()
    assert [message_images(node) for node in episode.traces[0].nodes] == [[kept.name]] * 2
