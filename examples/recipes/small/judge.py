"""A judge and an opponent by rule, behind an endpoint, for trying debates without a second model.

    python examples/recipes/small/judge.py --port 8077

The judge knows the generated items: the debater with the right letter wins, then the one with any
letter, then the shorter reply. It believes a consultant who names a letter. Asked for an argument
instead of a judgement, it names a letter that depends on the question alone.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from aiohttp import web

from gradus_gpqa.items import generate_items

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rule_models import Said, build_app

LETTERS = "ABCD"
_ANSWER = re.compile(r"<answer> ?([A-D]) ?</answer>", re.IGNORECASE)
_SPEECH = re.compile(r"^(debater_a|debater_b|consultant) says \(\w+\):\n", re.MULTILINE)


@cache
def right_letters(seed: int = 0) -> dict[str, str]:
    """Question → right letter, for the items that the small recipes can ask."""
    return {item.question: item.answer for item in generate_items(3000, seed=seed)}


def reply_to(messages: list[str]) -> str:
    """What the judge, or the opponent, answers to a conversation.

    >>> reply_to(["debater_a says (x):\\n<answer>B</answer>", "Who won?"])
    '<decision>debater_a</decision>'
    """
    told = "\n\n".join(messages)
    last = messages[-1] if messages else ""
    if "Who won?" in last:
        return f"<decision>{winner(told)}</decision>"
    if "Which answer is right?" in last:
        said = speeches(told).get("consultant", "")
        return f"<answer>{letter_of(said) or LETTERS[len(said) % len(LETTERS)]}</answer>"
    question = next((q for q in right_letters() if q in told), told[:200])
    return f"<answer>{LETTERS[hashlib.sha256(question.encode()).digest()[0] % 4]}</answer>"


def winner(told: str) -> str:
    """The debater whose last speech is better; the first by name when they are equal."""
    right = next((letter for q, letter in right_letters().items() if q in told), None)

    def quality(speech: str) -> tuple[bool, bool, int]:
        letter = letter_of(speech)
        return letter is not None and letter == right, letter is not None, -len(speech)

    said = speeches(told)
    return max(("debater_a", "debater_b"), key=lambda name: quality(said.get(name, "")))


def speeches(told: str) -> dict[str, str]:
    """What each speaker said last."""
    parts = _SPEECH.split(told)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def letter_of(text: str) -> str | None:
    """The last letter between answer tags."""
    found = _ANSWER.findall(text)
    return found[-1].upper() if found else None


def answer(said: Sequence[Said]) -> str:
    """What is answered to a conversation; its own earlier replies count for nothing."""
    return reply_to([text for role, text in said if role == "user"])


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Serve a judge and an opponent by rule.")
    parser.add_argument("--port", type=int, default=8077)
    port = parser.parse_args().port
    right_letters()
    print(f"judging at http://127.0.0.1:{port}/v1", flush=True)
    web.run_app(build_app({"scripted": answer}), host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
