"""The request and response bodies of vLLM 0.31, as the scripted engine reads and writes them."""

from __future__ import annotations

import time
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec

from gradus.testing.engine_script import FinishedReply
from gradus.wire.inference import SERVED_MODEL_NAME


class GenerateRequest(msgspec.Struct, frozen=True):
    """Body of `POST /inference/v1/generate`, the part that a script can use."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str = SERVED_MODEL_NAME
    cache_salt: str | None = None
    stream: bool = False

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
                f"the prompt has {len(self.token_ids)} tokens, the context {max_length_tokens}"
            )


class ChatRequest(msgspec.Struct, frozen=True):
    """Body of `POST /v1/chat/completions`, the part that a script can use."""

    messages: list[dict[str, object]]
    model: str = SERVED_MODEL_NAME


@lru_cache(maxsize=65536)
def _logprob_entry(token_id: int, logprob: float) -> str:
    number = "null" if logprob is None else msgspec.json.encode(logprob).decode()
    entry = f'"token":"token_id:{token_id}","logprob":{number},"bytes":null'
    return f'{{{entry},"top_logprobs":[{{{entry}}}]}}'


def generate_body(number: int, num_prompt_tokens: int, reply: FinishedReply) -> bytes:
    """Answer of `POST /inference/v1/generate`.

    Built from cached pieces: this server must cost less than anything that is measured with it.
    """
    entries = ",".join(map(_logprob_entry, reply.token_ids, reply.logprobs))
    tokens = ",".join(map(str, reply.token_ids))
    completion = len(reply.token_ids)
    return (
        f'{{"request_id":"generate-tokens-scripted-{number}","model":"{SERVED_MODEL_NAME}",'
        f'"created":{int(time.time())},"choices":[{{"index":0,"logprobs":{{"content":[{entries}]}},'
        f'"finish_reason":"{reply.finish_reason}","token_ids":[{tokens}],"routed_experts":null,'
        f'"sampling_mask":null}}],"usage":{{"prompt_tokens":{num_prompt_tokens},'
        f'"total_tokens":{num_prompt_tokens + completion},"completion_tokens":{completion},'
        '"prompt_tokens_details":null},"prompt_logprobs":null,"prompt_token_id_logprobs":null,'
        '"prompt_token_ids":null,"mm_placeholders":null,"metrics":null,"kv_transfer_params":null,'
        '"ec_transfer_params":null}'
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
    """Body of every error answer."""
    kind = HTTPStatus(code).phrase
    error = {"message": message, "type": kind, "param": None, "code": code}
    return msgspec.json.encode({"error": error})
