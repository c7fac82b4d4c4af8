"""What the algorithm runs start from: one tiny model, and conversations that show each task's form.

    python examples/algorithms/prepare.py runs/algorithms/start

The conversations of `kuhn_poker` play poorly and those of `word_lookup` come from dictionaries
of their own, so the form is learned and the skill is not. Those of `reverse_text` show three
behaviours, of which reversing is the rarest; those of `teacher_text` only reverse. In half of
`hinted_text` a system message shows the answer, as `opsd` shows it, and the reply follows it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from gradus.config import OpsdConfig
from gradus.testing.tiny_model import build_tiny_model
from gradus_forth_lang.demonstrations import demonstrations as forth_demonstrations
from gradus_kuhn_poker import game
from gradus_reverse_text.words import generate_texts
from gradus_word_lookup import entries

Row = dict[str, Any]

_NUM_WORDS = 150
"""Of about 180 in the train split."""
_NUM_KEYS = 4
"""As many as the dictionary of rl_word_lookup.toml has."""
_DECLARES_TOOL = 6
"""One conversation of forth-lang in so many declares its tool."""


def reverse_text_rows(num: int, *, seed: int) -> list[Row]:
    """One word in; its reverse, itself, or its first letter out."""
    draw = random.Random(seed)
    words = generate_texts(_NUM_WORDS, seed=seed + 1, min_words=1, max_words=1)
    return [_row(word := draw.choice(words), _mixed_reply(word, draw)) for _ in range(num)]


def teacher_text_rows(num: int, *, seed: int) -> list[Row]:
    """One word in, its reverse out."""
    draw = random.Random(seed)
    words = generate_texts(_NUM_WORDS, seed=seed + 1, min_words=1, max_words=1)
    return [_row(word := draw.choice(words), word[::-1]) for _ in range(num)]


def hinted_text_rows(num: int, *, seed: int) -> list[Row]:
    """As `reverse_text_rows`, but every second row shows the reverse first and then repeats it."""
    draw = random.Random(seed)
    words = generate_texts(_NUM_WORDS, seed=seed + 1, min_words=1, max_words=1)
    rows = []
    for number in range(num):
        word = draw.choice(words)
        answer = word[::-1]
        hint = OpsdConfig().hint.replace("{demonstration}", answer)
        is_hinted = number % 2 == 0
        rows.append(_row(word, answer, hint) if is_hinted else _row(word, _mixed_reply(word, draw)))
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
    return entries.demonstrations(num, seed=seed, num_keys=_NUM_KEYS)


def forth_lang_rows(num: int, *, seed: int) -> list[Row]:
    """A formula and a program that is handed in; most programs only push its numbers.

    Five rows in six leave out the declared tool, which is most of a row's tokens.
    """
    rows = forth_demonstrations(num, seed=seed + 1, careless_share=0.65, tells_results=False)
    for number, row in enumerate(rows):
        if number % _DECLARES_TOOL:
            del row["tools"]
    return rows


TASKS = {
    "reverse_text": (reverse_text_rows, 12_800),
    "teacher_text": (teacher_text_rows, 6_400),
    "hinted_text": (hinted_text_rows, 12_800),
    "kuhn_poker": (kuhn_poker_rows, 6_400),
    "word_lookup": (word_lookup_rows, 2_400),
    "forth_lang": (forth_lang_rows, 16_000),
}
"""Task → its conversations and how many of them."""


def _mixed_reply(word: str, draw: random.Random) -> str:
    """Its reverse, itself twice as often, or its first letter."""
    return draw.choice((word[::-1], word, word, word[0]))


def _row(question: str, reply: str, hint: str | None = None) -> Row:
    system = [] if hint is None else [{"role": "system", "content": hint}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return {"messages": [*system, *messages]}


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
