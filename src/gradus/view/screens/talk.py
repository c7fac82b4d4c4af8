"""Talks to OpenAI-compatible servers that the user named, such as `gradus serve`, for the page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from gradus.errors import ConfigError, ProcessError

_SECONDS = 300.0
_MAX_ANSWER_BYTES = 16 << 20
_ALTERNATIVES = 5
"""Of each token, with their logprobs."""
_SETTINGS = ("temperature", "top_p", "max_tokens", "seed")


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """What the page wants to be said to the model of a server."""

    messages: list[dict[str, Any]]
    settings: dict[str, float | int] = {}
    tools: list[dict[str, Any]] = []
    """That the model may call; whoever talks answers for them."""

    def __post_init__(self) -> None:
        if wrong := sorted(self.settings.keys() - set(_SETTINGS)):
            raise ValueError(f"there is no setting {wrong[0]!r}; there are {', '.join(_SETTINGS)}")


@dataclass(frozen=True)
class Target:
    """A server, asked one thing at a time."""

    url: str
    key: str | None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, url: str, variables: Mapping[str, str], key_var: str | None) -> Target:
        """ConfigError for what is no address, and for a variable that is not set."""
        if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", url):
            raise ConfigError(f"--talk {url}: give an address such as http://127.0.0.1:8000")
        if key_var is not None and not variables.get(key_var):
            raise ConfigError(f"--key-var {key_var}: the variable is not set")
        base = url.rstrip("/")
        versioned = base if re.search(r"/v\d+$", base) else f"{base}/v1"
        return cls(versioned, variables[key_var] if key_var else None)

    async def model(self) -> str:
        """The name of its first model."""
        answer = await self._send("GET", "models", None)
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError):
            raise ProcessError(f"{self.url}/models names no model") from None

    async def say(self, asked: Asked) -> dict[str, Any]:
        """The reply with its tokens; ProcessError when there is none."""
        body = {"model": await self.model(), "messages": asked.messages, "logprobs": True}
        body |= {"top_logprobs": _ALTERNATIVES} | ({"tools": asked.tools} if asked.tools else {})
        answer = await self._send("POST", "chat/completions", body | asked.settings)
        try:
            choice = answer["choices"][0]
            message, told = choice["message"], (choice.get("logprobs") or {}).get("content") or []
            return {
                "text": str(message.get("content") or ""),
                "reasoning": str(
                    message.get("reasoning") or message.get("reasoning_content") or ""
                ),
                "calls": list(map(_call, message.get("tool_calls") or ())),
                "finish": choice.get("finish_reason"),
                "tokens": [
                    [*_token(it), list(map(_token, it.get("top_logprobs") or ()))] for it in told
                ],
            }
        except (LookupError, TypeError, AttributeError, ValueError):
            raise ProcessError(f"{self.url} gave no reply that can be read") from None

    async def _send(self, method: str, path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        try:
            async with (
                self.turn,
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(
                    method, f"{self.url}/{path}", json=body, allow_redirects=False
                ) as answer,
            ):
                content = await answer.content.read(_MAX_ANSWER_BYTES)
                while not answer.content.at_eof() and len(content) < _MAX_ANSWER_BYTES:
                    content += await answer.content.read(_MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProcessError(f"{self.url} does not answer: {error or 'too slow'}") from error
        if answer.status != 200:
            said = content[:400].decode(errors="replace")
            raise ProcessError(f"{self.url} refuses with {answer.status}: {said}")
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:
            raise ProcessError(f"{self.url} answered something that is no JSON") from None


def _token(told: Mapping[str, Any]) -> tuple[str, float]:
    return str(told["token"]), float(told["logprob"])


def _call(told: Mapping[str, Any]) -> dict[str, Any]:
    """A call as it goes back to the server with its answer."""
    function = {name: str(told["function"][name]) for name in ("name", "arguments")}
    return {"id": str(told.get("id") or function["name"]), "type": "function", "function": function}


def targets_of(
    urls: Sequence[str], variables: Mapping[str, str], key_var: str | None
) -> list[Target]:
    if key_var is not None and not urls:
        raise ConfigError("--key-var is the key of a server; name it with --talk")
    return [Target.of(url, variables, key_var) for url in dict.fromkeys(urls)]
