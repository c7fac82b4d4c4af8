"""The scripted engine speaks as vLLM does, and fails as it is told."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from commands import wait_until
from openai import APIConnectionError, AsyncOpenAI, InternalServerError, RateLimitError
from renderers.client import MalformedGenerateResponseError, OverlongPromptError, generate

from gradus.files import DurableFiles
from gradus.run.paths import RunDirectory
from gradus.sealed import seal, stage
from gradus.testing.engine import GENERATE_PATH, ScriptedEngine
from gradus.testing.engine_script import (
    AnyBody,
    Drip,
    Fault,
    GenerateCall,
    GenerateRequest,
    Placed,
    Reply,
    Reset,
    Status,
    Stuck,
    Truncate,
    reply_from_prompt,
)
from gradus.weights.published import VersionLabel
from gradus.wire.inference import ADMIN_ROUTES, DATA_ROUTES, EngineStatus

PROMPT = [1, 7, 8, 9, 7, 4]
STOP = 3


class FakeRenderer:
    """The part of a renderer that `generate` calls when the prompt is given as tokens."""

    supports_tools = True

    def get_stop_token_ids(self) -> list[int]:
        return [STOP, 99]

    def parse_response(self, token_ids: list[int], **_: Any) -> Any:
        class Parsed:
            content = " ".join(map(str, token_ids))
            reasoning_content = None
            tool_calls: tuple[Any, ...] = ()
            reasoning_complete = True

        return Parsed()


async def ask(engine: ScriptedEngine, prompt: list[int] = PROMPT, **options: Any) -> dict[str, Any]:
    """One turn through the client that environments use."""
    base_url = f"{engine.base_url}/v1"
    key = engine.data_token
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=5) as client:
        return await generate(
            client=client,
            renderer=FakeRenderer(),  # type: ignore[arg-type]
            messages=[],
            model="policy",
            prompt_ids=prompt,
            **options,
        )


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def session(engine: ScriptedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {engine.admin_token}"}
    async with aiohttp.ClientSession(engine.base_url, headers=headers) as session:
        yield session


async def test_the_renderers_client_reads_tokens_and_logprobs(engine: ScriptedEngine) -> None:
    engine.reply = lambda prompt: Reply([11, 12], [-0.5, -1.5])
    answer = await ask(engine, cache_salt="v0", sampling_params={"max_tokens": 9})
    assert answer["completion_ids"] == [11, 12, STOP]
    assert answer["completion_logprobs"] == [-0.5, -1.5, -0.25]
    assert (answer["finish_reason"], answer["prompt_ids"]) == ("stop", PROMPT)
    assert answer["usage"]["total_tokens"] == len(PROMPT) + 3
    assert (engine.calls[0].cache_salt, engine.calls[0].status) == ("v0", 200)


async def test_the_default_reply_depends_on_nothing_but_the_prompt(engine: ScriptedEngine) -> None:
    answers = [(await ask(engine))["completion_ids"] for _ in range(2)]
    assert answers[0] == answers[1]
    assert set(answers[0]) <= {*PROMPT[1:], STOP}
    assert reply_from_prompt(PROMPT) == reply_from_prompt(list(PROMPT))


async def test_a_reply_is_cut_at_max_tokens_and_says_so(engine: ScriptedEngine) -> None:
    engine.reply = lambda prompt: Reply([11, 12, 13])
    answer = await ask(engine, sampling_params={"max_tokens": 2})
    assert (answer["completion_ids"], answer["finish_reason"]) == ([11, 12], "length")


async def test_a_reply_ends_where_the_context_does() -> None:
    async with ScriptedEngine(max_length_tokens=6) as engine:
        engine.reply = lambda prompt: Reply([11, 12, 13, 14, 15])
        answer = await ask(engine, [1, 2, 3])
    assert (answer["completion_ids"], answer["finish_reason"]) == ([11, 12, 13], "length")


async def test_a_prompt_too_long_is_refused_by_the_client_from_the_model_card() -> None:
    async with ScriptedEngine(max_length_tokens=4) as engine:
        with pytest.raises(OverlongPromptError):
            await ask(engine)


async def test_a_script_may_send_what_the_client_must_refuse(engine: ScriptedEngine) -> None:
    nan = float("nan")
    for reply in (Reply([11, 12], [-0.1]), Reply([11], [nan]), Reply([11], [-9999.0])):
        engine.reply = lambda prompt, reply=reply: reply
        with pytest.raises(MalformedGenerateResponseError):
            await ask(engine)


@pytest.mark.parametrize(("method", "path"), [*sorted(DATA_ROUTES | ADMIN_ROUTES), ("GET", "/x")])
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic data-token"])
async def test_every_route_is_closed_without_a_token(
    engine: ScriptedEngine, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with (
        aiohttp.ClientSession(engine.base_url) as session,
        session.request(method, path, headers=headers) as response,
    ):
        assert response.status == 401


async def test_the_data_token_opens_no_admin_route_and_no_unlisted_one(
    engine: ScriptedEngine,
) -> None:
    headers = {"Authorization": f"Bearer {engine.data_token}"}
    async with aiohttp.ClientSession(engine.base_url, headers=headers) as session:
        for method, path, status in (
            ("POST", "/gradus/apply", 401),
            ("GET", "/metrics", 404),
            ("GET", "/health", 200),
        ):
            async with session.request(method, path) as response:
                assert response.status == status


async def test_models_and_chat_have_the_shapes_that_clients_read(engine: ScriptedEngine) -> None:
    key = engine.data_token
    async with AsyncOpenAI(base_url=f"{engine.base_url}/v1", api_key=key) as client:
        assert [card.id async for card in await client.models.list()] == ["policy"]
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "abc"}]
        )
    assert answer.choices[0].message.content == "cba"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Status(500), InternalServerError),
        (Status(429, retry_after_seconds=7), RateLimitError),
        (Reset(), APIConnectionError),
        (Truncate(), APIConnectionError),
        (AnyBody(b"<html>busy</html>", "text/html"), json.JSONDecodeError),
        (AnyBody(b"{}"), MalformedGenerateResponseError),
    ],
)
async def test_faults_reach_the_client_once_each_and_are_recorded(
    engine: ScriptedEngine, fault: Fault, error: type[Exception]
) -> None:
    engine.inject(fault)
    with pytest.raises(error):
        await ask(engine)
    assert engine.calls[0].status == fault.status
    assert (await ask(engine))["completion_ids"]


async def test_retry_after_is_told(engine: ScriptedEngine, session: aiohttp.ClientSession) -> None:
    engine.inject(Status(429, retry_after_seconds=7), path="/health")
    async with session.get("/health") as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")


@pytest.mark.parametrize("fault", [Stuck(), Drip(interval_seconds=30)])
async def test_stuck_and_dripping_answers_last_until_the_caller_gives_up(
    engine: ScriptedEngine, fault: Fault
) -> None:
    engine.inject(fault)
    call = asyncio.create_task(ask(engine))
    await engine.wait_until(lambda engine: engine.running == 1)
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()


async def test_held_requests_run_until_they_are_released(engine: ScriptedEngine) -> None:
    engine.hold()
    calls = [asyncio.create_task(ask(engine)) for _ in range(3)]
    await engine.wait_until(lambda engine: engine.running == 3)
    assert engine.status().running == 3
    engine.release()
    await asyncio.gather(*calls)
    assert engine.running == 0


async def test_waiting_for_what_never_comes_ends(engine: ScriptedEngine) -> None:
    with pytest.raises(TimeoutError):
        await engine.wait_until(lambda engine: False, timeout_seconds=0.01)


async def test_latency_is_added_to_each_reply() -> None:
    async with ScriptedEngine(latency_seconds=0.05) as engine:
        begun = asyncio.get_running_loop().time()
        await ask(engine)
        assert asyncio.get_running_loop().time() - begun >= 0.05


def publish(run_dir: RunDirectory, version: int) -> dict[str, Any]:
    """Body of an apply request for a small version on disk."""
    directory = run_dir.version(version)
    files = DurableFiles()
    with stage(directory, files) as staging:
        files.stage(staging / "model.safetensors", b"weights")
        digest = seal(staging, directory, VersionLabel(version, 1), files=files).digest
    body = {"run_id": run_dir.root.name, "term": 1, "version": version}
    return body | {"directory": str(directory), "digest": digest}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    run_dir = RunDirectory(tmp_path / "demo")
    run_dir.secrets.mkdir(parents=True)
    run_dir.inference_token.write_text("d" * 64)
    run_dir.admin_token.write_text("a" * 64)
    return run_dir


async def test_apply_checks_counts_and_tells_the_version(run_dir: RunDirectory) -> None:
    body = publish(run_dir, 1)
    headers = {"Authorization": "Bearer " + "a" * 64}
    async with (
        ScriptedEngine(run_dir=run_dir.root, term=1) as engine,
        aiohttp.ClientSession(engine.base_url, headers=headers) as session,
    ):

        async def apply(**changes: Any) -> int:
            async with session.post("/gradus/apply", json=body | changes) as response:
                return response.status

        assert await apply(term=0) == 409
        assert await apply(run_id="other") == 409
        assert await apply(directory="/etc") == 403
        assert await apply(digest="0" * 64) == 422
        assert engine.version == 0
        assert await apply() == 200
        assert await apply() == 200
        assert (engine.version, len(engine.applied)) == (1, 1)
        await ask(engine)
        assert engine.calls[-1].version == 1


async def test_a_wrong_version_can_be_told(
    engine: ScriptedEngine, session: aiohttp.ClientSession
) -> None:
    engine.reported_version = 41
    async with session.get("/gradus/status") as response:
        status = msgspec.json.decode(await response.read(), type=EngineStatus)
    assert (status.version, engine.version) == (41, 0)


async def test_bad_generate_requests_get_400(
    engine: ScriptedEngine, session: aiohttp.ClientSession
) -> None:
    good = {"token_ids": [1], "sampling_params": {}}
    for change in ({"token_ids": []}, {"token_ids": [-1]}, {"model": "x"}, {"stream": True}):
        async with session.post("/inference/v1/generate", json=good | change) as response:
            assert response.status == 400
    async with session.post("/inference/v1/generate", data=b"{") as response:
        assert response.status == 400
    assert engine.calls == []


def test_as_a_process_it_stands_in_for_the_inference_role(run_dir: RunDirectory) -> None:
    command = [sys.executable, "-m", "gradus.testing.engine", "--run-dir", str(run_dir.root)]
    process = subprocess.Popen([*command, "--term", "4"])
    try:
        ready = run_dir.ready_file("inference")
        wait_until(lambda: ready.exists() or process.poll() is not None)
        told = json.loads(ready.read_text())
        assert (told["pid"], told["term"], told["version"]) == (process.pid, 4, 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


async def test_a_subclass_may_answer_by_the_seed_of_the_call() -> None:
    class Seeded(ScriptedEngine):
        def answer_to(self, call: GenerateCall) -> Reply:
            return Reply([call.sampling_params["seed"]], [-0.5])

    async with Seeded() as engine:
        first, second = [await ask(engine, sampling_params={"seed": seed}) for seed in (41, 42)]
    assert first["completion_ids"][0] == 41
    assert second["completion_ids"][0] == 42


async def test_a_subclass_may_read_the_images_of_a_request() -> None:
    class Looking(ScriptedEngine):
        def with_images(self, asked: GenerateRequest) -> Placed:
            if not asked.content_parts:
                raise ValueError("show an image")
            token, *rest = asked.token_ids
            prompt = [token, token, *rest]
            return msgspec.structs.replace(asked, token_ids=prompt), [{"offset": 0, "length": 2}]

    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
    async with Looking() as engine, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {engine.data_token}"}
        url = f"{engine.base_url}{GENERATE_PATH}"
        async with session.post(url, json=body, headers=headers) as response:
            assert response.status == 400
            assert "show an image" in await response.text()
        body["content_parts"] = [{"type": "image_url", "uuid": "a"}]
        async with session.post(url, json=body, headers=headers) as response:
            answer = await response.json()
    assert answer["prompt_token_ids"] == [PROMPT[0], *PROMPT]
    assert answer["mm_placeholders"] == {"image": [{"offset": 0, "length": 2}]}
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) + 1
    assert engine.calls[-1].prompt_token_ids == [PROMPT[0], *PROMPT]
