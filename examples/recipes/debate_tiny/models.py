"""The models that do not learn: a judge, a picker and an opponent, by rules, as an endpoint.

They read the larger digit off the options, so they know what the policy has to find out. Where
knowing does not settle it, a hash of the question does, so that all runs meet the same opposition.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rule_models import Rule, build_app

_OPTION = re.compile(r"^([AB])\) (\d)", re.MULTILINE)
_SAID = re.compile(
    r"^\[(debater_[ab]|consultant), propose\]\s*(?:<said \w+>\s*)?(?:<answer>([AB])</answer>)?",
    re.MULTILINE,
)
OPPONENT_SKILL = 0.6
"""Share of the questions on which the opponent gives the right letter."""


def judged(text: str) -> str:
    """The debater with the right letter; a hash where both have it, a tie where none has."""
    right, said = right_letter(text), said_letters(text)
    winners = sorted(name for name, letter in said.items() if letter == right)
    winner = winners[int(_coin(text) * len(winners))] if winners else "tie"
    return f"<decision>{winner}</decision>"


def picked(text: str) -> str:
    """The consultant's letter when it is right, and in half of the other cases."""
    right, said = right_letter(text), said_letters(text).get("consultant")
    if said is None:
        return f"<answer>{'AB'[int(_coin(text) * 2)]}</answer>"
    return f"<answer>{said if said == right or _coin(text) < 0.5 else right}</answer>"


def opposed(text: str) -> str:
    """The right letter, or on some questions the wrong one."""
    right = right_letter(text)
    is_right = _coin(text) < OPPONENT_SKILL
    return f"<answer>{right if is_right else 'BA'['AB'.index(right)]}</answer>"


MODELS = {"judge": judged, "picker": picked, "opponent": opposed}


def right_letter(text: str) -> str:
    """The option with the larger digit."""
    options = {letter: int(digit) for letter, digit in _OPTION.findall(text)}
    return max(options, key=lambda letter: options[letter])


def said_letters(text: str) -> dict[str, str]:
    """Member → its letter, for those that gave one."""
    return {name: letter for name, letter in _SAID.findall(text) if letter}


def _coin(text: str) -> float:
    question = "".join(f"{letter}{digit}" for letter, digit in _OPTION.findall(text))
    return hashlib.sha256(question.encode()).digest()[0] / 256


def _of_all(rule: Callable[[str], str]) -> Rule:
    """A rule that reads all messages as one text."""
    return lambda said: rule("\n".join(text for _, text in said))


@contextmanager
def served_models() -> Iterator[str]:
    """The base URL while the models are served, on loopback and a port that the system chooses."""
    loop = asyncio.new_event_loop()
    app = build_app({name: _of_all(rule) for name, rule in MODELS.items()})
    runner = web.AppRunner(app, access_log=None)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
