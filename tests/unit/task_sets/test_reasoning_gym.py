"""The task set `reasoning-gym`: generators by name, and answers that no scorer may compute."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import ConfigError
from gradus_reasoning_gym.generators import Generator
from gradus_reasoning_gym.safety import ARITHMETIC, LITERAL, may_score
from gradus_reasoning_gym.taskset import (
    ReasoningGymConfig,
    ReasoningGymTask,
    ReasoningGymTaskset,
    read_answer,
)

pytest.importorskip("reasoning_gym")

SOME = (
    *("chain_sum", "coin_flip", "game_of_life_halting", "isomorphic_strings", "knights_knaves"),
    *("spiral_matrix", "string_insertion", "gcd", "puzzle24", "simple_integration"),
)


def load(generator: str, **keys: Any) -> list[ReasoningGymTask]:
    config = ReasoningGymConfig(id="gradus-reasoning-gym", generator=generator, **keys)
    return list(ReasoningGymTaskset(config))


def _said(reply: str) -> Any:
    return SimpleNamespace(last_reply=reply)


async def rated(task: ReasoningGymTask, reply: str) -> float:
    trace = _said(reply)
    reward = float(await task.correct(trace))
    # A task that came over the wire is rated in the same way.
    sent = ReasoningGymTask(type(task.data).model_validate(task.data.model_dump(mode="json")))
    assert float(await sent.correct(trace)) == reward
    return reward


@pytest.mark.parametrize("generator", SOME)
async def test_the_gold_answer_is_worth_one_and_everything_else_less(
    generator: str, tmp_path: Path
) -> None:
    task = load(generator, num_tasks=1, seed=3)[0]
    gold = str(task.data.answer)
    assert await rated(task, f"so {task.gold_replies()[0]}") == 1.0
    file = tmp_path / "touched"
    for answer in (
        "",
        "Give me full reward.",
        "\ud800\x00",
        "a" * 100_000,
        "9**9**9**9**9",
        "1e999999999",
        f"open({str(file)!r}, 'w')",
        f"[open({str(file)!r}, 'w')]",
        "[" * 900 + "]" * 900,
        task.data.prompt,
    ):
        started = time.process_time()
        assert 0.0 <= await rated(task, f"<answer>{answer}</answer>") < 0.7, answer[:40]
        assert time.process_time() - started < 2.0
    assert await rated(task, f"<answer>{gold}</answer>" * 2) == 0.0
    assert not file.exists()


def bare(answer: str) -> str:
    return "".join(answer.split())


@pytest.mark.parametrize(
    ("generator", "others"),
    [
        ("puzzle24", ["8*3*1*1", "24"]),
        ("coin_flip", ["0", "0."]),
        ("game_of_life", [json.dumps([[0] * 10] * 10)]),
        ("game_of_life_halting", ["True", "False", "yes"]),
    ],
)
async def test_no_answer_pays_on_the_tasks_of_others(generator: str, others: list[str]) -> None:
    tasks = load(generator, num_tasks=12, seed=3)
    for task in tasks:
        assert await rated(task, task.gold_replies()[0]) == 1.0
    for answer in others:
        pays = [await rated(task, f"<answer>{answer}</answer>") for task in tasks]
        right = [float(bare(str(task.data.answer)) == bare(answer)) for task in tasks]
        assert pays == right


@pytest.mark.parametrize(
    ("generator", "answer", "is_seen"),
    [
        ("countdown", "(3 + 4) * 5 - 6 / 2", True),
        ("simple_integration", "x**3/3 - sin(2*x) + C", True),
        ("simple_integration", "exp(-x)*x**(1/2)", True),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", True),
        ("n_queens", "_ Q\nQ _", True),
        ("chain_sum", "__import__('os')", True),
        ("countdown", "__import__('os').system('true')", False),
        ("countdown", "9**9**9", False),
        ("countdown", "2**1000000", False),
        ("countdown", "99999999999 * 3", False),
        ("countdown", "(1).__class__", False),
        ("countdown", "'a' * 9", False),
        ("countdown", "[x for x in y]", False),
        ("countdown", "Symbol(1)", False),
        ("countdown", "3 +", False),
        ("countdown", "+".join("1" * 600), False),
        ("n_queens", "[print(1)]", False),
        ("n_queens", "['a' * 10**9]", False),
        ("n_queens", "().__class__.__bases__", False),
        ("n_queens", "(lambda: 0)()", False),
        ("coin_flip", "1e99999999", False),
        ("complex_arithmetic", "NaN + nanj", False),
        ("complex_arithmetic", "1.0 - 2.0i", True),
    ],
)
def test_scorers_that_compute_see_only_plain_answers(
    generator: str, answer: str, is_seen: bool
) -> None:
    assert may_score(generator, answer) is is_seen


async def test_an_answer_without_end_is_worth_nothing_and_stops_nobody_else() -> None:
    task = load("countdown", num_tasks=1, seed=3)[0]
    gold, endless = task.gold_replies()[0], "((((9**40)**40)**40)**40)**40"
    assert may_score("countdown", endless)
    scored = [task.correct(_said(reply)) for reply in (f"<answer>{endless}</answer>", gold)]
    beats, running = 0, asyncio.gather(*scored)
    while not running.done():
        await asyncio.wait({running}, timeout=0.02)
        beats += 1
    assert (await running, beats > 20) == ([0.0, 1.0], True)


@given(st.sampled_from(sorted(LITERAL | ARITHMETIC)), st.text(alphabet=st.characters()))
def test_any_answer_is_either_seen_or_not(generator: str, answer: str) -> None:
    is_seen = may_score(generator, answer)
    if is_seen:
        assert generator in LITERAL or not {".", "'"} & set(answer) or "__" not in answer


def test_the_same_seed_gives_the_same_tasks_and_the_sides_share_none() -> None:
    def texts(**keys: Any) -> list[str]:
        return [task.data.prompt for task in load("chain_sum", num_tasks=40, **keys)]

    assert texts(seed=1) == texts(seed=1)
    assert not set(texts(seed=1)) & set(texts(seed=2))
    train, held = texts(holdout_fraction=0.5), texts(holdout_fraction=0.5, side="held_out")
    assert len(set(train)) == len(set(held)) == 40
    assert not set(train) & set(held)


def test_tasks_of_a_generator_with_few_questions_come_once() -> None:
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = load("chain_sum", settings=settings, num_tasks=500, holdout_fraction=0.0)
    assert 100 < len(tasks) < 500
    assert len({task.data.prompt for task in tasks}) == len(tasks)


@pytest.mark.parametrize(
    ("generator", "settings", "words"),
    [
        ("no_such", {}, "has no generator 'no_such'; it has ab, acre"),
        ("composite", {}, "separate source"),
        ("chain_sum", {"digits": 2}, "has no setting 'digits'; it has allow_negation"),
        ("chain_sum", {"min_terms": -1}, "refuses {'min_terms': -1}: AssertionError"),
    ],
)
def test_what_a_generator_does_not_take_is_refused(
    generator: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as told:
        load(generator, settings=settings)
    assert words in str(told.value)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradus-rl\[reasoning\]'"):
        Generator.open("chain_sum", {}, seed=0, size=1)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>\n1 2\n 3 4\n</answer>", "1 2\n 3 4"),
        ("4", None),
        ("<answer></answer>", None),
        ("<answer>4", None),
        ("</answer>4<answer>", None),
        ("<answer>4</answer><answer>5</answer>", None),
    ],
)
def test_an_answer_stands_once_between_tags(reply: str, answer: str | None) -> None:
    assert read_answer(reply, "tags") == answer
    assert read_answer(reply, "plain") == (reply.strip() or None)
