"""The task set `color-codeword`: squares of one colour each, and the word that they spell."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf

from gradus.wire.images import bytes_of, open_image
from gradus_color_codeword.environment import (
    LETTERS,
    ColorCodewordConfig,
    ColorCodewordTask,
    ColorCodewordTaskset,
)

COLOURS = {"A": (255, 0, 0), "C": (0, 0, 255), "G": (0, 0, 0), "H": (255, 255, 255)}


def load(count: int, **keys: Any) -> list[ColorCodewordTask]:
    tasks = ColorCodewordTaskset(ColorCodewordConfig(id="gradus-color-codeword", **keys))
    return list(islice(iter(tasks), count))


def test_each_square_has_the_colour_of_its_letter_and_words_never_end() -> None:
    tasks = load(200, turns=2, images_per_turn=2)
    assert len(tasks) == 200
    for task in tasks:
        prompt = task.data.prompt
        assert isinstance(prompt, list)
        shown = [part for it in (*prompt, *task.data.later_turns) for part in it.content]
        urls: list[str] = [part.image_url.url for part in shown if part.type == "image_url"]  # type: ignore[union-attr]
        pixels = [open_image(bytes_of(url)).getpixel((20, 30)) for url in urls]
        known = [(letter, pixel) for letter, pixel in zip(task.data.word, pixels, strict=True)]
        assert all(COLOURS.get(letter, pixel) == pixel for letter, pixel in known)
        assert task.gold_replies() == [task.data.word[:2], task.data.word]
    assert {letter for task in tasks for letter in task.data.word} == set(LETTERS.values())


@pytest.mark.parametrize(
    ("replies", "spelled", "whole"),
    [
        (["A", "AC"], 1.0, 1.0),
        (["x", " ac\n"], 1.0, 1.0),
        (["A", "AD"], 0.5, 0.0),
        (["AC"], 0.0, 0.0),
        (["A", "ACA"], 0.0, 0.0),
        (["A", "The word is AC"], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
async def test_the_last_reply_is_the_whole_word(
    replies: list[str], spelled: float, whole: float
) -> None:
    (task,) = load(1, turns=2)
    task.data = task.data.model_copy(update={"word": "AC"})
    said = [vf.AssistantMessage(content=reply) for reply in replies]
    trace: Any = SimpleNamespace(assistant_messages=said)
    assert (await task.spelled(trace), await task.whole(trace)) == (spelled, whole)
