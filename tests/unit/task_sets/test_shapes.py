"""The task set `shapes`: drawings that engine and trainer read, counted one by one."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import verifiers.v1 as vf
from pydantic import ValidationError

from gradus.errors import ConfigError
from gradus.wire.images import bytes_of, open_image
from gradus_shapes.drawing import Drawing, drawings
from gradus_shapes.environment import MOST_SHAPES, ShapesConfig, ShapesTask, ShapesTaskset


def load(**keys: Any) -> list[ShapesTask]:
    return list(ShapesTaskset(ShapesConfig(id="gradus-shapes", **keys)))


def parts(drawing: Drawing) -> int:
    """How many shapes lie apart on the white of a drawing."""
    ink = (np.asarray(open_image(drawing.content)) != 255).any(-1)
    found, left = 0, {(int(y), int(x)) for y, x in zip(*np.nonzero(ink), strict=True)}
    while left:
        found, near = found + 1, [left.pop()]
        while near:
            y, x = near.pop()
            beside = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= beside
            near += beside
    return found


def test_a_drawing_has_as_many_circles_as_it_says_and_they_do_not_touch() -> None:
    drawn = list(islice(drawings(seed=3, max_circles=MOST_SHAPES, max_squares=0), 30))
    assert [parts(it) for it in drawn] == [it.num_circles for it in drawn]
    assert {it.num_circles for it in drawn} == set(range(1, MOST_SHAPES + 1))


def test_squares_are_drawn_and_not_counted() -> None:
    drawn = list(islice(drawings(seed=3, max_circles=2, max_squares=3), 30))
    more = [parts(it) - it.num_circles for it in drawn]
    assert (min(more), max(more)) == (0, 3)


def test_a_conversation_shows_a_drawing_each_turn_and_both_sides_share_none() -> None:
    tasks, held_out = (load(num_tasks=40, turns=2, side=side) for side in ("train", "held_out"))
    assert len(tasks) == len(held_out) == 40

    def urls(task: ShapesTask) -> set[str]:
        (prompt,) = task.data.prompt
        shown = [message.content[0].image_url.url for message in (prompt, *task.data.later_turns)]
        assert all(len(bytes_of(url)) > 100 for url in shown)
        return set(shown)

    assert all(len(urls(task)) == len(task.data.counts) == 2 for task in tasks)
    trained, kept = ({url for it in side for url in urls(it)} for side in (tasks, held_out))
    assert not trained & kept


@pytest.mark.parametrize(
    ("replies", "counted", "numbers"),
    [
        *[(["3", " 4\n"], 1.0, 1.0), (["3", "3"], 0.5, 1.0), (["3 circles", "4"], 0.5, 0.5)],
        *[([], 0.0, 0.0), (["3"], 0.5, 0.5), (["03", "-4"], 0.0, 0.5), (["34", "4"], 0.5, 1.0)],
    ],
)
async def test_the_reward_is_the_share_that_was_counted_right(
    replies: list[str], counted: float, numbers: float
) -> None:
    (task,) = load(num_tasks=1, turns=2)
    task.data = task.data.model_copy(update={"counts": (3, 4)})
    assert task.gold_replies() == ["3", "4"]

    said = [vf.AssistantMessage(content=reply) for reply in replies]
    trace: Any = SimpleNamespace(assistant_messages=said)
    assert (await task.counted(trace), await task.numbers(trace)) == (counted, numbers)


def test_what_no_drawing_can_hold_and_a_side_without_tasks_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_circles \\+ max_squares = 7: a drawing holds"):
        load(max_circles=4, max_squares=3)
    with pytest.raises(ConfigError, match="no task is on side = 'held_out'"):
        load(side="held_out", holdout_fraction=0.0)
