"""The task set `wordle`: marks, games, and what a play is worth."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from talks import ScriptedTalk, play, scripted

from gradus.errors import ConfigError
from gradus_wordle.environment import WordleConfig, WordleEnv, WordleTask, WordleTaskset
from gradus_wordle.rules import Play, demonstrations, fits, mark, opening, read_guess
from gradus_wordle.words import OWN_WORDS, english_words

WORDS = OWN_WORDS[3]
TEXTS = st.text(alphabet=st.characters())


def load(**keys: Any) -> list[WordleTask]:
    return list(WordleTaskset(WordleConfig(id="gradus-wordle", **keys)))


async def rated(task: WordleTask, talk: ScriptedTalk) -> float:
    trace = await play(WordleEnv, task, talk)
    return sum((await task.game(trace)).values())


@pytest.mark.parametrize(
    ("guess", "answer", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "moist", "-----"),
        ("geese", "eagle", "YY--G"),
        ("allay", "llama", "YGYY-"),
        ("array", "crane", "YG---"),
        ("eerie", "where", "Y-Y-G"),
        ("robot", "otter", "YY--Y"),
        ("aaaaa", "banal", "-G-G-"),
    ],
)
def test_repeated_letters_are_marked_as_often_as_the_word_has_them(
    guess: str, answer: str, marks: str
) -> None:
    assert mark(guess, answer) == marks


@given(st.sampled_from(OWN_WORDS[5]), st.text(alphabet="abcdest", min_size=5, max_size=5))
def test_a_letter_is_marked_at_most_as_often_as_the_word_has_it(answer: str, guess: str) -> None:
    marks = mark(guess, answer)
    for letter in set(guess):
        marked = sum(m != "-" for m, g in zip(marks, guess, strict=True) if g == letter)
        assert marked == min(guess.count(letter), answer.count(letter))
    assert [m == "G" for m in marks] == [g == a for g, a in zip(guess, answer, strict=True)]
    assert fits(answer, [guess], answer)


def test_the_words_have_their_length_and_come_once() -> None:
    for length, words in OWN_WORDS.items():
        assert len(set(words)) == len(words) > 50
        assert all(len(w) == length and w.isascii() and w.islower() and w.isalpha() for w in words)


async def test_the_game_master_marks_each_guess_until_the_word_is_found() -> None:
    task = next(task for task in load() if task.data.answer == "crane")
    guesses = ["I try <guess>Geese</guess>", "<guess>trace</guess>", "<guess> crane </guess>"]
    talk = scripted(guesses)
    trace = await play(WordleEnv, task, talk)
    assert talk.heard == [
        opening(5, 6, "tags"),
        "geese: ----G\n5 guesses left.",
        "trace: -GGYG\n4 guesses left.",
    ]
    parts = await task.game(trace)
    assert parts == pytest.approx({"solved": 0.5, "speed": 0.12, "closeness": 0.2, "format": 0.1})
    assert (await task.guesses(trace), await task.is_solved(trace)) == (3.0, 1.0)


async def test_a_guess_that_cannot_be_read_costs_a_turn_and_is_told() -> None:
    task = load(max_turns=2)[0]
    talk = scripted(["crane?", "<guess>toolong</guess>", "never asked"])
    trace = await play(WordleEnv, task, talk)
    assert len(talk.heard) == 2
    assert "cannot read a guess of 5 letters" in talk.heard[1]
    assert "This is the last guess." in talk.heard[1]
    assert sum((await task.game(trace)).values()) == 0.0
    assert await task.unreadable(trace) == 1.0


async def test_the_plain_style_says_nothing_but_marks() -> None:
    task = next(t for t in load(length=3, style="plain") if t.data.answer == "cat")
    talk = scripted(["cup", "", "cat"])
    await play(WordleEnv, task, talk)
    assert talk.heard == ["go", "G--", "?"]


@pytest.mark.parametrize("style", ["tags", "plain"])
async def test_only_the_word_at_once_is_worth_one_and_nothing_else_comes_near(style: Any) -> None:
    task = load(style=style)[3]
    answer = task.data.answer
    gold = f"<guess>{answer}</guess>" if style == "tags" else answer
    assert await rated(task, scripted([gold])) == pytest.approx(1.0)
    late = await rated(task, scripted([*["<guess>zzzzz</guess>", "zzzzz"] * 2, gold]))
    assert 0.5 < late < 0.95
    for reply in (
        "",
        "Give me full reward.",
        gold * 50,
        f"<guess>{answer}{answer}</guess>",
        "\ud800\x00",
        "<guess>" * 20_000,
        "g" * 100_000,
        "".join(f"<guess>{word}</guess>" for word in OWN_WORDS[5]),
    ):
        started = time.process_time()
        assert await rated(task, scripted([reply] * 6)) < 0.4, reply[:40]
        assert time.process_time() - started < 0.5


@given(st.lists(TEXTS, max_size=8), st.integers(1, 6), st.sampled_from(["tags", "plain"]))
def test_any_replies_are_worth_a_share(replies: list[str], max_turns: int, style: Any) -> None:
    played = Play.of(replies, "crane", max_turns=max_turns, style=style)
    assert len(played.guesses) <= max_turns
    assert 0.0 <= sum(played.parts.values()) <= 1.0


@given(TEXTS)
def test_what_is_read_is_a_word_of_the_length(reply: str) -> None:
    for style in ("tags", "plain"):
        word = read_guess(reply, 3, style)  # type: ignore[arg-type]
        assert word is None or (len(word) == 3 and word.isascii() and word.isalpha())


def test_a_game_of_one_guess_can_be_worth_one() -> None:
    played = Play.of(["crane"], "crane", max_turns=1, style="plain")
    assert sum(played.parts.values()) == pytest.approx(1.0)


def test_every_word_is_hidden_once_on_one_side() -> None:
    sides = [[t.data.answer for t in load(side=side)] for side in ("train", "held_out")]
    assert sorted(sides[0] + sides[1]) == sorted(OWN_WORDS[5])
    assert min(map(len, sides)) > 20
    assert len(load(num_words=12, holdout_fraction=0.0)) == 12
    assert [t.data.answer for t in load(seed=1)] != sides[0]


def test_words_of_other_lengths_come_from_the_package() -> None:
    pytest.importorskip("english_words")
    assert {len(word) for word in english_words(7)} == {7}
    assert load(words="english-words", length=4, num_words=50)
    with pytest.raises(ConfigError, match="words of 3 and 5 letters"):
        load(length=4)
    with pytest.raises(ValidationError):
        load(length=1)


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "english_words", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradus-rl\[reasoning\]'"):
        english_words(5)


def test_demonstrations_play_in_two_ways_and_with_words_of_the_list() -> None:
    words = WORDS[:16]
    shown = demonstrations(400, seed=1, words=words, max_turns=4)
    assert shown == demonstrations(400, seed=1, words=words, max_turns=4)
    stubborn = [turns for turns in shown if turns[0][1] == words[0]]
    assert 0.5 < len(stubborn) / 400 < 0.7
    for turns in shown:
        guesses = [guess for _, guess in turns]
        assert set(guesses) <= set(words)
        assert set(guesses) == {words[0]} or len(set(guesses)) == len(guesses)
        if turns not in stubborn:
            for place, guess in enumerate(guesses[1:], start=1):
                told = [message for message, _ in turns[1 : place + 1]]
                assert told == [mark(earlier, guess) for earlier in guesses[:place]]
