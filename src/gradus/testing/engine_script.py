"""What a scripted engine says: replies and faults, the record of each call, the bodies of vLLM."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec

from gradus.wire.episode import POLICY_VERSIONS
from gradus.wire.inference import SERVED_MODEL_NAME
from gradus.wire.versions import VersionRuns, add_run


@dataclass(frozen=True)
class Reply:
    """The tokens of one model turn, with the logprob of each.

    By default the request's first stop token is appended (an engine reports the stop token as
    sampled), and the reply is cut at `max_tokens`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Nats, one per token; None means -0.5 for each."""
    ends_with_stop: bool = True
    """Append the request's first stop token unless the reply ends with one."""
    finish_reason: str | None = None
    """None means "stop", or "length" when the reply was cut or has no stop token."""

    def finish(self, sampling_params: Mapping[str, Any], room: int | None = None) -> FinishedReply:
        """The reply as the engine sends it under these sampling parameters, within the `room` that
        the prompt leaves of its context."""
        token_ids = list(self.token_ids)
        logprobs = [-0.5] * len(token_ids) if self.logprobs is None else list(self.logprobs)
        stops = sampling_params.get("stop_token_ids") or []
        if self.ends_with_stop and stops and (not token_ids or token_ids[-1] not in stops):
            token_ids.append(stops[0])
            logprobs.append(-0.25)
        max_tokens = sampling_params.get("max_tokens") or len(token_ids)
        max_tokens = max_tokens if room is None else min(max_tokens, room)
        is_cut = len(token_ids) > max_tokens
        reason = self.finish_reason or ("length" if is_cut else "stop")
        if not is_cut:
            return FinishedReply(token_ids, logprobs, reason)
        return FinishedReply(token_ids[:max_tokens], logprobs[:max_tokens], reason)


@dataclass(frozen=True)
class FinishedReply:
    """What goes over the wire. The lengths differ only when a script wants them to."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str

    def versions(self, first: int, last: int) -> VersionRuns:
        """As if the weights that came while it waited had come in the middle of the reply."""
        runs: VersionRuns = []
        num_before = (len(self.token_ids) + 1) // 2
        add_run(runs, first, num_before)
        add_run(runs, last, len(self.token_ids) - num_before)
        return runs


@dataclass
class GenerateCall:
    """One generate request and what became of it."""

    prompt_token_ids: list[int]
    sampling_params: dict[str, Any]
    cache_salt: str | None
    session_id: str | None
    version: int
    """Policy version served when the request arrived."""
    status: int | None = None
    """HTTP status of the answer; None while it runs, 0 when the connection was broken."""
    reply: FinishedReply | None = None
    versions: VersionRuns = field(default_factory=list)
    """Those that sampled the reply."""


def reply_from_prompt(prompt_token_ids: list[int], *, max_length: int = 8) -> Reply:
    """A deterministic reply: up to `max_length` tokens drawn from the prompt by its checksum.

    The first token of the prompt and its repeats are left out; in chat templates it is a control
    token, which would make the reply unparseable.
    """
    checksum = zlib.crc32(repr(prompt_token_ids).encode())
    candidates = [token for token in prompt_token_ids if token != prompt_token_ids[0]]
    length = min(len(candidates), 1 + checksum % max_length)
    picked = [candidates[(checksum >> i) % len(candidates)] for i in range(length)]
    return Reply(picked, [-0.1 - 0.01 * i for i in range(length)])


def reversed_last_message(messages: list[dict[str, object]]) -> str:
    content = messages[-1].get("content") if messages else ""
    return content[::-1] if isinstance(content, str) else ""


@dataclass(frozen=True)
class Status:
    """Answer with an HTTP error."""

    code: int = 500
    retry_after_seconds: float | None = None

    @property
    def status(self) -> int:
        return self.code


@dataclass(frozen=True)
class AnyBody:
    """Answer 200 with these bytes: an HTML page, broken JSON, foreign fields."""

    content: bytes
    content_type: str = "application/json"
    status: int = field(default=200, init=False)


@dataclass(frozen=True)
class Stuck:
    """Never answer."""

    status: int = field(default=0, init=False)


@dataclass(frozen=True)
class Reset:
    """Break the connection before an answer."""

    status: int = field(default=0, init=False)


@dataclass(frozen=True)
class Truncate:
    """Break the connection in the middle of the body."""

    content: bytes = b'{"choices": [{"token_ids": [1, 2'
    status: int = field(default=0, init=False)


@dataclass(frozen=True)
class Drip:
    """Answer 200 one byte at a time."""

    content: bytes = b'{"choices": []}'
    interval_seconds: float = 1.0
    status: int = field(default=200, init=False)


Fault = Status | AnyBody | Stuck | Reset | Truncate | Drip


class GenerateRequest(msgspec.Struct, frozen=True):
    """Body of `POST /inference/v1/generate`, the part that a script can use."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str = SERVED_MODEL_NAME
    cache_salt: str | None = None
    stream: bool = False
    content_parts: list[dict[str, Any]] = []
    """Its images, for a script that reads them."""

    def check(self, max_length_tokens: int) -> None:
        """ValueError where vLLM would answer 400."""
        if not self.token_ids:
            raise ValueError("token_ids must have at least one token")
        if min(self.token_ids) < 0:
            raise ValueError("token_ids must not contain negative values")
        if self.model != SERVED_MODEL_NAME:
            raise ValueError(f"The model `{self.model}` does not exist.")
        if self.stream:
            raise ValueError("the scripted engine does not stream")
        if len(self.token_ids) >= max_length_tokens:
            raise ValueError(
                f"This model's maximum context length is {max_length_tokens} tokens, and the "
                f"prompt has {len(self.token_ids)}"
            )


Placed = tuple[GenerateRequest, list[dict[str, int]] | None]
"""A request with as many placeholders as its images take, and where they lie."""


def images_unread(asked: GenerateRequest) -> Placed:
    """As it came; another script reads images, and raises ValueError where it cannot."""
    return asked, None


class ChatRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/chat/completions`, the part that a script can use."""

    messages: list[dict[str, object]]
    model: str = SERVED_MODEL_NAME


@lru_cache(maxsize=65536)
def _logprob_entry(token_id: int, logprob: float) -> str:
    number = "null" if logprob is None else msgspec.json.encode(logprob).decode()
    entry = f'"token":"token_id:{token_id}","logprob":{number},"bytes":null'
    return f'{{{entry},"top_logprobs":[{{{entry}}}]}}'


def generate_body(
    number: int,
    prompt: list[int],
    reply: FinishedReply,
    versions: VersionRuns,
    images: list[dict[str, int]] | None = None,
) -> bytes:
    """Answer of `POST /inference/v1/generate`, with the prompt where that has `images`.

    Built from cached pieces: this server must cost less than anything that is measured with it.
    """
    entries = ",".join(map(_logprob_entry, reply.token_ids, reply.logprobs))
    tokens = ",".join(map(str, reply.token_ids))
    num_prompt_tokens, completion = len(prompt), len(reply.token_ids)
    shown = b"null" if images is None else msgspec.json.encode({"image": images})
    prompt_ids = b"null" if images is None else msgspec.json.encode(prompt)
    params = msgspec.json.encode({POLICY_VERSIONS: versions}).decode()
    return (
        f'{{"request_id":"generate-tokens-scripted-{number}","model":"{SERVED_MODEL_NAME}",'
        f'"created":{int(time.time())},"choices":[{{"index":0,"logprobs":{{"content":[{entries}]}},'
        f'"finish_reason":"{reply.finish_reason}","token_ids":[{tokens}],"routed_experts":null,'
        f'"sampling_mask":null}}],"usage":{{"prompt_tokens":{num_prompt_tokens},'
        f'"total_tokens":{num_prompt_tokens + completion},"completion_tokens":{completion},'
        '"prompt_tokens_details":null},"prompt_logprobs":null,"prompt_token_id_logprobs":null,'
        f'"prompt_token_ids":{prompt_ids.decode()},"mm_placeholders":{shown.decode()},'
        '"metrics":null,"ec_transfer_params":null,'
        f'"kv_transfer_params":{params}}}'
    ).encode()


def chat_body(text: str) -> bytes:
    """Answer of `POST /v1/chat/completions`."""
    message: dict[str, object] = {
        "role": "assistant",
        "content": text,
        "tool_calls": [],
        "reasoning": None,
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return msgspec.json.encode(
        {
            "id": "chatcmpl-scripted",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": SERVED_MODEL_NAME,
            "choices": [choice],
            "usage": {
                "prompt_tokens": 1,
                "total_tokens": 1 + len(text),
                "completion_tokens": len(text),
            },
        }
    )


def models_body(max_length_tokens: int) -> bytes:
    """Answer of `GET /v1/models`."""
    card = {
        "id": SERVED_MODEL_NAME,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "gradus",
        "root": SERVED_MODEL_NAME,
        "parent": None,
        "max_model_len": max_length_tokens,
        "permission": [],
    }
    return msgspec.json.encode({"object": "list", "data": [card]})


def error_body(code: int, message: str) -> bytes:
    kind = HTTPStatus(code).phrase
    error = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": error})
