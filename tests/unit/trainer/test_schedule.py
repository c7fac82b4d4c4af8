"""The learning rate as a function of the step."""

from __future__ import annotations

import pytest

from gradus.config import AdamWConfig
from gradus.trainer.optimizer.optimizer import learning_rate

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.5, 0.0]),
        ("cosine", [1.0, 0.5, 0.0]),
    ],
)
def test_schedules_start_at_the_peak_and_end_at_their_floor(
    schedule: str, rates: list[float]
) -> None:
    config = AdamWConfig.model_validate({"lr": 1.0, "schedule": schedule})
    assert [learning_rate(config, step, 10) for step in (0, 5, 10)] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_floor_is_a_share_of_the_peak(schedule: str) -> None:
    config = AdamWConfig.model_validate({"lr": 2.0, "schedule": schedule, "min_lr_ratio": 0.1})
    rates = [learning_rate(config, step, 11) for step in (0, 5, 10, 99)]
    assert rates == pytest.approx([2.0, 1.1, 0.2, 0.2])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_the_last_step_has_the_floor_and_none_has_a_rate_of_zero(
    schedule: str, warmup_steps: int
) -> None:
    def rates(min_lr_ratio: float) -> list[float]:
        values = {"lr": 2.0, "schedule": schedule, "warmup_steps": warmup_steps}
        config = AdamWConfig.model_validate({**values, "min_lr_ratio": min_lr_ratio})
        return [learning_rate(config, step, 20) for step in range(20)]

    assert rates(0.1)[-1] == pytest.approx(0.2)
    assert rates(0.1)[-2] > 0.2
    assert 0 < rates(0.0)[-1] < 0.3


def test_the_warm_up_rises_to_the_peak() -> None:
    config = AdamWConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_schedule_begins_where_the_warm_up_ends() -> None:
    config = AdamWConfig(lr=1.0, warmup_steps=4, schedule="linear")
    rates = [learning_rate(config, step, 14) for step in (3, 4, 9, 14)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.0])
