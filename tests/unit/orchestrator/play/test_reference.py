from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gradus.config.schema.algorithms import ReferenceConfig
from gradus.errors import ConfigError
from gradus.orchestrator.algorithms.teacher import (
    PROBE,
    REFUSED,
    UNAVAILABLE,
    ReferenceModel,
    compare_tokenizers,
    open_reference,
)
from gradus.orchestrator.types import EpisodeFailed

Answer = Callable[[dict[str, Any]], Awaitable[web.Response]]


@asynccontextmanager
async def serve(answer: Answer, **settings: Any) -> AsyncIterator[ReferenceModel]:
    """A reference model whose server says what `answer` says."""

    async def handle(request: web.Request) -> web.Response:
        return await answer(await request.json())

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    app.router.add_post("/tokenize", handle)
    # Without this the end waits a minute for a request that is never answered.
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    config = ReferenceConfig(base_url=url, model="teacher", **settings)
    try:
        async with ReferenceModel(config, token="t", retry_delays_seconds=(0, 0)) as model:
            yield model
    finally:
        await runner.cleanup()


def scored(body: dict[str, Any], value: float = -0.5) -> web.Response:
    entries = [None] + [{str(t): {"logprob": value}} for t in body["prompt"][1:]]
    return web.json_response({"choices": [{"prompt_logprobs": entries}]})


async def test_every_token_behind_the_first_gets_its_logprob() -> None:
    async def answer(body: dict[str, Any]) -> web.Response:
        assert body["model"] == "teacher"
        assert body["max_tokens"] == 1
        return scored(body)

    async with serve(answer) as model:
        first, *others = await model.score([5, 6, 7])
        assert math.isnan(first)
        assert others == [-0.5, -0.5]


@pytest.mark.shows("F61")
@pytest.mark.parametrize(
    ("after", "least"),
    [("7", 7.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", 0.0), ("1e9", 120.0)],
)
async def test_a_server_that_asks_for_patience_gets_it(after: str, least: float) -> None:
    """F61"""
    waits: list[float] = []

    async def answer(body: dict[str, Any]) -> web.Response:
        return (
            web.Response(status=429, headers={"Retry-After": after}) if not waits else scored(body)
        )

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with serve(answer) as model:
        model._sleep = sleep
        await model.score([5, 6])
    assert least <= waits[0] <= 1.5 * least


@pytest.mark.shows("F61")
async def test_a_server_that_is_down_is_soon_asked_once_only() -> None:
    """F61: retries are a share of what is asked, over the run."""
    asked = 0

    async def answer(_: dict[str, Any]) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=503)

    async with serve(answer) as model:
        model._retries_left = 2.0
        for _ in range(5):
            with pytest.raises(EpisodeFailed):
                await model.score([5, 6])
    assert asked == 5 + 2 + 1


async def test_an_impossible_token_gets_a_finite_logprob() -> None:
    async def answer(body: dict[str, Any]) -> web.Response:
        return scored(body, -9999.0)

    async with serve(answer) as model:
        assert (await model.score([5, 6]))[1:] == [-100.0]


@pytest.mark.shows("F61")
async def test_a_busy_server_is_asked_again() -> None:
    statuses = [429, 503, 200]

    async def answer(body: dict[str, Any]) -> web.Response:
        status = statuses.pop(0)
        return scored(body) if status == 200 else web.Response(status=status)

    async with serve(answer) as model:
        assert (await model.score([5, 6]))[1:] == [-0.5]
    assert statuses == []


async def test_a_server_that_stays_away_fails_the_episode_by_name() -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return web.Response(status=500)

    async with serve(answer) as model:
        with pytest.raises(EpisodeFailed, match="answered 500 \\(3 attempts\\)") as caught:
            await model.score([5, 6])
    assert caught.value.failure.kind == UNAVAILABLE


@pytest.mark.shows("F64")
async def test_a_server_that_is_silent_meets_the_deadline() -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serve(answer, timeout_seconds=0.05) as model:
        with pytest.raises(EpisodeFailed, match=r"did not answer in 0\.05 s"):
            await model.score([5, 6])


@pytest.mark.shows("F63")
async def test_a_too_long_branch_is_refused_and_not_tried_again() -> None:
    calls = []

    async def answer(body: dict[str, Any]) -> web.Response:
        calls.append(body)
        return web.Response(status=400, text="maximum context length is 4")

    async with serve(answer) as model:
        with pytest.raises(EpisodeFailed, match="maximum context length") as caught:
            await model.score([5, 6])
    assert caught.value.failure.kind == REFUSED
    assert len(calls) == 1


async def test_a_wrong_key_ends_the_run_with_what_to_do() -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return web.Response(status=401)

    async with serve(answer) as model:
        with pytest.raises(ConfigError, match="key is wrong"):
            await model.score([5, 6])


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None]}]},
        {"choices": [{"prompt_logprobs": [None, None]}]},
        {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"6": {"logprob": "x"}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"6": {"logprob": 3.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"6": {"logprob": True}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"6": {"logprob": "-1.0"}}]}]},
    ],
)
async def test_an_answer_without_these_logprobs_fails_the_episode(payload: Any) -> None:
    async def answer(_: dict[str, Any]) -> web.Response:
        return web.json_response(payload)

    async with serve(answer) as model:
        with pytest.raises(EpisodeFailed, match="prompt_logprobs"):
            await model.score([5, 6])


async def test_so_many_requests_run_at_once_and_no_more() -> None:
    running = most = 0
    full = asyncio.Event()

    async def answer(body: dict[str, Any]) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0)
        running -= 1
        return scored(body)

    async with serve(answer, max_concurrent_requests=3) as model:
        await asyncio.gather(*(model.score([5, 6]) for _ in range(12)))
    assert most == 3


async def test_a_conversation_becomes_tokens() -> None:
    async def answer(body: dict[str, Any]) -> web.Response:
        assert body["add_generation_prompt"] is True
        return web.json_response({"tokens": [1, 2, 3]})

    async with serve(answer) as model:
        messages = [{"role": "user", "content": "a"}]
        assert await model.tokenize(messages, add_generation_prompt=True) == [1, 2, 3]


def test_a_key_that_is_not_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    config = ReferenceConfig(base_url="http://127.0.0.1:1", model="m", api_key_var="TEACHER_KEY")
    with pytest.raises(ConfigError, match=r"source 'words'.*'TEACHER_KEY'.*not set"):
        open_reference(config, "words")


def writes(tokens: list[int], status: int = 200) -> Answer:
    async def answer(body: dict[str, Any]) -> web.Response:
        assert body["prompt"] == PROBE
        return web.json_response({"tokens": tokens}, status=status)

    return answer


async def test_a_teacher_with_the_policys_tokenizer_is_taken() -> None:
    async with serve(writes([1, 2, 3])) as teacher, serve(writes([1, 2, 3])) as policy:
        await compare_tokenizers(teacher, policy, "words")


@pytest.mark.shows("F44")
async def test_a_teacher_with_another_tokenizer_is_refused() -> None:
    async with serve(writes([1, 2, 3])) as teacher, serve(writes([1, 9])) as policy:
        with pytest.raises(ConfigError, match=r"'words'.* 3 tokens, the policy in 2.* token 1 on"):
            await compare_tokenizers(teacher, policy, "words")


async def test_a_teacher_that_cannot_tell_its_tokens_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serve(writes([], status=404)) as teacher, serve(writes([1])) as policy:
        await compare_tokenizers(teacher, policy, "words")
    assert "cannot be compared" in caplog.text
