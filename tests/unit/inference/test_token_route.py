"""The token route against a stand-in for the engine's process."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, PrefillStats
from vllm.v1.outputs import LogprobsLists

from gradus.heartbeat import Heartbeat, Sign
from gradus.inference.policy_engine import EngineCounters, VllmControl
from gradus.inference.token_route import TokenRoute, beat_with_engine
from gradus.testing.tiny_model import build_tiny_tokenizer
from gradus.wire.inference import GENERATE_ROUTE, LIVE_HEADER, is_behind_refusal

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SAMPLING = {"temperature": 1.0, "max_tokens": 4, "logprobs": 1, "seed": 3}


class Core:
    """Takes requests and aborts, computes nothing."""

    def __init__(self) -> None:
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.error: Exception | None = None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if self.error is not None:
            raise self.error
        self.added.append(request)

    async def abort_requests_async(self, names: list[str]) -> None:
        self.aborted += names


class Inputs:
    """Makes requests as vLLM's input processor does, without a model."""

    def process_inputs(
        self, request_id: str, prompt: Any, params: Any, tasks: Any, **options: Any
    ) -> EngineCoreRequest:
        assert tasks == ("generate",)
        if 99 in prompt["prompt_token_ids"]:
            raise ValueError("Token id 99 is out of vocabulary")
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            cache_salt=prompt["cache_salt"],
            data_parallel_rank=None,
            **options,
        )

    def assign_request_id(self, request: EngineCoreRequest) -> None:
        request.external_req_id, request.request_id = request.request_id, f"{request.request_id}-x"


class Engine:
    """What the route asks of PolicyEngine."""

    def __init__(self) -> None:
        self.engine_core = Core()
        self.input_processor = Inputs()
        self.output_processor = OutputProcessor(None, log_stats=True)
        self.adapter: LoRARequest | None = None
        self.errored = False
        self.own_salt = "served-v7"
        self.served_version = 7

    def sample(self, number: int, *tokens: int, logprob: float = -0.5, **more: Any) -> Any:
        """The engine's output for the request that was added as `number`."""
        rows = len(tokens)
        logprobs = LogprobsLists(
            np.array([[token] for token in tokens], np.int32),
            np.full((rows, 1), logprob, np.float32),
            np.ones(rows, np.int32),
        )
        return EngineCoreOutput(
            self.engine_core.added[number].request_id, list(tokens), logprobs, **more
        )


class Call:
    """A request to the route as its server sees it, and what it was answered."""

    def __init__(self, route: TokenRoute, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.has_left = asyncio.Event()
        self._bodies = [msgspec.json.encode(body)]
        named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": GENERATE_ROUTE[1], "headers": named}
        self.task = asyncio.ensure_future(route(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop()}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def lines(self) -> list[bytes]:
        return b"".join(it.get("body", b"") for it in self.messages).split(b"\n")

    @property
    def reply(self) -> Any:
        """The choice of the answer, with the rest of it."""
        answer = msgspec.json.decode(self.lines[-1])
        return SimpleNamespace(
            **answer["choices"][0],
            **{name: value for name, value in answer.items() if name != "choices"},
            probabilities=[it["logprob"] for it in answer["choices"][0]["logprobs"]["content"]],
        )


async def vllm(_: Any, receive: Any, send: Any) -> None:
    """Stands for vLLM's own application: it gets the body whole."""
    assert msgspec.json.decode((await receive())["body"])["token_ids"]
    await send({"type": "http.response.start", "status": ELSEWHERE_STATUS})


ELSEWHERE_STATUS = 299


def question(**changes: Any) -> dict[str, Any]:
    given = {"token_ids": [1, 2], "sampling_params": SAMPLING, "model": "policy", **changes}
    return {name: value for name, value in given.items() if value is not None}


async def asked(engine: Engine, *questions: dict[str, Any], live: int | None = None) -> list[Call]:
    """The calls of a route, which have arrived; that number `live` is told token by token."""
    route = TokenRoute(vllm, engine, ("generate",), EngineCounters())  # type: ignore[arg-type]
    calls = []
    for number, body in enumerate(questions):
        headers = {"X-Session-ID": "trace"} | ({LIVE_HEADER: "1"} if number == live else {})
        calls.append(Call(route, body, headers))
    await settled()
    return calls


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def outputs(engine: Engine, *found: Any, stats: IterationStats | None = None) -> Any:
    processed = engine.output_processor.process_outputs(list(found), 1.0, stats)
    await settled()
    return processed


END = {"finish_reason": FinishReason.STOP}


async def test_a_reply_comes_back_with_what_was_sampled() -> None:
    engine = Engine()
    (call,) = await asked(engine, question())
    (request,) = engine.engine_core.added
    assert (request.cache_salt, request.session_id, request.prompt_token_ids) == (
        "served-v7",
        "trace",
        [1, 2],
    )
    params = request.sampling_params
    assert params is not None
    assert (params.logprobs, params.detokenize, params.output_kind, params.seed) == (
        0,
        False,
        RequestOutputKind.FINAL_ONLY,
        3,
    )
    await outputs(engine, engine.sample(0, 8, 9))
    assert call.messages == []
    await outputs(engine, engine.sample(0, 4, **END))
    assert (call.status, call.reply.finish_reason) == (200, "stop")
    assert call.reply.token_ids == [8, 9, 4]
    assert call.reply.probabilities == [-0.5] * 3
    assert call.reply.request_id.startswith("generate-tokens-")
    assert call.reply.usage["prompt_tokens"] == 2


async def test_a_live_reply_is_told_in_parts_and_answered_whole() -> None:
    engine = Engine()
    live, other = await asked(engine, question(), question(), live=0)
    kinds = [request.sampling_params.output_kind for request in engine.engine_core.added]  # type: ignore[union-attr]
    assert kinds == [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]
    await outputs(engine, engine.sample(0, 8, 9), engine.sample(1, 8), engine.sample(0, 4))
    assert live.lines == [b"[8,9]", b"[4]", b""]
    await outputs(engine, engine.sample(0, 3, **END))
    assert live.reply.token_ids == [8, 9, 4, 3]
    assert (len(live.lines), other.messages) == (3, [])
    other.task.cancel()


@pytest.mark.parametrize("is_live", [False, True])
async def test_a_stop_string_over_two_tokens_ends_a_reply_where_vllm_ends_it(
    is_live: bool, tmp_path: Path
) -> None:
    build_tiny_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    engine = Engine()
    engine.output_processor.tokenizer = tokenizer
    sampling = SAMPLING | {"stop": ["ef"], "max_tokens": 9}
    body = question(sampling_params=sampling)
    (call,) = await asked(engine, body, live=0 if is_live else None)
    for place, text in enumerate("defg"):
        (token,) = tokenizer.encode(text, add_special_tokens=False)
        part = engine.sample(0, token, routed_experts=np.full((1, 1, 1), place, np.uint8))
        await outputs(engine, part)
    experts = np.load(io.BytesIO(base64.b64decode(call.reply.routed_experts)))
    assert experts.ravel().tolist() == [0, 1, 2]
    assert tokenizer.decode(call.reply.token_ids) == "def"
    assert (call.reply.finish_reason, call.status, len(call.reply.probabilities)) == (
        "stop",
        200,
        3,
    )
    assert engine.engine_core.aborted == [engine.engine_core.added[0].request_id]
    assert len(call.lines) == 1 + 2 * is_live


async def test_counters_see_the_tokens_as_vllm_counts_them() -> None:
    engine, stats = Engine(), IterationStats()
    await asked(engine, question())
    prefill = PrefillStats(num_prompt_tokens=2, num_computed_tokens=2)
    event = EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED, 1.0)
    await outputs(engine, engine.sample(0, 8, prefill_stats=prefill, events=[event]), stats=stats)
    await outputs(engine, engine.sample(0, 9, prefill_stats=prefill, **END), stats=stats)
    counted = (stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_preempted_reqs)
    assert counted == (2, 2, 1)


async def test_the_salt_of_the_client_and_the_served_adapter_reach_the_engine() -> None:
    engine = Engine()
    engine.adapter = LoRARequest(lora_name="policy-v3", lora_int_id=1, lora_path="/a")
    (call,) = await asked(engine, question(cache_salt="v3", model=None))
    (request,) = engine.engine_core.added
    assert (request.cache_salt, request.lora_request) == ("v3", engine.adapter)
    call.task.cancel()


ELSEWHERE: list[dict[str, Any]] = [
    {"model": "another"},
    {"token_ids": [1, 99]},
    {"token_ids": [[1]]},
    {"content_parts": []},
    *(
        {"sampling_params": SAMPLING | more}
        for more in (
            {"n": 2},
            {"logprobs": 2},
            {"logprobs": None},
            {"prompt_logprobs": 1},
            {"temperature": -1.0},
            {"structured_outputs": {"choice": ["a"]}},
            {"extra_args": {"a": 1}},
        )
    ),
]


@pytest.mark.parametrize("changes", ELSEWHERE, ids=str)
async def test_what_is_not_known_here_is_for_vllms_route(changes: dict[str, Any]) -> None:
    engine = Engine()
    call, other = await asked(engine, question(**changes), question())
    assert (call.status, other.status) == (ELSEWHERE_STATUS, None)
    assert len(engine.engine_core.added) == 1
    other.task.cancel()


async def test_the_engine_drops_the_request_of_a_client_that_went_away() -> None:
    engine = Engine()
    gone, ended = await asked(engine, question(), question())
    await outputs(engine, engine.sample(1, 8, **END))
    assert ended.status == 200
    gone.has_left.set()
    await settled()
    assert engine.engine_core.aborted == [engine.engine_core.added[0].request_id]
    assert (await outputs(engine, engine.sample(0, 8, **END))).request_outputs == []
    assert gone.messages == []


async def test_what_a_dead_engine_cannot_answer_is_an_error_of_the_server() -> None:
    """For which the guard asks to come again, since the engine is gone."""
    engine = Engine()
    calls = await asked(engine, question(), question())
    engine.output_processor.propagate_error(EngineDeadError())
    await settled()
    assert [call.status for call in calls] == [500] * 2
    for dead, status in (("errored", ELSEWHERE_STATUS), ("send", 500)):
        engine = Engine()
        engine.errored = dead == "errored"
        engine.engine_core.error = EngineDeadError() if dead == "send" else None
        (call,) = await asked(engine, question())
        assert call.status == status


@pytest.mark.shows("F09", "I3")
async def test_an_engine_with_older_weights_than_an_episode_began_with_is_not_asked() -> None:
    engine = Engine()
    call, *others = await asked(
        engine, question(cache_salt="v8"), question(cache_salt="v7"), question()
    )
    assert (call.status, is_behind_refusal(call.lines[0])) == (503, True)
    assert [request.cache_salt for request in engine.engine_core.added] == ["v7", "served-v7"]
    for other in others:
        other.task.cancel()


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
async def test_a_reply_that_the_engine_gave_up_is_an_error_of_the_server(
    reason: FinishReason,
) -> None:
    engine = Engine()
    (call,) = await asked(engine, question())
    await outputs(engine, engine.sample(0, finish_reason=reason))
    assert call.status == 500
    assert b"Internal server error" in call.lines[0]


@pytest.mark.shows("F38")
async def test_a_logprob_that_is_no_number_is_an_error_of_the_server() -> None:
    engine = Engine()
    (call,) = await asked(engine, question())
    await outputs(engine, engine.sample(0, 8, logprob=np.nan, **END))
    assert call.status == 500


async def test_a_logprob_without_end_is_the_lowest_that_vllm_answers() -> None:
    engine = Engine()
    (call,) = await asked(engine, question())
    await outputs(engine, engine.sample(0, 8, logprob=-np.inf, **END))
    assert call.reply.probabilities == [-9999.0]


async def test_a_probe_is_one_token_that_is_counted_nowhere() -> None:
    engine, stats = Engine(), IterationStats()
    route = TokenRoute(vllm, engine, ("generate",), EngineCounters())  # type: ignore[arg-type]
    probing = asyncio.create_task(route.probe())
    while not engine.engine_core.added:
        await asyncio.sleep(0)
    (request,) = engine.engine_core.added
    params = request.sampling_params
    assert params is not None
    assert (params.max_tokens, params.temperature) == (1, 0.0)
    assert params.skip_reading_prefix_cache
    assert not probing.done()
    engine.output_processor.process_outputs([engine.sample(0, 8, **END)], 1.0, stats)
    await probing
    assert stats.num_generation_tokens == 0


class Probed:
    """An engine as `beat_with_engine` sees it, and the signs of life that follow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_steps = 0
        self.is_paused = False
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def probe(self) -> None:
        self.asked += 1
        await self.answers.wait()

    @property
    def sign(self) -> Sign:
        if not self.path.exists():
            return Sign(0)
        return msgspec.json.decode(self.path.read_bytes(), type=Sign)

    async def beats(self, number: int) -> str:
        """What it says once it has given so many signs of life more."""
        before = self.sign.number
        while self.sign.number < before + number:
            await asyncio.sleep(0)
        return self.sign.last


@pytest.fixture
async def probed(tmp_path: Path) -> AsyncIterator[Probed]:
    engine = Probed(tmp_path / "inference.json")
    with Heartbeat(engine.path).beating():
        task = asyncio.create_task(
            beat_with_engine(
                engine.probe, lambda: engine.num_steps, lambda: engine.is_paused, seconds=0.002
            )
        )
    yield engine
    task.cancel()


@pytest.mark.shows("F11")
async def test_an_idle_engine_is_asked_for_a_token_and_lives(probed: Probed) -> None:
    assert await probed.beats(3) == "an idle engine"
    assert probed.asked >= 3


@pytest.mark.shows("F11")
async def test_an_engine_that_does_not_answer_gives_no_sign_of_life(probed: Probed) -> None:
    await probed.beats(1)
    probed.answers.clear()
    asked = probed.asked
    while probed.asked == asked:
        await asyncio.sleep(0)
    before, until = probed.sign.number, time.monotonic() + 0.05
    while time.monotonic() < until:
        await asyncio.sleep(0)
    assert (probed.sign.number, probed.asked) == (before, asked + 1)
    # It was paused meanwhile, or generates for others: that is life too.
    probed.is_paused = True
    assert "paused" in await probed.beats(2)
    probed.is_paused = False
    probed.num_steps += 1
    while "generating" not in probed.sign.last:
        probed.num_steps += 1
        await asyncio.sleep(0)


async def test_an_engine_that_refuses_the_token_does_not_hang(probed: Probed) -> None:
    async def refuse() -> None:
        raise ValueError("no")

    probed.probe = refuse  # type: ignore[method-assign]
    task_sign = await probed.beats(1)
    assert task_sign == "an idle engine"


class ReloadedEngine:
    """Remembers what new weights made it do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def collective_rpc(self, name: str, args: tuple[str, ...]) -> list[int]:
        self.calls.append(name)
        return [7]

    async def reset_encoder_cache(self) -> None:
        self.calls.append("reset_encoder_cache")


async def test_with_new_weights_the_scheduler_counts_on_no_image_that_the_tower_read() -> None:
    """Workers have none left: the next request with the same image would end the engine."""
    engine: Any = ReloadedEngine()
    await VllmControl(engine).load(Path("version_1"))
    assert engine.calls == ["gradus_load", "reset_encoder_cache"]
