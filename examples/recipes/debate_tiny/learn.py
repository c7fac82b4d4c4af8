"""Debate, consultancy and plain answers on two cores: a warm-up, then reinforcement learning.

    python examples/recipes/debate_tiny/learn.py selfplay             # about three minutes
    python examples/recipes/debate_tiny/learn.py opponent --seed 1
    python examples/recipes/debate_tiny/learn.py consultancy rlvr

All four ask for the larger of two digits. The warm-up teaches the form, and no more: a third of its
replies cannot be read, and of the others six in ten have the right letter. Results lie in
runs/tiny/debate-<seed>: `start`, `warm-up`, and one folder per run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from models import served_models

from gradus.testing.tiny_model import build_tiny_model
from gradus_debate.questions import build_questions

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
sys.path.insert(0, str(HERE.parent))

from tiny import run  # noqa: E402

RUNS = ("selfplay", "opponent", "consultancy", "rlvr")
SERVED = {"selfplay": ["judge"], "opponent": ["judge", "opponent"], "consultancy": ["judge"]}
"""Run → the roles that another model plays."""
NUM_CONVERSATIONS = 10_240
UNREADABLE, RIGHT = 0.35, 0.6


def demonstrations(num: int, *, seed: int) -> list[dict[str, Any]]:
    """Conversations in the form of the packs; half of them have an assigned letter."""
    draw = random.Random(f"debate demonstrations {seed}")
    return [
        _conversation(made.question, made.options, made.answer, draw)
        for made in build_questions(num, seed=seed + 1000, kinds=["digits"])
    ]


def _conversation(
    question: str, options: tuple[str, str], answer: str, draw: random.Random
) -> dict[str, Any]:
    prompt = "\n".join([question, "", *(f"{a}) {b}" for a, b in zip("AB", options, strict=True))])
    if draw.random() < 0.5:
        answer = draw.choice("AB")
        prompt += f" {answer}"
    letter = answer if draw.random() < RIGHT else "BA"["AB".index(answer)]
    # An opened block that never ends: nobody can tell what of it is public.
    reply = f"<thinking>{letter}" if draw.random() < UNREADABLE else f"<answer>{letter}</answer>"
    # The environment joins what is new in a turn by a blank line: the question and the instruction.
    texts = (("system", "d"), ("user", f"{prompt}\n\n?"), ("assistant", reply))
    return {"messages": [{"role": role, "content": text} for role, text in texts]}


def prepare(start: Path, *, seed: int) -> None:
    """Write `model/` and `conversations.jsonl` into `start`."""
    build_tiny_model(start / "model", seed=seed)
    lines = [json.dumps(row) + "\n" for row in demonstrations(NUM_CONVERSATIONS, seed=seed)]
    (start / "conversations.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Prepare and warm up once per seed, then train."""
    parser = argparse.ArgumentParser(description="Train the tiny model by debate.")
    parser.add_argument("runs", nargs="+", choices=RUNS)
    parser.add_argument("--seed", type=int, default=0)
    arguments, flags = parser.parse_known_args()
    folder = Path("runs/tiny") / f"debate-{arguments.seed}"
    configs = HERE.relative_to(REPOSITORY)
    same = ["--output-dir", str(folder), "--seed", str(arguments.seed), "--clean"]
    if not (REPOSITORY / folder / "warm-up" / "model").exists():
        prepare(REPOSITORY / folder / "start", seed=arguments.seed)
        data = ["--data.path", f"{folder}/start/conversations.jsonl"]
        start = ["--model.name", f"{folder}/start/model"]
        run(["sft", "@", f"{configs}/sft.toml", *same, *data, *start])
    with served_models() as url:
        for name in arguments.runs:
            files = ["@", f"{configs}/base.toml", "@", f"{configs}/{name}.toml"]
            more = ["--name", name, "--model.name", f"{folder}/warm-up/model"]
            for role in SERVED.get(name, []):
                more += [f"--orchestrator.train.env.0.agents.{role}.base-url", url]
            run(["rl", *files, *same, *more, *flags])


if __name__ == "__main__":
    main()
