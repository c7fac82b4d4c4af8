"""Multi-turn games that the tiny model learns on two cores: a warm-up, then reinforcement learning.

    python examples/recipes/tiny.py alphabet_sort            # about three minutes
    python examples/recipes/tiny.py alphabet_sort --seed 1   # another model, warm-up and run

The warm-up shows several behaviours and does not say which one pays. Results lie in
runs/tiny/<game>-<seed>: `start`, `warm-up` and `rl`, whose reward is drawn at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradus.testing.tiny_model import build_tiny_model
from gradus_alphabet_sort import rules as alphabet_sort
from gradus_wordle import rules as wordle
from gradus_wordle.words import own_words

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "reverse_text"))

from curve import draw_curve, read_curve  # noqa: E402

Turns = list[list[tuple[str, str]]]


@dataclass(frozen=True)
class Game:
    """Where a game's demonstrations come from, and how many its warm-up needs."""

    demonstrations: Callable[..., Turns]
    num: int


GAMES = {
    "alphabet_sort": Game(alphabet_sort.demonstrations, 12_800),
    # The same words and turns as in wordle_tiny/rl.toml.
    "wordle": Game(partial(wordle.demonstrations, words=own_words(3)[:8], max_turns=4), 12_800),
}


def prepare(name: str, start: Path, *, seed: int) -> None:
    """Write `model/` and `conversations.jsonl` into `start`."""
    build_tiny_model(start / "model", seed=seed)
    game = GAMES[name]
    with (start / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for turns in game.demonstrations(game.num, seed=seed):
            messages = [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def run(command: list[str]) -> None:
    """Run one command of gradus in the repository; refuses a failure."""
    print("\n==> gradus", *command, flush=True)
    started = time.perf_counter()
    words = [sys.executable, "-m", "gradus.cli.main", *command]
    code = subprocess.run(words, cwd=REPOSITORY, check=False).returncode
    if code:
        raise SystemExit(f"recipe: ended with code {code}; its own words are above")
    print(f"    {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    """Prepare, warm up, train, and draw the reward."""
    parser = argparse.ArgumentParser(description="Train the tiny model on a multi-turn game.")
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--seed", type=int, default=0)
    arguments, flags = parser.parse_known_args()
    folder = Path("runs/tiny") / f"{arguments.game}-{arguments.seed}"
    configs = HERE.relative_to(REPOSITORY) / f"{arguments.game}_tiny"
    prepare(arguments.game, REPOSITORY / folder / "start", seed=arguments.seed)
    same = ["--output-dir", str(folder), "--seed", str(arguments.seed), "--clean"]
    data = ["--data.path", f"{folder}/start/conversations.jsonl"]
    start = ["--model.name", f"{folder}/start/model"]
    run(["sft", "@", f"{configs}/sft.toml", *same, *data, *start])
    warm = ["--model.name", f"{folder}/warm-up/model"]
    run(["rl", "@", f"{configs}/rl.toml", *same, *warm, *flags])
    curve = read_curve(REPOSITORY / folder / "rl" / "metrics.jsonl")
    print("\nmean reward per step\n")
    print(*draw_curve(curve.values), sep="\n")
    print(f"\nreward {curve.first:.3f} at the first step, {curve.last:.3f} at the end")


if __name__ == "__main__":
    main()
