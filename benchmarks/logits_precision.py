"""What float32 logits cost and save in bfloat16: time of forward and backward, error of logprobs.

Both forms run in turns in one process on one thread; the medians are of the CPU time that they
took, which a busy machine changes little. The error is that of the
logprobs against float64 on the same bfloat16 inputs, whose logits reach about ±10.

    python benchmarks/logits_precision.py --output benchmarks/results/logits_precision.json

`--without-bfloat16` measures a processor without instructions for bfloat16: the script starts
itself again with oneDNN held back from them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradus.trainer.model.kernels import Platform

SHAPES = ((512, 576, 49_152), (512, 1024, 151_936))
"""Tokens, hidden size and vocabulary: the output layers of SmolLM2-135M and Qwen3-0.6B."""
FORMS = {"rounded": False, "float32": True}


def measure(
    tokens: int, hidden_size: int, vocabulary: int, repeats: int, processor: Platform
) -> dict[str, Any]:
    """Seconds and errors of both forms."""
    import torch

    from gradus.trainer.logprobs import LogitRule, chosen_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, hidden_size).mul_(2.5 / hidden_size**0.5).bfloat16()
    weight.requires_grad_()
    ones = torch.ones(tokens)
    with torch.no_grad():
        logits = hidden.double() @ weight.double().T
        labels = torch.distributions.Categorical(logits=logits).sample()
        logits = logits[:64]
        exact = logits.log_softmax(-1).gather(1, labels[:64, None]).squeeze(1)
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    errors: dict[str, float] = {}
    for number in range(repeats + 1):
        for name, is_exact in FORMS.items():
            hidden.grad = weight.grad = None
            start = time.process_time()
            logprobs, _ = chosen_logprobs(
                hidden, weight, labels, ones, rule=LogitRule(is_exact), platform=processor
            )
            logprobs.sum().backward()
            if number:  # The first call of a kernel also prepares it.
                seconds[name].append(time.process_time() - start)
            errors[name] = float((logprobs[:64].detach().double() - exact).abs().mean())
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "tokens": tokens,
        "hidden": hidden_size,
        "vocabulary": vocabulary,
        "largest_logit": float(logits.abs().max()),
        "seconds": medians,
        "time_ratio": medians["float32"] / medians["rounded"],
        "mean_error_nats": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--without-bfloat16", action="store_true")
    arguments = parser.parse_args()
    if arguments.without_bfloat16 and "ONEDNN_MAX_CPU_ISA" not in os.environ:
        held_back = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
        subprocess.run([sys.executable, *sys.argv], env=held_back, check=True)
        return
    from gradus.trainer.model.cpu.head import has_bfloat16_instructions
    from gradus.trainer.model.kernels import DeviceFacts, Platform

    has_instructions = has_bfloat16_instructions() and not arguments.without_bfloat16
    processor = Platform(DeviceFacts("cpu", has_bfloat16=has_instructions))
    found = {
        "machine": platform.processor() or platform.machine(),
        "has_bfloat16_instructions": has_instructions,
        "cases": [measure(*shape, arguments.repeats, processor) for shape in SHAPES],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
