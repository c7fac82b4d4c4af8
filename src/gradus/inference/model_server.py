"""A model behind vLLM's own OpenAI server, for ordinary clients: no versions, no run.

Imported only once the environment is set (see `server.py`): vLLM reads variables while importing.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvloop
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from gradus.inference.guard import Guard, ServedToken
from gradus.inference.http_server import Stop, build_http_server, serve_until_stopped
from gradus.inference.settings import ServedModel, serving_settings
from gradus.inference.vllm_server import (
    ENGINE_STOP_SECONDS,
    available_bytes,
    build_vllm_app,
    engine_config,
    fill_arguments,
    interrupt,
    watch_engine,
)


def serve(model: ServedModel, listener: socket.socket, on_listening: Callable[[str], None]) -> None:
    """Serve on `listener` until SIGTERM or SIGINT; ProcessError when the engine ends by itself."""
    signal.signal(signal.SIGTERM, interrupt)
    uvloop.run(_serve(model, listener, on_listening))


async def _serve(
    model: ServedModel, listener: socket.socket, on_listening: Callable[[str], None]
) -> None:
    args = fill_arguments(serving_settings(model, available_bytes=available_bytes()))
    with engine_config(args) as vllm_config:
        engine = AsyncLLM.from_vllm_config(
            vllm_config, usage_context=UsageContext.OPENAI_API_SERVER
        )

    async def tell(base_url: str) -> None:
        on_listening(base_url)

    stop = Stop()
    watching = asyncio.create_task(watch_engine(engine, stop))
    try:
        await engine.collective_rpc("gradus_die_with_parent")
        app = await build_vllm_app(engine, args)
        server = build_http_server(Guard(app, ServedToken.of(model.token)))
        app.state.server = server  # vLLM's error handlers look for it there
        await serve_until_stopped(server, listener, stop=stop, when_listening=tell)
    finally:
        watching.cancel()
        await asyncio.to_thread(engine.shutdown, ENGINE_STOP_SECONDS)
