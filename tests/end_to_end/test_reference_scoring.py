"""A real vLLM as the reference model: its prompt logprobs are those that it samples with."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running import RunningInference

from gradus.config.schema.algorithms import ReferenceConfig
from gradus.files import read_json
from gradus.orchestrator.algorithms.teacher import PROBE, ReferenceModel, compare_tokenizers
from gradus.orchestrator.types import EpisodeFailed

pytestmark = pytest.mark.end_to_end
PROMPT = [5, 9, 12, 30, 7, 22, 41, 8]


def connect(server: RunningInference, **settings: Any) -> tuple[ReferenceConfig, str]:
    base_url = read_json(server.run_dir.ready_file("inference"))["base_url"]
    token = Path(server.run_dir.inference_token).read_text().strip()
    return ReferenceConfig(base_url=base_url, model="policy", **settings), token


async def sample(config: ReferenceConfig, token: str) -> tuple[list[int], list[float]]:
    """Tokens that the engine sampled after PROMPT, with their logprobs."""
    body = {
        "model": "policy",
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 16, "temperature": 1.0, "logprobs": 1, "seed": 3},
    }
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
        session.post(f"{config.base_url}/inference/v1/generate", json=body) as response,
    ):
        choice = (await response.json())["choices"][0]
    entries = choice["logprobs"]["content"]
    return choice["token_ids"], [entry["logprob"] for entry in entries]


async def test_scores_are_the_logprobs_that_the_engine_samples_with(
    inference_server: RunningInference,
) -> None:
    config, token = connect(inference_server)
    tokens, logprobs = await sample(config, token)
    async with ReferenceModel(config, token=token) as model:
        scores = await model.score([*PROMPT, *tokens])
    assert math.isnan(scores[0])
    assert len(scores) == len(PROMPT) + len(tokens)
    # Prefill and decoding round differently in bfloat16.
    assert scores[len(PROMPT) :] == pytest.approx(logprobs, abs=0.05)


async def test_forty_branches_at_once_get_the_same_scores_as_one_after_the_other(
    inference_server: RunningInference,
) -> None:
    config, token = connect(inference_server, max_concurrent_requests=4)
    branches = [[5 + n % 40, *PROMPT, 6 + n % 30] for n in range(40)]
    async with ReferenceModel(config, token=token) as model:
        together = await asyncio.gather(*map(model.score, branches))
        alone = await model.score(branches[17])
    assert together[17] == pytest.approx(alone, abs=0.05, nan_ok=True)


async def test_a_server_tells_how_it_writes_a_text_and_is_compared(
    inference_server: RunningInference,
) -> None:
    config, token = connect(inference_server)
    async with (
        ReferenceModel(config, token=token) as teacher,
        ReferenceModel(config, token=token) as policy,
    ):
        assert len(await teacher.encode("abc")) == 3
        assert await teacher.encode(PROBE)
        await compare_tokenizers(teacher, policy, "words")


async def test_a_branch_that_is_too_long_fails_by_name(inference_server: RunningInference) -> None:
    config, token = connect(inference_server)
    async with ReferenceModel(config, token=token) as model:
        with pytest.raises(EpisodeFailed, match="answered 400"):
            await model.score([5] * 5000)


async def test_the_chat_template_is_the_policys_own(inference_server: RunningInference) -> None:
    config, token = connect(inference_server)
    messages = [{"role": "user", "content": "ab"}]
    async with ReferenceModel(config, token=token) as model:
        asked = await model.tokenize(messages, add_generation_prompt=True)
        answered = await model.tokenize(
            [*messages, {"role": "assistant", "content": "c"}], add_generation_prompt=False
        )
    assert answered[: len(asked)] == asked
    assert len(answered) > len(asked)
