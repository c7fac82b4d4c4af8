"""The learning table: what its numbers mean, what its runs start from, what it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from configs import contradictions_of

from gradus.config import RunConfig, SftConfig, load_config
from gradus.config.schema.algorithms import AlgorithmConfig

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "algorithms"
NEIGHBOURS = ("learn", "measures", "poker_value", "recipes", "teacher")
"""Modules of the example that import each other by these names."""


@pytest.fixture
def load(
    load_example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    """Loads a script of the example; what it imports from its folder is forgotten afterwards."""
    for name in NEIGHBOURS:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]
    return lambda name: load_example(f"algorithms/{name}.py")


@pytest.fixture
def poker(load: Callable[[str], Any]) -> Any:
    return load("poker_value")


def equilibrium(poker: Any, bluffs: float) -> dict[str, Any]:
    """An equilibrium of Kuhn poker: how often the first player bets with the lowest card."""
    bets = {"J": bluffs, "Q": 0, "K": 3 * bluffs, "J pb": 0, "Q pb": bluffs + 1 / 3, "K pb": 1}
    bets |= {"J p": 1 / 3, "Q p": 0, "K p": 1, "J b": 0, "Q b": 1 / 3, "K b": 1}
    return {seen: poker.Move(1 - share, share) for seen, share in bets.items()}


@pytest.mark.parametrize("bluffs", [0.0, 0.2, 1 / 3])
def test_an_equilibrium_loses_an_eighteenth_first_and_cannot_be_exploited(
    poker: Any, bluffs: float
) -> None:
    strategy = equilibrium(poker, bluffs)
    assert poker.expected_chips(strategy, strategy) == pytest.approx(-1 / 18)
    assert poker.exploitability(strategy) == pytest.approx(0.0, abs=1e-12)


def test_tossing_a_coin_is_exploitable_by_a_known_amount(poker: Any) -> None:
    assert poker.exploitability(poker.RANDOM_STRATEGY) == pytest.approx(11 / 24)


def test_no_strategy_wins_against_itself(poker: Any) -> None:
    strategy = equilibrium(poker, 0.1) | {"K": poker.Move(0.2, 0.5)}
    assert poker.chips_against(strategy, strategy) == pytest.approx(0.0)
    assert poker.chips_against(equilibrium(poker, 0.1), poker.RANDOM_STRATEGY) > 0.1


def test_a_forfeit_costs_two_chips(poker: Any) -> None:
    silent = poker.RANDOM_STRATEGY | {card: poker.Move(0.0, 0.0) for card in "JQK"}
    assert poker.expected_chips(silent, poker.RANDOM_STRATEGY) == -2.0


def test_a_strategy_is_estimated_from_moves_and_random_where_nothing_was_seen(poker: Any) -> None:
    moves = [("K", "b"), ("K", " b\n"), ("K", "p"), ("K", "hello"), ("J b", "p")]
    strategy = poker.estimate_strategy(moves)
    assert strategy["K"] == poker.Move(0.25, 0.5)
    assert strategy["J b"] == poker.Move(1.0, 0.0)
    assert strategy["Q"] == poker.RANDOM


def poker_trace(*moves: tuple[str, str], clear: float = 0.0, mistakes: float = 0.0) -> Any:
    nodes = []
    for told, reply in moves:
        nodes.append({"message": {"role": "user", "content": told}, "sampled": False})
        nodes.append({"message": {"role": "assistant", "content": reply}, "sampled": True})
    return {"nodes": nodes, "metrics": {"clear_decisions": clear, "mistakes": mistakes}}


def write_steps(run_dir: Path, steps: list[list[Any]]) -> Path:
    for number, traces in enumerate(steps):
        folder = run_dir / "episodes" / f"step_{number}"
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text(json.dumps({"traces": traces}) + "\n")
    return run_dir


def write_metric(run_dir: Path, name: str, values: list[float]) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, name: value} for step, value in enumerate(values)]
    rows.append({"step": len(values), "other": 1.0})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_mistakes_are_a_share_of_the_clear_decisions_of_a_step(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    poor, none, good = (
        [poker_trace(clear=2.0, mistakes=1.0), poker_trace(clear=2.0)],
        [poker_trace()],
        [poker_trace(clear=1.0)],
    )
    run_dir = write_steps(tmp_path, [poor, none, good])
    assert load("measures").read_mistakes(run_dir) == [0.25, 0.0]


def test_a_policy_that_learned_to_call_with_the_king_beats_its_start(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    measures = load("measures")
    folds = [poker_trace(("K b", "p"), ("K pb", "p"))]
    calls = [poker_trace(("K b", "b"), ("K pb", "b"))]
    run_dir = write_steps(tmp_path, [folds] * 4 + [calls] * 3)
    start, end = measures.read_chips_against_start(run_dir)
    assert start == 0.0
    assert end > 0.1
    before, after = measures.read_exploitability(run_dir)
    assert after < before


def test_before_and_after_are_means_of_three_steps_with_their_error(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    measures = load("measures")
    run_dir = write_metric(tmp_path, "episode/reward/mean", [0.0, 0.1, 0.2, 0.9, 0.5, 0.5, 0.5])
    before, after = measures.edges(measures.REWARD.read(run_dir))
    assert before.text() == "0.100 ± 0.058"
    assert after.text() == "0.500 ± 0.000"
    assert [edge.text() for edge in measures.edges([0.0, 1.0], steps_per_value=3)] == [
        "0.000",
        "1.000",
    ]


def test_a_run_too_short_for_a_before_and_an_after_is_refused(load: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="5 values have no beginning and end of 3 each"):
        load("measures").edges([0.0] * 5)


def test_every_registered_algorithm_has_a_run_that_the_config_accepts(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    configs = [
        load_config(RunConfig, recipe.arguments(seed=1)[1:-1]) for recipe in load("recipes").RECIPES
    ]
    assert {config.orchestrator.train.algo.type for config in configs} == set(
        AlgorithmConfig.registered()
    )
    assert [problem for config in configs for problem in contradictions_of(config)] == []
    assert {config.seed for config in configs} == {1}
    assert len({config.name for config in configs}) == len(configs)


def test_every_run_starts_from_a_model_that_a_warm_up_makes(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    recipes = load("recipes")
    made: dict[str, SftConfig] = {}
    for recipe in recipes.RECIPES:
        config = load_config(RunConfig, recipe.arguments(seed=0)[1:-1])
        assert config.model.name == str(recipes.model_of(recipe.start))
        for name in recipe.warm_ups:
            warm_up = load_config(SftConfig, recipes.warm_up_arguments(name)[1:-1])
            assert warm_up.name == f"warm-up-{name}"
            is_first = warm_up.model.name == "runs/algorithms/start/model"
            assert is_first or warm_up.model.name.split("/")[2] in {
                earlier.name for earlier in made.values()
            }
            made[name] = warm_up


def test_the_teacher_is_served_where_the_configs_look_for_it(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    teacher = load("teacher")
    words = teacher.serve_arguments(Path("m"))
    assert words[words.index("--port") + 1] == teacher.URL.rpartition(":")[2]
    asked = [
        load_config(RunConfig, recipe.arguments(seed=0)[1:-1])
        for recipe in load("recipes").RECIPES
        if recipe.has_teacher
    ]
    urls, names, keys = set(), set(), set()
    for config in asked:
        source = config.orchestrator.train.env[0]
        model: Any = config.orchestrator.train.algo.reference or source.agents["agent"]
        urls.add(model.base_url.removesuffix("/v1"))
        names.add(model.model)
        keys.add(model.api_key_var)
    assert (urls, names, keys) == ({teacher.URL}, {"teacher"}, {teacher.KEY_VARIABLE})
    assert teacher.serve_environment({"PATH": "/bin"})["PATH"] == "/bin"


def test_a_teacher_that_ends_at_once_is_an_error_that_names_its_log(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    teacher = load("teacher")
    monkeypatch.setattr(teacher, "URL", "http://127.0.0.1:9")
    monkeypatch.setattr(teacher.sys, "executable", "/bin/false")
    words = r"ended with code 1; see .*teacher\.log"
    served = teacher.served(Path("m"), tmp_path / "teacher.log")
    with pytest.raises(SystemExit, match=words), served:
        pytest.fail("it serves")


def test_a_result_replaces_the_older_one_of_the_same_run_and_becomes_a_row(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    learn = load("learn")
    recipe = next(recipe for recipe in learn.RECIPES if recipe.name == "grpo")
    write_metric(recipe.run_dir(tmp_path, 0), "episode/reward/mean", [0.1] * 3 + [0.7] * 3)
    row = learn.measured(recipe, seed=0, seconds=61.2, repository=tmp_path)
    path = tmp_path / "results.json"
    for stored in (row | {"name": "rae"}, row | {"seconds": 1}, row | {"seed": 1}, row):
        learn.store(stored, path)
    rows = learn.read_results(path)
    assert [(r["name"], r["seed"], r["seconds"]) for r in rows] == [
        ("grpo", 0, 61),
        ("grpo", 1, 61),
        ("rae", 0, 61),
    ]
    assert learn.table(rows[:1])[-1] == (
        "| `grpo` | 0 | reverse_text | mean reward | 0.100 ± 0.000 | 0.700 ± 0.000 | 6 | 61 |"
    )
    assert rows[0]["command"].startswith("gradus rl @ examples/algorithms/rl_reverse_text.toml")


def test_the_table_in_the_readme_is_that_of_the_results(load: Callable[[str], Any]) -> None:
    learn = load("learn")
    rows = learn.read_results()
    assert {row["name"] for row in rows} <= {recipe.name for recipe in learn.RECIPES}
    readme = (EXAMPLE / "README.md").read_text()
    assert "\n".join(learn.table(rows)) in readme


def test_the_table_is_put_between_its_marks(load: Callable[[str], Any], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- table -->\nold\n<!-- end -->\nb\n")
    load("learn").write_table(["| new |"], readme)
    assert readme.read_text() == "a\n<!-- table -->\n| new |\n<!-- end -->\nb\n"


def test_the_plot_has_a_panel_for_every_run(load: Callable[[str], Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = {"measure": "a long name of a quantity, in nats per token", "values": [2.0, 1.5, 1.0]}
    shown = [curve, {"measure": "before and after, no curve", "values": [1.0, 2.0]}]
    rows = [
        {"name": name, "seed": seed, "steps": 6, "shown": shown}
        for name, seed in (("grpo", 0), ("grpo", 1), *((f"run{n}", 0) for n in range(5)))
    ]
    out = tmp_path / "curves.png"
    load("plot_results").plot_results(rows, out)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.torch
def test_conversations_show_what_the_tasks_need(load: Callable[[str], Any]) -> None:
    prepare = load("prepare")
    for question, reply in map(spoken, prepare.teacher_text_rows(50, seed=0)):
        assert reply == question[::-1]
    hinted = prepare.hinted_text_rows(50, seed=0)
    shown = [row["messages"] for row in hinted if row["messages"][0]["role"] == "system"]
    assert len(shown) == 25
    for system, user, assistant in shown:
        assert system["content"].endswith(f": {assistant['content']}")
        assert assistant["content"] == user["content"][::-1]
    replies = [reply == question[::-1] for question, reply in map(spoken, mixed_rows(prepare))]
    assert 0.15 < sum(replies) / len(replies) < 0.4


def mixed_rows(prepare: Any) -> list[Any]:
    rows: list[Any] = prepare.reverse_text_rows(400, seed=0)
    return rows


def spoken(row: Any) -> tuple[str, str]:
    """What the user and the assistant said last."""
    return row["messages"][-2]["content"], row["messages"][-1]["content"]
