"""TRL's side of `whole_step.py`; runs in an environment of its own.

    python trl_whole_step.py case.json

GRPOTrainer as it is: its own generation, its own tool loop, its own training loop. Prints one JSON
object: seconds and core-seconds per step, and what was generated.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


def count_next(k: str) -> str:
    """The next digit.

    Args:
        k: A digit.
    """
    return str(max(0, int(k) - 1)) if k.isdigit() else "0"


# The model learned to call a tool whose declaration does not say what it returns.
del count_next.__annotations__["return"]


def similarity(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The reward of the task set reverse-text."""
    replies = [completion[-1]["content"] for completion in completions]
    return [
        difflib.SequenceMatcher(None, reply.strip(), wanted.strip(), autojunk=False).ratio()
        for reply, wanted in zip(replies, answer, strict=True)
    ]


def drawn(completions: list[Any], **_: Any) -> list[float]:
    """A random reward, as in the task of the tool."""
    return [random.random() for _ in completions]


class StepTimes(TrainerCallback):
    """When each step ended, on the clock and in this process's CPU time."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, float]] = []
        self.logged: dict[str, list[float]] = {}
        self.trainer: GRPOTrainer | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._note()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._note()

    def _note(self) -> None:
        self.ended.append((time.perf_counter(), time.process_time()))
        if self.trainer is not None:
            # The trainer forgets them when the training ends.
            self.logged = {name: list(v) for name, v in self.trainer._metrics["train"].items()}


def build_trainer(case: dict[str, Any], times: StepTimes) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    if case["has_tool"]:
        tokenizer.response_template = qwen3_template
    generation = {"max_new_tokens": case["turn_tokens"]}
    if case["is_exact"]:
        generation["min_new_tokens"] = case["turn_tokens"]
    weights = "bfloat16" if case["trl_dtype"] == "bfloat16 weights" else "float32"
    arguments = GRPOConfig(
        output_dir=case["folder"],
        model_init_kwargs={"dtype": weights},
        max_steps=case["warm_up"] + case["steps"],
        per_device_train_batch_size=case["micro_batch_rows"],
        gradient_accumulation_steps=case["episodes"] // case["micro_batch_rows"],
        num_generations=case["group_size"],
        max_completion_length=case["episode_tokens"],
        generation_kwargs=generation,
        temperature=1.0,
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant",
        bf16=case["trl_dtype"] != "float32",
        gradient_checkpointing=False,  # it only costs time at this size
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [
        {"prompt": [{"role": "user", "content": row["text"]}], "answer": row["answer"]}
        for row in case["rows"]
    ]
    return GRPOTrainer(
        model=case["model"],
        reward_funcs=drawn if case["has_tool"] else similarity,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[count_next] if case["has_tool"] else None,
        callbacks=[times],
    )


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    times = StepTimes()
    trainer = times.trainer = build_trainer(case, times)
    trainer.train()
    measured = times.ended[case["warm_up"] :]
    logged = times.logged
    result = {
        "seconds": [b[0] - a[0] for a, b in itertools.pairwise(measured)],
        "core_seconds": {"all": (measured[-1][1] - measured[0][1]) / (len(measured) - 1)},
        "sampled_and_tool_tokens": logged["completions/mean_length"][-1],
        "model_calls": 1 + (logged.get("tools/call_frequency") or [0])[-1],
        "whole_core_seconds": time.process_time(),
        "rewards": [round(float(value), 3) for value in logged["reward"]],
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
