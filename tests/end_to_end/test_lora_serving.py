"""Adapters from the trainer's files to vLLM's logprobs: hot-swapped, confirmed, checked."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
import verifiers.v1 as vf
from running import RunningInference, wait_until_ended
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.environments.verifiers.engine_client import EngineClient
from gradus.errors import ExitCode
from gradus.inference.policy_engine import AdapterControl
from gradus.run.model_files import model_digest
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import BASE_FILE, Published
from gradus.weights.tensor_files import write_tensors

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

Tensors = dict[str, torch.Tensor]
PROMPT = [5, 9, 13, 21, 34, 55, 17, 8]
RANK, ALPHA = 6, 12  # not a rank that vLLM knows: it pads to 8
LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[RunningInference]:
    """A vLLM server with one adapter slot."""
    config = InferenceProcessConfig(
        run_dir=str(tmp_path_factory.mktemp("adapter-run")),
        term=0,
        model=ModelConfig(name=str(tiny_model), max_length_tokens=1024),
        seed=0,
        lora_rank=RANK,
        inference=InferenceConfig(dtype="bfloat16", kv_cache_gib=0.2, max_num_seqs=16),
    )
    with RunningInference(config) as running:
        running.wait_ready()
        yield running


def random_adapter(model: Path, *, seed: int) -> Tensors:
    """Factors large enough to make another policy."""
    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in LEAVES:
            rows, columns = weight.shape
            a = torch.randn(RANK, columns, generator=random) / columns**0.5
            b = 0.05 * torch.randn(rows, RANK, generator=random)
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a.bfloat16()
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b.bfloat16()
    return tensors


@pytest.fixture(scope="module")
def publish(server: RunningInference, tiny_model: Path) -> Callable[[int, Tensors], Published]:
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": LEAVES, "peft_type": "LORA"}
    weights = FilesystemWeights(
        server.run_dir,
        term=server.term,
        extra_files={
            "adapter_config.json": json.dumps(settings).encode(),
            BASE_FILE: json.dumps({"sha256": model_digest(tiny_model)}).encode(),
        },
        write=partial(write_tensors, stem="adapter_model"),
    )
    return lambda version, tensors: weights.publish_version(version, tensors.items())


async def ask(server: RunningInference, method: str, path: str, body: Any = None) -> Any:
    """The JSON of one request with the admin token, and its status."""
    headers = {"Authorization": f"Bearer {server.admin_token}"}
    async with (
        aiohttp.ClientSession(server.base_url, headers=headers) as session,
        session.request(method, path, json=body) as response,
    ):
        return response.status, await response.json()


async def apply(server: RunningInference, published: Published) -> Any:
    body = {
        "run_id": server.run_id,
        "term": server.term,
        "version": published.version,
        "directory": str(published.directory),
        "digest": published.digest,
    }
    return await ask(server, "POST", "/gradus/apply", body)


async def generate(
    server: RunningInference, *, max_tokens: int = 64
) -> tuple[list[int], torch.Tensor]:
    sampling = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": 1, "ignore_eos": True}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling}
    code, answer = await ask(server, "POST", "/inference/v1/generate", body)
    assert code == 200, answer
    choice = answer["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], torch.tensor(logprobs)


async def generate_connected(
    server: RunningInference, *, max_tokens: int = 64
) -> tuple[list[int], torch.Tensor]:
    """As `generate`, by the token route, as the environments do."""
    os.environ["ADAPTER_TOKEN"] = server.data_token
    client = EngineClient(
        vf.TrainClientConfig(base_url=server.base_url, api_key_var="ADAPTER_TOKEN")
    )
    sampling = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": 1, "ignore_eos": True}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling}
    try:
        answer = await client.post(f"{server.base_url}/inference/v1/generate", body=body)
    finally:
        await client.close()
    choice = json.loads(answer.content)["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], torch.tensor(logprobs)


def policy_logprobs(model: Path, adapter: Tensors | None, tokens: list[int]) -> torch.Tensor:
    """Logprobs of the reply, from a transformers forward of the merged model in float32."""
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, a in (adapter or {}).items():
        if ".lora_A." in name:
            b = adapter[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weight = merged.get_parameter(f"{layer}.weight")
            weight.data += ALPHA / RANK * b.float() @ a.float()
    with torch.no_grad():
        logits = merged(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def mismatch(policy: torch.Tensor, sampling: torch.Tensor) -> float:
    log_ratio = policy - sampling
    return float((log_ratio.exp() - log_ratio - 1).mean())


async def test_the_slot_starts_as_the_base_model(server: RunningInference) -> None:
    assert (await ask(server, "GET", "/gradus/status"))[1]["version"] == 0
    tokens, sampling = await generate(server)
    assert mismatch(policy_logprobs(server.model_dir, None, tokens), sampling) < 1e-3


async def test_each_of_three_swaps_is_served_and_confirmed(
    server: RunningInference, publish: Callable[[int, Tensors], Published]
) -> None:
    for version in (1, 2, 3):
        adapter = random_adapter(server.model_dir, seed=version)
        code, result = await apply(server, publish(version, adapter))
        assert (code, result["version"]) == (200, version), result
        assert (await ask(server, "GET", "/gradus/status"))[1]["version"] == version
        older = random_adapter(server.model_dir, seed=version - 1)
        for ask_for_tokens in (generate, generate_connected):
            tokens, sampling = await ask_for_tokens(server)
            assert mismatch(policy_logprobs(server.model_dir, adapter, tokens), sampling) < 1e-3
            assert mismatch(policy_logprobs(server.model_dir, older, tokens), sampling) > 1e-2


async def test_the_slots_hold_the_published_factors(
    server: RunningInference, publish: Callable[[int, Tensors], Published]
) -> None:
    adapter = random_adapter(server.model_dir, seed=4)
    await apply(server, publish(4, adapter))
    served = (await ask(server, "GET", "/gradus/weights"))[1]
    slots = {
        name: tensor
        for name, tensor in served["workers"][0].items()
        if ".0.self_attn.o_proj.lora" in name or ".0.self_attn.o_proj.base" in name
    }
    prefix = "model.layers.0.self_attn.o_proj"
    a = adapter[f"base_model.model.{prefix}.lora_A.weight"]
    found = slots[f"{prefix}.lora_a_stacked.0"]
    padded = torch.zeros(1, 1, 8, a.shape[1], dtype=torch.bfloat16)
    padded[0, 0, :RANK] = a
    assert found["shape"] == list(padded.shape)
    assert found["sha256"] == digest_of(padded)


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


async def test_running_requests_finish_whole_through_a_swap(
    server: RunningInference, publish: Callable[[int, Tensors], Published]
) -> None:
    published = publish(5, random_adapter(server.model_dir, seed=5))
    running = [asyncio.create_task(generate(server, max_tokens=500)) for _ in range(4)]
    async with asyncio.timeout(60):
        while (await ask(server, "GET", "/gradus/status"))[1]["running"] < 4:
            pass  # asking takes its own time
    assert (await apply(server, published))[0] == 200
    assert not any(task.done() for task in running)
    assert [len(tokens) for tokens, _ in await asyncio.gather(*running)] == [500] * 4


async def test_an_adapter_that_does_not_fit_leaves_the_old_one_serving(
    server: RunningInference, publish: Callable[[int, Tensors], Published]
) -> None:
    before = (await ask(server, "GET", "/gradus/weights"))[1]
    adapter = random_adapter(server.model_dir, seed=6)
    name = next(iter(adapter))
    code, answer = await apply(server, publish(6, adapter | {name: torch.ones(RANK, 3)}))
    assert code == 422, answer
    assert (await ask(server, "GET", "/gradus/weights"))[1] == before


@pytest.mark.shows("F10")
async def test_a_killed_engine_ends_the_server_and_fails_what_runs(
    server: RunningInference,
) -> None:
    """The last test of this server. The engine is the process with the most memory below it."""
    started = server.below()
    engine = max(started, key=lambda entry: resident_pages(entry.pid))
    running = [asyncio.create_task(generate_connected(server, max_tokens=900)) for _ in range(4)]
    async with asyncio.timeout(60):
        while (await ask(server, "GET", "/gradus/status"))[1]["running"] < 4:
            pass  # asking takes its own time
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        failed = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(error, openai.APIError) for error in failed), failed
    assert server.process.wait(60) == ExitCode.TRY_AGAIN
    (line,) = [line for line in server.log.splitlines() if line.startswith("gradus inference:")]
    assert f"vLLM's engine process ({engine.pid}) was killed by SIGKILL: out of memory" in line
    wait_until_ended(started)


def resident_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


class Engine:
    """Records what an AdapterControl asks for; `counts` are the workers' answers."""

    def __init__(self, *counts: int) -> None:
        self.adapter: Any = None
        self.asked: list[Any] = []
        self.counts = list(counts)

    async def add_lora(self, request: Any) -> bool:
        self.asked.append(request)
        return True

    async def collective_rpc(self, method: str, args: tuple[int, ...]) -> list[Any]:
        self.asked.append(method)
        return self.counts


async def test_each_version_has_a_name_of_its_own_and_the_same_slot(tmp_path: Path) -> None:
    engine = Engine(14, 14)
    names = []
    for version in ("version_00000001", "version_00000002"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "adapter_config.json").write_text("{}")
        await AdapterControl(engine).load(tmp_path / version)  # type: ignore[arg-type]
        assert (engine.adapter.lora_int_id, engine.adapter.load_inplace) == (1, False)
        names.append(engine.adapter.lora_name)
    assert names == ["policy-version_00000001", "policy-version_00000002"]
    assert [asked.load_inplace for asked in engine.asked if not isinstance(asked, str)] == [
        True
    ] * 2


async def test_a_base_model_put_back_is_a_zero_adapter(tmp_path: Path) -> None:
    engine = Engine(14)
    await AdapterControl(engine).load(tmp_path)  # type: ignore[arg-type]
    assert engine.asked == ["gradus_zero_adapter", "gradus_adapted_layers"]


@pytest.mark.parametrize("counts", [(0,), (14, 13)])
async def test_workers_that_disagree_or_adapt_nothing_are_an_error(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    engine = Engine(*counts)
    with pytest.raises(RuntimeError, match="workers adapted"):
        await AdapterControl(engine).load(tmp_path)  # type: ignore[arg-type]
    assert engine.adapter is None


RL_TOML = """
name = "lora"
output_dir = "{root}"
max_steps = 3
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 96
[orchestrator]
groups_per_batch = 2
[orchestrator.train.sampling]
max_completion_tokens = 24
[[orchestrator.train.env]]
id = "gradus-reverse-text"
group_size = 4
[trainer.optimizer]
lr = 1e-2
[trainer.lora]
rank = 4
[inference]
kv_cache_gib = 0.2
max_num_seqs = 32
"""


def test_a_run_trains_serves_and_saves_an_adapter(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "rl.toml").write_text(RL_TOML.format(root=tmp_path, model=tiny_model))
    done = subprocess.run(
        [sys.executable, "-m", "gradus.cli.main", "rl", "@", str(tmp_path / "rl.toml")],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "lora"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fresh = [row for row in rows if row["sample/staleness/max"] == 0]
    assert len(rows) == 3
    assert fresh
    assert all(0 <= row["loss/mismatch_kl/mean"] < 0.01 for row in fresh)
    published = run / "weights" / "version_00000003"
    assert {path.name for path in published.iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", BASE_FILE, "manifest.json"),
    }
    stored = load_file(run / "adapter" / "adapter_model.safetensors")
    last = load_file(published / "adapter_model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in last.items())
    assert any(stored[name].any() for name in stored if ".lora_B." in name)
    base = load_file(tiny_model / "model.safetensors")
    merged = load_file(run / "model" / "model.safetensors")
    assert base.keys() == merged.keys()
    assert any(not torch.equal(base[name], merged[name]) for name in base)
