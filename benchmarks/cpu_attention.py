"""Exact attention of ragged samples on a CPU: four ways, side by side in one run.

    python benchmarks/cpu_attention.py --output benchmarks/results/cpu_attention.json

Forward and backward of one layer's attention, over samples longest first, as packing leaves them.
`gradus` is what the trainer does: short samples of like length share a rectangle (up to 256 tokens
in bfloat16, as matrix products; up to 128 in float32, in torch's kernel), longer ones go to torch's
kernel alone. `per sample` calls torch's kernel
for each sample; `mask` once over the whole row with a block-diagonal mask; `padded` once over all
samples padded to the longest. One thread; rounds of the ways alternate, and medians of their CPU
time are compared, which other work on the machine moves little.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gradus.trainer.model.attention import PackedLayout, packed_attention
from gradus.trainer.model.cpu.attention import count_padding

HEADS, KEY_HEADS, SIZE = 6, 2, 32
CPU = torch.device("cpu")
CASES = {
    "256 samples up to 32": (256, 32),
    "64 up to 128": (64, 128),
    "24 up to 512": (24, 512),
    "6 up to 2048": (6, 2048),
}
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def kernel(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    return scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


def gradus(lengths: Sequence[int]) -> Way:
    layout = PackedLayout.build(lengths, CPU)
    module = torch.nn.Identity()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended, _ = packed_attention(module, query, key, value, None, packed_layout=layout)
        return attended[0].transpose(0, 1)

    return attend


def per_sample(lengths: Sequence[int]) -> Way:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(t.split(list(lengths), dim=2) for t in (query, key, value)), strict=True)
        return torch.cat([kernel(*part, is_causal=True) for part in parts], dim=2)[0]

    return attend


def mask(lengths: Sequence[int]) -> Way:
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (sample[:, None] == sample[None]).tril()
    return lambda *tokens: kernel(*tokens, attn_mask=allowed)[0]


def padded(lengths: Sequence[int]) -> Way:
    longest = max(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    column = np.arange(longest)[None]
    shown = np.minimum(starts[:, None] + column, sum(lengths) - 1)
    rows = torch.from_numpy(shown)
    is_token = torch.from_numpy(column < np.array(lengths)[:, None])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        wide = [t[0][:, rows].transpose(0, 1) for t in (query, key, value)]
        return kernel(*wide, is_causal=True).transpose(1, 2)[is_token].transpose(0, 1)

    return attend


WAYS = {"gradus": gradus, "per sample": per_sample, "mask": mask, "padded": padded}


def measure(lengths: Sequence[int], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Median CPU milliseconds of forward and backward, by way; refuses ways that disagree."""
    torch.manual_seed(0)
    # As models hand them over and want them back: token by token, heads side by side.
    shapes = [(1, sum(lengths), heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    gradient = torch.randn(sum(lengths), HEADS, SIZE, dtype=dtype)
    ways = {name: build(lengths) for name, build in WAYS.items()}

    def attend(way: Way) -> Tensor:
        return way(*(t.transpose(1, 2) for t in leaves)).transpose(0, 1).contiguous()

    results = {name: attend(way).detach() for name, way in ways.items()}
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for name, result in results.items():
        torch.testing.assert_close(
            result, results["gradus"], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            if name == "mask" and number > 1:
                continue
            start = time.process_time()
            attend(way).backward(gradient)
            seconds[name].append(time.process_time() - start)
    # The first round warms caches.
    return {name: round(1000 * statistics.median(s[1:]), 2) for name, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    results = []
    for case, (count, longest) in CASES.items():
        lengths = sorted(random.integers(longest // 8, longest + 1, count).tolist(), reverse=True)
        for dtype in (torch.float32, torch.bfloat16):
            found = measure(lengths, dtype, options.rounds)
            share = count_padding(lengths, dtype) / sum(lengths)
            results.append(
                {"case": case, "dtype": str(dtype), "milliseconds": found}
                | {"gradus_padding_per_token": round(share, 3)}
            )
            print(f"{case:<22}{dtype!s:<16}{found}")
    machine = {"torch": torch.__version__, "cpu": platform.machine()}
    machine["threads"] = str(torch.get_num_threads())
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    main()
