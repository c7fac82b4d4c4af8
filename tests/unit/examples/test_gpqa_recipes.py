"""The three recipes over one set of questions differ only in where the reward comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradus.config import RunConfig, load_config
from gradus_gpqa.items import generate_items

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
COMPARED = ("gpqa_rlvr", "gpqa_debate_selfplay", "gpqa_consultancy")
MAY_DIFFER = {"id", "settings", "agents", "algo"}


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every value of a configuration by its path."""
    if isinstance(value, dict) and value:
        return {k: v for key, it in value.items() for k, v in leaves(it, (*path, key)).items()}
    if isinstance(value, list) and value:
        found = [leaves(it, (*path, str(i))) for i, it in enumerate(value)]
        return {k: v for part in found for k, v in part.items()}
    return {path: value}


def recipe(name: str) -> dict[tuple[str, ...], Any]:
    config = load_config(RunConfig, ["@", str(RECIPES / f"{name}.toml")])
    return leaves(config.model_dump(mode="json"))


def differences(one: str, other: str) -> set[tuple[str, ...]]:
    first, second = recipe(one), recipe(other)
    return {path for path in first.keys() | second.keys() if first.get(path) != second.get(path)}


@pytest.mark.parametrize("other", COMPARED[1:])
def test_the_recipes_differ_in_id_settings_agents_and_algo_alone(other: str) -> None:
    found = differences(COMPARED[0], other)
    assert {part for path in found for part in path} >= {"id", "settings", "agents"}
    assert [path for path in found if not MAY_DIFFER & set(path)] == []


def test_against_an_opponent_only_the_seat_and_the_agents_change() -> None:
    found = differences("gpqa_debate_selfplay", "gpqa_debate_opponent")
    trained = [path for path in found if "agents" not in path and "eval" not in path]
    assert {path[-1] for path in trained} <= {"learner_seat", "drop_judge"}
    given = recipe("gpqa_debate_opponent")
    where = ("orchestrator", "train", "env", "0")
    assert given[*where, "taskset", "learner_seat"] == "bernoulli"
    for role in ("opponent", "judge"):
        for key in ("model", "base_url", "api_key_var"):
            assert given[*where, "agents", role, key], (role, key)


@pytest.fixture
def judge(load_example: Callable[[str], ModuleType]) -> Any:
    return load_example("recipes/small/judge.py")


def test_the_judge_by_rule_prefers_the_right_letter_then_any_then_the_shorter(judge: Any) -> None:
    (item,) = generate_items(1)
    wrong = item.letters.replace(item.answer, "")[0]

    def won(a: str, b: str) -> str:
        said = [f"debater_{name} says (critique):\n{text}" for name, text in (("a", a), ("b", b))]
        return str(judge.reply_to([f"The question:\n{item.question}", *said, "Who won?"]))

    right = f"<answer>{item.answer}</answer>"
    assert won(f"<answer>{wrong}</answer>", right) == "<decision>debater_b</decision>"
    assert won(right, "long and loud, without any letter") == "<decision>debater_a</decision>"
    assert won("no letter and much text", "hm") == "<decision>debater_b</decision>"


def test_the_judge_believes_a_consultant_and_the_opponent_names_a_letter(judge: Any) -> None:
    said = "consultant says (conclude):\nIt is <answer>c</answer>"
    assert judge.reply_to([said, "Which answer is right?"]) == "<answer>C</answer>"
    assert judge.reply_to(["The question:\nx", "Turn 1 of 2."])[8] in "ABCD"


@pytest.mark.parametrize("folder", ["recipes", "recipes/small"])
def test_the_evaluations_pin_each_seat_against_the_same_opponent(folder: str) -> None:
    path = Path(__file__).parents[3] / "examples" / folder / "gpqa_debate_opponent.toml"
    recipe = tomllib.loads(path.read_text())["orchestrator"]
    (trained,) = recipe["train"]["env"]
    pinned = [it for it in recipe["eval"]["env"] if it["id"] == "gpqa-debate"]
    assert [it["taskset"]["learner_seat"] for it in pinned] == ["debater_a", "debater_b"]
    for it in pinned:
        assert it["agents"] == trained["agents"]
        assert it["taskset"]["side"] == "held_out"
