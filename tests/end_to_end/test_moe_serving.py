"""A mixture of experts: vLLM loads the trainer's tensors and gives the trainer's logprobs."""

from __future__ import annotations

import base64
import io
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from listening import listeners
from running import RunningInference, wait_until_ended
from tiny_experts import build_tiny_moe_model

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.inference.server import ENGINE_FORKSERVER
from gradus.processes.table import catches
from gradus.trainer.model.cpu.routing import Routers
from gradus.trainer.model.load import load_model
from gradus.trainer.publish import serving_tensors
from gradus.weights.filesystem import FilesystemWeights
from gradus.wire.inference import STALE_WEIGHTS, reason_of
from gradus.wire.tokens import NOT_CHOSEN

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

PROMPT = [5, 9, 13, 21, 34, 55, 17, 8]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningInference]:
    model = build_tiny_moe_model(tmp_path_factory.mktemp("model") / "moe")
    config = InferenceProcessConfig(
        run_dir=str(tmp_path_factory.mktemp("moe-run")),
        term=0,
        model=ModelConfig(name=str(model), max_length_tokens=512),
        seed=0,
        awaits_version=True,
        tells_experts=True,
        inference=InferenceConfig(dtype="bfloat16", kv_cache_gib=0.2, max_num_seqs=8),
    )
    with RunningInference(config) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def policy(server: RunningInference) -> Any:
    """The trainer's model with every expert moved away from the served one."""
    model = load_model(ModelConfig(name=str(server.model_dir)), torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "gate" in name:
                parameter.normal_(std=0.2, generator=random)
    return model


async def post(server: RunningInference, path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {server.admin_token}"}
    async with (
        aiohttp.ClientSession(server.base_url, headers=headers) as session,
        session.post(path, json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer


@dataclass(frozen=True)
class Generated:
    """A reply, and what the engine says of it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    experts: torch.Tensor
    """[tokens - 1, layers, k]"""


async def generate(server: RunningInference, prompt: list[int] = PROMPT) -> Generated:
    sampling = {"temperature": 1.0, "max_tokens": 64, "logprobs": 1, "ignore_eos": True}
    body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
    choice = (await post(server, "/inference/v1/generate", body))["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    told = torch.from_numpy(experts.astype(np.int16))
    return Generated(prompt, choice["token_ids"], torch.tensor(logprobs), told)


def mismatch(model: Any, reply: Generated) -> float:
    """Mismatch KL of the engine's logprobs against a plain forward in float32."""
    tokens, sampling, prompt = reply.tokens, reply.logprobs, reply.prompt
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    policy = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    log_ratio = policy - sampling
    return float((log_ratio.exp() - log_ratio - 1).mean())


async def as_an_episode(server: RunningInference) -> tuple[int, bytes, bool]:
    """What the data token is answered: to a request, and of the state."""
    headers = {"Authorization": f"Bearer {server.data_token}"}
    async with aiohttp.ClientSession(server.base_url, headers=headers) as session:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "logprobs": 0}}
        async with session.post("/inference/v1/generate", json=body) as response:
            status, answer = response.status, await response.read()
        async with session.get("/gradus/status") as response:
            is_stale = bool((await response.json())["is_stale"])
    return status, answer, is_stale


@pytest.mark.shows("F09")
async def test_a_server_answers_no_episode_before_it_is_told_its_version(
    server: RunningInference,
) -> None:
    status, answer, is_stale = await as_an_episode(server)
    assert (status, reason_of(answer), is_stale) == (503, STALE_WEIGHTS, True)


async def test_published_experts_are_served(server: RunningInference, policy: Any) -> None:
    weights = FilesystemWeights(server.run_dir, term=server.term, extra_files={})
    published = weights.publish_version(1, serving_tensors(policy, torch.bfloat16))
    before = await generate(server)
    change = {"run_id": server.run_id, "term": server.term, "version": 1}
    change |= {"directory": str(published.directory), "digest": published.digest}
    assert (await post(server, "/gradus/apply", change))["version"] == 1
    status, _, is_stale = await as_an_episode(server)
    assert (status, is_stale) == (200, False)
    after = await generate(server)
    assert mismatch(policy, after) < 2e-3
    assert mismatch(policy, before) > 1e-2


async def test_a_reply_tells_the_experts_that_the_trainer_takes(
    server: RunningInference, policy: Any
) -> None:
    """After the experts were published. A prompt of two blocks, which the second request finds in
    the prefix cache."""
    prompt = [3 + number % 40 for number in range(70)]
    replies = [await generate(server, prompt) for _ in range(2)]
    routers = Routers.of(policy)
    shape = (len(prompt) + 64 - 1, routers.num_layers, routers.num_chosen)
    first, second = (reply.experts for reply in replies)
    assert first.shape == second.shape == shape
    assert torch.equal(first[:64], second[:64])
    assert len(first.unique()) > routers.num_chosen
    for reply in replies:
        last = torch.full_like(reply.experts[:1], NOT_CHOSEN)
        routers.take(None)
        alone = mismatch(policy, reply)
        routers.take(torch.cat([reply.experts, last]))
        assert mismatch(policy, reply) <= max(alone, 1e-4)
        # Those of other tokens are not theirs.
        routers.take(torch.cat([last, reply.experts]))
        assert mismatch(policy, reply) > 10 * max(alone, 1e-4)
    routers.take(None)


@pytest.mark.shows("F10")
def test_a_killed_server_takes_its_engine_along(server: RunningInference) -> None:
    """The last test of this server. Its engine was forked from a copy of the server, which keeps
    neither the address of the server nor its handlers."""
    started = server.below()
    names = {it.pid: Path(f"/proc/{it.pid}/comm").read_text().strip() for it in started}
    (copy,) = [pid for pid, name in names.items() if name == ENGINE_FORKSERVER]
    assert [it for it in listeners([copy]) if it.is_tcp] == []
    assert [it for it in started if it.parent == copy]
    assert not catches(copy, signal.SIGTERM)
    server.process.kill()
    wait_until_ended(started)
