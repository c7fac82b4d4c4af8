"""TRL's side of `train_step_vs_trl.py`; runs in the benchmark's own virtual environment.

    python trl_train_step.py case.json

Prints one JSON object: seconds per step, peak memory. GRPOTrainer's own training_step does forward,
loss and backward; only the generation of rollouts is replaced by the given tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer


def reset_peak() -> int:
    """Forget the peak of this process's memory; the memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class FixedRollouts(GRPOTrainer):
    """GRPOTrainer that gets its rollouts from outside."""

    rollouts: dict[str, Any]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        return generation_batch


def pad(rows: list[list[int]], length: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for number, row in enumerate(rows):
        place = slice(length - len(row), length) if left else slice(0, len(row))
        ids[number, place] = torch.tensor(row)
        mask[number, place] = 1
    return ids, mask


def micro_batches(case: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """TRL pads every row to the longest of the batch, prompts left and completions right."""
    rows = case["rows"]
    prompts, completions = [r["prompt"] for r in rows], [r["completion"] for r in rows]
    prompt_ids, prompt_mask = pad(prompts, max(map(len, prompts)), left=True)
    completion_ids, completion_mask = pad(completions, max(map(len, completions)), left=False)
    advantages = torch.tensor([r["advantage"] for r in rows])
    parts = []
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        parts.append(
            {
                "prompt_ids": prompt_ids[part],
                "prompt_mask": prompt_mask[part],
                "completion_ids": completion_ids[part],
                "completion_mask": completion_mask[part],
                "advantages": advantages[part],
                "num_items_in_batch": completion_mask.sum(),
            }
        )
    return parts


def build_trainer(case: dict[str, Any], folder: str) -> FixedRollouts:
    arguments = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=case["micro_batch_rows"],
        gradient_accumulation_steps=len(case["rows"]) // case["micro_batch_rows"],
        num_generations=8,
        max_completion_length=128,
        learning_rate=1e-4,
        bf16=case["dtype"] == "bfloat16",
        gradient_checkpointing=False,  # it only costs time at this size
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**case["model"]))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(case["tokenizer"])
    return FixedRollouts(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
        processing_class=tokenizer,
    )


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    trainer = build_trainer(case, case["folder"])
    trainer.create_optimizer()
    model, optimizer = trainer.model, trainer.optimizer
    model.train()
    parts = micro_batches(case, case["micro_batch_rows"])
    trainer.current_gradient_accumulation_steps = len(parts)
    before = reset_peak()
    seconds = []
    for _ in range(case["warm_up"] + case["steps"]):
        begun = time.perf_counter()
        for part in parts:
            loss = trainer.training_step(model, part, part["num_items_in_batch"])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begun)
        assert torch.isfinite(loss)
    peak = status_bytes("VmHWM")
    result = {
        "seconds": seconds[case["warm_up"] :],
        "peak_bytes": peak,
        "peak_over_start_bytes": peak - before,
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
