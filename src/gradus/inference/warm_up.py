"""The first requests to a new server, over its real socket, so that no episode pays for them."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from gradus.errors import DeadlineError, ProcessError

NUM_PARALLEL = 4


async def warm_up(base_url: str, token: str, *, timeout_seconds: float) -> None:
    """Return once generate requests were answered, alone and in parallel.

    DeadlineError after `timeout_seconds`; ProcessError when the server answers with an error.
    """
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            aiohttp.ClientSession(base_url, headers=headers) as session,
        ):
            await _generate(session, max_tokens=1)
            await asyncio.gather(*[_generate(session, max_tokens=2) for _ in range(NUM_PARALLEL)])
    except TimeoutError as error:
        raise DeadlineError(
            f"the inference server at {base_url} did not answer a generate request within "
            f"{timeout_seconds:.0f} s"
        ) from error


async def _generate(session: aiohttp.ClientSession, *, max_tokens: int) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": 1}
    sampling |= {"ignore_eos": True, "seed": None}
    body = {"token_ids": [0], "sampling_params": sampling, "cache_salt": "warm-up"}
    async with session.post("/inference/v1/generate", json=body) as response:
        if response.status != 200:
            text = await response.text()
            raise ProcessError(f"the first generate request got {response.status}: {text[:500]}")
