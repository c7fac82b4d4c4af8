"""The engine's generate route over aiohttp, in the shape that `renderers` expects of its client.

verifiers' train client asks the engine through the openai package, which builds an httpx request, a
client for it and several models around a body that is plain JSON already. This client posts the
body. Addresses, headers, time limits and errors are those of the openai client.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import httpx
import msgspec
import openai
from verifiers.v1.clients.base import DEFAULT_LIMITS, join_url
from verifiers.v1.configs.client import BaseClientConfig, resolve_api_key, resolve_headers

from gradus.environments.request_seeds import RequestSeeds

MODELS_ROUTE = "/models"


@dataclass(frozen=True)
class EngineAnswer:
    """The body of a successful answer."""

    content: bytes


class EngineClient:
    """Owns the connections of one worker to one engine."""

    def __init__(self, config: BaseClientConfig, *, seeds: RequestSeeds | None = None) -> None:
        """`seeds` is shared by all clients of a worker; None means that nobody else asks."""
        self.base_url = config.base_url
        self._seeds = RequestSeeds() if seeds is None else seeds
        self._config = config
        self._headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {resolve_api_key(config)}",
            **resolve_headers(config),
        }

    @functools.cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Opened by the first request, because a session belongs to the running loop.
        limits = self._config.timeout
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=DEFAULT_LIMITS.max_connections or 0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect, sock_read=limits.read
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=True,
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
        headers = {**self._headers, **(options or {}).get("headers", {})}
        content = msgspec.json.encode(self._seeds.renewed(body))
        return EngineAnswer(await self._ask("POST", url, headers, content))

    async def get(self, route: str, *, cast_to: object = None) -> dict[str, Any]:  # noqa: ARG002
        """The JSON object behind a route of the engine's `/v1`; raises openai's errors."""
        url = join_url(self.base_url, f"/v1{route}")
        raw = await self._ask("GET", url, self._headers, None)
        return msgspec.json.decode(raw, type=dict[str, Any])

    async def _ask(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None
    ) -> bytes:
        try:
            async with self._session.request(
                method, url, data=content, headers=headers, allow_redirects=False
            ) as response:
                raw = await response.read()
                status = response.status
        except TimeoutError as error:
            raise openai.APITimeoutError(httpx.Request(method, url)) from error
        except aiohttp.ClientError as error:
            text = f"Connection error: {type(error).__name__}: {error}"
            raise openai.APIConnectionError(
                message=text, request=httpx.Request(method, url)
            ) from error
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            raise _status_error(method, url, status, raw)
        return raw

    async def close(self) -> None:
        """Close the connections."""
        if "_session" in self.__dict__:
            await self._session.close()
            # aiohttp closes its sockets in the next round of the loop.
            await asyncio.sleep(0)


def _status_error(method: str, url: str, status: int, raw: bytes) -> openai.APIStatusError:
    response = httpx.Response(status, content=raw, request=httpx.Request(method, url))
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = response.text.strip() or f"Error code: {status}"
        return openai.APIStatusError(text, response=response, body=None)
    return openai.APIStatusError(f"Error code: {status} - {body}", response=response, body=body)
