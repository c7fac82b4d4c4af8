"""The Forth itself: its words, its documentation, and that every program ends."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus_forth_lang.dictionary import all_words, build_machine, lookup, run_program
from gradus_forth_lang.machine import ForthError, Limits, signed

NUMBERS = (7, 3, 12, 5, 2, 9)
OUTSIDE = {"CLEAR", "PICK", "ROLL", "SUM-ALL", "MAX-ALL", "MIN-ALL", "NDROP", "RANGE", "NDUP"}
"""Words whose effect on the depth depends on the values."""


def result(code: str) -> tuple[list[int], str]:
    machine, error = run_program(code)
    assert error is None, error
    return machine.stack, machine.text


def test_there_are_four_hundred_words_and_each_says_what_it_does() -> None:
    words = all_words()
    assert len(words) > 400
    assert len({word.name for word in words}) == len(words)
    for word in words:
        assert re.fullmatch(r"\( .*\)", word.effect), word.name
        assert word.text.endswith((".", "?")), word.name
        assert word.group != "yours", word.name


@pytest.mark.parametrize(
    "group", ["stack", "arithmetic", "comparison", "bits", "double"], ids=lambda group: group
)
def test_words_change_the_depth_as_their_effect_says(group: str) -> None:
    for word in all_words():
        sides = word.effect.strip("() ").split("--")
        if word.group != group or word.is_compile_only or word.name in OUTSIDE or "|" in sides[1]:
            continue
        cells = {"d": 2} if group == "double" else {}
        taken, left = (sum(cells.get(part, 1) for part in side.split()) for side in sides)
        machine = build_machine()
        machine.push_many([*NUMBERS])
        machine.execute(word)
        assert len(machine.stack) == len(NUMBERS) - taken + left, word.name


@pytest.mark.parametrize(
    ("code", "stack"),
    [
        ("7 squared 15 0 10 clamp 7 2 ceil/ 8 3 round/", [49, 10, 4, 3]),
        ("3 1 2 median3 5 sum-squares 5 factorial 10 fibonacci", [2, 55, 120, 55]),
        ("5 2 choose 5 catalan 1000 ilog10 12 totient 3 20 7 modpow", [10, 42, 3, 4, 2]),
        ("97 prime? 1 prime? 28 perfect? 1900 leap-year? 2000 leap-year?", [-1, 0, -1, 0, -1]),
        ("-7 2 / -7 2 mod -7 2 trunc/mod", [-4, 1, -1, -3]),
        ("1 63 lshift -1 1 rshift 1+", [-(2**63), -(2**63)]),
        (": t case 1 of 10 endof 2 of 20 endof 99 swap endcase ; 1 t 2 t 3 t", [10, 20, 99]),
        (": c create , does> @ + ; 5 c add5 10 add5", [15]),
        (": f 10 0 do i 5 = if leave then i loop ; f", [0, 1, 2, 3, 4]),
        (": f 0 10 do i -3 +loop ; f 0 0 : g ?do 1 loop ; g", [10, 7, 4, 1]),
        (": f 2 0 do 2 0 do j i loop loop ; f", [0, 0, 0, 1, 1, 0, 1, 1]),
        (": e 7 throw ; 1 ' e catch", [1, 7]),
        (": r dup 0> if 1- recurse then ; 100 r", [0]),
        ("5 value v 7 to v 1 +to v v defer z : y z ; ' squared is z 4 y", [8, 16]),
        (
            ': f s" level" s-palindrome? ; f s"  two  words here" s-words s" 12x" >number?',
            [-1, 3, 0, 0],
        ),
        ("create a 3 , 5 , 4 , a 3 sort a @ a 3 cells-sum", [3, 12]),
        ('s" 1 2 +" evaluate 5 array b 9 4 b ! 4 b @', [3, 9]),
        ("$ff %101 'a' -3", [255, 5, 97, -3]),
        (": i2 immediate ; : twice postpone dup postpone + ; immediate : f twice ; 4 f", [8]),
    ],
)
def test_programs_leave_what_forth_says(code: str, stack: list[int]) -> None:
    assert result(code)[0] == stack


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("hex ff decimal . -1234 .cents 125 .time", "255 -12.34 2:05 "),
        ("create a 3 , 5 , 4 , a 3 ' . cells-each", "3 5 4 "),
        ("12345. <# # # ',' hold #s #> type", "123,45"),
        ("2e 3e f+ f. fpi f>s . 3e 1e 2e fmedian3 f.", "5 3 2 "),
        (': f ." hi" cr ; f 3 stars ( ignored ) \\ and this', "hi\n***"),
    ],
)
def test_programs_print_what_forth_says(code: str, text: str) -> None:
    assert result(code)[1] == text


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 +", "stack underflow"),
        ("1 0 /", "division by zero"),
        ("no-such-word", "not a word"),
        (": f if ;", "IF is not ended"),
        (": f then ;", "THEN has no IF or ELSE"),
        (": f 1", "has no ;"),
        (": f >r ; 1 f", "on the return stack"),
        (": f r> ; f", "return stack underflow"),
        ("-8 @", "invalid memory address"),
        ("8 1000000000000000000 0 fill", "invalid memory address"),
        ("8 1000000000000000000 erase", "invalid memory address"),
        ("8 -1 erase", "invalid memory address"),
        ("8 1000000000000000000 blank", "invalid memory address"),
        ("1000000 allot", "data space is full"),
        (": f recurse ; f", "endless recursion"),
        (": f begin again ; f", "more than 100000 steps"),
        (": f begin 1 again ; f", "stack overflow"),
        (": f begin 1024 spaces again ; f", "characters printed"),
        (": f begin 0 60000 0 fill again ; f", "more than 100000 steps"),
        (': f begin s" : x ; " evaluate again ; f', "too many definitions"),
        (': f ; : g s" g" evaluate ; g', "inside one another"),
        ("1e 0e f/", "float division by zero"),
        ("-1e fsqrt 9e400", "out of range"),
        ("12345 execute", "no execution token"),
        ("' if execute", "only inside a definition"),
        ("i", "only inside a definition"),
        ("x" * 40_000, "more than 32768 characters"),
    ],
)
def test_what_goes_wrong_is_named(code: str, reason: str) -> None:
    _, error = run_program(code)
    assert error is not None
    assert reason in error


def test_catch_does_not_stop_a_limit() -> None:
    _, error = run_program(": f begin again ; : g begin ['] f catch drop again ; g")
    assert error == "more than 100000 steps"


def test_a_program_cannot_reach_another_one() -> None:
    run_program(": dup drop ; 5 base!")
    assert result("3 dup 10 .") == ([3, 3], "10 ")


@given(st.text(max_size=60))
def test_any_text_ends_as_a_program(text: str) -> None:
    machine, error = run_program(text, Limits(steps=2_000))
    assert error is None or error
    assert all(value == signed(value) for value in machine.stack)


WORDS = st.sampled_from([word.name for word in all_words()])


@given(st.lists(WORDS | st.integers(-3, 300).map(str) | st.just(": f"), max_size=40))
def test_any_words_end_as_a_program(parts: list[str]) -> None:
    machine, error = run_program(" ".join(parts), Limits(steps=2_000))
    assert error is None or error
    assert machine.steps < 20_000
    assert len(machine.text) <= machine.limits.output
    assert all(value == signed(value) for value in machine.stack)


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ("dup", "DUP ( x -- x x )"),
        (" bits ", "Words of the chapter bits: "),
        ("square root", "ISQRT"),
        ("swop", "Near names: "),
        ("", "There is no word"),
        ("\x00" * 10_000, "There is no word"),
    ],
)
def test_the_documentation_answers_any_question(query: str, part: str) -> None:
    assert part in lookup(query)
    assert len(lookup(query)) < 4_000


def test_the_prelude_raises_where_its_words_are_asked_too_much() -> None:
    with pytest.raises(ForthError, match="division by zero"):
        build_machine().run("5 0 multiple?")
