"""Evaluations inside a run: when they happen, that they measure one version, and what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until_async
from evaluated import read_gradus_fields
from scripted_peers import (
    ScriptedEnvironment,
    ScriptedTrainer,
    at_once,
)

from gradus.errors import EnvironmentFailure, ProtocolError
from gradus.orchestrator.evaluation.episodes import EvaluationSource
from gradus.testing.episodes import build_episode


def with_evaluation(
    build_rig: Any,
    *,
    environment: ScriptedEnvironment | None = None,
    evaluation: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A rig whose run measures three tasks, two episodes each."""
    section = {"env": [{"id": "held-out"}], "interval_steps": 2, **(evaluation or {})}
    rig = build_rig(eval=section, **changes)
    rig.evaluated = [
        EvaluationSource("held-out", 3, 2, environment or ScriptedEnvironment(num_tasks=3))
    ]
    return rig


def measured(rig: Any) -> list[tuple[int, dict[str, float]]]:
    return [(step, found) for step, found in rig.monitor.records if "eval/version" in found]


def gradus_fields(rig: Any, version: int) -> list[dict[str, Any]]:
    return read_gradus_fields(rig.root / "episodes" / f"step_{version}" / "eval.jsonl")


async def test_the_base_model_each_interval_and_the_end_are_measured(build_rig: Any) -> None:
    rig = with_evaluation(build_rig, max_steps=5)
    await rig.play()
    assert [step for step, _ in measured(rig)] == [0, 2, 4, 5]
    assert [found["eval/version"] for _, found in measured(rig)] == [0.0, 2.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("switches", "versions"),
    [
        ({"base_model_first": False}, [2, 3]),
        ({"at_end": False}, [0, 2]),
        ({"interval_steps": 3}, [0, 3]),
        ({"base_model_first": False, "at_end": False, "interval_steps": 9}, []),
    ],
)
async def test_each_occasion_can_be_switched_off(
    build_rig: Any, switches: dict[str, Any], versions: list[int]
) -> None:
    rig = with_evaluation(build_rig, max_steps=3, evaluation=switches)
    await rig.play()
    assert [step for step, _ in measured(rig)] == versions


async def test_the_numbers_and_the_episodes_of_an_evaluation_are_recorded(build_rig: Any) -> None:
    environment = ScriptedEnvironment(play=lambda n: build_episode(reward=float(n < 3), seed=n))
    rig = with_evaluation(
        build_rig,
        max_steps=1,
        environment=environment,
        evaluation={"at_end": False, "max_in_flight_episodes": 1},
    )
    await rig.play()
    ((_, found),) = measured(rig)
    assert found["eval/held-out/avg@2"] == pytest.approx(0.5)
    assert found["eval/held-out/pass@2"] == pytest.approx(2 / 3)
    assert found["eval/held-out/pass^2"] == pytest.approx(1 / 3)
    assert found["eval/avg@2"] == pytest.approx(0.5)
    keys = [(s["task"]["index"], s["replica"]) for s in gradus_fields(rig, 0)]
    assert keys == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


async def test_evaluation_episodes_never_train_and_never_count_as_trained(build_rig: Any) -> None:
    environment = ScriptedEnvironment(play=lambda n: build_episode(reward=7.0, seed=n))
    rig = with_evaluation(build_rig, max_steps=4, environment=environment)
    await rig.play()
    shipped = [sample for line in rig.events("batch_shipped") for sample in line["samples"]]
    assert all(sample.startswith("g") for sample in shipped)
    steps = [found for _, found in rig.monitor.records if "loss/total/mean" in found]
    assert all(found["episode/reward/mean"] == 0.5 for found in steps)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
async def test_one_evaluation_sees_one_version_whatever_the_trainer_does(
    build_rig: Any, max_lag: int
) -> None:
    """Each episode takes many turns of the loop, in which a fast trainer publishes several."""
    rig: Any = None
    seen: list[set[int]] = []

    async def wait(number: int) -> None:
        if number % 6 == 0:
            seen.append(set())
        for _ in range(30):
            seen[-1].add(rig.policy.newest_version)
            await asyncio.sleep(0)

    environment = ScriptedEnvironment(wait=wait)
    rig = with_evaluation(
        build_rig,
        environment=environment,
        max_steps=4,
        max_lag=max_lag,
        evaluation={"max_in_flight_episodes": 2, "interval_steps": 1},
    )
    await rig.play()
    assert seen == [{0}, {1}, {2}, {3}, {4}]
    assert [call.version for call in environment.calls] == [v for v in range(5) for _ in range(6)]


def until(event: asyncio.Event, number: int) -> Callable[[int], Awaitable[None]]:
    """Waits for `event` in one call only."""

    async def wait(called: int) -> None:
        if called == number:
            await event.wait()

    return wait


async def test_training_goes_on_while_new_weights_wait_and_the_wait_is_a_metric(
    build_rig: Any,
) -> None:
    """The slots bound it: max_lag + 1 batches of the pinned version are made, and no more."""
    ended = asyncio.Event()
    rig = with_evaluation(
        build_rig,
        environment=ScriptedEnvironment(wait=until(ended, 5)),
        max_steps=4,
        max_lag=1,
        evaluation={"at_end": False, "interval_steps": 9},
    )
    playing = asyncio.create_task(rig.play())
    # A thread writes the files, so no fixed number of turns of the loop would be enough.
    await wait_until_async(lambda: len(rig.trainer.batches) >= 2, what="the second batch")
    for _ in range(500):
        await asyncio.sleep(0)
    assert len(rig.trainer.batches) == 2
    assert (rig.policy.version, rig.policy.newest_version) == (0, 0)
    ended.set()
    await playing
    assert len(rig.trainer.batches) == 4
    held = [
        f["time/evaluation_hold_seconds"] for _, f in rig.monitor.records if "loss/total/mean" in f
    ]
    assert len(held) == 4
    assert held[0] > held[3] >= 0.0


async def test_an_evaluation_that_never_ends_is_cut_at_its_deadline(build_rig: Any) -> None:
    environment = ScriptedEnvironment(wait=until(asyncio.Event(), 4))
    rig = with_evaluation(
        build_rig,
        environment=environment,
        max_steps=2,
        evaluation={"timeout_seconds": 0.05, "at_end": False, "interval_steps": 9},
    )
    await rig.play()
    assert environment.calls[4].outcome == "cancelled"
    ((_, found),) = measured(rig)
    assert found["eval/held-out/error/evaluation_timeout/sum"] == 1.0
    assert found["eval/held-out/episodes/sum"] == 6.0
    assert [batch.step for batch in rig.trainer.batches] == [0, 1]


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_engine_that_serves_another_version_ends_the_run(
    build_rig: Any, is_late: bool
) -> None:
    """Something else applied weights in the middle: the numbers would be of no version at all.

    A batch that was sent by then is trained first, and its version waits for no measurement.
    """
    sent = asyncio.Event()

    async def train(_: int) -> None:
        sent.set()

    async def swap(number: int) -> None:
        await (sent.wait() if is_late else at_once(number))
        rig.policy.version = 7

    rig = with_evaluation(
        build_rig,
        environment=ScriptedEnvironment(wait=swap),
        trainer=ScriptedTrainer(max_steps=2, wait=train),
        max_steps=2,
    )
    with pytest.raises(ProtocolError, match="serves version 7 while version 0 is evaluated"):
        await rig.play()


async def test_a_dead_evaluation_environment_ends_the_run_by_its_name(build_rig: Any) -> None:
    environment = ScriptedEnvironment(wait=until(asyncio.Event(), 0))
    environment.die(EnvironmentFailure("environment process 'held-out' (pid 7) ended"))
    rig = with_evaluation(build_rig, environment=environment)
    with pytest.raises(EnvironmentFailure, match="'held-out'"):
        await rig.play()


async def test_episodes_of_an_evaluation_cut_off_by_a_kill_are_replaced(build_rig: Any) -> None:
    rig = with_evaluation(build_rig, max_steps=1, evaluation={"at_end": False})
    left: Path = rig.root / "episodes" / "step_0" / "eval.jsonl"
    left.parent.mkdir(parents=True)
    left.write_text("what an earlier attempt wrote, cut o")
    await rig.play()
    assert len(gradus_fields(rig, 0)) == 6


async def test_the_journal_tells_when_an_evaluation_ran(build_rig: Any) -> None:
    rig = with_evaluation(build_rig, max_steps=1)
    await rig.play()
    assert [line["version"] for line in rig.events("evaluation_started")] == [0, 1]
    assert [line["episodes"] for line in rig.events("evaluation_ended")] == [6, 6]


async def test_a_run_without_evaluation_neither_waits_nor_says_so(build_rig: Any) -> None:
    rig = build_rig(max_steps=1)
    await rig.play()
    ((_, found),) = rig.monitor.records
    assert not [name for name in found if name.startswith("eval/") or "hold" in name]
