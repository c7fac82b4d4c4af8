"""The generate route of a run: requests of a token connection go to vLLM's engine as they are.

vLLM's own route makes a web request, a task, a generator, a text and JSON of each reply. Here a
request is a message in and a message out: it is checked by vLLM's input processor, sent to the
engine's process, and its tokens and logprobs come back as the arrays that the engine sampled.
What this route does not know, it leaves to vLLM's own, which also has the texts of all refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any

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
from gradus.inference.policy_engine import EngineCounters, PolicyEngine
from gradus.log import get_logger
from gradus.wire.episode import POLICY_VERSIONS
from gradus.wire.inference import SERVED_MODEL_NAME, behind
from gradus.wire.token_stream import (
    ASK_ELSEWHERE,
    TokenAnswer,
    TokenConnection,
    TokenPart,
    TokenQuestion,
)

logger = get_logger(__name__)
LOWEST_LOGPROB = -9999.0
"""vLLM's routes answer no lower logprob, since JSON has no infinity."""
_SAMPLING = TypeAdapter(SamplingParams)
_PROBE = TokenQuestion(
    number=0,
    token_ids=np.zeros(1, np.int32),
    sampling_params={
        **{"max_tokens": 1, "temperature": 0.0, "logprobs": 0},
        "skip_reading_prefix_cache": True,
    },
    model=None,
    cache_salt="probe",
    session_id=None,
)

End = Callable[[EngineCoreOutput | Exception], None]
"""Told how a request ended: its whole output, or why there is none."""
Watch = Callable[[EngineCoreOutput], None]
"""Shown each output of a request before it is kept; may say that the request ends with it."""


class TokenReplies:
    """Owns the requests of token connections that the engine has not answered.

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

    def is_expected(self, request_id: str) -> bool:
        return request_id in self._ends

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
    """Answers token connections with the engine of this process.

    TokenRoute(engine, await engine.get_supported_tasks(), counters)
    """

    def __init__(
        self, engine: PolicyEngine, tasks: tuple[SupportedTask, ...], counters: EngineCounters
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._tasks = tasks
        self._replies = TokenReplies(engine.output_processor)
        self._running: dict[TokenConnection, dict[int, str]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def ask(self, connection: TokenConnection, questions: list[TokenQuestion]) -> None:
        """Hand requests to the engine; what they lack is for vLLM's own route to say."""
        self._counters.asked_again += sum(question.is_again for question in questions)
        requests = []
        for question in questions:
            if refusal := behind(question.cache_salt, self._engine.served_version):
                connection.answer(_failed(question.number, refusal, HTTPStatus.SERVICE_UNAVAILABLE))
                continue
            try:
                request = self._request_of(question)
            except Exception as error:
                logger.debug("request %d goes to vLLM's route: %s", question.number, error)
                connection.answer(TokenAnswer.without_tokens(question.number, ASK_ELSEWHERE))
                continue
            self._expect(connection, question, request)
            requests.append(request)
        self._start(self._send(requests))

    def cancel(self, connection: TokenConnection, numbers: list[int]) -> None:
        running = self._running.get(connection, {})
        self._abort([name for number in numbers if (name := running.pop(number, None))])

    def disconnect(self, connection: TokenConnection) -> None:
        self._abort(list(self._running.pop(connection, {}).values()))

    async def probe(self) -> None:
        """Return once the engine's process has answered a request for one token, which no number
        and no cache knows of."""
        request, answered = self._request_of(_PROBE), asyncio.Event()
        self._replies.expect(request.request_id, lambda _: answered.set(), is_counted=False)
        await self._send([request])
        await answered.wait()

    def _expect(
        self, connection: TokenConnection, question: TokenQuestion, request: EngineCoreRequest
    ) -> None:
        number, running = question.number, self._running.setdefault(connection, {})
        if number in running:
            connection.abort()
            return
        running[number] = request.request_id
        external, size = request.external_req_id or "", len(request.prompt_token_ids or ())

        def end(output: EngineCoreOutput | Exception) -> None:
            if isinstance(output, Exception) and self._engine.errored:
                # It asks again where the next engine serves.
                connection.abort()
                return
            running.pop(number, None)
            connection.answer(_answer_of(number, external, size, output))

        self._replies.expect(
            request.request_id, end, watch=self._watch(connection, question, request)
        )

    def _watch(
        self, connection: TokenConnection, question: TokenQuestion, request: EngineCoreRequest
    ) -> Watch | None:
        """What looks at a reply while it grows: for its stop strings, or for who reads it."""
        asks_to_stop = bool(request.sampling_params and request.sampling_params.stop)
        if not (asks_to_stop or question.is_streamed):
            return None
        tokenizer = self._engine.output_processor.tokenizer if asks_to_stop else None
        text = IncrementalDetokenizer.from_new_request(tokenizer, request)

        def watch(output: EngineCoreOutput) -> None:
            is_over = output.finish_reason is not None
            if text.update(output.new_token_ids, output.finish_reason == FinishReason.STOP):
                output.finish_reason = FinishReason.STOP
                if not is_over:
                    self._start(self._tell_aborted([request.request_id]))
            elif question.is_streamed and not is_over:
                connection.tell(TokenPart(question.number, list(output.new_token_ids)))

        return watch

    def _request_of(self, question: TokenQuestion) -> EngineCoreRequest:
        """What the engine is sent; any exception means that vLLM's route must be asked."""
        question.check()
        engine = self._engine
        if question.model not in (None, SERVED_MODEL_NAME) or engine.errored:
            raise ProtocolError(f"model {question.model!r}, engine errored: {engine.errored}")
        params = _sampling_of(question.sampling_params)
        if question.is_streamed:
            params.output_kind = RequestOutputKind.DELTA
        name = f"{TOKENS_ONLY_PREFIX}{random_uuid()}"
        prompt = tokens_input(
            question.token_ids.tolist(), cache_salt=question.cache_salt or engine.own_salt
        )
        request = engine.input_processor.process_inputs(
            name,
            prompt,
            params,
            self._tasks,
            lora_request=engine.adapter,
            priority=question.priority,
            session_id=question.session_id,
        )
        engine.input_processor.assign_request_id(request)
        return request

    async def _send(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            if not self._replies.is_expected(request.request_id):
                continue
            try:
                await self._engine.engine_core.add_request_async(request)
            except Exception as error:
                self._replies.fail(request.request_id, error)

    def _abort(self, names: list[str]) -> None:
        running = self._replies.forget(names)
        if running:
            self._start(self._tell_aborted(running))

    async def _tell_aborted(self, names: list[str]) -> None:
        with contextlib.suppress(Exception):  # a dead engine computes nothing any more
            await self._engine.engine_core.abort_requests_async(names)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


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
    number: int, request_id: str, num_prompt_tokens: int, output: EngineCoreOutput | Exception
) -> TokenAnswer:
    if isinstance(output, Exception):
        return TokenAnswer.without_tokens(number, ASK_ELSEWHERE)
    reason, logprobs = output.finish_reason, output.new_logprobs
    if reason in (None, FinishReason.ERROR, FinishReason.ABORT) or logprobs is None:
        return _failed(number, "Internal server error")
    sampled = logprobs.logprobs[:, 0].astype(np.float32, copy=False)
    if np.isnan(sampled).any():
        return _failed(number, "a logprob of the reply is not a number")
    return TokenAnswer(
        number=number,
        status=HTTPStatus.OK.value,
        request_id=request_id,
        token_ids=np.asarray(output.new_token_ids, np.int32),
        logprobs=np.maximum(sampled, np.float32(LOWEST_LOGPROB)),
        finish_reason=str(reason),
        num_prompt_tokens=num_prompt_tokens,
        versions=(output.kv_transfer_params or {}).get(POLICY_VERSIONS, []),
        experts=output.routed_experts,
    )


def _failed(
    number: int, message: str, status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
) -> TokenAnswer:
    kind = status.phrase.replace(" ", "")
    error = {"message": message, "type": kind, "param": None, "code": status.value}
    return TokenAnswer.without_tokens(number, status.value, msgspec.json.encode({"error": error}))


def _count(stats: IterationStats, output: EngineCoreOutput, *, is_first: bool) -> None:
    """What `EngineCounters` reads of vLLM's statistics of an iteration."""
    stats.num_generation_tokens += len(output.new_token_ids)
    if is_first and output.prefill_stats is not None:
        stats.prompt_token_stats.update_from_output(output.prefill_stats)
    for event in output.events or ():
        stats.num_preempted_reqs += event.type == EngineCoreEventType.PREEMPTED
