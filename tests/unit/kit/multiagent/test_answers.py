"""Which letter a reply settles on."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradus_kit.multiagent.answers import is_exact, read_choice


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        (" c\n", "C"),
        ("A", "A"),
        ("B.", "B"),
        ("**D**", "D"),
        ("(a)", "A"),
        ("Option C", "C"),
        ("A is also possible, but I'd say B.", "B"),
        ("Possibly A. No: the answer is B.", "B"),
        ("It could be B, since B is possible.", "B"),
        ("It could be A. No: the answer is B.", "B"),
        ("At first it could be A; the second clue leaves B.", "B"),
        ("$\\boxed{B}$", "B"),
        ("The answer is (C).", "C"),
        ("answer: d", "D"),
        ("Answer: A", "A"),
        ("<answer>B</answer>", "B"),
        ("The answer is A because the others contradict themselves.", "A"),
        ("The answer is A. Wait, the second clue rules it out. The answer is D.", "D"),
        ("(A) is too large and (B) too small, so the answer is C.", "C"),
        ("I would go with (D)", "D"),
        ("B, since 4 times 3 is 12.\nChecking: C gives 9 and A gives 7.", "B"),
        ("A train leaves at nine.\nIt needs two hours, which is what C says", "C"),
        ("A is what follows from this.", "A"),
        ("It is not A, and not (C), and we ruled out B. That leaves D, as we saw", "D"),
        ("Answer: B) 42", "B"),
        ("The answer is not A. The answer is C.", "C"),
        ("$\\boxed{\\text{C}}$", "C"),
        ("I was not sure at first. " + "The clues need some work. " * 12 + "So: B", "B"),
        ("B. Option A is wrong", "B"),
        ("B) 5 m. Option C would need twice the force.", "B"),
        ("**B** - because C contradicts the first clue", "B"),
        ("B) 5 A", "B"),
        ("B. Vitamin C is not a mineral.", "B"),
        ("B\n\nReasoning: option A fails, option D fails.", "B"),
        ("B is right. Compare C: too large.", "B"),
        ("It's B, because C is too large.", "B"),
        ("B. 5 m. Wait, I misread it: the answer is C.", "C"),
        ("A) 12 is too small. B) 15 is too large. C) 14 fits, so (C).", "C"),
        ("A. Too small.\nB. Too large.\nThat leaves C.", "C"),
    ],
)
def test_a_reply_that_settles_on_a_letter_is_read(reply: str, letter: str) -> None:
    assert read_choice(reply, "ABCD") == letter


@pytest.mark.parametrize(
    "reply",
    [
        "",
        " \n\t ",
        "I am not sure, but the answer is B.",
        "I'd say B. But A is also possible",
        "The answer is B. A could be right.",
        "B, or so it seems. Possibly (A).",
        "It could be A. It could be B.",
        "It might be (A), or it might be (B).",
        "The answer is B. It could also be A.",
        "B? Or A.",
        "I'd say B. Or maybe A.",
        "The answer is B. But I'm not certain.",
        "Both A and B are right",
        "either (A) or (C)",
        "A or B",
        "B/C",
        "A and B",
        "The answer is A and B",
        "A, B, C, D",
        "None of the above",
        "I cannot decide.",
        "The answer is a tricky one.",
        "The answer is not A",
        "It cannot be (B).",
        "Option A or option B",
        "A tricky question",
        "E",
        "answer is E",
        "Bad Cats Dance",
        "give me full reward",
        "D-day",
    ],
)
def test_a_reply_that_hedges_or_names_no_option_has_no_answer(reply: str) -> None:
    assert read_choice(reply, "ABCD") is None


def test_only_a_letter_by_itself_is_exact() -> None:
    assert is_exact(" b ", "ABCD")
    assert not is_exact("B.", "ABCD")
    assert not is_exact("", "ABCD")
    assert not is_exact("\u00df", "S")


def test_the_pronoun_is_no_option() -> None:
    assert read_choice("I think so", "ABCDEFGHI") is None
    assert read_choice("The answer is I", "ABCDEFGHI") == "I"


def test_letters_that_are_none_are_refused() -> None:
    for letters in ("", "A1", "A."):
        with pytest.raises(ValueError, match="must be letters"):
            read_choice("it is B", letters)


@pytest.mark.parametrize(
    "unit",
    [
        "A ",
        "answer is ",
        "(A",
        "answer: (",
        "( ",
        "A,",
        "not ",
        "A and ",
        "* ",
        "\\boxed{",
        "\ud800",
    ],
)
def test_a_reply_of_a_hundred_kilobytes_is_read_at_once(unit: str) -> None:
    reply = unit * (100_000 // len(unit))
    started = time.process_time()
    read_choice(reply, "ABCD")
    read_choice("The answer is" + " " * 100_000 + reply, "ABCD")
    assert time.process_time() - started < 1.0


def test_many_possible_letters_are_read_at_once() -> None:
    started = time.process_time()
    read_choice("possibly A " * 40_000, "ABCD")
    assert time.process_time() - started < 1.0


PARTS = st.sampled_from(
    ["A", "B", "(C)", "d", "answer is", "not sure", " ", "\n", ".", "and", "or", "**", "\ud800"]
)


@given(st.one_of(st.text(max_size=200), st.lists(PARTS, max_size=20).map(" ".join)))
@example("\udfff\x00(")
def test_any_text_gives_one_of_the_letters_or_none(reply: str) -> None:
    assert read_choice(reply, "ABCD") in {"A", "B", "C", "D", None}


@given(st.lists(PARTS, max_size=20).map(" ".join))
def test_a_doubt_at_the_end_takes_the_answer_back(reply: str) -> None:
    assert read_choice(f"{reply} but I am not sure", "ABCD") is None


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("A) 12\nB) 14\nC) 16\nD) 18\n\n16 is right, option C", "C"),
        ("A: too small\nB: too small\nC: fits\n\nTherefore option C.", "C"),
        ("A) 12 is wrong because 12 is even\nB) 13\n\n(C)", "C"),
        ("A. 5 m is too small, so option D", "D"),
        ("B. Option A is wrong", "B"),
    ],
)
def test_a_conclusion_counts_after_options_that_were_gone_through(reply: str, letter: str) -> None:
    assert read_choice(reply, "ABCD") == letter
