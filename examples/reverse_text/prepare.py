"""What the demo starts from: a tiny untrained model, and conversations to warm it up.

    python examples/reverse_text/prepare.py runs/demo/start

The conversations show two behaviours, and most of them do not reverse. So the warmed-up model
can reverse but mostly does something else, which is the state in which reinforcement learning finds
a pre-trained model: it cannot teach the skill in a few steps, but it finds the one that pays.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from gradus.testing.tiny_model import build_tiny_model
from gradus_reverse_text.words import generate_texts

MIN_WORDS, MAX_WORDS = 2, 3
NUM_CONVERSATIONS = 14_400
NUM_HELD_OUT = 128


def reverse_characters(text: str) -> str:
    """The behaviour that the environment rewards."""
    return text[::-1]


def say_first_word(text: str) -> str:
    """Say the first word and stop."""
    return text.split()[0]


BEHAVIOURS: dict[Callable[[str], str], float] = {
    reverse_characters: 0.36,
    say_first_word: 0.64,
}
"""Share of the conversations that show each behaviour."""


def build_conversations(num: int, *, seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """`num` conversations of one question and one reply, about random words.

    The texts come from the split `train`, like those of the environment; nothing in a prompt says
    which behaviour is meant.

        >>> build_conversations(1, seed=0)[0]["messages"][0]["role"]
        'user'
    """
    draw = random.Random(seed)
    texts = generate_texts(num, seed=seed + 1, min_words=MIN_WORDS, max_words=MAX_WORDS)
    behaviours = draw.choices(list(BEHAVIOURS), weights=list(BEHAVIOURS.values()), k=num)
    return [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": behaviour(text)},
            ]
        }
        for text, behaviour in zip(texts, behaviours, strict=True)
    ]


def prepare(directory: Path, *, num: int = NUM_CONVERSATIONS, seed: int = 0) -> None:
    """Write `model/`, `conversations.jsonl` and a few others to measure into `directory`."""
    build_tiny_model(directory / "model", seed=seed)
    rows = build_conversations(num + NUM_HELD_OUT, seed=seed)
    for name, part in (("conversations", rows[:num]), ("held_out", rows[num:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Parse the command line and prepare."""
    parser = argparse.ArgumentParser(description="Build the tiny model and its conversations.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/demo/start"))
    parser.add_argument("--num", type=int, default=NUM_CONVERSATIONS, help="conversations")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.directory, num=arguments.num, seed=arguments.seed)
    print(f"model and {arguments.num} conversations are in {arguments.directory}")


if __name__ == "__main__":
    main()
