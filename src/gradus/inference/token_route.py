"""The generate route of a run: a request goes to vLLM's engine as it is.

vLLM's own route makes a generator, a text and several models of each reply. Here a request is
checked by vLLM's input processor, sent to the engine's process, and its tokens and logprobs come
back as the arrays that the engine sampled. What this route does not know, it leaves to vLLM's own,
which also has the texts of all refusals.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pydantic import TypeAdapter
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import SupportedTask
from vllm.utils import random_uuid
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.metrics.stats import IterationStats

from gradus.errors import ProtocolError
from gradus.heartbeat import BEAT_SECONDS, beat
from gradus.inference.engine.scheduler import TOKENS_ONLY_PREFIX, merged
from gradus.inference.guard import AsgiApp, Message, Receive, Scope, Send
from gradus.inference.policy_engine import EngineCounters, PolicyEngine
from gradus.log import get_logger
from gradus.wire.episode import POLICY_VERSIONS
from gradus.wire.inference import (
    AGAIN_HEADER,
    GENERATE_ROUTE,
    LINES_TYPE,
    LIVE_HEADER,
    SERVED_MODEL_NAME,
    SESSION_HEADER,
    behind,
)

logger = get_logger(__name__)
LOWEST_LOGPROB = -9999.0
"""vLLM's routes answer no lower logprob, since JSON has no infinity."""
_SAMPLING = TypeAdapter(SamplingParams)


class TokenQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that this route knows."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str | None = None
    cache_salt: str | None = None
    priority: int = 0


class RouteAnswer(NamedTuple):
    """What a request is answered, whole."""

    status: HTTPStatus
    body: bytes


_PROBE = TokenQuestion(
    token_ids=[0],
    sampling_params={
        **{"max_tokens": 1, "temperature": 0.0, "logprobs": 0},
        "skip_reading_prefix_cache": True,
    },
    cache_salt="probe",
)

End = Callable[[EngineCoreOutput | Exception], None]
"""Told how a request ended: its whole output, or why there is none."""
Watch = Callable[[EngineCoreOutput], None]
"""Shown each output of a request before it is kept; may say that the request ends with it."""


class TokenReplies:
    """Owns the requests of this route that the engine has not answered.

    Stands between vLLM's loop that receives outputs and its output processor, which must never
    hear of these requests: it would make objects of every token.
    """

    def __init__(self, processor: Any) -> None:
        self._ends: dict[str, End] = {}
        self._watches: dict[str, Watch] = {}
        self._parts: dict[str, list[EngineCoreOutput]] = {}
        self._uncounted: set[str] = set()
        self._process = processor.process_outputs
        self._propagate_error = processor.propagate_error
        # The running loop of vLLM holds the processor itself, so it cannot be another object.
        processor.process_outputs = self.process_outputs
        processor.propagate_error = self.propagate_error

    def expect(
        self, request_id: str, end: End, *, watch: Watch | None = None, is_counted: bool = True
    ) -> None:
        """Call `end` once with what becomes of a request."""
        self._ends[request_id] = end
        if watch is not None:
            self._watches[request_id] = watch
        if not is_counted:
            self._uncounted.add(request_id)

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """Drop the answers of these requests; returns those that were still running."""
        running = [name for name in request_ids if self._ends.pop(name, None) is not None]
        for name in running:
            self._parts.pop(name, None)
            self._watches.pop(name, None)
            self._uncounted.discard(name)
        return running

    def process_outputs(
        self,
        outputs: list[EngineCoreOutput],
        timestamp: float | None = None,
        stats: IterationStats | None = None,
    ) -> Any:
        """As vLLM's, for the outputs that are not ours."""
        others = [output for output in outputs if not self._take(output, stats)]
        return self._process(others, timestamp, stats)

    def _take(self, output: EngineCoreOutput, stats: IterationStats | None) -> bool:
        name = output.request_id
        end = self._ends.get(name)
        if end is None:
            return False
        parts = self._parts.setdefault(name, [])
        if stats is not None and name not in self._uncounted:
            _count(stats, output, is_first=not parts)
        parts.append(output)
        if (watch := self._watches.get(name)) is not None:
            watch(output)
        if output.finish_reason is not None:
            self.forget([name])
            end(merged(parts))
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        """The engine did not take a request."""
        end = self._ends.get(request_id)
        if end is not None:
            self.forget([request_id])
            end(error)

    def propagate_error(self, error: Exception) -> None:
        """As vLLM's: the engine is gone, everybody who waits hears of it."""
        ends = list(self._ends.values())
        self.forget(list(self._ends))
        for end in ends:
            end(error)
        self._propagate_error(error)


class TokenRoute:
    """Answers generate requests with the engine of this process; `app` is asked all the rest.

    TokenRoute(app, engine, await engine.get_supported_tasks(), counters)
    """

    def __init__(
        self,
        app: AsgiApp,
        engine: PolicyEngine,
        tasks: tuple[SupportedTask, ...],
        counters: EngineCounters,
    ) -> None:
        self._app = app
        self._engine = engine
        self._counters = counters
        self._tasks = tasks
        self._replies = TokenReplies(engine.output_processor)
        self._aborting: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != GENERATE_ROUTE:
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        if body is None:
            return
        headers = dict(scope["headers"])
        self._counters.asked_again += AGAIN_HEADER.lower().encode() in headers
        try:
            question = msgspec.json.decode(body, type=TokenQuestion)
            is_live = LIVE_HEADER.lower().encode() in headers
            session_id = headers.get(SESSION_HEADER.lower().encode(), b"").decode("latin-1")
            request = self._request_of(question, session_id or None, is_live=is_live)
        except Exception as error:
            logger.debug("a request goes to vLLM's route: %s", error)
            await self._app(scope, _again(body, receive), send)
            return
        if refusal := behind(question.cache_salt, self._engine.served_version):
            refused = _failed(refusal, HTTPStatus.SERVICE_UNAVAILABLE)
            await send(_head(refused.status, b"application/json", _length(refused.body)))
            await send({"type": "http.response.body", "body": refused.body})
            return
        await self._answer(request, receive, send, is_live=is_live)

    async def probe(self) -> None:
        """Return once the engine's process has answered a request for one token, which no number
        and no cache knows of."""
        request, answered = self._request_of(_PROBE, None), asyncio.Event()
        self._replies.expect(request.request_id, lambda _: answered.set(), is_counted=False)
        await self._ask(request)
        await answered.wait()

    async def _answer(
        self, request: EngineCoreRequest, receive: Receive, send: Send, *, is_live: bool
    ) -> None:
        """The reply as one JSON body, where it is live with lines of tokens before it; the engine
        drops the request of a client that left."""
        size = len(request.prompt_token_ids or ())
        heard: asyncio.Queue[bytes | RouteAnswer | None] = asyncio.Queue()
        self._replies.expect(
            request.request_id,
            lambda output: heard.put_nowait(_answer_of(request.external_req_id, size, output)),
            watch=self._watch(request, heard.put_nowait if is_live else None),
        )
        leaving = asyncio.ensure_future(_left(receive))
        leaving.add_done_callback(lambda _: heard.put_nowait(None))
        try:
            await self._ask(request)
            has_begun = False
            while isinstance(said := await heard.get(), bytes):
                if not has_begun:
                    has_begun = True
                    await send(_head(HTTPStatus.OK, LINES_TYPE))
                await send({"type": "http.response.body", "body": said, "more_body": True})
        finally:
            leaving.cancel()
            self._abort([request.request_id])
        # A live reply that fails is broken off: its client then asks again.
        if said is None or (has_begun and said.status != HTTPStatus.OK):
            return
        if not has_begun:
            await send(_head(said.status, b"application/json", _length(said.body)))
        await send({"type": "http.response.body", "body": said.body})

    def _watch(
        self, request: EngineCoreRequest, tell: Callable[[bytes], None] | None
    ) -> Watch | None:
        """What looks at a reply while it grows: for its stop strings, or for who reads it."""
        asks_to_stop = bool(request.sampling_params and request.sampling_params.stop)
        if not (asks_to_stop or tell):
            return None
        tokenizer = self._engine.output_processor.tokenizer if asks_to_stop else None
        text = IncrementalDetokenizer.from_new_request(tokenizer, request)

        def watch(output: EngineCoreOutput) -> None:
            is_over = output.finish_reason is not None
            if text.update(output.new_token_ids, output.finish_reason == FinishReason.STOP):
                output.finish_reason = FinishReason.STOP
                if not is_over:
                    self._tell_aborted([request.request_id])
            elif tell and not is_over:
                tell(msgspec.json.encode(output.new_token_ids) + b"\n")

        return watch

    def _request_of(
        self, question: TokenQuestion, session_id: str | None, *, is_live: bool = False
    ) -> EngineCoreRequest:
        """What the engine is sent; any exception means that vLLM's route must be asked."""
        engine = self._engine
        if question.model not in (None, SERVED_MODEL_NAME) or engine.errored:
            raise ProtocolError(f"model {question.model!r}, engine errored: {engine.errored}")
        params = _sampling_of(question.sampling_params)
        if is_live:
            params.output_kind = RequestOutputKind.DELTA
        prompt = tokens_input(question.token_ids, cache_salt=question.cache_salt or engine.own_salt)
        request = engine.input_processor.process_inputs(
            f"{TOKENS_ONLY_PREFIX}{random_uuid()}",
            prompt,
            params,
            self._tasks,
            lora_request=engine.adapter,
            priority=question.priority,
            session_id=session_id,
        )
        engine.input_processor.assign_request_id(request)
        return request

    async def _ask(self, request: EngineCoreRequest) -> None:
        try:
            await self._engine.engine_core.add_request_async(request)
        except Exception as error:
            self._replies.fail(request.request_id, error)

    def _abort(self, names: list[str]) -> None:
        if running := self._replies.forget(names):
            self._tell_aborted(running)

    def _tell_aborted(self, names: list[str]) -> None:
        async def tell() -> None:
            with contextlib.suppress(Exception):  # a dead engine computes nothing any more
                await self._engine.engine_core.abort_requests_async(names)

        task = asyncio.ensure_future(tell())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)


async def beat_with_engine(
    probe: Callable[[], Awaitable[None]],
    num_steps: Callable[[], int],
    is_paused: Callable[[], bool],
    *,
    seconds: float = BEAT_SECONDS,
) -> None:
    """Give a sign of life when the engine computes, until cancelled.

    While it has nothing to do, a discarded token shows that it could: a server answers its
    clients beside an engine process that hangs. A change of weights has a deadline of its own.
    """
    before, asked = num_steps(), None
    while True:
        await asyncio.sleep(seconds)
        if is_paused():
            beat("paused for other weights, or asleep")
        elif num_steps() != before:
            beat("generating")
        else:
            asked = asked or asyncio.ensure_future(probe())
            await asyncio.wait({asked}, timeout=seconds)
        if asked is not None and asked.done():
            # Refused, it was not hanging; whether the engine is gone, others watch.
            if asked.exception() is not None:
                logger.debug("no token could be asked for: %s", asked.exception())
            beat("an idle engine")
            asked = None
        before = num_steps()


def _sampling_of(given: dict[str, Any]) -> SamplingParams:
    """vLLM's parameters; ProtocolError for what an answer of this route has no room for."""
    params = _SAMPLING.validate_python(given)
    if (
        params.logprobs not in (0, 1)
        or params.n != 1
        or params.prompt_logprobs is not None
        or params.logprob_token_ids
        or params.structured_outputs is not None
        or params.extra_args
    ):
        raise ProtocolError("these sampling parameters need vLLM's own route")
    # Only the sampled token's logprob is answered, so that no other has to be looked for.
    params.logprobs = 0
    params.detokenize = bool(params.stop)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.skip_clone = True
    if "max_tokens" not in given:
        params.max_tokens = None
    return params


def _answer_of(
    request_id: str | None, num_prompt_tokens: int, output: EngineCoreOutput | Exception
) -> RouteAnswer:
    """What `renderers` and gradus read of the JSON that vLLM's own route answers."""
    if isinstance(output, Exception):
        return _failed(str(output))
    reason, logprobs = output.finish_reason, output.new_logprobs
    if reason in (None, FinishReason.ERROR, FinishReason.ABORT) or logprobs is None:
        return _failed("Internal server error")
    sampled = logprobs.logprobs[:, 0].astype(np.float32, copy=False)
    if np.isnan(sampled).any():
        return _failed("a logprob of the reply is not a number")
    token_ids = [int(it) for it in output.new_token_ids]
    entries = [
        {"token": f"token_id:{token_id}", "logprob": logprob}
        for token_id, logprob in zip(
            token_ids, np.maximum(sampled, np.float32(LOWEST_LOGPROB)).tolist(), strict=True
        )
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": {"content": entries},
        "finish_reason": str(reason),
    }
    if output.routed_experts is not None:
        choice["routed_experts"] = npy_text(output.routed_experts)
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(token_ids),
        "total_tokens": num_prompt_tokens + len(token_ids),
    }
    versions = (output.kv_transfer_params or {}).get(POLICY_VERSIONS)
    body = {
        "request_id": request_id,
        "choices": [choice],
        "usage": usage,
        "kv_transfer_params": {POLICY_VERSIONS: versions} if versions else None,
    }
    return RouteAnswer(HTTPStatus.OK, msgspec.json.encode(body))


def npy_text(experts: np.ndarray[Any, Any]) -> str:
    """As vLLM's own route writes them: a file of numpy in base64."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _failed(message: str, status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR) -> RouteAnswer:
    kind = status.phrase.replace(" ", "")
    error = {"message": message, "type": kind, "param": None, "code": status.value}
    return RouteAnswer(status, msgspec.json.encode({"error": error}))


async def _whole_body(receive: Receive) -> bytes | None:
    """The body of a request; None where its client left."""
    body = bytearray()
    while (message := await receive())["type"] != "http.disconnect":
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)
    return None


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives a body that was read already."""
    read = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_again() -> Message:
        return next(read, None) or await receive()

    return receive_again


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: HTTPStatus, kind: bytes, *more: tuple[bytes, bytes]) -> Message:
    headers = [(b"content-type", kind), *more]
    return {"type": "http.response.start", "status": status.value, "headers": headers}


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()


def _count(stats: IterationStats, output: EngineCoreOutput, *, is_first: bool) -> None:
    """What `EngineCounters` reads of vLLM's statistics of an iteration."""
    stats.num_generation_tokens += len(output.new_token_ids)
    if is_first and output.prefill_stats is not None:
        stats.prompt_token_stats.update_from_output(output.prefill_stats)
    for event in output.events or ():
        stats.num_preempted_reqs += event.type == EngineCoreEventType.PREEMPTED
