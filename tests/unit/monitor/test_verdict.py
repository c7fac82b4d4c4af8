"""Whether a run learned, told from its records alone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradus.config import RunConfig
from gradus.monitor import verdict as module
from gradus.monitor.verdict import Word, judge_supervised, verdict_on
from gradus.monitor.verdict import judge_rewards as judge
from gradus.run.records import Record
from gradus.run.settings import leaves

REWARD = "episode/reward/mean"


def noisy(
    start: float, end: float, *, seed: int = 0, num_steps: int = 60, noise: float = 0.05
) -> Any:
    random = np.random.default_rng(seed)
    return np.linspace(start, end, num_steps) + noise * random.standard_normal(num_steps)


def steps_of(**series: Any) -> list[dict[str, float]]:
    """Records from series by metric; `__` stands for `/`."""
    named = {name.replace("__", "/"): values for name, values in series.items()}
    length = max(len(values) for values in named.values() if not isinstance(values, float))
    return [
        {
            name: values if isinstance(values, float) else float(values[step])
            for name, values in named.items()
        }
        for step in range(length)
    ]


@pytest.mark.parametrize(
    ("start", "end", "word"),
    [(0.2, 0.5, "rising"), (0.5, 0.2, "falling"), (-0.9, -0.5, "rising"), (0.3, 0.3, "flat")],
)
def test_a_trend_beyond_the_noise_is_told(start: float, end: float, word: str) -> None:
    found = judge(steps_of(episode__reward__mean=noisy(start, end)))
    assert found is not None
    assert found.word == word
    (reward,) = found.trends
    assert reward.change.value == pytest.approx((end - start) * 2 / 3, abs=0.05)
    assert reward.num_steps == 20


def test_noise_alone_is_seldom_called_a_trend() -> None:
    words = [
        found.word
        for seed in range(200)
        if (found := judge(steps_of(episode__reward__mean=noisy(0.3, 0.3, seed=seed))))
    ]
    assert len(words) == 200
    assert words.count(Word.FLAT) >= 180


@pytest.mark.parametrize("num_steps", [1, 19])
def test_few_steps_give_no_verdict(num_steps: int) -> None:
    steps = steps_of(episode__reward__mean=noisy(0, 9, num_steps=num_steps))
    found = judge(steps)
    assert found is not None
    assert (found.word, found.trends, found.advice) == (Word.SHORT, (), "")
    alarmed = judge([*steps[:-1], {**steps[-1], "alarm/words/truncated": 1.0}])
    assert alarmed is not None
    assert str(alarmed).endswith("; alarms on: words/truncated")


def test_twenty_steps_are_enough() -> None:
    found = judge(steps_of(episode__reward__mean=noisy(0, 9, num_steps=20)))
    assert found is not None
    assert found.word == Word.RISING


def test_parts_stand_beside_the_reward_and_those_that_changed_most_come_first() -> None:
    found = judge(
        steps_of(
            episode__reward__mean=noisy(0.2, 0.5),
            episode__words__reward__format__mean=noisy(0.1, 0.9),
            episode__words__reward__right__mean=noisy(0.3, 0.3),
            episode__words__reward__mean=noisy(0.2, 0.5),
        )
    )
    assert found is not None
    assert [(trend.name, trend.word) for trend in found.trends] == [
        ("reward", "rising"),
        ("format", "rising"),
        ("right", "flat"),
    ]


def test_where_several_sources_train_each_counts_and_not_their_mix() -> None:
    found = judge(
        steps_of(
            episode__reward__mean=noisy(0, 1),
            episode__a__reward__mean=noisy(0.9, 0.5),
            episode__b__reward__mean=noisy(0.5, 0.1),
            episode__a__reward__right__mean=noisy(0, 1),
            episode__b__reward__right__mean=noisy(1, 0),
        )
    )
    assert found is not None
    assert found.word == Word.FALLING
    assert [trend.name for trend in found.trends] == ["a", "b", "a/right", "b/right"]


def test_a_part_called_reward_is_not_taken_for_the_reward() -> None:
    found = judge(
        steps_of(
            episode__reward__mean=noisy(0, 1),
            episode__a__reward__reward__mean=noisy(1, 0),
            episode__a__reward__length__mean=noisy(0, 2),
        )
    )
    assert found is not None
    assert found.word == Word.RISING
    changes = found.as_json()["changes"]
    assert changes["episode/reward/mean"]["value"] > 0
    assert changes["episode/a/reward/reward/mean"]["value"] < 0
    assert str(found).count("reward +") == 1


@pytest.mark.parametrize("factor", [1e99, 1e-90, 1e60])
def test_rewards_of_any_size_have_an_interval(factor: float) -> None:
    found = judge(steps_of(episode__reward__mean=noisy(0, 1) * factor))
    assert found is not None
    assert found.word == Word.RISING


def test_a_step_without_a_reward_is_left_out() -> None:
    steps = steps_of(episode__reward__mean=noisy(0, 1, num_steps=29))
    del steps[4]["episode/reward/mean"]
    found = judge(steps)
    assert found is not None
    assert found.word == Word.RISING


def test_a_reward_at_its_ceiling_needs_no_higher_learning_rate() -> None:
    found = judge(
        steps_of(episode__reward__mean=noisy(0.99, 0.99, noise=0.003), episode__reward__p95=1.0)
    )
    assert found is not None
    assert found.word == Word.FLAT
    assert found.advice.startswith("nearly all is earned")


def test_the_alarm_of_a_source_that_does_not_rise_is_no_gaming() -> None:
    found = judge(
        steps_of(
            episode__a__reward__mean=noisy(0, 1),
            episode__b__reward__mean=noisy(0.5, 0.5),
            alarm__b__reward_part=1.0,
        )
    )
    assert found is not None
    assert found.word == Word.MIXED


def test_a_single_part_is_the_reward_and_told_once() -> None:
    rising = noisy(0, 1)
    found = judge(steps_of(episode__reward__mean=rising, episode__a__reward__right__mean=rising))
    assert found is not None
    assert [trend.name for trend in found.trends] == ["reward"]


def test_a_rise_by_one_part_at_the_cost_of_another_is_gamed() -> None:
    rising = {"episode__reward__mean": noisy(0, 1)}
    on, off = (
        steps_of(**rising, alarm__a__reward_part=1.0),
        steps_of(**rising, alarm__a__truncated=1.0),
    )
    gamed, plain = judge(on), judge(off)
    assert gamed is not None
    assert plain is not None
    assert (gamed.word, gamed.alarms) == (Word.GAMED, ("a/reward_part",))
    assert gamed.advice
    assert (plain.word, plain.alarms, plain.advice) == (Word.RISING, ("a/truncated",), "")


def test_an_alarm_that_is_over_is_not_told() -> None:
    steps = steps_of(episode__reward__mean=noisy(0, 1), alarm__a__reward_part=1.0)
    steps[-1]["alarm/a/reward_part"] = 0.0
    steps[-1]["alarm/a/reward_part/value"] = 0.2
    found = judge(steps)
    assert found is not None
    assert (found.word, found.alarms) == (Word.RISING, ())


@pytest.mark.parametrize(
    ("black", "white", "word"), [((0, 1), (0, 1), "rising"), ((0, 1), (0, -1), "mixed")]
)
def test_where_several_agents_train_all_of_them_count(black: Any, white: Any, word: str) -> None:
    found = judge(
        steps_of(
            episode__go__agent__black__reward__mean=noisy(*black),
            episode__go__agent__black__trained__share=1.0,
            episode__go__agent__white__reward__mean=noisy(*white),
            episode__go__agent__white__trained__share=1.0,
            episode__go__agent__judge__reward__mean=noisy(0, 5),
            episode__go__agent__judge__trained__share=0.0,
        )
    )
    assert found is not None
    assert found.word == word
    assert {trend.name for trend in found.trends} == {"black", "white"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"episode__error__share": 0.4}, "40% of the episodes fail"),
        ({"episode__truncated__share": 0.5}, "50% of the episodes are cut off"),
        ({"episode__flat__share": 0.7}, "70% of the episodes earn what all"),
        ({"loss__entropy__mean": np.linspace(1, 2, 60)}, "multiply"),
        ({}, "multiply"),
    ],
)
def test_a_flat_reward_is_told_with_what_explains_it(more: dict[str, Any], words: str) -> None:
    found = judge(steps_of(episode__reward__mean=noisy(0.3, 0.3), **more))
    assert found is not None
    assert words in found.advice


def test_a_fall_with_growing_entropy_is_a_learning_rate_that_is_too_high() -> None:
    found = judge(
        steps_of(episode__reward__mean=noisy(0.5, 0.1), loss__entropy__mean=np.linspace(1, 3, 60))
    )
    assert found is not None
    assert found.advice.startswith("entropy went from 1.32 to 2.68")


def test_a_run_without_a_reward_has_no_verdict() -> None:
    assert judge([]) is None
    assert judge(steps_of(loss__total__mean=noisy(0, 1))) is None


def test_rewards_beyond_reason_do_not_end_the_summary() -> None:
    beyond = judge(steps_of(episode__reward__mean=[1.5e308] * 30))
    assert beyond is not None
    assert (beyond.word, beyond.trends) == (Word.SHORT, ())
    mixed = judge(steps_of(episode__reward__mean=[*noisy(0, 1), 1e300]))
    assert mixed is not None
    assert mixed.word == Word.RISING


def losses(
    *validation: float, before: float | None = None, loss: float = 0.001, epoch: float = 9.0
) -> Any:
    """Steps with a validation loss each; their training loss falls to `loss`, or rises to it."""
    values = validation or (None,) * 4
    steps = [
        {"loss/total/mean": 1.0 + (loss - 1.0) * bool(step), "batch/epoch": epoch}
        | ({} if held_out is None else {"validation/loss/mean": held_out})
        for step, held_out in enumerate(values)
    ]
    if before is not None:
        steps[0]["validation/loss/before"] = before
    return steps


def test_rows_that_were_left_out_are_told_from_a_tenth_on() -> None:
    for share in (0.09, 0.1, 0.95):
        found = judge_supervised([{**it, "sample/skipped/share": share} for it in losses(1.0, 0.8)])
        assert found is not None
        assert (f"{share:.0%} of the rows" in str(found)) is (share >= 0.1)


_CALMER = 'divide `optimizer.lr` by 3, or train for more steps with `optimizer.schedule = "cosine"`'


@pytest.mark.parametrize(
    ("steps", "word", "advice"),
    [
        (losses(1.0, 0.8, 0.9), "overfitted", "train for 2 steps, or with more data"),
        (losses(1.1, 1.2, before=1.0), "overfitted", "divide `optimizer.lr` by 3, or add data"),
        (losses(1.0, 0.8, 0.9, epoch=1.0), "overfitted", "train for 2 steps, or with more data"),
        (losses(1.0, 0.8, 0.9, epoch=0.71), "unsteady", _CALMER),
        (losses(1.1, 1.2, before=1.0, epoch=0.71), "worse", "divide `optimizer.lr` by 3"),
        (losses(1.0, 1.2, loss=2.0), "worse", "divide `optimizer.lr` by 3"),
        (losses(1.0, math.nan, loss=math.nan), "worse", "divide `optimizer.lr` by 3"),
        (losses(1.0, 0.8, 0.805), "learned", ""),
        (losses(0.001, 0.002, before=1.0), "learned", ""),
        (losses(1.0, 0.8, 0.7), "learned", "it was still falling: more steps may teach more"),
        (losses(1.0, before=3.0), "learned", ""),
        (losses(1.0, 0.99), "flat", "multiply `optimizer.lr` by 3, or train for more steps"),
        (losses(0.01, 0.01), "flat", ""),
        (losses(), "memorised", "set `validation.path`, or train for fewer steps"),
        (losses(loss=0.5), "not measured", "set `validation.path`"),
        (losses(epoch=2.0), "not measured", "set `validation.path`"),
        ([{}], None, None),
        ([], None, None),
    ],
)
def test_what_a_training_loss_hides_is_told(
    steps: Any, word: str | None, advice: str | None
) -> None:
    found = judge_supervised(steps)
    assert (found and found.word, found and found.advice) == (word, advice)
    assert found is None or found.reason in str(found)


def test_the_validation_loss_is_told_from_before_the_first_step() -> None:
    told = "validation loss 3.000 before the first step, 1.000 at the end"
    assert str(judge_supervised(losses(2.0, 1.0, before=3.0))) == f"learned: {told}"


def records(steps: Any) -> list[Record]:
    return [Record(step, 0.0, metrics) for step, metrics in enumerate(steps)]


def test_of_a_sample_the_steps_keep_their_numbers() -> None:
    rises = [1.0, *(2.0 + n for n in range(20))]
    steps = losses(*rises)
    sample = [Record(100 * n, 0.0, numbers) for n, numbers in enumerate(steps, 1)]
    whole, found = (verdict_on("sft", "done", it) for it in (records(steps), sample))
    assert whole is not None
    assert "after step 1 " in whole.reason
    assert found is not None
    assert "after step 101 " in found.reason


def test_a_run_whose_losses_end_as_no_number_has_not_learned() -> None:
    nan = float("nan")
    for steps in (losses(3.0, 1.0, nan), losses(3.0, 1.0, nan, loss=nan)):
        found = verdict_on("sft", "done", records(steps))
        assert found is not None
        assert found.word in (Word.WORSE, Word.OVERFITTED)
        assert "nan at the end" in found.reason or "is nan" in found.reason
    assert verdict_on("sft", "done", records(losses(loss=nan))) is not None
    broken = [{"episode/reward/mean": nan, "episode/reward/p95": nan, "loss/entropy/mean": nan}]
    assert verdict_on("rl", "done", records(broken * 40)) is not None


def test_each_kind_of_run_has_its_own_verdict() -> None:
    rising = steps_of(episode__reward__mean=noisy(0, 1))
    assert getattr(verdict_on("rl", "done", records(rising)), "word", None) == Word.RISING
    assert verdict_on("rl", "solved", records(rising)) is None
    assert getattr(verdict_on("sft", "done", records(losses())), "word", None) == Word.MEMORISED
    assert verdict_on("bench", "done", records(losses())) is None


def test_keys_in_the_advice_exist() -> None:
    text = Path(module.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:orchestrator|trainer)\.[\w.]+)`", text))
    assert len(named) >= 2
    config = {
        "max_steps": 1,
        "model": {"name": "x"},
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}},
    }
    known = {key for key, _ in leaves(RunConfig.model_validate(config).model_dump(mode="json"))}
    assert named <= known
