"""Peak memory and time of logprobs with their gradient: the plain form against blocks.

Each case runs in a process of its own. Peak memory is the highest resident size during forward and
backward, less the resident size before, so the gradients count and the inputs do not.

    python benchmarks/logprobs_memory.py --output benchmarks/results/logprobs_memory.json

The second table is a whole model step, with and without activation checkpointing. `--parts`,
`--forms` and `--tokens` choose what is measured; other rows of the stored file are kept. A plain
case that does not fit into the free memory is named with what it would need, and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
"""Of Qwen3."""
TOKENS = (4096, 16384, 65536)
PLAIN_BYTES_PER_LOGIT = 20
"""Measured at 4k tokens; a plain case runs only where this fits."""
STEP_VOCABULARY, STEP_HIDDEN, STEP_LAYERS = 32_000, 128, 4


@dataclass(frozen=True)
class Case:
    """One measurement."""

    part: str
    """`head` (output layer alone) or `step` (a model of four layers with it)."""
    form: str
    """`plain` or `blocks`."""
    tokens: int
    vocabulary: int
    hidden: int
    checkpointing: bool = False


def resident_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measured(run: Callable[[], None]) -> dict[str, float]:
    """Peak memory above the present one, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts again from here.
    before = resident_bytes("VmRSS")
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    return {"peak_mib": (resident_bytes("VmHWM") - before) / 2**20, "seconds": seconds}


def scores(form: str, hidden: Any, weight: Any, labels: Any) -> Any:
    """Logprobs and entropies at temperature 1, by one of the forms."""
    import torch

    from gradus.trainer.logprobs import chosen_logprobs

    if form == "blocks":
        return chosen_logprobs(hidden, weight, labels, torch.ones(len(labels)))
    logits = torch.nn.functional.linear(hidden, weight).float() / torch.ones(len(labels), 1)
    log_p = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropies = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), entropies


def head_case(case: Case) -> dict[str, float]:
    """The output layer alone, in bfloat16."""
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(case.tokens, case.hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(case.vocabulary, case.hidden, dtype=torch.bfloat16) / case.hidden**0.5
    weight.requires_grad_()
    labels = torch.randint(0, case.vocabulary, (case.tokens,))
    scores(case.form, hidden[:64], weight[:512], labels[:64] % 512)[0].sum().backward()
    hidden.grad = weight.grad = None
    return measured(lambda: scores(case.form, hidden, weight, labels)[0].sum().backward())


def step_case(case: Case) -> dict[str, float]:
    """Forward and backward of a small Qwen3 on samples of 256 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=STEP_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=case.hidden // 4,
    )
    model = Qwen3Model(config).bfloat16().train()
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    weight = model.embed_tokens.weight
    token_ids = torch.randint(0, case.vocabulary, (case.tokens // 256, 256))

    def run() -> None:
        states = model(token_ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        scores(case.form, states, weight, token_ids[:, 1:].flatten())[0].sum().backward()

    return measured(run)


def cases(chosen: argparse.Namespace) -> list[Case]:
    """What was asked for of both tables."""
    heads = [
        Case("head", form, tokens, VOCABULARY, 64)
        for tokens in TOKENS
        for form in ("plain", "blocks")
    ]
    steps = [
        Case("step", form, tokens, STEP_VOCABULARY, STEP_HIDDEN, checkpointing)
        for tokens in TOKENS
        for form in ("plain", "blocks")
        for checkpointing in (False, True)
    ]
    return [
        case
        for case in heads + steps
        if case.part in chosen.parts and case.form in chosen.forms and case.tokens in chosen.tokens
    ]


def missing_bytes(case: Case) -> int:
    """How much more memory a plain case needs than is free; 0 or less when it fits."""
    if case.form == "blocks":
        return 0
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return case.tokens * case.vocabulary * PLAIN_BYTES_PER_LOGIT - available


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a stored row measured."""
    return (row["part"], TOKENS.index(row["tokens"]), row["form"] != "plain", row["checkpointing"])


def in_own_process(case: Case) -> dict[str, Any]:
    """Run one case in a fresh interpreter."""
    words = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return asdict(case) | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="run this one here; the other processes use it")
    parser.add_argument("--parts", nargs="+", default=["head", "step"])
    parser.add_argument("--forms", nargs="+", default=["plain", "blocks"])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    if chosen.case:
        case = Case(**json.loads(chosen.case))
        print(json.dumps({"head": head_case, "step": step_case}[case.part](case)))
        return
    before = []
    if chosen.output is not None and chosen.output.exists():
        before = json.loads(chosen.output.read_text())["rows"]
    rows = {key(row): row for row in before}
    for case in cases(chosen):
        if missing_bytes(case) > 0:
            needed = case.tokens * case.vocabulary * PLAIN_BYTES_PER_LOGIT / 2**30
            print(f"{case.part} {case.form} {case.tokens} tokens needs about {needed:.0f} GiB")
            continue
        row = in_own_process(case)
        rows[key(row)] = row
        print(
            f"{row['part']} {row['form']:<6} {row['tokens']:>6} tokens  checkpointing "
            f"{row['checkpointing']!s:<5}  {row['peak_mib']:>8.0f} MiB  {row['seconds']:.1f} s",
            flush=True,
        )
        if chosen.output is not None:
            record = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
            stored = record | {"rows": [rows[each] for each in sorted(rows)]}
            chosen.output.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
