"""What the algorithm runs start from: one tiny model, and conversations that show each task's form.

    python examples/algorithms/prepare.py runs/algorithms/start

The conversations of `kuhn_poker` play poorly and those of `word_lookup` come from dictionaries
of their own, so the form is learned and the skill is not. Those of `reverse_text` show three
behaviours, of which reversing is the rarest.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from gradus.testing.tiny_model import build_tiny_model
from kuhn_poker import game
from reverse_text.words import generate_texts
from word_lookup import entries

Row = dict[str, Any]


def reverse_text_rows(num: int, *, seed: int) -> list[Row]:
    """One word in; its reverse, itself, or its first letter out."""
    draw = random.Random(seed)
    words = generate_texts(60, seed=seed + 1, min_words=1, max_words=1)
    rows = []
    for _ in range(num):
        word = draw.choice(words)
        reply = draw.choice((word[::-1], word, word, word[0]))
        rows.append(_row(word, reply))
    return rows


def kuhn_poker_rows(num: int, *, seed: int) -> list[Row]:
    """One player's turns of a poorly played game."""
    return [
        {
            "messages": [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
        }
        for turns in game.demonstrations(num, seed=seed)
    ]


def word_lookup_rows(num: int, *, seed: int) -> list[Row]:
    """A key, the tool call, its output, and the reply."""
    return entries.demonstrations(num, seed=seed)


TASKS = {
    "reverse_text": (reverse_text_rows, 9_600),
    "kuhn_poker": (kuhn_poker_rows, 3_200),
    "word_lookup": (word_lookup_rows, 2_400),
}
"""Task → its conversations and how many of them."""


def _row(question: str, reply: str) -> Row:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"messages": messages}


def prepare(directory: Path, *, seed: int = 0) -> None:
    """Write `model/` and one `<task>.jsonl` per task into `directory`."""
    build_tiny_model(directory / "model", seed=seed)
    for task, (rows, num) in TASKS.items():
        lines = [json.dumps(row) + "\n" for row in rows(num, seed=seed)]
        (directory / f"{task}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Parse the command line and prepare."""
    parser = argparse.ArgumentParser(description="Build the tiny model and its conversations.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/algorithms/start"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.directory, seed=arguments.seed)
    print(f"model and conversations are in {arguments.directory}")


if __name__ == "__main__":
    main()
