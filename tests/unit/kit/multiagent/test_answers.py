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
    assert time.process_time() - started < 10.0


def test_many_possible_letters_are_read_at_once() -> None:
    started = time.process_time()
    read_choice("possibly A " * 40_000, "ABCD")
    assert time.process_time() - started < 10.0


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


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B is the correct answer. Option A ignores friction.", "B"),
        ("Therefore, B is the correct answer. Option A ignores friction.", "B"),
        ("B is the best answer. Option A ignores friction.", "B"),
        ("I think it's B. Option A is wrong.", "B"),
        ("Friction matters, so B is correct. Option A ignores it.", "B"),
        ("The answer is clearly B. Option A is out.", "B"),
        ("The answer is therefore B. Option A is out.", "B"),
        ("The answer, then, is B. Option A is out.", "B"),
        ("The answer to the question is B. Option A is out.", "B"),
        ("The correct one is B. Option A is out.", "B"),
        ("Result: B. Option A is out.", "B"),
        ("Correct: B. Option A is out.", "B"),
        ("I'm going with B. Option A is out.", "B"),
        ("B, 14. Option A is out", "B"),
        ("B (14). Option A is out", "B"),
        ("B = 14. Option A is out", "B"),
        ("B → 14. Option A is out", "B"),
        ("- A: 12, no\n- B: 14, yes\n- C: 16, no\n\nSo it is B.", "B"),
        ("- A: 12, no\n- B: 14, yes\n- C: 16, no\n\nTherefore B.", "B"),
        ("- A: 12, no\n- B: 14, yes\n- C: 16, no\n\nB", "B"),
        ("A - 12, no\nB - 14, yes\n\nTherefore B.", "B"),
        ("Option A: too small.\nOption B: fits.\nOption C: too large.\n\nSo B.", "B"),
        ("Option A\nToo small.\nOption B\nFits.\n\nB", "B"),
        ("If the answer is A then 2=3. So it is option B.", "B"),
        ("Option A is correct? No, option B is correct.", "B"),
        ("answer: b because a is out", "B"),
        ("The answer is A if x, else the option is B; x fails, option B.", "B"),
        ("**Answer:** B", "B"),
        ("### Final Answer\nB", "B"),
        ("Final answer: **B) 14**", "B"),
        ("(b)", "B"),
        ("The correct answer is:\n\n**B**", "B"),
        ("The right choice here is option B, because A overshoots.", "B"),
        ("A is wrong, C is wrong, D is wrong. B.", "B"),
        ("Since A and C are out, B remains. So (B).", "B"),
        ("It has to be B", "B"),
        ("A: no. B: yes. The answer is thus B.", "B"),
        ("I choose B over A.", "B"),
        ("B. A is smaller.", "B"),
        ("My answer is B since neither A nor C fits.", "B"),
        ("The answer must be B", "B"),
        ("The most likely option is B.", "B"),
        ("Let me check A: 12. No. B: 14. Yes. Answer: B", "B"),
        ("Only B is correct.", "B"),
        ("Thus the correct option is (B) 14 m/s.", "B"),
        ("It's option B: the others fail, A most of all.", "B"),
        ("The answer is\n\n\\boxed{B}", "B"),
        ("$$\\boxed{\\mathrm{B}}$$", "B"),
        ("B seems right to me", "B"),
        ("The correct answer is option (B), not option (A).", "B"),
        ("I'd pick B. A looks tempting.", "B"),
        ("<answer>B</answer> A would be too small", "B"),
        ("Answer: C. Neither A nor B fits.", "C"),
        ("C. Neither A nor B fits.", "C"),
        ("Both A and B are wrong, so the answer is C.", "C"),
        ("The answer is C, because both A and B ignore friction.", "C"),
        ("The answer is C. You cannot tell A from B by sight.", "C"),
        ("The answer is C because A could be heated.", "C"),
        ("It must be C: A and B are excluded.", "C"),
        ("A: 3, B: 6, C: 4. Option C", "C"),
        ("A works", "A"),
        ("A makes sense", "A"),
        ("A will do", "A"),
        ("A definitely", "A"),
        ("A has the largest value", "A"),
        ("The answer is B: all of the above", "B"),
        (
            "Answer: B\n\nExplanation: A is wrong because it is too small; C could be right if x "
            "were 2, but it is not.",
            "B",
        ),
        ("B\n\nA is possible only in winter.", "B"),
        ("I am not sure about A, but B is certainly correct.", "B"),
        ("It can't be A or C, so B or D; B fits better. Answer: B", "B"),
        ("The answer is B. Let me know if any of these steps are unclear.", "B"),
        ("I don't know the exact value, but B is the closest, so the answer is B.", "B"),
        ("A is incorrect, B is correct, C is incorrect, D is incorrect.", "B"),
        ("The answer is B and A is wrong", "B"),
        ("The answer is B, and A is wrong", "B"),
        ("The answer is B, A is too small", "B"),
        ("You might think the answer is A, but B has a lower energy. So B.", "B"),
        ("b) 5 m", "B"),
        ("Answer: b) 5 m", "B"),
        ("(b) 3 m/s", "B"),
        ("The answer is 'B'.", "B"),
        ("The answer is B; A is too large.", "B"),
        ("Many would say A. The truth is C.", "C"),
        ("The answer is A. Actually, C.", "C"),
        ("D. All of the above", "D"),
        ("D) None of the above", "D"),
        ("The answer is D, none of the above.", "D"),
        ("The correct answer is D. All of them are right.", "D"),
    ],
)
def test_a_statement_counts_whatever_is_said_of_other_options(reply: str, letter: str) -> None:
    assert read_choice(reply, "ABCD") == letter


@pytest.mark.parametrize(
    "reply",
    [
        "The answer is A or B",
        "B. Or A.",
        "maybe A, maybe B",
        "A B C D",
        "A\nB\nC\nD... whatever?",
        "I'd answer A; or B.",
        "Answer: A and B",
        "The answer is A/B",
        "Is it A? Is it B?",
        "B? No. A? No.",
        "A fits. B fits.",
        "If the answer is A then 2 = 3, and if it is B then 3 = 4.",
    ],
)
def test_a_reply_that_names_several_letters_and_states_none_has_no_answer(reply: str) -> None:
    assert read_choice(reply, "ABCD") is None


@pytest.mark.parametrize(
    "reply",
    [
        "C is wrong.",
        "C isn't correct",
        "C is not the answer.",
        "C does not work.",
        "C is false.",
        "I reject C",
        "Anything but C.",
        "I would not choose A",
        "Don't choose A",
        "Never pick A",
        "I will not answer A.",
        "All except A are wrong",
        "All but A are wrong",
        "My opponent claims the correct answer is A, which is wrong.",
        "The answer is A; B also works.",
        "The answer is A (or B).",
        "The answer is A | B | C",
        "The answer is A - B",
        "The answer is A\u2013D",
        "The answer is A + B",
        "A=B=C=D",
        "The answer is A... or is it B?",
        "A. B. C. D.",
        "A through D",
        "any of A, B, C, D is right",
        "I don't think it's C",
        "I don't think C is right",
        "I doubt the answer is C",
        "It is unlikely that the answer is C",
        "The answer is hardly C",
        "There is no way it is C",
        "The answer being C would be absurd",
        "C would be wrong",
        "Rejecting C.",
    ],
)
def test_a_letter_that_is_ruled_out_or_stands_beside_others_is_no_answer(reply: str) -> None:
    assert read_choice(reply, "ABCD") is None
