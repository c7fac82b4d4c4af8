"""The task set `forth-lang`: problems, submissions, hold-out, and the tools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus_forth_lang.demonstrations import TOOL, demonstrations
from gradus_forth_lang.problems.build import NUM_TIERS, SOLUTION, TEMPLATES, build_problems
from gradus_forth_lang.problems.problem import Case, grade
from gradus_forth_lang.taskset import ForthLangConfig, ForthLangTaskset, ForthTask
from gradus_forth_lang.tools import ForthState, ForthTools, ForthToolsConfig

CASES = (Case((3,), (6,)), Case((-1,), (-2,)))


def load(**keys: Any) -> list[ForthTask]:
    return list(ForthLangTaskset(ForthLangConfig(id="gradus-forth-lang", **keys)))


class OneEpisode(ForthTools):
    """The tools with the state of one episode in the process."""

    def __init__(self, state: ForthState) -> None:
        super().__init__(ForthToolsConfig())
        self._one = state

    @property
    def state(self) -> ForthState:
        return self._one


async def begin(task: ForthTask) -> tuple[Any, OneEpisode]:
    trace = SimpleNamespace(state=ForthState(), info={})
    await task.setup(trace, None)
    return trace, OneEpisode(trace.state)


def test_every_reference_solves_its_problem_and_an_empty_word_none() -> None:
    problems = list(build_problems(range(NUM_TIERS), 12))
    assert {one.tier for one in problems} == set(range(NUM_TIERS))
    for one in problems:
        right = grade(one.problem.solution(SOLUTION), SOLUTION, one.problem.cases)
        assert right.is_right, (one.name, right.reason)
        assert not grade(f": {SOLUTION} ;", SOLUTION, one.problem.cases).is_right, one.name


def test_no_constant_solves_a_problem() -> None:
    for seed in range(3):
        for one in build_problems(range(NUM_TIERS), 100, seed=seed):
            results = {(case.stack, tuple(case.output.split())) for case in one.problem.cases}
            assert len(results) > 1, (one.name, one.problem.text)


def test_every_template_gives_problems_and_more_of_them_change_none() -> None:
    few = {one.name: one.problem for one in build_problems(range(NUM_TIERS), 12)}
    many = {one.name: one.problem for one in build_problems(range(NUM_TIERS), 40)}
    assert {name.rsplit("-", 1)[0] for name in few} == {f"t{t.tier}-{t.name}" for t in TEMPLATES}
    assert few == {name: many[name] for name in few}
    assert len({(p.effect, p.text) for p in many.values()}) == len(many)


def test_the_sides_are_disjoint_and_stable_when_problems_are_added() -> None:
    def names(**keys: Any) -> set[str]:
        return {task.data.name or "" for task in load(tiers=[0, 3], **keys)}

    few, many = names(per_tier=20), names(per_tier=60)
    held = names(per_tier=60, side="held_out")
    assert few < many
    assert held
    assert not many & held
    assert len(many | held) == 120


def test_the_prompt_shows_examples_and_never_the_solution() -> None:
    for task in load(per_tier=6):
        assert isinstance(task.data.prompt, str)
        assert task.data.cases[0].text in task.data.prompt
        assert task.data.cases[-1].text not in task.data.prompt
        assert task.data.answer not in task.data.prompt
        assert "submit_code" in (task.data.system_prompt or "")


def test_the_brief_style_asks_with_a_formula_alone() -> None:
    tasks = load(style="brief", per_tier=8)
    assert {task.data.tier for task in tasks} == {0, 1}
    assert all(len(str(task.data.prompt)) < 20 and not task.data.system_prompt for task in tasks)


@pytest.mark.parametrize(
    "keys", [{"tiers": []}, {"per_tier": 0}, {"task": {"partial_reward": 1.0}}, {"levels": [1]}]
)
def test_settings_that_mean_nothing_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ForthLangConfig(id="gradus-forth-lang", **keys)


def test_a_tier_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="there are tiers 0 to 5"):
        load(tiers=[0, 9])


@pytest.mark.parametrize(
    ("codes", "reward"),
    [
        ([], 0.0),
        (["{answer}"], 1.0),
        ([": answer drop ;"], 0.0),
        ([": answer drop ;", "{answer}"], 1.0),
        (["{answer}", "give me full reward"], 0.0),
        (["", ": answer begin again ;", "\ud800\x00" * 1000], 0.0),
        (["wrong", "wrong", "wrong", "{answer}"], 0.0),
    ],
)
async def test_the_last_submission_counts_and_no_more_than_three(
    codes: list[str], reward: float
) -> None:
    task = load(tiers=[3], per_tier=1)[0]
    trace, tools = await begin(task)
    answers = [tools.submit_code(code.replace("{answer}", task.data.answer)) for code in codes]
    await task.finalize(trace, None)
    assert await task.solved(trace) == reward
    assert trace.info["submissions"] == trace.state.submissions
    assert await task.submissions(trace) == min(len(codes), 3)
    assert all(len(answer) < 2_100 for answer in answers)
    assert len(codes) < 4 or answers[-1] == "no submission is left"


async def test_a_submission_that_passes_some_cases_gets_a_part() -> None:
    task = load(tiers=[2], per_tier=1)[0]
    trace, tools = await begin(task)
    values = task.data.cases[0].stack[0]
    tools.submit_code(f": answer drop {values} ;")
    assert 0.0 < await task.solved(trace) <= task.config.partial_reward


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (": w 2* ;", ""),
        (": w 2* 1 ;", "3 -> 6, but it left 6 1"),
        (": w 2* dup . ;", "3 -> 6, but it printed '6'"),
        (": v 2* ;", "the word w is not defined"),
        (": w drop drop ;", "3 -> 6, but it failed: stack underflow"),
        ("1 2 3 . : w 2* ;", ""),
        (": w 2* ; hex", ""),
    ],
)
def test_a_grade_names_the_first_case_that_failed(code: str, reason: str) -> None:
    assert grade(code, "w", CASES).reason == reason


@given(st.text(max_size=80))
def test_any_submission_is_graded(code: str) -> None:
    result = grade(code, "w", CASES)
    assert 0 <= result.num_passed <= result.num_cases == 2


def test_the_tools_answer_in_bounded_text() -> None:
    tools = OneEpisode(ForthState())
    assert tools.run_code("1 2 + 'x' emit") == "stack: 3\noutput: x"
    assert "error: stack underflow" in tools.run_code("+")
    assert len(tools.run_code(": f 3000 0 do i . loop ; f")) <= 2_000
    assert tools.lookup_docs("over").startswith("OVER ( a b -- a b a )")
    assert tools.submit_code(": answer ;") == "no submission is left"


def test_only_the_tools_that_are_offered_are_declared() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("forth")
    ForthTools(ForthToolsConfig(offers=["submit_code"])).register(server)
    (declared,) = server._tool_manager.list_tools()
    shown = TOOL["function"]
    assert (declared.name, declared.parameters) == (shown["name"], shown["parameters"])
    assert declared.description == shown["description"]


def test_demonstrations_are_right_unless_they_shall_be_careless() -> None:
    def code(shown: dict[str, Any]) -> str:
        return str(shown["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"])

    problems = {p.problem.formula: p.problem for p in build_problems([0], 400, seed=5)}
    for share, is_right in ((0.0, True), (1.0, False)):
        for shown in demonstrations(20, seed=5, careless_share=share):
            result = grade(code(shown), SOLUTION, problems[shown["messages"][0]["content"]].cases)
            assert result.is_right == is_right
            told = shown["messages"][2]["content"]
            assert told == f"passed {result.num_passed} of {result.num_cases}"


def test_demonstrations_may_keep_silent_about_the_results() -> None:
    shown = demonstrations(200, seed=5, tells_results=False)
    told = [row["messages"][2]["content"] for row in shown]
    assert set(told) == {f"passed {num} of 8" for num in range(9)}
