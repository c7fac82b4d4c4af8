"""The engine's generate route, in the shape that `renderers` expects of its client.

verifiers' train client asks the engine through the openai package, which builds an httpx request, a
client for it and several models around a body that is plain JSON already. This client posts the
body. Addresses, headers, time limits and errors are those of the openai client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import io
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import aiohttp
import httpx
import msgspec
import numpy as np
import openai
from verifiers.v1.clients.base import DEFAULT_LIMITS, join_url
from verifiers.v1.configs.client import BaseClientConfig, resolve_api_key, resolve_headers

from gradus.environments.policy.images import CheckedImages, Part, SentImages
from gradus.environments.policy.live import LiveReply
from gradus.environments.policy.replicas import EngineStale, OlderVersion, Replicas, is_late
from gradus.errors import ProtocolError
from gradus.processes.secured import client_context
from gradus.wire.inference import (
    AGAIN_HEADER,
    FILE_SCHEME,
    INFERENCE_TOKEN_VARIABLE,
    LINES_TYPE,
    LIVE_HEADER,
    SESSION_HEADER,
    STALE_WEIGHTS,
    EngineStatus,
    is_behind_refusal,
    reason_of,
    split_addresses,
)
from gradus.wire.versions import VersionRuns

AWAY_SECONDS = 0.25
"""Between two questions to an engine that ended or is not open yet."""
_EXPERTS_START = "routed_experts_prompt_start"
_FILE_OF_EXPERTS = b'"routed_experts":"'
REMEMBERED_PROMPTS = 65_536
"""Prompts whose repetitions are counted; the oldest is forgotten first."""


_seed: ContextVar[int | None] = ContextVar("request_seed", default=None)


def request_seed() -> int | None:
    return _seed.get()


Hear = Callable[[list[int]], None]
"""Told the tokens of a reply so far, each time that there are more."""
hearing: ContextVar[LiveReply | None] = ContextVar("hearing", default=None)
"""Who reads the reply of this task's request while it grows."""


class _ReplyParams(msgspec.Struct):
    policy_versions: VersionRuns = []


class _Reply(msgspec.Struct):
    """What `renderers` does not read of an answer."""

    request_id: str = ""
    kv_transfer_params: _ReplyParams | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[dict[str, int]]] | None = None
    """Given where a request shows images."""

    @property
    def placeholders(self) -> set[int]:
        """The tokens that stand for images in its prompt; of Gemma 4 a range has others at its
        ends."""
        ranges = itertools.chain(*(self.mm_placeholders or {}).values())
        return {(self.prompt_token_ids or [])[it["offset"] + it["length"] // 2] for it in ranges}


_reply: ContextVar[_Reply] = ContextVar("reply", default=_Reply())  # noqa: B039 - never written


def versions_of_reply(request_id: str) -> VersionRuns:
    """Which versions sampled the reply that this task got last, if that is its id."""
    reply = _reply.get()
    params = reply.kv_transfer_params
    return params.policy_versions if params and reply.request_id == request_id else []


def _note_reply(content: bytes) -> None:
    try:
        _reply.set(msgspec.json.decode(content, type=_Reply))
    except msgspec.MsgspecError:
        _reply.set(_Reply())


@dataclass(frozen=True)
class EngineAnswer:
    """The body of a successful answer."""

    content: bytes


class EngineClient:
    """Owns the connections of one worker to an engine, or to all replicas of it.

    `base_url` of the config is one address, those of all replicas with commas between them, or a
    file that names them and may change.
    """

    def __init__(self, config: BaseClientConfig, *, seeds: RequestSeeds | None = None) -> None:
        """All clients of a worker share `seeds`; None means that this client is the only one."""
        addresses = split_addresses(config.base_url)
        self.base_url = addresses[0]
        """What callers make their addresses of, whichever replica is asked then."""
        self._replicas: Replicas | None = None
        if self.base_url.startswith(FILE_SCHEME):
            file = Path(self.base_url.removeprefix(FILE_SCHEME))
            # The origin of every address that is asked is put in its place.
            self.base_url = "http://policy"
            self._replicas = Replicas(
                [],
                is_there=self._is_there,
                read=lambda: file.read_text().split(),
            )
        elif len(addresses) > 1:
            self._replicas = Replicas(addresses, is_there=self._is_there)
        self._seeds = RequestSeeds() if seeds is None else seeds
        self._config = config
        self._is_replaced = config.api_key_var == INFERENCE_TOKEN_VARIABLE
        self._images = CheckedImages()
        self._sent = SentImages()
        self._headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {resolve_api_key(config)}",
            **resolve_headers(config),
        }

    @functools.cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Opened by the first request, because a session belongs to the running loop.
        limits, trust = self._config.timeout, client_context(is_own=self._is_replaced)
        is_over_nodes = self._is_replaced and trust is not True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=DEFAULT_LIMITS.max_connections or 0, ssl=trust),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect, sock_read=limits.read
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Asked once: aiohttp looks proxies up on a thread, for every request. None reaches
            # other nodes of a run; the loopback is excepted by name.
            trust_env=bool(getproxies()) and not is_over_nodes,
        )

    async def post(
        self,
        url: str,
        *,
        body: Mapping[str, Any],
        cast_to: object = None,  # noqa: ARG002 - the answer's bytes are all that is asked for
        options: Mapping[str, Any] | None = None,
    ) -> EngineAnswer:
        """The answer to a JSON body; raises openai's errors."""
        headers = (options or {}).get("headers", {})
        if parts := body.get("content_parts", ()):
            try:
                parts = await self._images.named(parts, body["token_ids"])
            except ProtocolError as error:
                answer = msgspec.json.encode({"error": {"message": str(error), "code": 400}})
                raise _status_error("POST", url, HTTPStatus.BAD_REQUEST, answer) from error
            # Another's engine may take names from strangers, and an image for another one then.
            body = {**body, "content_parts": parts} if self._is_replaced else body
        # Once for all replicas that are asked: the same seed draws the same reply.
        body = self._seeds.renewed(body)
        _seed.set((body.get("sampling_params") or {}).get("seed"))
        num_asked = itertools.count()

        async def ask(address: str) -> bytes:
            is_again = next(num_asked) > 0
            return await self._post_to(address, url, body, headers, is_again=is_again)

        with _openai_errors("POST", url):
            content = await self._until_answered(headers.get(SESSION_HEADER), ask)
        _note_reply(content)
        if parts:
            self._images.placeholders |= _reply.get().placeholders
        return EngineAnswer(content)

    async def _until_answered(
        self, session_id: str | None, ask: Callable[[str], Awaitable[bytes]]
    ) -> bytes:
        """The answer of a replica, or of the one engine: where it is the run's, also that of the
        process which takes its place, as long as the episode lasts."""
        if self._replicas is not None:
            return await self._replicas.ask(session_id, ask)
        while True:
            try:
                return await ask(self.base_url)
            except (aiohttp.ClientError, OSError) as error:
                if is_late(error) or not self._is_replaced:
                    raise
            await asyncio.sleep(AWAY_SECONDS)

    async def _post_to(
        self,
        address: str,
        url: str,
        body: Mapping[str, Any],
        own_headers: Mapping[str, str],
        *,
        is_again: bool,
    ) -> bytes:
        """The answer of the engine at `address` to what is asked at `url`."""
        url = url.replace(self.base_url, address, 1)
        headers = {**self._headers, **own_headers}
        if is_again:
            headers[AGAIN_HEADER] = "1"
        if self._is_replaced and (parts := body.get("content_parts")):
            return await self._ask_with_images(address, url, body, headers, parts)
        hear = None
        if (live := hearing.get()) is not None and "token_ids" in body:
            live.begin()
            headers[LIVE_HEADER] = "1"
            hear = functools.partial(live.hear, body["token_ids"])
        answered = await self._ask("POST", url, headers, msgspec.json.encode(body), hear)
        return _with_readable_experts(answered, body)

    async def _ask_with_images(
        self,
        address: str,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        parts: Sequence[Part],
    ) -> bytes:
        """Without those that the engine was sent before; with all of them where it is another
        process, or its cache dropped one.

        vLLM answers 500 where one of its two caches has an image and the other has not, as after a
        request that was refused in between, and knows better when it is asked again.
        """
        shortened = self._sent.shorten(parts, address)
        tries = [shortened, parts, parts] if shortened != parts else [parts, parts]
        while True:
            asked = tries.pop(0)
            content = msgspec.json.encode({**body, "content_parts": asked})
            try:
                answered = await self._ask("POST", url, headers, content)
            except openai.APIStatusError as error:
                self._sent.forget(parts, address)
                if not tries or (asked is parts and error.status_code < 500):
                    raise
            else:
                self._sent.note(parts, address)
                return _with_readable_experts(answered, body)

    async def get(self, route: str, *, cast_to: object = None) -> dict[str, Any]:  # noqa: ARG002
        """The JSON object behind a route of the engine's `/v1`; raises openai's errors."""
        url = join_url(self.base_url, f"/v1{route}")

        async def ask(address: str) -> bytes:
            return await self._ask("GET", url.replace(self.base_url, address, 1), self._headers)

        with _openai_errors("GET", url):
            raw = await self._until_answered(None, ask)
        return msgspec.json.decode(raw, type=dict[str, Any])

    async def _ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None = None,
        hear: Hear | None = None,
    ) -> bytes:
        """The body of an answer; of one in lines the last, while `hear` is told of the others."""
        async with self._session.request(
            method, url, data=content, headers=headers, allow_redirects=False
        ) as response:
            if hear is not None and response.content_type == LINES_TYPE.decode():
                raw = await _last_line(response.content, hear)
            else:
                raw = await response.read()
            status = response.status
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            raise _status_error(method, url, status, raw)
        return raw

    async def _is_there(self, address: str, is_settled: bool) -> bool:
        """Whether a replica answers with this run's token, and knows what it serves."""
        route = "/gradus/status" if is_settled else "/health"
        url = f"{address.rstrip('/').removesuffix('/v1')}{route}"
        async with self._session.get(url, headers=self._headers) as response:
            raw = await response.read()
        return response.status == HTTPStatus.OK and not _is_stale(raw)

    async def close(self) -> None:
        if self._replicas is not None:
            await self._replicas.close()
        if "_session" in self.__dict__:
            await self._session.close()
            # aiohttp closes its sockets in the next round of the loop.
            await asyncio.sleep(0)


@contextlib.contextmanager
def _openai_errors(method: str, url: str) -> Iterator[None]:
    """Errors of a connection as the openai client has them."""
    try:
        yield
    except TimeoutError as error:
        raise openai.APITimeoutError(httpx.Request(method, url)) from error
    except (aiohttp.ClientError, OSError) as error:
        text = f"Connection error: {type(error).__name__}: {error}"
        raise openai.APIConnectionError(message=text, request=httpx.Request(method, url)) from error


def _is_stale(raw: bytes) -> bool:
    try:
        return msgspec.json.decode(raw, type=EngineStatus).is_stale
    except msgspec.MsgspecError:
        return False


async def _last_line(content: aiohttp.StreamReader, hear: Hear) -> bytes:
    """The answer itself; the lines before hold the tokens of its reply so far."""
    tokens: list[int] = []
    received = b""
    async for part in content.iter_any():
        *lines, received = (received + part).split(b"\n")
        for line in lines:
            tokens += msgspec.json.decode(line, type=list[int])
            hear(tokens)
    return received


def _experts_entry(experts: Any, start: int) -> dict[str, Any]:
    """As verifiers reads them; `data` comes first, since `renderers` looks for that."""
    raw = np.ascontiguousarray(experts)
    shape, dtype = list(raw.shape), str(raw.dtype)
    return {"data": raw.tobytes(), "shape": shape, "dtype": dtype, "start": start}


def _with_readable_experts(content: bytes, body: Mapping[str, Any]) -> bytes:
    """An answer of vLLM's own route, whose experts are a file of numpy in base64."""
    if _FILE_OF_EXPERTS not in content:
        return content
    answer = msgspec.json.decode(content)
    for choice in answer["choices"]:
        file = io.BytesIO(base64.b64decode(choice["routed_experts"]))
        experts = np.load(file, allow_pickle=False)
        start = (body.get("sampling_params") or {}).get(_EXPERTS_START, 0)
        choice["routed_experts"] = _experts_entry(experts, start)
    return msgspec.json.encode(answer)


def _status_error(method: str, url: str, status: int, raw: bytes) -> Exception:
    if status == HTTPStatus.SERVICE_UNAVAILABLE and is_behind_refusal(raw):
        return OlderVersion(raw.decode(errors="replace")[:300])
    if status == HTTPStatus.SERVICE_UNAVAILABLE and reason_of(raw) == STALE_WEIGHTS:
        return EngineStale(raw.decode(errors="replace")[:300])
    response = httpx.Response(status, content=raw, request=httpx.Request(method, url))
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = response.text.strip() or f"Error code: {status}"
        return openai.APIStatusError(text, response=response, body=None)
    return openai.APIStatusError(f"Error code: {status} - {body}", response=response, body=body)


class RequestSeeds:
    """Turns the seed of an episode into the seed of one request, by its prompt.

    An engine that gets the same seed twice draws the same random numbers twice. If all calls of an
    episode shared one seed, a move would depend on the luck of the move before: in a game, whoever
    answers a bet would bet more often than the policy says.

    The same episode with the same prompts gets the same seeds, in whatever order requests come.
    A prompt that is asked again, by several solvers of one problem, gets another seed.

    >>> seeds = RequestSeeds()
    >>> first, again = (seeds.renewed({"seed": 1, "messages": []})["seed"] for _ in range(2))
    >>> first == again
    False
    """

    def __init__(self, *, remembered_prompts: int = REMEMBERED_PROMPTS) -> None:
        self._remembered = remembered_prompts
        self._asked: OrderedDict[bytes, int] = OrderedDict()
        self._of_episode: dict[object, set[bytes]] = {}

    def renewed(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body of a request with its own seed; a body without a seed stays as it is."""
        sampling = body.get("sampling_params")
        if isinstance(sampling, Mapping) and sampling.get("seed") is not None:
            seed = self._seed_of(sampling["seed"], body.get("token_ids"))
            return {**body, "sampling_params": {**sampling, "seed": seed}}
        if body.get("seed") is not None:
            prompt = body.get("messages", body.get("prompt", body.get("input")))
            return {**body, "seed": self._seed_of(body["seed"], prompt)}
        return body

    def begin(self, seed: object) -> None:
        """The episode of that seed is played from its start, perhaps again: nothing was asked."""
        for asked in self._of_episode.pop(seed, ()):
            self._asked.pop(asked, None)

    def _seed_of(self, seed: object, prompt: object) -> int:
        asked = hashlib.sha256(msgspec.json.encode([seed, prompt])).digest()
        count = self._asked.pop(asked, 0)
        self._asked[asked] = count + 1
        self._of_episode.setdefault(seed, set()).add(asked)
        if len(self._asked) > self._remembered:
            self._asked.popitem(last=False)
        if len(self._of_episode) > self._remembered:
            self._of_episode.clear()
        digest = hashlib.sha256(asked + count.to_bytes(8)).digest()
        # 31 bits, because some engines read a seed as a signed integer of 32.
        return int.from_bytes(digest[:4]) >> 1
