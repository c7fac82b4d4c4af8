"""What a GPU says of the trainer, in parts of at most a few minutes; see docs/gpu.md.

    python scripts/gpu_first_hour.py --out OUT                # all parts, on a GPU
    python scripts/gpu_first_hour.py --out OUT facts head     # some

Needs torch, transformers, pydantic, msgspec and this checkout, neither vLLM nor verifiers. Each
part runs in a process of its own with a deadline: one that fails, hangs or runs out of memory says
so, and the next one runs. OUT/first_hour.json is complete after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "benchmarks", "tests/support")]
# Read when CUDA starts, which is in the processes of the parts.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import older_torch

older_torch.mend()

import gpu_train
import torch
from gpu_stand_in import plain_varlen
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gradus.config import AdamWConfig, BenchConfig, ModelConfig, ParallelConfig, TrainerConfig
from gradus.config.schema.learning import DppoConfig
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.entry.bench import fake_samples
from gradus.trainer.logprobs import chosen_logprobs
from gradus.trainer.losses import Dppo
from gradus.trainer.model.attention import ATTENTION_NAME, PackedLayout
from gradus.trainer.model.build import build_policy
from gradus.trainer.model.cpu.attention import ScoreRule
from gradus.trainer.model.cpu.states import separate_states, state_mixers
from gradus.trainer.model.gpu.flash import choose_flash_attention, flash_attention
from gradus.trainer.model.gpu.offload import InputStore
from gradus.trainer.model.kernels import Platform
from gradus.trainer.model.layers import decoder_layers
from gradus.trainer.model.shard import sync_on
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.publish import WeightSnapshot, serving_tensors
from gradus.trainer.step import GradientStep
from gradus.wire.packing import pack

Found = dict[str, Any]
SEED = 0
OUT = Path()
"""Where the numbers go."""
PEAK = 989e12
"""Operations a second of an H100 or H200 in bfloat16, by its data sheet."""


def seconds_of(run: Callable[[], Any], times: int = 10, warm: int = 3) -> float:
    for _ in range(warm):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def distance(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact||."""
    exact = exact.double().cpu()
    return float((found.double().cpu() - exact).norm() / exact.norm())


def facts(gpu: torch.device) -> Found:
    import transformers

    found: Found = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "name": torch.cuda.get_device_name(),
    }
    left, right = (torch.randn(8192, 8192, device=gpu, dtype=torch.bfloat16) for _ in range(2))
    found["bf16_tflops"] = 2 * 8192**3 / seconds_of(lambda: left @ right) / 1e12
    big = torch.empty(2 << 30, dtype=torch.uint8, device=gpu)
    found["copy_tb_s"] = 2 * big.numel() / seconds_of(big.clone) / 1e12
    host, part = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), big[: 1 << 30]
    out = seconds_of(lambda: host.copy_(part, non_blocking=True), 5, 1)
    back = seconds_of(lambda: part.copy_(host, non_blocking=True), 5, 1)
    found |= {"d2h_gb_s": 1.07 / out, "h2d_gb_s": 1.07 / back}
    found["pageable_d2h_gb_s"] = 1.07 / seconds_of(part.cpu, 3, 1)
    return found


Attend = Callable[..., Tensor]


def flash(platform: Platform) -> Attend:
    return lambda tokens, starts, longest, size, window: flash_attention(
        tokens, starts, longest, ScoreRule(size**-0.5, window), platform
    )


def attention(gpu: torch.device) -> Found:
    """By the kernels that torch brings for any GPU."""
    return attends(gpu, flash(Platform.of(gpu)))


def attention_fa4(gpu: torch.device) -> Found:
    start = time.perf_counter()
    version = choose_flash_attention(Platform.of(gpu))
    if version != "FA4":
        return {"failed": f"{version} was chosen; the log says why"}
    seconds = time.perf_counter() - start
    return {"trial_seconds": seconds, **attends(gpu, flash(Platform.of(gpu)))}


def attends(gpu: torch.device, attend: Attend) -> Found:
    """Distances from plain attention in float32, first calls, and operations a second."""
    checks, speeds = [], {}
    for heads, key_heads, size, window in (
        (4, 4, 64, None),
        (8, 2, 128, None),
        (8, 2, 128, 100),
        (4, 1, 256, None),
        (8, 8, 96, 17),
    ):
        lengths = (1, 2, 63, 64, 65, 300, 1)
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=gpu)
        leaves = [
            torch.randn(sum(lengths), n, size, device=gpu).bfloat16().requires_grad_()
            for n in (heads, key_heads, key_heads)
        ]
        exact = [leaf.detach().float().cpu().requires_grad_() for leaf in leaves]
        row: Found = {"shape": [heads, key_heads, size, window]}
        try:
            began = time.perf_counter()
            out = attend(tuple(leaves), starts, max(lengths), size, window)
            want = plain_varlen(
                *exact,
                starts.cpu(),
                starts.cpu(),
                max(lengths),
                max(lengths),
                scale=size**-0.5,
                window_size=(-1 if window is None else window - 1, 0),
                enable_gqa=heads != key_heads,
            )
            gradient = torch.randn_like(want)
            out.backward(gradient.to(gpu, out.dtype))
            torch.cuda.synchronize()
            row["first_seconds"] = time.perf_counter() - began
            want.backward(gradient)
            row["out"] = distance(out, want)
            row["gradients"] = [
                distance(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)
            ]  # type: ignore[arg-type]
        except Exception as error:
            traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        checks.append(row)
    for tokens, samples in ((16384, 1), (16384, 4), (16384, 16), (65536, 4)):
        length = tokens // samples
        starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=gpu)
        leaves = [
            torch.randn(tokens, n, 128, device=gpu, dtype=torch.bfloat16, requires_grad=True)
            for n in (32, 8, 8)
        ]
        call = lambda: attend(tuple(leaves), starts, length, 128, None)
        out = call()
        gradient = torch.randn_like(out)
        back = lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)
        operations = 4 * 32 * 128 * length**2 / 2 * samples
        speeds[f"{samples}x{length}"] = {
            "forward_tflops": operations / seconds_of(call) / 1e12,
            "backward_tflops": 2.5 * operations / seconds_of(back) / 1e12,
        }
    return {"checks": checks, "speeds": speeds}


def products(gpu: torch.device) -> Found:
    found: Found = {}
    for m, k, n in ((4096, 2560, 16384), (16384, 4096, 2560), (2560, 4096, 16384)):
        left = torch.randn(m, k, device=gpu, dtype=torch.bfloat16)
        right = torch.randn(n, k, device=gpu, dtype=torch.bfloat16)
        total = torch.randn(m, n, device=gpu)
        exact, operations = left.double() @ right.double().T, 2 * m * k * n
        widening = Platform.of(gpu).widening
        row: Found = {"error": distance(widening(left, right.T), exact)}
        forms: dict[str, Callable[[], Tensor]] = {
            "bf16": lambda: left @ right.T,
            "widening": lambda: widening(left, right.T),
            "added": lambda: total.add_(widening(left, right.T)),
            "added_in_product": lambda: torch.addmm(
                total,
                left,
                right.T,
                out_dtype=torch.float32,
                out=total,
            ),
        }
        for name, form in forms.items():
            try:
                row[f"{name}_tflops"] = operations / seconds_of(form) / 1e12
            except (RuntimeError, TypeError, NotImplementedError) as error:
                row[f"{name}_tflops"] = str(error).splitlines()[0][:200]
        try:
            start = torch.randn(m, n, device=gpu)
            got = start.clone()
            torch.addmm(got, left, right.T, out_dtype=torch.float32, out=got)
            row["added_in_product_error"] = distance(got, start.double() + exact)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            row["added_in_product_error"] = str(error).splitlines()[0][:200]
        found[f"{m}x{k}x{n}"] = row
    return found


def head(gpu: torch.device) -> Found:
    """Exactness against float64, and time and memory, step by step and in one pass."""
    plain = replace(Platform.of(gpu), facts=replace(Platform.of(gpu).facts, can_compile=False))
    found: Found = {}
    for name, platform in (("step by step", plain), ("one pass", Platform.of(gpu))):
        count, width, words = 700, 64, 40000
        hidden = torch.randn(count, width, device=gpu).bfloat16()
        weight, bias = (
            torch.randn(words, width, device=gpu).bfloat16(),
            torch.randn(words, device=gpu),
        )
        labels = torch.randint(words, (count,), device=gpu)
        temperatures = torch.rand(count, device=gpu) + 0.5
        ours = [t.clone().requires_grad_() for t in (hidden, weight, bias.bfloat16())]
        exact = [t.detach().double().requires_grad_() for t in ours]
        logprobs, entropies = chosen_logprobs(
            ours[0], ours[1], labels, temperatures, bias=ours[2], platform=platform
        )
        (logprobs.sum() + entropies.sum()).backward()
        logits = (exact[0] @ exact[1].T + exact[2]) / temperatures.double()[:, None]
        whole = logits.log_softmax(-1)
        want, spread = whole.gather(1, labels[:, None])[:, 0], -(whole.exp() * whole).sum(1)
        (want.sum() + spread.sum()).backward()
        row: Found = {
            "logprobs": float((logprobs - want).abs().max()),
            "entropies": float((entropies - spread).abs().max()),
            "gradients": [distance(a.grad, b.grad) for a, b in zip(ours, exact, strict=True)],  # type: ignore[arg-type]
        }
        for count in (4096, 16384):
            hidden = torch.randn(count, 2560, device=gpu, dtype=torch.bfloat16, requires_grad=True)
            weight = (0.02 * torch.randn(151936, 2560, device=gpu)).bfloat16().requires_grad_()
            labels = torch.randint(151936, (count,), device=gpu)
            temperatures = torch.ones(count, device=gpu)
            run = lambda: chosen_logprobs(hidden, weight, labels, temperatures, platform=platform)[
                0
            ]
            forward = seconds_of(run, 5, 2)
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            both = seconds_of(lambda: torch.autograd.grad(run().sum(), (hidden, weight)), 5, 2)
            row[str(count)] = {
                "forward_ms": 1e3 * forward,
                "both_ms": 1e3 * both,
                "share_of_peak": 8 * count * 2560 * 151936 / both / PEAK,
                "extra_gib": (torch.cuda.max_memory_allocated() - base) / 2**30,
            }
        found[name] = row
    return found


def experts(gpu: torch.device) -> Found:
    """The grouped product with odd and empty groups; a hang shows as this part's deadline."""
    found: Found = {}
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    for counts in ((16, 32, 16, 64), (17, 3, 1, 40), (0, 5, 0, 7), (0, 0, 0, 33), (40, 0, 0, 0)):
        rows = torch.randn(sum(counts), 256, device=gpu).bfloat16().requires_grad_()
        weight = torch.randn(4, 128, 256, device=gpu).bfloat16().requires_grad_()
        ends = torch.tensor(counts, device=gpu).cumsum(0).int()
        out = grouped(rows, weight.transpose(-2, -1), offs=ends)
        gradient = torch.randn_like(out)
        out.backward(gradient)
        parts = rows.detach().double().split(list(counts))
        backs = gradient.double().split(list(counts))
        exact = torch.cat([part @ weight[i].double().T for i, part in enumerate(parts)])
        by_rows = torch.cat([back @ weight[i].double() for i, back in enumerate(backs)])
        by_weight = torch.stack([b.T @ p for p, b in zip(parts, backs, strict=True)])
        found[str(counts)] = {
            "out": distance(out, exact),
            "rows": distance(rows.grad, by_rows),  # type: ignore[arg-type]
            "weight": distance(weight.grad, by_weight),  # type: ignore[arg-type]
            "weight_is_finite": bool(weight.grad.isfinite().all()),  # type: ignore[union-attr]
        }
    return found


def families(_: torch.device) -> Found:
    """Small models of all families; needs tests/support, and takes all cores."""
    output = OUT / "gpu_families.json"
    words = [sys.executable, str(ROOT / "benchmarks" / "gpu_families.py"), "--output", str(output)]
    subprocess.run([*words, "--seconds", "240"], check=True)
    found: Found = json.loads(output.read_text())
    return found


def states(gpu: torch.device, tokens: int = 16384, hidden: int = 2048) -> Found:
    """Milliseconds, forward and back, and GiB of mixers as large as those of models of 4B and 8B;
    by flash-linear-attention where it is installed."""
    found: Found = {}
    for family, more in (
        ("qwen3_5_text", {"linear_num_value_heads": 32, "linear_num_key_heads": 16}),
        ("mamba2", {"num_heads": hidden // 32, "head_dim": 64, "n_groups": 1, "state_size": 128}),
        ("lfm2", {"layer_types": ["conv"]}),
    ):
        config = AutoConfig.for_model(family, hidden_size=hidden, num_hidden_layers=1, **more)
        with gpu:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        layers = decoder_layers(model)
        separate_states(layers)
        mixer, row = next((it, it.forward.args[1]) for it in state_mixers(model))
        for samples in (1, 16):
            row.layout = PackedLayout.build([tokens // samples] * samples, gpu)
            states = torch.randn(1, tokens, hidden, device=gpu, dtype=torch.bfloat16)
            run = lambda: mixer(states).sum().backward()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            found[f"{family} {samples}x{tokens // samples}"] = {
                "ms": 1e3 * seconds_of(run, 3, 1),
                "extra_gib": (torch.cuda.max_memory_allocated() - base) / 2**30,
            }
    return found


def tiny_model(folder: Path, family: str, **more: Any) -> Path:
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        family,
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        **more,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / family)
    return folder / family


def step_plain(gpu: torch.device) -> Found:
    return step(gpu, only=("cpu float32", "plain"))


def step(gpu: torch.device, only: tuple[str, ...] = ()) -> Found:
    """Two steps of gradus' own parts on the CPU in float32 and here in several ways."""
    ways: dict[str, tuple[torch.device, torch.dtype, Found]] = {
        "cpu float32": (CPU, torch.float32, {}),
        "cpu bfloat16": (CPU, torch.bfloat16, {}),
        "plain": (gpu, torch.bfloat16, {"compile": False}),
        "compiled": (gpu, torch.bfloat16, {}),
        "selective": (gpu, torch.bfloat16, {"activation_checkpointing": "selective"}),
        "full, offloaded": (
            gpu,
            torch.bfloat16,
            {
                "activation_checkpointing": "full",
                "offload_activations": True,
                "offload_optimizer": True,
            },
        ),
    }
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, more in (
            ("qwen3", {}),
            (
                "qwen3_moe",
                {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
            ),
        ):
            model = str(tiny_model(Path(folder), family, **more))
            samples = fake_samples(
                BenchConfig(samples_per_step=9), longest=600, vocabulary=2048, seed=1
            )
            rows: Found = {}
            for name, (where, dtype, keys) in ways.items():
                if only and name not in only:
                    continue
                start = time.perf_counter()
                try:
                    rows[name] = two_steps(model, samples, where, dtype, ParallelConfig(**keys))
                except Exception as error:
                    traceback.print_exc()
                    rows[name] = f"{type(error).__name__}: {str(error)[:300]}"
                print(family, name, rows[name], time.perf_counter() - start, flush=True)
            found[family] = rows
    return found


def two_steps(
    model: str, samples: Any, where: torch.device, dtype: torch.dtype, parallel: ParallelConfig
) -> list[float]:
    """Loss and gradient norm of each."""
    with join_world(where) as world:
        settings = TrainerConfig(parallel=parallel)
        policy = build_policy(
            ModelConfig(name=model, max_length_tokens=1024), settings, world, dtype
        )
        gradients = GradientStep(policy, Dppo(DppoConfig()), world, sync=sync_on(where, parallel))
        optimizer = PolicyOptimizer(
            policy, AdamWConfig(lr=1e-4), max_steps=2, max_skipped_steps=1, world=world
        )
        found = []
        for number in range(2):
            (micro_batches,) = pack(samples, max_tokens=1024, num_ranks=1)
            loss = gradients.run(micro_batches)
            found += [loss.total, optimizer.step(number).grad_norm]
        return [float(f"{number:.6g}") for number in found]


def offload(gpu: torch.device) -> Found:
    store = InputStore()
    states = torch.randn(16384, 2560, device=gpu, dtype=torch.bfloat16)

    def around() -> list[Tensor]:
        kept = [store.put(states) for _ in range(8)]
        return [store.take(one) for one in reversed(kept)]

    same = all(bool((back == states).all()) for back in around())
    return {"same": same, "ms_per_layer": 1e3 * seconds_of(around, 3, 1) / 8}


def publish(gpu: torch.device) -> Found:
    found: Found = {}
    for family, more in (
        ("qwen3", {}),
        ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 768}),
    ):
        config = AutoConfig.for_model(
            family,
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=128,
            **more,
        )
        with gpu:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        snapshot, times, copied = WeightSnapshot(), [], {}
        for _ in range(3):
            start = time.perf_counter()
            snapshot.take(serving_tensors(model, torch.bfloat16, place=snapshot.place))
            held = time.perf_counter() - start
            copied = dict(snapshot.tensors())
            times.append([round(held, 3), round(time.perf_counter() - start, 3)])
        size = sum(t.numel() * t.element_size() for t in copied.values())
        want = {name: t.to(torch.bfloat16).cpu() for name, t in model.state_dict().items()}
        same = [bool((copied[n] == want[n]).all()) for n in copied if n in want]
        found[family] = {
            "gib": round(size / 2**30, 3),
            "seconds_that_hold_the_step_and_until_whole": times,
            "compared": len(same),
            "equal": all(same),
        }
        del model, copied, want, snapshot
        torch.cuda.empty_cache()
    return found


def case(way: str, shape: str, tokens: int, recompute: str) -> gpu_train.Case:
    return gpu_train.Case(way, shape, tokens, False, recompute, "cuda", 5, 2)


def train(way: str, shape: str, tokens: int, recompute: str) -> Callable[[torch.device], Found]:
    return lambda _: gpu_train.work(case(way, shape, tokens, recompute))


def profile(gpu: torch.device) -> Found:
    """One step of the 4B shape: kernels by time, and the time in which none ran."""
    one = case("gradus compiled", "4B", 16384, "full")
    with join_world(gpu) as world:
        model = gpu_train.build_model(one, gpu, ATTENTION_NAME)
        run = gpu_train.gradus_step(one, model, world)
        for number in range(3):
            run(number, gpu_train.batch(one, number))
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as seen:
            start = time.perf_counter()
            run(3, gpu_train.batch(one, 3))
            torch.cuda.synchronize()
            wall = time.perf_counter() - start
        rows = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in rows) / 1e6
    top = [[e.key[:90], round(e.self_device_time_total / 1e3, 2), e.count] for e in rows[:40]]
    return {"wall_s": wall, "busy_s": busy, "top_ms": top}


PARTS: dict[str, tuple[float, Callable[[torch.device], Found]]] = {
    "facts": (40, facts),
    "attention": (60, attention),
    "products": (40, products),
    "head": (90, head),
    "experts": (40, experts),
    "families": (300, families),
    "states": (90, states),
    "step": (120, step),
    "step plain": (60, step_plain),
    "offload": (30, offload),
    "publish": (60, publish),
    "4B compiled": (90, train("gradus compiled", "4B", 16384, "full")),
    "profile": (90, profile),
    "4B plain": (90, train("gradus", "4B", 16384, "full")),
    "4B transformers": (90, train("transformers compiled", "4B", 16384, "full")),
    "1.7B none": (90, train("gradus compiled", "1.7B", 8192, "none")),
    "1.7B selective": (90, train("gradus compiled", "1.7B", 8192, "selective")),
    "1.7B plain": (90, train("gradus", "1.7B", 8192, "none")),
    "attention_fa4": (120, attention_fa4),
}


def in_a_process(name: str, out: Path) -> Found:
    """What a part found. No fork: packages of attention may start CUDA when they are imported,
    and nothing starts it twice."""
    seconds, _ = PARTS[name]
    answer = out / f"{name}.json"
    answer.unlink(missing_ok=True)
    words = [sys.executable, __file__, "--out", str(out), "--inside", name]
    try:
        with (out / f"{name}.log").open("w") as log:
            done = subprocess.run(words, stdout=log, stderr=log, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer in {seconds:g} s"}
    if not answer.exists():
        return {"failed": f"ended with {done.returncode} before it said anything"}
    found: Found = json.loads(answer.read_text())
    return found


def inside(name: str, out: Path) -> None:
    global OUT
    OUT = out
    torch.manual_seed(SEED)
    try:
        found = PARTS[name][1](torch.device("cuda", 0))
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {str(error)[:400]}"}
    (out / f"{name}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if options.inside:
        inside(options.inside, options.out)
        return
    if not torch.cuda.is_available():
        parser.error("no GPU here")
    options.out.mkdir(parents=True, exist_ok=True)
    report: Found = {}
    for name in options.parts or PARTS:
        start = time.monotonic()
        found = in_a_process(name, options.out)
        report[name] = {"seconds": round(time.monotonic() - start, 1), **found}
        print(json.dumps({"part": name, **report[name]}), flush=True)
        (options.out / "first_hour.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
