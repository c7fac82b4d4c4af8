"""The task set `hendrycks-math`: templates, boxes in replies, and answers that are equal."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus.errors import ConfigError, EnvironmentFailure
from gradus_hendrycks_math.latex import fraction, root
from gradus_hendrycks_math.problems import LEVELS, SUBJECTS, read_solve_rates, template_problems
from gradus_hendrycks_math.reading import in_the_unit, plain
from gradus_hendrycks_math.taskset import (
    HendrycksMathConfig,
    HendrycksMathTaskset,
    MathTask,
    helpers_here,
    is_right,
)
from gradus_kit.tasksets.marked import last_boxed


@pytest.fixture(autouse=True, scope="module")
def _no_helper_is_left() -> Iterator[None]:
    yield
    helpers_here().close()


def load(**keys: Any) -> list[MathTask]:
    pytest.importorskip("math_verify")
    return list(HendrycksMathTaskset(HendrycksMathConfig(id="gradus-hendrycks-math", **keys)))


def test_there_are_300_different_problems_of_every_subject_and_level() -> None:
    tasks = load()
    assert len({task.data.prompt for task in tasks}) == len(tasks) == 300
    kinds = {(task.data.subject, task.data.level) for task in tasks}
    assert kinds == set(itertools.product(SUBJECTS, LEVELS))
    assert all(task.data.answer for task in tasks)


def test_a_problem_depends_on_its_name_and_seed_alone() -> None:
    few = list(itertools.islice(template_problems(SUBJECTS, LEVELS, seed=1), 35))
    again = list(itertools.islice(template_problems(SUBJECTS, LEVELS, seed=1), 70))
    other = list(itertools.islice(template_problems(SUBJECTS, LEVELS, seed=2), 35))
    assert few == again[:35]
    assert few != other


def test_a_kind_that_has_no_further_problem_ends() -> None:
    problems = list(template_problems(["counting_and_probability"], [4]))
    assert len(problems) == 16


@pytest.mark.parametrize("level", LEVELS)
def test_no_constant_answers_much_of_number_theory(level: int) -> None:
    """Once 1 was the greatest common divisor of two thirds of the pairs."""
    problems = itertools.islice(template_problems(["number_theory"], [level]), 100)
    answers = Counter(problem.answer for problem in problems)
    assert answers.most_common(1)[0][1] <= 0.25 * answers.total()


def test_the_answers_of_templates_solve_them() -> None:
    """Where a problem's numbers can be read back, its answer is computed another way."""
    checked = 0
    for problem in itertools.islice(template_problems(SUBJECTS, LEVELS), 350):
        words = problem.text.replace("$", "").rstrip("?.").split()
        if problem.name.startswith("number_theory-1"):
            assert int(problem.answer) == math.gcd(int(words[-3]), int(words[-1]))
        elif problem.name.startswith("number_theory-3"):
            base, power = words[words.index("when") + 1].rstrip("}").split("^{")
            value = 1
            for _ in range(int(power)):
                value = value * int(base) % int(words[-1])
            assert int(problem.answer) == value
        elif problem.name.startswith("number_theory-4"):
            assert int(problem.answer, int(words[6].rstrip("?"))) == int(words[2])
        elif problem.name.startswith("algebra-1"):
            left, right = problem.text.split("$")[3].split(" = ")
            slope, shift = left.replace(" ", "").split("x")
            assert int(slope) * int(problem.answer) + int(shift) == int(right)
        else:
            continue
        checked += 1
    assert checked == 40


@pytest.mark.parametrize(
    ("reply", "content"),
    [
        (r"So \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{2} and \boxed{3", ""),
        (r"\boxed{2} and \fbox{\frac{1}{", ""),
        (r"\boxed{2} and \boxed", ""),
        (r"\boxed{2} and \bo", ""),
        (r"\boxed{a = \boxed{2}}", "2"),
        (r"\boxed{2} in \textbf{bold}", "2"),
        (r"\boxed 7 it is", "7"),
        (r"\fbox{a{b}c}", "a{b}c"),
        ("The answer is 5.", ""),
        ("", ""),
        (r"\boxed{}", ""),
        (r"\boxed{" + "1" * 400 + "}", ""),
        (r"\boxed{" * 20_000, ""),
        ("\\boxed{3}" + "x" * 100_000, ""),
    ],
)
def test_the_last_box_is_read_and_nothing_where_it_is_cut(reply: str, content: str) -> None:
    assert last_boxed(reply) == content


@given(st.text(alphabet=st.characters()))
def test_any_reply_can_be_read(reply: str) -> None:
    assert isinstance(last_boxed(reply), str)
    assert plain(plain(reply)) == plain(plain(plain(reply)))


@given(st.fractions(), st.integers(1, 10_000))
def test_answers_are_in_lowest_terms(value: Fraction, square: int) -> None:
    assert fraction(value).startswith("-") == (value < 0)
    outside, _, inside = root(square).rstrip("}").partition("\\sqrt{")
    assert int(outside or 1) ** 2 * int(inside or 1) == square


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{0.5000001}", r"\frac{1}{2}", False),
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", False),
        (r"\boxed{1,000}", "1000", True),
        (r"\boxed{x = 3}", "3", True),
        (r"\boxed{f(x) = 3}", "3", True),
        (r"\boxed{1=2=3}", "3", False),
        (r"\boxed{2+1=3}", "3", False),
        (r"\boxed{4}", "3", False),
        (r"\boxed{3 \text{ or } 4}", "3", False),
        (r"\boxed{3, 4}", "3", False),
        (r"\boxed{\{1,2,3,4\}}", "3", False),
        (r"3", "3", False),
        ("", "3", False),
        (r"\boxed{give me full reward}", "3", False),
        (r"\boxed{" * 1000 + "3", "3", False),
        ("\\boxed{\x00\ud800}", "3", False),
        (r"\boxed{9^{9^{9^{9}}}}", "3", False),
        (r"\boxed{" + "(" * 250 + "}", "3", False),
    ],
)
async def test_equal_answers_are_right_however_they_are_written(
    reply: str, answer: str, right: bool
) -> None:
    pytest.importorskip("math_verify")
    assert await is_right(reply, answer, seconds=1.0 if "^" in reply else 60.0) is right


async def test_a_helper_that_cannot_compare_fails_the_episode_and_costs_no_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradus_hendrycks_math.taskset._EQUAL", "no_such_module:are_equal")
    with pytest.raises(EnvironmentFailure, match="answers cannot be compared"):
        await is_right(r"\boxed{y+x}", "x+y", seconds=60.0)


_COLUMN = r"\begin{pmatrix}1/2\\2\end{pmatrix}"


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (r"\begin{vmatrix}2 & 3\\4 & 5\end{vmatrix}", "-2"),
        (r"4'+20'\times 3", "64"),
        (r"4\:+ 20\:\times 3", "64"),
        (r"4~+~60", "64"),
        (r"\begin{vmatrix}2&3\\4&5\end{vmatrix}x", r"-2x"),
        (r"a'+b'", "c"),
        (r"\frac{27}{216}", r"\frac{1}{8}"),
        (r"\frac{(27)}{-216}", r"-\frac{1}{8}"),
        (r"\frac{2}{4}x", r"\frac{1}{2}x"),
        ("(27)/216", r"\frac{1}{8}"),
        (r"27 \div 216", r"\frac{1}{8}"),
        (r"\sqrt{50}", r"5\sqrt{2}"),
        (r"\sqrt8", r"2\sqrt{2}"),
    ],
)
async def test_what_is_left_to_compute_is_no_answer(given: str, answer: str) -> None:
    assert await is_right(f"\\boxed{{{given}}}", answer, seconds=60.0) is False


@pytest.mark.parametrize(
    "given",
    [
        *(r"30\text{ cm}^2", r"30 \mathrm{~cm}^{2}", r"30\,\text{square units}", r"\text{30}"),
        *(r"\displaystyle 30", "{30}", r"30\text{ cm}"),
    ],
)
async def test_a_number_is_right_with_any_unit(given: str) -> None:
    assert await is_right(f"\\boxed{{{given}}}", "30", seconds=60.0)
    assert not await is_right(f"\\boxed{{{given}}}", "31", seconds=60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "given", "answer", "right"),
    [
        (r"What is $4 + 20 \times 3$?", r"4 + 20 \times 3", "64", False),
        (r"What is $4 + 20 \times 3$?", r"x = 4+20\times{3}", "64", False),
        (r"What is $4 + 20 \times 3$?", r"(4 + 20 \times 3)", "64", False),
        (r"What is $4 + 20 \times 3$?", r"4 + 20 \times 3 + 0", "64", False),
        (r"What is $4 + 20 \times 3$?", r"20 \times 3 + 4", "64", False),
        (r"What is $4 + 20 \times 3$?", r"\frac{2(4 + 20 \times 3)}{2}", "64", False),
        (r"What is $4 + 20 \times 3$?", r"\frac{128}{2}", "64", False),
        (r"What is $4 + 20 \times 3$?", "4\N{MULTIPLICATION SIGN}16", "64", False),
        (r"What is $4 + 20 \times 3$?", "128\N{DIVISION SIGN}2", "64", False),
        (r"What is $4 + 20 \times 3$?", r"\cfrac{128}{2}", "64", False),
        (r"What is $4 + 20 \times 3$?", r"\text{4+60}", "64", False),
        (r"What is $4 + 20 \times 3$?", "+64", "64", True),
        (r"What is $4 + 20 \times 3$?", r"6.4 \times 10^1", "64", True),
        (r"Simplify $\frac{14}{21}$.", r"\left(\frac{14}{21}\right)", r"\frac{2}{3}", False),
        (r"What is $\sqrt{8}$?", r"\sqrt{8} + 0", r"2\sqrt{2}", False),
        ("What is the mean?", r"\frac{3}{2}", "1.5", True),
        ("What is the mean?", "-1.5", r"-\frac{3}{2}", True),
        ("How far?", r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", True),
        ("How far?", r"\frac{1}{2}\sqrt{3}", r"\frac{\sqrt{3}}{2}", True),
        ("How far?", r"\sqrt{3} \cdot \frac{1}{2}", r"\frac{\sqrt{3}}{2}", True),
        ("How far?", r"\frac{1}{2} \cdot 128", "64", False),
        ("How far?", "(x+2)/4", r"\frac{x+2}{4}", True),
        ("How far?", r"\frac{1}{2}(3 + 4)", r"\frac{7}{2}", False),
        ("What is the area?", r"\pi \cdot 4", r"4\pi", True),
        ("Which day is it?", "Tuesday", r"\text{Tuesday}", True),
        ("Which day is it?", r"\text{Tuesday}", "Tuesday", True),
        ("Which day is it?", "Monday", r"\text{Tuesday}", False),
        *(
            ("Where?", rf"\begin{{pmatrix}} {x} \\ 2 \end{{pmatrix}}", _COLUMN, right)
            for x, right in ((r"\frac{1}{2}", True), ("2^{-1} + 0", False))
        ),
        ("What is it?", r"\det\begin{pmatrix}8&0\\0&8\end{pmatrix}", "64", False),
        ("Where is it?", r"(1+2, 4)", "(3,4)", False),
        ("Where is it?", r"\left( 3, 4 \right)", "(3,4)", True),
        (r"What is $\frac{7}{8} + \frac{3}{9}$?", r"\dfrac78+\frac{3}{9}", r"\frac{29}{24}", False),
        (r"Simplify $\frac{14}{21}$.", "14/21", r"\frac{2}{3}", False),
        (r"Expand \[(x+1)^2.\]", "(x+1)^2", "x^2+2x+1", False),
        ("Expand $(x+2)(x+3)$.", "(x+3)(x+2)", "x^2+5x+6", False),
        ("Expand $(x+2)(x+3)$.", "6+5x+x^2", "x^2+5x+6", True),
        ("Factor $x^2+5x+6$.", "x(x+5)+6", "(x+2)(x+3)", False),
        ("Factor $t^2-121$.", "-121+t^2", "(t-11)(t+11)", False),
        ("Factor $t^2-121$.", "(t+11)(t-11)", "(t-11)(t+11)", True),
        (
            r"Express $0.\overline{7}$ as a common fraction.",
            "0.777777777777",
            r"\frac{7}{9}",
            False,
        ),
        ("Write $(2^3)^2$ as a power of two.", "64", "2^6", False),
        (r"Factor $x^2 + 3x + 2 = 0$.", "x^2+3x+2", "(x+1)(x+2)", False),
        (r"Simplify $\sqrt{12}$.", r"\sqrt{12}", r"2\sqrt{3}", False),
        (r"Simplify $\sqrt{12}$.", r"\sqrt{3}\cdot2", r"2\sqrt{3}", True),
        (r"Which is larger, $1/2$ or $1/3$?", "1/2", r"\frac{1}{2}", True),
        (r"Which line is steeper, $y = 2x + 3$ or $y = x$?", "2x+3", "y=2x+3", True),
        (r"Which power is larger, $x^2$ or $x^3$?", "x^{3}", "x^3", True),
        (r"What is $3x + 20 - x - 8$?", "12+2x", "2x+12", True),
        (r"What is $-5 + 0$?", "-5", "-5", True),
        ("How many dollars must be paid?", "154 dollars", "154", True),
        ("How many dollars must be paid?", "154 million", "154", False),
        ("How many dollars must be paid?", "-\N{EN DASH}154", "-154", False),
        ("What is $3 - 8$?", "\N{EN DASH}5", "-5", True),
    ],
)
async def test_an_expression_of_the_question_is_no_answer_and_its_unit_may_follow(
    question: str, given: str, answer: str, right: bool
) -> None:
    pytest.importorskip("math_verify")
    reply = f"\\boxed{{{given}}}"
    assert await is_right(reply, answer, seconds=60.0, question=question) is right


@pytest.mark.parametrize(
    ("given", "answer", "right"),
    [
        *((text, r"5\text{ cm}", True) for text in ("5", "5cm", "5 cm.", r"5\,\text{cm}")),
        (r"5\text{ centimetres}", r"5\text{ cm}", True),
        *((text, r"5\text{ cm}", False) for text in (r"5\text{ m}", "5m", "5x", "6cm")),
        (r"30\text{ cm}", r"30\text{ cm}^2", True),
        *(
            (text, r"30\text{ cm}^2", True)
            for text in (r"30\ \mathrm{cm^2}", "30 cm^2", r"30\;\textrm{cm}^{2}")
        ),
        (r"30\text{ cm}^3", r"30\text{ cm}^2", False),
        ("30 cm^3", r"30\text{ cm}^2", False),
        (r"5\text{ minutes}", r"5\text{ hours}", False),
        (r"5\text{ cm}", r"5\text{ meters}", False),
        (r"5\text{ kph}", r"5\text{ km/h}", True),
        (r"5\text{ hours}", r"5\text{ hr}", True),
        (r"5\text{ apples}", r"5\text{ pieces}", False),
        *((text, r"5\text{ apples}", True) for text in (r"5\text{ apple}", r"\text{5 apples}")),
        (r"5\text{ cm/s}", r"5\text{ m/s}", False),
        (r"5\text{ square inches}", r"5\text{ square feet}", False),
        (r"5\text{ cubic feet}", r"5\text{ square feet}", False),
        *((text, r"5\text{ ft}^2", True) for text in (r"5\text{ square feet}", "5 sq. ft")),
        (r"5\text{ ml}", r"5\text{ liters}", False),
        (r"5\text{ oz}", r"5\text{ pounds}", False),
        (r"5\text{ radians}", r"5\text{ degrees}", False),
        (r"5\text{ miles per hour}", r"5\text{ mph}", True),
        *((text, r"5\text{ hours}", True) for text in ("5 hr", "5h", r"5\textbf{ hours}")),
        *((text, r"5\text{ cm}", True) for text in (r"\text{5 cm}", r"\mathrm{5\,cm}")),
        (r"\text{5 cm}", "5", True),
        (r"\text{5 m}", r"5\text{ cm}", False),
        *(
            (rf"3\text{{ {it}}}", "3", False)
            for it in ("fourths", "score", "over two", "less than")
        ),
        *((rf"3\text{{ {it}}}", "3", False) for it in "tcupMK"),
        *((text, "1200", True) for text in ("1{,}200", r"1,\!200", "1,200")),
        ("1, 200", "1200", False),
        (r"2\mathrm{i}", "2i", True),
        (r"2\mathrm{i}", "2", False),
        (r"7\text{ x}", "7", False),
        (r"7\text{ tenths}", "7", False),
    ],
)
async def test_a_unit_may_stand_bare_and_must_not_be_another(
    given: str, answer: str, right: bool
) -> None:
    pytest.importorskip("math_verify")
    assert await is_right(f"\\boxed{{{given}}}", answer, seconds=60.0) is right


@pytest.mark.parametrize(
    ("question", "right"), [("How many apples?", True), ("How many?", False), ("", False)]
)
async def test_a_word_after_a_number_is_a_unit_where_the_question_has_it(
    question: str, right: bool
) -> None:
    reply = r"\boxed{5\text{ apples}}"
    assert await is_right(reply, "5", seconds=60.0, question=question) is right


async def test_no_template_gives_its_answer_away() -> None:
    for task in load(num_tasks=70):
        for formula in str(task.data.prompt).split("$")[1::2]:
            trace: Any = SimpleNamespace(last_reply=f"\\boxed{{{formula}}}")
            assert await task.right(trace) == 0.0 or formula == task.data.answer, task.data.name


async def test_no_rewriting_of_the_question_s_formula_is_an_answer() -> None:
    forms = ("({})", "{} + 0", "0 + {}", "1 \\times ({})", "\\frac{2({})}{2}", "{{}}", "({}) - 0")
    for task in load(num_tasks=42):
        for formula in str(task.data.prompt).split("$")[1::2]:
            if not any(sign in formula for sign in "+-^\\"):
                continue
            for form in forms:
                reply = f"\\boxed{{{form.replace('{}', formula)}}}"
                trace: Any = SimpleNamespace(last_reply=reply)
                assert await task.right(trace) == 0.0, (task.data.name, reply)


async def test_the_gold_reply_of_every_template_is_right() -> None:
    for task in load():
        [reply] = task.gold_replies()
        trace: Any = SimpleNamespace(last_reply=reply)
        assert (await task.right(trace), await task.boxed(trace)) == (1.0, 1.0)


def test_only_problems_between_both_solve_rates_are_tasks(tmp_path: Path) -> None:
    rates = {"algebra-1-0000": 0.0, "algebra-2-0001": 0.5, "geometry-3-0000": 0.8, "gone-1-0": 0.5}
    rows = [{"name": name, "solve_rate": rate} for name, rate in rates.items()]
    path = tmp_path / "rates.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    names = [task.data.name for task in load(solve_rates=path)]
    assert sorted(map(str, names)) == ["algebra-2-0001", "geometry-3-0000"]
    with pytest.raises(ConfigError, match=r"solved between 0\.9 and 1"):
        load(solve_rates=path, min_solve_rate=0.9, max_solve_rate=1.0)


@pytest.mark.parametrize("line", ["{}", "[1]", '{"name": "a", "solve_rate": 2}', "{", "1"])
def test_a_line_that_is_no_solve_rate_is_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rates.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1"):
        read_solve_rates(path)


def test_keys_that_cannot_work_are_refused() -> None:
    for keys in ({"levels": [6]}, {"subjects": []}, {"min_solve_rate": 0.9}):
        with pytest.raises(ValidationError):
            HendrycksMathConfig(id="gradus-hendrycks-math", **keys)


def test_a_side_that_must_be_empty_is_refused() -> None:
    with pytest.raises(ConfigError, match="no task is on side = 'train'"):
        load(holdout_fraction=1.0)
    with pytest.raises(ConfigError, match="'held_out' with holdout_fraction = 0"):
        load(holdout_fraction=0.0, side="held_out")


def test_both_sides_together_are_all_problems() -> None:
    sides = [
        {task.data.name for task in load(num_tasks=100, side=side, holdout_fraction=0.5)}
        for side in ("train", "held_out")
    ]
    assert len(sides[0]) == len(sides[1]) == 100
    assert not sides[0] & sides[1]


def test_a_problem_that_is_held_out_trains_under_no_seed() -> None:
    held_out = {task.data.prompt for task in load(num_tasks=300, side="held_out")}
    trained = {task.data.prompt for task in load(num_tasks=300, seed=5)}
    assert not held_out & trained


@pytest.mark.parametrize(
    ("given", "unit", "is_same"),
    [
        (r"5\text{ lbs}", "lb", True),
        (r"3\text{ hr}", "h", True),
        (r"5\text{ CM}", "cm", True),
        (r"9\text{ p.m.}", "PM", True),
        (r"5\text{ m}", "cm", False),
        (r"5\text{ ms}", "m", False),
    ],
)
def test_a_unit_that_is_spelt_otherwise_is_no_other_unit(
    given: str, unit: str, is_same: bool
) -> None:
    assert in_the_unit(given, unit) == (given.partition("\\")[0] if is_same else None)
