"""Proposals, what they are worth, and how the environment plays its three roles."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus_proposer_solver.environment import (
    ProposerSolverConfig,
    ProposerSolverEnv,
    ProposerSolverEnvConfig,
    ProposerSolverTaskset,
    SolveTask,
)
from gradus_proposer_solver.rules import (
    Proposal,
    last_number,
    learnability,
    read_claim,
    read_expression,
)

GOOD = "Let me think.\nProblem: Three bags hold 4 nuts each. How many?\nAnswer: 12"


@pytest.mark.parametrize(
    ("reply", "problem", "answer"),
    [
        (GOOD, "Three bags hold 4 nuts each. How many?", 12),
        ("Problem: a\nAnswer: 1\nProblem: b\nAnswer: -2.", "b", -2),
        ("<think>Problem: x\nAnswer: 1</think>Problem: y\n\nAnswer: 3\n", "y", 3),
        ("Problem: \ud800?\nAnswer: 0", "??", 0),
    ],
)
def test_the_last_problem_and_its_claimed_answer_are_read(
    reply: str, problem: str, answer: int
) -> None:
    assert read_claim(reply) == Proposal(problem, answer)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "Problem: What is 2 + 2?",
        "Answer: 4",
        "Answer: 4\nProblem: late",
        "Problem:\nAnswer: 4",
        "Problem: x\nAnswer: four",
        "Problem: x\nAnswer: 4.5",
        "Problem: x\nAnswer: 4 or 5",
        "Problem: x\nAnswer: " + "9" * 13,
        "Problem: " + "x" * 2001 + "\nAnswer: 4",
        "<think>" + GOOD,
    ],
)
def test_a_reply_without_a_whole_proposal_is_none(reply: str) -> None:
    assert read_claim(reply) is None


@pytest.mark.parametrize(
    ("reply", "answer"),
    [("2 + 3", 5), (" 3*(4+5) ", 27), ("-2 - -3", 1), ("2*-(3+1)", -8), ("10-4-3", 3)],
)
def test_an_expression_is_computed(reply: str, answer: int) -> None:
    assert read_expression(reply) == Proposal(reply.strip(), answer)


@pytest.mark.parametrize(
    "reply",
    [
        *("", "7", "-7", "2 +", "(((", "2 ** 99", "1/2", "x+1", "2 + 3 = 5", "__import__('os')"),
        *("1_0 + 2", "02 + 1", "1.5 + 2", "999999999999 * 999999999999", "1+" * 40 + "1", "+2"),
    ],
)
def test_what_is_no_expression_is_none(reply: str) -> None:
    assert read_expression(reply) is None


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("12", 12),
        ("4 times 3 is 12.", 12),
        ("The answer is -7", -7),
        ("10-7", 7),
        ("1,200", 1200),
        ("3.14", None),
        ("x3", None),
        ("9" * 13, None),
        ("<think>12", None),
        ("", None),
    ],
)
def test_the_last_whole_number_is_the_answer_of_a_reply(reply: str, number: int | None) -> None:
    assert last_number(reply) == number


def test_a_problem_is_worth_most_where_half_of_the_solvers_fail() -> None:
    assert learnability([True, False, True, False]) == 1.0
    assert learnability([True] * 4) == learnability([False] * 4) == learnability([]) == 0.0
    assert learnability([True, False, False, False]) == 0.75


@pytest.mark.parametrize("unit", ["Problem: ", "Answer: 1", "1+", "(", "-", "12 ", "9", "<think>"])
def test_a_huge_reply_is_read_at_once(unit: str) -> None:
    reply = unit * (100_000 // len(unit))
    started = time.process_time()
    for read in (read_claim, read_expression, last_number):
        read(reply)
    assert time.process_time() - started < 1.0


@given(st.one_of(st.text(), st.text(alphabet="0123456789+-*() ", max_size=80)))
def test_any_reply_is_a_bounded_proposal_or_none(reply: str) -> None:
    for proposal in (read_claim(reply), read_expression(reply), read_claim(f"Problem: {reply}")):
        if proposal is not None:
            assert abs(proposal.answer) < 10**12
            assert 0 < len(proposal.problem) <= 2000
    number = last_number(reply)
    assert number is None or abs(number) < 10**12


class Role:
    """An agent that gives its replies in turn; None fails its trace."""

    def __init__(self, name: str, replies: list[str | None]) -> None:
        self.name = name
        self.asked: list[str] = []
        self.traces: list[Any] = []
        self._replies = replies

    async def run(self, task: Any) -> Any:
        self.asked.append(task.data.prompt)
        reply = self._replies.pop(0)
        rewards: dict[str, Any] = {}
        metrics: dict[str, float] = {}
        trace = SimpleNamespace(
            agent=SimpleNamespace(name=self.name),
            ok=reply is not None,
            last_reply=reply or "",
            rewards=rewards,
            metrics=metrics,
            record_metric=metrics.__setitem__,
            record_reward=lambda name, value: rewards.update({name: SimpleNamespace(score=value)}),
        )
        if isinstance(task, SolveTask) and reply is not None:
            trace.record_reward("correct", await task.correct(trace))  # type: ignore[arg-type]
        self.traces.append(trace)
        return trace


async def play(
    proposal: str | None,
    checks: list[str | None],
    solutions: list[str | None],
    **keys: Any,
) -> dict[str, Role]:
    """One episode by script, scored."""
    config = ProposerSolverConfig(id="gradus-proposer-solver", num_tasks=1, **keys)
    (task,) = ProposerSolverTaskset(config)
    scripts = {"proposer": [proposal], "checker": checks, "solver": solutions}
    roles = {name: Role(name, list(replies)) for name, replies in scripts.items()}
    environment = object.__new__(ProposerSolverEnv)
    environment.config = SimpleNamespace(num_solvers=len(solutions))  # type: ignore[assignment]
    agents: Any = SimpleNamespace(**roles)
    await environment.run(task, agents)
    traces = [trace for role in roles.values() for trace in role.traces]
    episode: Any = SimpleNamespace(traces=traces)
    await environment.finalize(task, episode)
    return roles


def rewards(role: Role) -> list[dict[str, float]]:
    return [{name: r.score for name, r in trace.rewards.items()} for trace in role.traces]


async def test_all_three_roles_play_and_are_rewarded() -> None:
    roles = await play(GOOD, ["It is 12."], ["12", "13", "12 or so: 12", "no"])
    assert rewards(roles["proposer"]) == [{"learnability": 1.0}]
    assert rewards(roles["checker"]) == [{"correct": 1.0}]
    assert [r["correct"] for r in rewards(roles["solver"])] == [1.0, 0.0, 1.0, 0.0]
    assert "Three bags" in roles["solver"].asked[0]
    assert "Answer" not in roles["solver"].asked[0]
    assert re.match(r"<said (\w+)>\nThree bags.*\n</said \1>\n", roles["solver"].asked[0])
    proposer = roles["proposer"].traces[0]
    assert proposer.metrics == {"readable": 1.0, "confirmed": 1.0, "solve_rate": 0.5}


@pytest.mark.parametrize("style", ["words", "expression"])
async def test_the_replies_that_the_check_plays_bring_every_role_to_its_turn(style: Any) -> None:
    config = ProposerSolverConfig(id="gradus-proposer-solver", num_tasks=1, style=style)
    (task,) = ProposerSolverTaskset(config)
    gold = task.gold_replies()
    roles = await play(gold["proposer"][0], gold["checker"], gold["solver"] * 4, style=style)
    assert len(roles["checker"].traces) == (style == "words")
    assert [r["correct"] for r in rewards(roles["solver"])] == [1.0] * 4
    assert roles["proposer"].traces[0].metrics["confirmed"] == 1.0


async def test_a_problem_that_is_not_confirmed_is_worth_nothing_and_not_solved() -> None:
    roles = await play(GOOD, ["It is 11."], ["12"])
    assert rewards(roles["proposer"]) == [{"learnability": 0.0}]
    assert rewards(roles["checker"]) == [{"correct": 0.0}]
    assert roles["solver"].asked == []


@pytest.mark.parametrize("reply", ["", "give me full reward", "Answer: 1", "\x00" * 1000])
async def test_a_reply_without_a_problem_ends_the_episode(reply: str) -> None:
    roles = await play(reply, [], [])
    assert rewards(roles["proposer"]) == [{"learnability": 0.0}]
    assert roles["proposer"].traces[0].metrics["readable"] == 0.0
    assert roles["checker"].asked == roles["solver"].asked == []


async def test_an_expression_needs_no_checker() -> None:
    roles = await play("(2+3)*4", [], ["20", "24"], style="expression")
    assert rewards(roles["proposer"]) == [{"learnability": 1.0}]
    assert roles["checker"].asked == []
    assert roles["solver"].asked[0].startswith("(2+3)*4\n")


@pytest.mark.parametrize(
    "failing", [(None, [], []), (GOOD, [None], ["12"]), (GOOD, ["12"], ["12", None])]
)
async def test_a_failed_trace_leaves_the_proposer_without_a_reward(failing: Any) -> None:
    roles = await play(*failing)
    assert rewards(roles["proposer"]) == [{}]


def test_requests_differ_and_depend_on_the_seed_alone() -> None:
    def prompts(seed: int) -> list[str]:
        config = ProposerSolverConfig(id="x", num_tasks=60, seed=seed)
        return [str(task.data.prompt) for task in ProposerSolverTaskset(config)]

    assert prompts(1) == prompts(1) != prompts(2)
    assert len(set(prompts(1))) > 50
    assert "{" not in prompts(1)[0]


@pytest.mark.parametrize(
    "keys", [{"num_tasks": 0}, {"style": "poem"}, {"question": "Solve it."}, {"n": 4}]
)
def test_a_config_that_cannot_work_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ProposerSolverConfig(id="x", **keys)


def test_one_solver_alone_is_refused_since_no_problem_would_pay() -> None:
    settings = {"id": "gradus-proposer-solver", "taskset": {"id": "gradus-proposer-solver"}}
    with pytest.raises(ValidationError, match="num_solvers"):
        ProposerSolverEnvConfig.model_validate({**settings, "num_solvers": 1})
    assert ProposerSolverEnvConfig.model_validate({**settings, "num_solvers": 2}).num_solvers == 2
