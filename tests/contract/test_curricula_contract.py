"""What every registered curriculum promises."""

from __future__ import annotations

import json
import random

import pytest
from configs import build_curriculum_config

from gradus.config import CurriculumConfig
from gradus.orchestrator.play.curriculum import (
    Curriculum,
    Ending,
    TaskResult,
    build_curriculum,
)

pytestmark = pytest.mark.parametrize("name", sorted(CurriculumConfig.registered()))


def build(name: str, *, num_tasks: int | None = 20, seed: int = 0) -> Curriculum:
    config = build_curriculum_config(name)
    return build_curriculum(config, source="words", num_tasks=num_tasks, seed=seed)


def random_result(source: random.Random) -> TaskResult:
    rewards = tuple(float(source.random() < 0.5) for _ in range(source.randrange(5)))
    return TaskResult(source.choice(list(Ending)), rewards, tuple(3 for _ in rewards))


def play(curriculum: Curriculum, number: int, *, seed: int) -> list[int]:
    """Draw and record; rewards follow from `seed`."""
    source = random.Random(seed)
    drawn = []
    for _ in range(number):
        draw = curriculum.next_task()
        drawn.append(draw.index)
        if source.random() < 0.8:
            curriculum.record(draw.index, random_result(source))
    return drawn


def test_every_task_comes_before_one_comes_a_third_time(name: str) -> None:
    curriculum = build(name)
    drawn = [curriculum.next_task().index for _ in range(60)]
    assert set(drawn) == set(range(20))
    assert max(drawn[:40].count(index) for index in range(20)) == 2


def test_the_order_follows_from_seed_source_and_rewards_alone(name: str) -> None:
    assert play(build(name), 100, seed=1) == play(build(name), 100, seed=1)
    assert play(build(name, seed=4), 20, seed=1) != play(build(name, seed=5), 20, seed=1)


@pytest.mark.parametrize("before", [0, 1, 19, 20, 73])
def test_its_state_as_json_goes_on_as_if_nothing_had_happened(name: str, before: int) -> None:
    whole = build(name)
    play(whole, before, seed=2)
    resumed = build(name)
    resumed.load_state(json.loads(json.dumps(whole.state())))
    assert play(resumed, 80, seed=3) == play(whole, 80, seed=3)
    assert resumed.state() == whole.state()


def test_pass_numbers_count_the_draws_of_a_task(name: str) -> None:
    curriculum = build(name)
    seen: dict[int, int] = {}
    for _ in range(100):
        draw = curriculum.next_task()
        assert draw.pass_number == seen.get(draw.index, 0)
        seen[draw.index] = draw.pass_number + 1


def test_one_task_is_enough(name: str) -> None:
    assert play(build(name, num_tasks=1), 30, seed=0) == [0] * 30
