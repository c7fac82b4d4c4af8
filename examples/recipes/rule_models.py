"""Models by rule behind an OpenAI-compatible endpoint, for debates without a second model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

Said = tuple[str, str]
"""Role and text of one message."""
Rule = Callable[[Sequence[Said]], str]
MAX_BODY_BYTES = 4 << 20


def build_app(rules: Mapping[str, Rule]) -> web.Application:
    """The two routes that gradus asks; a model's name says which rule answers."""

    async def answer(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        name = body["model"]
        said = [(message["role"], _text(message["content"])) for message in body["messages"]]
        message = {"role": "assistant", "content": rules[name](said)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        kind = {"id": "rule", "object": "chat.completion", "created": 0, "model": name}
        return web.json_response({**kind, "choices": [choice], "usage": usage})

    async def list_models(_: web.Request) -> web.Response:
        models = [{"id": name, "object": "model"} for name in rules]
        return web.json_response({"object": "list", "data": models})

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.post("/v1/chat/completions", answer), web.get("/v1/models", list_models)])
    return app


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [])
