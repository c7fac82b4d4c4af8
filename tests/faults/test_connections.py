"""The network between a worker and its engine goes away and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
import verifiers.v1 as vf
from renderers.client import parse_generate_response

from gradus.environments.verifiers.engine_client import EngineClient
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply

TOKEN = "the-data-token"
READ_SECONDS = 1.0


class Link:
    """A wire of TCP to an engine, which can be cut without a word to either end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.there, self.back = asyncio.Event(), asyncio.Event()
        self.heal()

    def heal(self) -> None:
        self.there.set()
        self.back.set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        tasks = asyncio.TaskGroup()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with tasks:
            self._tasks = tasks
            yield f"http://{host}:{port}/v1"
            server.close()
            for task in tuple(tasks._tasks):
                task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._tasks.create_task(_carry(reader, far_writer, self.there))
        self._tasks.create_task(_carry(far_reader, writer, self.back))


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_whole: asyncio.Event
) -> None:
    try:
        while content := await reader.read(65_536):
            await is_whole.wait()
            writer.write(content)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def ask(client: EngineClient, number: int) -> list[int]:
    body = {"model": "policy", "token_ids": [number], "sampling_params": {"max_tokens": 4}}
    url = f"{client.base_url.removesuffix('/v1')}/inference/v1/generate"
    answer = await client.post(url, body=body)
    tokens: list[int] = parse_generate_response(answer.content)["choices"][0]["token_ids"]
    return tokens


@pytest.mark.shows("F72")
@pytest.mark.parametrize("cut", ["there", "back", "both"])
@pytest.mark.parametrize("headers", [{}, {"X-Own": "1"}], ids=["tokens", "http"])
async def test_f72_a_cut_link_is_a_bounded_wait_and_heals(
    cut: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    async with ScriptedEngine(
        reply=lambda prompt: Reply([prompt[0], 5], [-0.5, -1.5]), data_token=TOKEN
    ) as engine:
        link = Link(int(engine.base_url.rpartition(":")[2]))
        async with link.open() as base_url:
            settings = {"headers": headers, "timeout": {"read": READ_SECONDS, "connect": 5.0}}
            client = EngineClient(
                vf.TrainClientConfig(base_url=base_url, api_key_var="THE_TOKEN", **settings)
            )
            assert await ask(client, 1) == [1, 5]
            if cut != "back":
                link.there.clear()
            if cut != "there":
                link.back.clear()
            for number in (2, 3):
                async with asyncio.timeout(60):
                    with pytest.raises(openai.APITimeoutError):
                        await ask(client, number)
            link.heal()
            assert await ask(client, 4) == [4, 5]
            await client.close()
        await engine.wait_until(lambda it: it.running == 0)
