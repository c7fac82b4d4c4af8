"""Engine = trainer: logprobs of tokens that vLLM sampled beside the trainer's, family by family.

    python benchmarks/engine_logprobs.py [--missing] [CASE[:DTYPE] ...]

Cases are those of tests/support/model_families.py; without one, all, and without a dtype, both.
The engine is that of a run: its arguments, worker, scheduler and salts. Each model serves random
weights, then others that the trainer's code published while a request was running. Of a mixture of
experts the tokens are scored by the trainer's own choice and by that of the engine, and those are
counted for which the two differ in some layer. Results go to
benchmarks/results/engine_logprobs.json, of which `scripts/models` makes a column of docs/models.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
RESULTS = ROOT / "benchmarks" / "results" / "engine_logprobs.json"
PROMPT_LENGTHS = (9, 70, 33, 64)
"""In blocks of 32 tokens, and in chunks of 64 of layers with state."""
REPLY_TOKENS = 200
LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
DELTA_SIZES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""The only sizes of latent attention, and of gated delta nets in bfloat16, with kernels on CPUs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="of tests/support/model_families.py; default all")
    parser.add_argument("--missing", action="store_true", help="leave out what has a result")
    parser.add_argument("--exact-head", action="store_true", help="logits in float32 in vLLM too")
    parser.add_argument("--experts", action="store_true", help="only mixtures of experts")
    asked = parser.parse_args()
    more = {"hf_overrides": {"head_dtype": "float32"}} if asked.exact_head else {}
    from gradus.inference.server import prepare_process

    prepare_process(_config("none", "float32"))
    from model_families import FAMILIES

    pairs = [(case, dtype) for word in asked.cases or FAMILIES for case, dtype in _pairs(word)]
    for case, dtype in pairs:
        name = f"{dtype}, exact head" if more else dtype
        is_noted = asked.missing and name in _noted().get(case, {})
        if is_noted or (asked.experts and not has_experts(case)):
            continue
        began = time.monotonic()
        try:
            found = asyncio.run(asyncio.wait_for(_compared(case, dtype, more), 240))
        except Exception as error:
            lines = str(error).strip().splitlines()
            found = {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
        print(f"{case} {name} {time.monotonic() - began:.0f} s: {found}", flush=True)
        RESULTS.write_text(json.dumps(_with(case, name, found), indent=1, sort_keys=True) + "\n")


def _pairs(word: str) -> list[tuple[str, str]]:
    case, _, dtype = word.partition(":")
    return [(case, it) for it in ([dtype] if dtype else ["float32", "bfloat16"])]


def _noted() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _with(case: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
    noted = _noted()
    noted.setdefault(case, {})[name] = found
    return noted


def _config(model: str, dtype: str, tells_experts: bool = False, **more: Any) -> Any:
    from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig

    return InferenceProcessConfig(
        run_dir="none",
        term=0,
        seed=0,
        tells_experts=tells_experts,
        model=ModelConfig(name=model, max_length_tokens=512),
        inference=InferenceConfig(
            dtype=dtype,
            kv_cache_gib=0.2,
            max_num_seqs=8,
            extra_args=more,
        ),
    )


async def _compared(case: str, dtype: str, more: dict[str, Any]) -> dict[str, Any]:
    """Distances for the first weights, and for those that were published under a request."""
    import torch
    from model_families import FAMILIES, build_family, our_policy

    from gradus.inference.policy_engine import EngineCounters, VllmControl
    from gradus.inference.vllm_server import build_arguments, start_engine
    from gradus.run.paths import RunDirectory
    from gradus.trainer.publish import serving_tensors
    from gradus.weights.filesystem import FilesystemWeights

    family, options = FAMILIES[case][0], engine_options(case, dtype)
    root, torch_dtype = Path(tempfile.mkdtemp(prefix="gradus_engine_")), getattr(torch, dtype)
    build_family(root / "first", family, options)
    build_family(root / "second", family, options, seed=1)
    counters = EngineCounters()
    config = _config(str(root / "first"), dtype, has_experts(case), **more)
    arguments = build_arguments(config)
    # These models have none.
    arguments.skip_tokenizer_init = True
    # vLLM gives transformers classes of its own for the configs of some families.
    policies = [our_policy(root / name, torch_dtype) for name in ("first", "second")]
    published_model = our_policy(root / "second").model
    engine = start_engine(arguments, counters)
    try:
        await engine.update_weight_version("0")
        asked = [_prompt(n) for n in PROMPT_LENGTHS]
        first = await _sampled(engine, asked)
        again = await _sampled(engine, asked)
        running = asyncio.create_task(_sampled(engine, asked[:1], 400))
        while not counters.running:
            await asyncio.sleep(0.01)
        weights = FilesystemWeights(RunDirectory(root / "run"), term=0, extra_files={})
        tensors = serving_tensors(published_model, torch_dtype)
        control = VllmControl(engine)
        published = weights.publish_version(1, tensors)
        await control.pause()
        await control.load(published.directory)
        await control.set_version(1)
        await control.resume()
        across, second = await running, await _sampled(engine, asked)
    finally:
        await asyncio.to_thread(engine.shutdown, 2.0)
    replayed = _replayed(policies, first, second) if has_experts(case) else {}
    return {
        **({"experts": replayed} if replayed else {}),
        "first": _distance(policies[0], first),
        "cached": _distance(policies[0], again),
        "published": _distance(policies[1], second),
        "prefix_hits": counters.prefix_hits,
        "tokens_before_change": _agreeing(policies[0], across),
        "tokens_across": len(across[0][1]),
    }


def has_experts(case: str) -> bool:
    from model_families import EXPERTS, FAMILIES, LOCAL_EXPERTS, ROUTED

    names = {*EXPERTS, *LOCAL_EXPERTS, *ROUTED}
    # Its router gives scores to the experts of its chosen groups alone.
    if case == "deepseek_v2":
        return False
    options = FAMILIES[case][1]
    options = options.get("text_config", options)
    return any("experts" in name and name in names for name in options)


def engine_options(case: str, dtype: str = "float32") -> dict[str, Any]:
    """A case's options, in sizes for which there are kernels."""
    from model_families import FAMILIES, SHAPE

    family, options = FAMILIES[case]
    # vLLM reads these, and transformers writes them into no config of its own.
    if "conv_dim" in options:
        return options | {"block_dim": options["conv_dim"]}
    if family == "granitemoehybrid":
        return options | {"mamba_n_groups": 1}
    if family == "glm4_moe":
        return options | {"head_dim": SHAPE["head_dim"]}
    if family == "deepseek_v2":
        options = options | {"topk_method": "group_limited_greedy"}
    if family == "llama4_text":
        options = options | {"num_experts_per_tok": 1}
    if family == "deepseek_v3":
        options = options | {"scoring_func": "sigmoid"}
    sizes = LATENT_SIZES if dtype == "float32" else LATENT_SIZES | DELTA_SIZES
    if "kv_lora_rank" not in options and "linear_key_head_dim" not in options:
        return options
    return options | {name: size for name, size in sizes.items() if name in options}


def _prompt(length: int) -> list[int]:
    import torch

    random = torch.Generator().manual_seed(length)
    return torch.randint(3, 96, (length,), generator=random).tolist()


async def _sampled(engine: Any, prompts: list[list[int]], tokens: int = REPLY_TOKENS) -> Any:
    """Prompt, tokens and sampling logprobs of a reply to each prompt."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    async def one(number: int, prompt: list[int]) -> Any:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            seed=number,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"{number}-{time.monotonic_ns()}"
        async for output in engine.generate(tokens_input(prompt), params, name):
            reply = output.outputs[0]
        ids = list(reply.token_ids)
        logprobs = [it[t].logprob for it, t in zip(reply.logprobs, ids, strict=True)]
        return prompt, ids, logprobs, reply.routed_experts

    return await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts)))


def _replayed(
    policies: list[Any], first: Any, second: Any, differences: Any = None
) -> dict[str, Any]:
    """Distances with the engine's experts, and how many tokens the trainer routes otherwise."""
    from gradus.trainer.model.cpu.routing import Routers

    differences = differences or _differences
    found: dict[str, Any] = {"tokens": sum(len(it[0]) + len(it[1]) - 1 for it in second)}
    for policy, replies, name in zip(
        policies, (first, second), ("first", "published"), strict=True
    ):
        routers = Routers.of(policy.model)
        for is_told in (False, True):
            policy.routers = routers if is_told else None
            routers.take(None)
            chosen = _chosen(routers, partial(differences, policy, replies))
            word = "on" if is_told else "off"
            found[f"{name}_differ_{word}"] = _num_differing(chosen, replies, routers)
            found[f"{name}_{word}"] = _summary(differences(policy, replies))
        policy.routers = None
        routers.take(None)
    return found


def _chosen(routers: Any, score: Any) -> dict[int, Any]:
    """Layer -> [T, k] experts that computed each token of the row that `score` reads."""
    from gradus.trainer.model.cpu.routing import chosen_by

    seen: dict[int, Any] = {}

    def note(layer: int) -> Any:
        def hook(router: Any, _: Any, outputs: Any) -> None:
            seen[layer] = chosen_by(router, outputs)

        return hook

    hooks = [it.register_forward_hook(note(layer)) for layer, it in routers.by_layer.items()]
    score()
    for hook in hooks:
        hook.remove()
    return seen


def _num_differing(chosen: dict[int, Any], replies: Any, routers: Any) -> int:
    import numpy as np

    differing = 0
    start = 0
    for prompt, ids, _, told, *_ in replies:
        count = len(prompt) + len(ids) - 1
        is_other = np.zeros(count, bool)
        for layer in routers.by_layer:
            ours = np.sort(chosen[layer][start : start + count].numpy(), axis=-1)
            is_other |= (ours != np.sort(told[:, layer], axis=-1)).any(-1)
        differing += int(is_other.sum())
        start += count + 1
    return differing


def _experts(replies: Any) -> Any:
    """[T, L, k] of the row; None where the engine told nothing."""
    import numpy as np

    if replies[0][3] is None:
        return None
    parts = [np.pad(it[3].astype(np.int16), ((0, 1), (0, 0), (0, 0))) for it in replies]
    for part in parts:
        part[-1] = -1
    return np.concatenate(parts)


def _differences(policy: Any, replies: Any) -> Any:
    """Policy logprob minus sampling logprob of each sampled token, all replies in one row."""
    import numpy as np
    import torch

    from gradus.trainer.tensors import TrainTensors
    from gradus.wire.micro_batch import MicroBatch
    from gradus.wire.tokens import TokenArrays

    rows = [reply[0] + reply[1] for reply in replies]
    lengths = [len(row) for row in rows]
    arrays = TokenArrays.build(
        np.concatenate([np.array(row) for row in rows]),
        {"ce": np.ones(sum(lengths), np.float32)},
        experts=_experts(replies),
    )
    batch = MicroBatch([f"s/{n}" for n in range(len(rows))], lengths, arrays)
    with torch.no_grad():
        scores = policy(TrainTensors.build(batch, torch.device("cpu"))).logprobs
    ours = [
        row[len(reply[0]) :]
        for row, reply in zip(torch.split(scores, lengths), replies, strict=True)
    ]
    sampling = torch.cat([torch.tensor(reply[2]) for reply in replies])
    return torch.cat(ours).double() - sampling.double()


def _distance(policy: Any, replies: Any) -> dict[str, float]:
    return _summary(_differences(policy, replies))


def _summary(found: Any) -> dict[str, float]:
    return {
        "max": float(f"{found.abs().max().item():.2e}"),
        "mismatch_kl": float(f"{(found.exp() - 1 - found).mean().item():.2e}"),
    }


def _agreeing(policy: Any, replies: Any) -> int:
    """How many tokens of a reply that saw a change these weights explain."""
    far = (_differences(policy, replies).abs() > 0.2).nonzero()
    return int(far[0]) if len(far) else len(replies[0][1])


if __name__ == "__main__":
    main()
