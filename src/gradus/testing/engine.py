"""A scripted policy server: the inference server's routes with chosen replies, waits and faults.

Runs inside a test (`async with ScriptedEngine() as engine`) or as a process
(`python -m gradus.testing.engine --run-dir DIR`), where it stands in for the `inference` role.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import importlib
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import msgspec
from aiohttp import web

from gradus.errors import CorruptStateError
from gradus.files import write_json
from gradus.processes.child import watch_death_pipe
from gradus.processes.listening import inherited_listener
from gradus.processes.secured import server_context
from gradus.run.paths import RunDirectory
from gradus.run.ready import own_pid
from gradus.testing.engine_script import (
    AnyBody,
    ChatRequest,
    Drip,
    Fault,
    FinishedReply,
    GenerateCall,
    GenerateRequest,
    Reply,
    Reset,
    Status,
    Stuck,
    Truncate,
    chat_body,
    error_body,
    generate_body,
    images_unread,
    models_body,
    reply_from_prompt,
    reversed_last_message,
)
from gradus.weights.published import verify_version
from gradus.wire.inference import (
    ADMIN_ROUTES,
    AGAIN_HEADER,
    DATA_ROUTES,
    GENERATE_ROUTE,
    GENERATING_ROUTES,
    LINES_TYPE,
    LIVE_HEADER,
    SESSION_HEADER,
    STALE_WEIGHTS,
    ApplyRefusal,
    ApplyRequest,
    ApplyResult,
    EngineStatus,
    ServedPolicy,
    TurnRequest,
    TurnResult,
    behind,
    check_weights_directory,
    decode_request,
)

GENERATE_PATH = GENERATE_ROUTE[1]
WeightsCheck = Callable[[Path, str], object]
"""Raises when the weights in a directory do not match a digest."""


class ScriptedEngine:
    """Owns a server on loopback, its script, and a record of every call it got.

    async with ScriptedEngine(reply=lambda prompt: Reply([5, 6], [-0.1, -0.2])) as engine:
        engine.inject(Status(500), times=2)
        ...  # POST f"{engine.base_url}/inference/v1/generate" with engine.data_token
        assert engine.calls[0].status == 500
    """

    with_images = staticmethod(images_unread)

    def __init__(
        self,
        *,
        reply: Callable[[list[int]], Reply] = reply_from_prompt,
        latency_seconds: float = 0.0,
        run_dir: Path | None = None,
        term: int = 0,
        data_token: str = "data-token",
        admin_token: str = "admin-token",
        max_length_tokens: int = 2048,
    ) -> None:
        self.reply = reply
        self.chat_reply: Callable[[list[dict[str, object]]], str] = reversed_last_message
        self.latency_seconds = latency_seconds
        self.between_parts: Callable[[int], Awaitable[None]] | None = None
        """When set, streamed replies are told by the token; awaited with how many were told."""
        self.check_weights: WeightsCheck | None = None if run_dir is None else verify_version
        """When set, `/gradus/apply` answers 422 if it raises."""
        self.reported_version: int | None = None
        """When set, the version that status and apply report instead of the applied one."""
        self.calls: list[GenerateCall] = []
        self.applied: list[ApplyRequest] = []
        self.turns: list[str] = []
        """What happened around the GPU, in order: `sleep 0`, `wake 0`, `apply 1`, ..."""
        self.is_asleep = False
        self.max_length_tokens = max_length_tokens
        self.load: dict[str, int | float] = {}
        """What status tells instead of the engine's own numbers, e.g. {"kv_usage": 0.95}."""
        self.run_dir = None if run_dir is None else RunDirectory(run_dir)
        self.data_token = self._read_token("inference_token", data_token)
        self.admin_token = self._read_token("admin_token", admin_token)
        run_id = "run" if run_dir is None else run_dir.name
        self.served = ServedPolicy(run_id=run_id, term=term, version=0, digest=None)
        self.model = ""
        self.text_digests: dict[str, str] = {}
        self.incarnation = secrets.token_hex(8)
        self.asked_again = 0
        self._faults: dict[str, list[Fault]] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Condition()
        self._waiters = self._running = 0
        self._prompt_tokens = self._generated_tokens = 0
        self._runner: web.ServerRunner | None = None
        self._host, self._port = "127.0.0.1", 0

    # ------------------------------------------------------------------ life cycle

    async def start(self, *, port: int = 0, listener: socket.socket | None = None) -> None:
        """Listen on loopback, or on a socket that somebody bound; `base_url` tells where."""
        runner = web.ServerRunner(
            web.Server(self._answer, handler_cancellation=True), shutdown_timeout=0.1
        )
        await runner.setup()
        tls = server_context()
        site: web.BaseSite = web.TCPSite(runner, "127.0.0.1", port, backlog=1024, ssl_context=tls)
        if listener is not None:
            site = web.SockSite(runner, listener, ssl_context=tls)
        await site.start()
        self._host, self._port = str(runner.addresses[0][0]), int(runner.addresses[0][1])
        self._runner = runner

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def base_url(self) -> str:
        scheme = "http" if server_context() is None else "https"
        return f"{scheme}://{self._host}:{self._port}"

    @property
    def version(self) -> int:
        return self.served.version

    # ------------------------------------------------------------------ script

    def inject(self, fault: Fault, *, times: int = 1, path: str = GENERATE_PATH) -> None:
        self._faults.setdefault(path, []).extend([fault] * times)

    def await_version(self) -> Self:
        """Answer nobody before `/gradus/apply` said what is served, as the server of a run."""
        self.served = msgspec.structs.replace(self.served, is_stale=True)
        return self

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def wait_until(
        self, is_reached: Callable[[ScriptedEngine], bool], *, timeout_seconds: float = 60.0
    ) -> None:
        """Return once `is_reached(engine)`; checked after every change, TimeoutError otherwise."""
        self._waiters += 1
        try:
            async with asyncio.timeout(timeout_seconds), self._changed:
                await self._changed.wait_for(lambda: is_reached(self))
        finally:
            self._waiters -= 1

    @property
    def running(self) -> int:
        """Generate requests that have arrived and are not answered."""
        return self._running

    def answer_to(self, call: GenerateCall) -> Reply:
        """What is said to one call; a subclass may look at its seed, or at the served weights."""
        return self.reply(call.prompt_token_ids)

    # ------------------------------------------------------------------ HTTP

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        refusal = self._refuse(request)
        if refusal is not None:
            return refusal
        waiting_faults = self._faults.get(request.path)
        if request.path == GENERATE_PATH:
            return await self._generate(request, waiting_faults)
        if waiting_faults:
            return await self._fail(request, waiting_faults.pop(0))
        if request.path == "/gradus/apply":
            return await self._apply(request)
        if request.path in ("/gradus/sleep", "/gradus/wake"):
            return await self._take_turns(request, request.path.rsplit("/", 1)[1])
        if request.path == "/v1/chat/completions":
            return await self._chat(request)
        if request.path == "/gradus/status":
            return _json(msgspec.json.encode(self.status()))
        if request.path == "/v1/models":
            return _json(models_body(self.max_length_tokens))
        if request.path == "/health":
            return web.Response()
        return _json(error_body(501, f"{request.path} is not scripted"), status=501)

    def _refuse(self, request: web.BaseRequest) -> web.Response | None:
        """401 without a token that opens the route; None where it does."""
        route = (request.method, request.path)
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        is_admin = hmac.compare_digest(given, f"Bearer {self.admin_token}".encode())
        is_data = hmac.compare_digest(given, f"Bearer {self.data_token}".encode())
        if is_admin and (route in ADMIN_ROUTES or route in DATA_ROUTES):
            return None
        if is_data and self.served.is_stale and route in GENERATING_ROUTES:
            refusal = ApplyRefusal(503, "not told which version", reason=STALE_WEIGHTS)
            return _json(refusal.body(), status=503)
        if is_data and route in DATA_ROUTES:
            return None
        if is_admin or (is_data and route not in ADMIN_ROUTES):
            return _json(error_body(404, "no such route"), status=404)
        return _json(error_body(401, "missing or wrong bearer token"), status=401)

    async def _generate(
        self, request: web.BaseRequest, faults: list[Fault] | None
    ) -> web.StreamResponse:
        body = await request.read()
        self.asked_again += AGAIN_HEADER in request.headers
        fault = faults.pop(0) if faults else None
        try:
            asked = msgspec.json.decode(body, type=GenerateRequest)
            asked, images = self.with_images(asked)
            asked.check(self.max_length_tokens)
        except (msgspec.MsgspecError, ValueError) as error:
            return _json(error_body(400, str(error)), status=400)
        if refusal := behind(asked.cache_salt, self.version):
            return _json(error_body(503, refusal), status=503)
        async with self._call_of(asked, request.headers.get(SESSION_HEADER)) as call:
            if fault is not None:
                call.status = fault.status
                return await self._fail(request, fault)
            reply = await self._complete(call)
        answer = generate_body(len(self.calls), asked.token_ids, reply, call.versions, images)
        if LIVE_HEADER in request.headers and self.between_parts is not None:
            return await self._in_lines(request, reply, answer)
        return _json(answer)

    async def _in_lines(
        self, request: web.BaseRequest, reply: FinishedReply, answer: bytes
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": LINES_TYPE.decode()})
        await response.prepare(request)
        assert self.between_parts is not None
        for place, token in enumerate(reply.token_ids[:-1]):
            await response.write(b"[%d]\n" % token)
            await self.between_parts(place + 1)
        await response.write(answer)
        return response

    @asynccontextmanager
    async def _call_of(
        self, asked: GenerateRequest, session_id: str | None
    ) -> AsyncIterator[GenerateCall]:
        """The record of a request, which runs until the end of the block."""
        call = GenerateCall(
            prompt_token_ids=asked.token_ids,
            sampling_params=asked.sampling_params,
            cache_salt=asked.cache_salt,
            session_id=session_id,
            version=self.version,
        )
        self.calls.append(call)
        self._running += 1
        await self._notify()
        try:
            yield call
        finally:
            self._running -= 1
            await self._notify()

    async def _complete(self, call: GenerateCall) -> FinishedReply:
        if self.latency_seconds > 0:
            await asyncio.sleep(self.latency_seconds)
        if not self._open.is_set():
            await self._open.wait()
        room = self.max_length_tokens - len(call.prompt_token_ids)
        reply = self.answer_to(call).finish(call.sampling_params, room)
        call.reply, call.status = reply, 200
        call.versions = reply.versions(call.version, self.version)
        self._prompt_tokens += len(call.prompt_token_ids)
        self._generated_tokens += len(reply.token_ids)
        return reply

    async def _chat(self, request: web.BaseRequest) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=ChatRequest)
        except ValueError as error:
            return _json(error_body(400, str(error)), status=400)
        return _json(chat_body(self.chat_reply(asked.messages)))

    async def _apply(self, request: web.BaseRequest) -> web.Response:
        try:
            asked = decode_request(await request.read(), ApplyRequest)
            self.served.check(asked)
            if self.run_dir is not None and not asked.is_initial:
                check_weights_directory(asked.directory, self.run_dir.weights)
            await self.wait_until(lambda engine: not engine.is_asleep)
            if not self.served.is_current(asked):
                self._check_weights(asked)
                if asked.only_verifies:
                    return _json(msgspec.json.encode(ApplyResult(self.version, 0.0, 0.0, 0.0)))
                self.applied.append(asked)
        except ApplyRefusal as refusal:
            return _json(refusal.body(), status=refusal.status)
        self.served = self.served.after(asked)
        self.turns.append(f"apply {asked.version}")
        await self._notify()
        version = self.version if self.reported_version is None else self.reported_version
        return _json(msgspec.json.encode(ApplyResult(version, 0.0, 0.0, 0.0)))

    async def _take_turns(self, request: web.BaseRequest, what: str) -> web.Response:
        """As the real one: asleep once the version is served, awake when it is told so."""
        try:
            asked = decode_request(await request.read(), TurnRequest)
            self.served.check_owner(asked)
            if what == "sleep":
                await self.wait_until(
                    lambda engine: engine.version >= asked.version,
                    timeout_seconds=asked.wait_seconds,
                )
        except TimeoutError:
            text = f"version {asked.version} was not served in {asked.wait_seconds:g} s"
            return _json(error_body(504, text), status=504)
        except ApplyRefusal as refusal:
            return _json(refusal.body(), status=refusal.status)
        was_in_time = what == "sleep" or self.is_asleep
        self.is_asleep = what == "sleep"
        (self.hold if self.is_asleep else self.release)()
        self.turns.append(f"{what} {asked.version}")
        await self._notify()
        return _json(msgspec.json.encode(TurnResult(0.0, was_in_time)))

    def _check_weights(self, asked: ApplyRequest) -> None:
        if self.check_weights is None:
            return
        try:
            self.check_weights(Path(asked.directory), asked.digest)
        except CorruptStateError as error:
            raise ApplyRefusal(422, f"weights of version {asked.version}: {error}") from error

    async def _fail(self, request: web.BaseRequest, fault: Fault) -> web.StreamResponse:
        match fault:
            case Status(code, retry_after_seconds):
                headers = (
                    {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
                )
                return _json(error_body(code, "scripted"), status=code, headers=headers)
            case AnyBody(content, content_type):
                return web.Response(body=content, content_type=content_type)
            case Stuck():
                await asyncio.Event().wait()
            case Reset():
                _abort(request)
            case Truncate(content):
                response = web.StreamResponse(headers={"Content-Length": "1000000"})
                await response.prepare(request)
                await response.write(content)
                _abort(request)
            case Drip(content, interval_seconds):
                return await _drip(request, content, interval_seconds)
        return web.Response(status=500)

    # ------------------------------------------------------------------ state

    def status(self) -> EngineStatus:
        version = self.version if self.reported_version is None else self.reported_version
        status = EngineStatus(
            version=version,
            term=self.served.term,
            running=self._running,
            waiting=0,
            kv_usage=min(1.0, self._running / 256),
            preemptions=0,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            is_paused=self.is_asleep,
            kv_capacity_tokens=256 * self.max_length_tokens,
            run_id=self.served.run_id,
            model=self.model,
            text_digests=self.text_digests,
            asked_again=self.asked_again,
            incarnation=self.incarnation,
            is_stale=self.served.is_stale,
        )
        return msgspec.structs.replace(status, **self.load)

    async def _notify(self) -> None:
        if self._waiters:
            async with self._changed:
                self._changed.notify_all()

    def _read_token(self, name: str, fallback: str) -> str:
        if self.run_dir is None:
            return fallback
        return (self.run_dir.secrets / name).read_text().strip()


def _json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _drip(
    request: web.BaseRequest, content: bytes, interval_seconds: float
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(content))})
    await response.prepare(request)
    for byte in content:
        await response.write(bytes([byte]))
        await asyncio.sleep(interval_seconds)
    return response


async def serve(engine: ScriptedEngine, *, port: int = 0, process: str = "inference") -> None:
    """Serve until SIGTERM or SIGINT; writes the ready file of the process."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await engine.start(port=port, listener=inherited_listener())
    try:
        if engine.run_dir is not None:
            ready = {"base_url": engine.base_url, "pid": own_pid()}
            ready |= {"term": engine.served.term, "version": engine.version}
            write_json(engine.run_dir.ready_file(process), ready)
        await stopped.wait()
    finally:
        await engine.close()


def main(arguments: list[str] | None = None) -> None:
    """`python -m gradus.testing.engine --run-dir DIR`: tokens are read from DIR/secrets."""
    parser = argparse.ArgumentParser(description="A scripted engine in the inference role.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--term", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-seconds", type=float, default=0.0)
    parser.add_argument("--max-length-tokens", type=int, default=2048)
    parser.add_argument("--awaits-version", action="store_true")
    parser.add_argument("--reply", help="function as module:name; prompt token ids to Reply")
    chosen = parser.parse_args(arguments)
    watch_death_pipe()
    reply = reply_from_prompt
    if chosen.reply is not None:
        module, _, name = chosen.reply.partition(":")
        reply = getattr(importlib.import_module(module), name)

    async def run() -> None:
        engine = ScriptedEngine(
            reply=reply,
            latency_seconds=chosen.latency_seconds,
            run_dir=chosen.run_dir,
            term=chosen.term,
            max_length_tokens=chosen.max_length_tokens,
        )
        if chosen.awaits_version:
            engine.await_version()
        await serve(engine, port=chosen.port)

    asyncio.run(run())


if __name__ == "__main__":
    main()
