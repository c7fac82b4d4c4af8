"""A run with nothing left to train saves what it has, and says whether that is a good end."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from configs import build_curriculum_config
from scripted_peers import ScriptedEnvironment, ScriptedTrainer

from gradus.errors import EmptyBatchError, EnvironmentFailure
from gradus.monitor import JsonlMonitor
from gradus.orchestrator.evaluation.episodes import EvaluationSource
from gradus.orchestrator.groups.batcher import Filling
from gradus.orchestrator.groups.solved import EarnedRange, EarnedRanges, RewardRanges
from gradus.orchestrator.records.journal import check_journal
from gradus.orchestrator.resume.checkpoint import load_orchestrator
from gradus.run.checkpoints import CheckpointStore
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode
from gradus.wire.codec import decode

MAX_STEPS = 50


def playing(*, learns_for: int, then: float) -> ScriptedEnvironment:
    """Every second episode earns 1 and the others 0, until all earn the same."""
    return ScriptedEnvironment(
        play=lambda number: build_episode(
            reward=then if number >= learns_for else float(number % 2), seed=number
        )
    )


def saving_rig(
    build_rig: Any, tmp_path: Path, environment: ScriptedEnvironment, **more: Any
) -> Any:
    run_dir = RunDirectory(tmp_path / "run0")
    run_dir.root.mkdir()
    mark_run(run_dir, "rl")
    store = CheckpointStore(run_dir, 1)
    trainer = ScriptedTrainer(max_steps=MAX_STEPS, checkpoints=store, checkpoint_interval=1000)
    settings = {"max_steps": MAX_STEPS, "max_empty_attempts": 2} | more
    return build_rig(trainer=trainer, environment=environment, **settings)


def saved_steps(rig: Any) -> list[int]:
    return [step for step, _ in CheckpointStore(RunDirectory(rig.root), 1).folders()]


async def test_a_run_that_solves_its_tasks_saves_its_last_version_and_ends_well(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=24, then=1.0))
    await rig.play()
    trained = len(rig.trainer.batches)
    assert 0 < trained < MAX_STEPS
    assert saved_steps(rig) == [trained]
    assert rig.policy.version == trained
    assert rig.journal[-1] == rig.journal[-1] | {"event": "run_ended", "step": trained - 1}
    solved = (rig.root / "control" / "solved.txt").read_text()
    assert solved.startswith("every episode of the last 200 groups earned 1, and none of the run")
    assert not (rig.root / "control" / "evicted.txt").exists()
    assert check_journal(rig.journal).problems == []


@pytest.mark.parametrize("learns_for", [24, 0], ids=["stuck later", "never differed"])
@pytest.mark.parametrize("reward", [0.0, 0.5], ids=["all failed", "stuck halfway"])
async def test_equal_rewards_that_are_not_the_best_are_saved_and_end_as_stalled(
    build_rig: Any, tmp_path: Path, reward: float, learns_for: int
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=learns_for, then=reward))
    await rig.play()
    assert saved_steps(rig) == ([len(rig.trainer.batches)] if learns_for else [])
    assert not (rig.root / "control" / "solved.txt").exists()
    said = (rig.root / "control" / "stalled.txt").read_text()
    assert "use easier or harder tasks" in said
    assert "200 groups" in said
    assert "the run goes on with other tasks" in (rig.root / "notices.log").read_text()


async def test_the_group_whose_age_ends_the_run_is_dropped_as_the_others_are(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=1000, then=1.0), max_staleness=1)
    orchestrator, journal = rig.build()
    orchestrator.groups.batcher.state.step = 9
    with journal, pytest.raises(ExceptionGroup) as ended:
        await orchestrator.play()
    assert ended.group_contains(EmptyBatchError, match="too late to train")
    graded = [line["group"] for line in rig.events("group_graded")]
    assert len(graded) >= 4
    assert [line["group"] for line in rig.events("group_dropped")] == graded


async def test_what_is_saved_at_the_end_can_be_resumed_and_counts_anew(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=24, then=0.0))
    await rig.play()
    checkpoint = CheckpointStore(RunDirectory(rig.root), 1).latest()
    assert checkpoint is not None
    saved = load_orchestrator(checkpoint)
    assert saved.state.step == len(rig.trainer.batches)
    states = saved.pieces.states
    assert decode(states["batcher"], Filling).empty_groups < 4
    ranges = decode(states["rewards"], EarnedRanges)
    assert ranges.of_sources == {"words": EarnedRange(0.0, 1.0)}


async def test_a_dead_environment_costs_no_trained_step(build_rig: Any, tmp_path: Path) -> None:
    environment = ScriptedEnvironment()

    async def train(step: int) -> None:
        if step == 2:
            environment.die(EnvironmentFailure("environment process 'words' ended"))

    rig = saving_rig(build_rig, tmp_path, environment)
    rig.trainer._wait = train
    with pytest.raises(EnvironmentFailure, match="'words' ended"):
        await rig.play()
    trained = len(rig.trainer.batches)
    assert trained >= 3
    assert saved_steps(rig) == [trained]


async def test_the_last_version_of_a_solved_run_is_evaluated(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(
        *(build_rig, tmp_path, playing(learns_for=24, then=1.0)),
        eval={"interval_steps": 1000, "env": [{"id": "held-out", "num_tasks": 1}]},
    )
    held_out = ScriptedEnvironment(play=lambda number: build_episode(reward=1.0, seed=number))
    rig.evaluated = [EvaluationSource("held-out", 1, 1, held_out)]
    await rig.play()
    evaluated = [line["version"] for line in rig.events("evaluation_ended")]
    assert evaluated[-1] == len(rig.trainer.batches)


async def test_a_solved_run_that_is_resumed_ends_as_solved_without_a_step(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=0, then=1.0))
    orchestrator, journal = rig.build()
    orchestrator.groups.rewards.state.of_sources["words"] = EarnedRange(0.0, 1.0)
    with journal:
        training = asyncio.create_task(rig.trainer.train())
        await orchestrator.play()
        await training
    assert rig.trainer.batches == []
    assert (rig.root / "control" / "solved.txt").exists()


def test_only_the_best_rewards_of_all_episodes_are_a_solved_group() -> None:
    ranges = RewardRanges({})
    assert not ranges.is_solved("words", [1.0, 1.0], size=2), "nothing ever earned less"
    assert not ranges.is_solved("words", [0.2, 0.2], size=2)
    assert not ranges.is_solved("words", [1.0], size=2), "one episode failed"
    assert not ranges.is_solved("words", [], size=0)
    assert ranges.is_solved("words", [1.0, 1.0 - 1e-9], size=2)
    assert not ranges.is_solved("words", [1.5, 1.0], size=2)
    assert not ranges.is_solved("words", [1.0, 1.0], size=2), "another earned more"


@pytest.mark.parametrize("earlier", [[0.0, 3.0], [-1.0, 1.0]])
def test_rewards_on_an_unknown_scale_are_never_the_best(earlier: list[float]) -> None:
    """A policy that is stuck at 3 of 10 would end its run as a success."""
    ranges = RewardRanges({})
    assert not ranges.is_solved("words", earlier, size=2)
    best = max(earlier)
    assert not ranges.is_solved("words", [best, best], size=2)
    assert not ranges.is_solved("words", [1.0, 1.0], size=2)


def test_a_declared_range_says_what_the_best_is() -> None:
    ranges = RewardRanges({"words": 10.0})
    assert not ranges.is_solved("words", [2.0, 3.0], size=2)
    assert not ranges.is_solved("words", [3.0, 3.0], size=2)
    assert ranges.is_solved("words", [10.0, 10.0], size=2)
    ranges = RewardRanges({"words": 1.0})
    assert not ranges.is_solved("words", [-1.0, 1.0], size=2)
    assert ranges.is_solved("words", [1.0, 1.0], size=2), "from -1 to 1 is declared"


async def test_the_range_that_a_curriculum_declares_counts(build_rig: Any, tmp_path: Path) -> None:
    curriculum = build_curriculum_config("difficulty", reward_range=(0.0, 2.0))
    environment = playing(learns_for=24, then=1.0)
    rig = saving_rig(build_rig, tmp_path, environment, curriculum=curriculum)
    await rig.play()
    assert (rig.root / "control" / "stalled.txt").exists()


def test_a_group_without_a_reward_leaves_a_state_that_can_be_saved() -> None:
    ranges = RewardRanges({})
    assert not ranges.is_solved("words", [], size=2)
    assert ranges.state.of_sources == {}


def evaluating_rig(build_rig: Any, tmp_path: Path, averages: list[float], **more: Any) -> Any:
    """Every second version is evaluated; `averages` are what the evaluations earn, in turn."""
    rig = saving_rig(
        *(build_rig, tmp_path, playing(learns_for=10_000, then=1.0)),
        eval={"interval_steps": 2, "env": [{"id": "held-out", "num_tasks": 1}]},
        max_lag=0,
    )
    rig.config = rig.config.model_copy(update=more)
    held_out = ScriptedEnvironment(
        play=lambda number: build_episode(reward=averages[number], seed=number)
    )
    rig.evaluated = [EvaluationSource("held-out", 1, 1, held_out)]
    return rig


async def test_a_run_that_reaches_its_target_saves_and_ends_one_step_later(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = evaluating_rig(build_rig, tmp_path, [0.1, 0.2, 0.95, 0.5], target_reward=0.9)
    await rig.play()
    assert len(rig.trainer.batches) == 5, "version 4 has it, and step 5 was under way"
    assert saved_steps(rig) == [5]
    said = (rig.root / "control" / "solved.txt").read_text()
    assert said == "the evaluation of version 4 earned 0.95, and target_reward is 0.9\n"
    assert [line["version"] for line in rig.events("evaluation_ended")] == [0, 2, 4, 5]


async def test_a_run_whose_evaluations_get_no_better_ends_as_stalled(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = evaluating_rig(build_rig, tmp_path, [0.1, 0.6, 0.5, 0.6, 0.7], patience_steps=4)
    await rig.play()
    assert len(rig.trainer.batches) == 7
    assert "version 2 (0.6) for 4 steps" in (rig.root / "control" / "stalled.txt").read_text()
    assert not (rig.root / "control" / "solved.txt").exists()


async def test_a_run_whose_last_evaluation_reaches_the_target_is_solved(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = evaluating_rig(build_rig, tmp_path, [0.1, 0.2, 0.95], target_reward=0.9, max_steps=4)
    rig.trainer._max_steps = 4
    await rig.play()
    assert len(rig.trainer.batches) == 4
    assert (rig.root / "control" / "solved.txt").exists()


async def test_a_training_reward_at_the_target_ends_the_run_where_nothing_is_evaluated(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=10_000, then=1.0), max_lag=0)
    rig.config = rig.config.model_copy(update={"target_reward": 0.5})
    await rig.play()
    assert len(rig.trainer.batches) == 10
    assert (rig.root / "control" / "solved.txt").read_text().startswith("reward 0.5 on average")


async def test_a_resumed_run_whose_records_reach_the_target_ends_without_a_step(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=10_000, then=1.0))
    rig.config = rig.config.model_copy(update={"target_reward": 0.5})
    with closing(JsonlMonitor(rig.root / "metrics.jsonl")) as records:
        for step in range(10):
            records.record({"episode/reward/mean": 0.6}, step=step)
    await rig.play()
    assert rig.trainer.batches == []
    assert (rig.root / "control" / "solved.txt").exists()


async def test_the_first_groups_of_a_run_are_told_while_it_plays(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=24, then=1.0))
    await rig.play()
    (line,) = [
        line for line in (rig.root / "notices.log").read_text().splitlines() if "probe" in line
    ]
    # Told when it is next looked at after the eighth group; a busy machine looks later.
    told = re.match(r"probe     (\d+) groups of 2 by version", line)
    assert told
    assert int(told[1]) >= 8


async def test_no_batch_is_sent_before_the_record_that_may_end_the_run(
    build_rig: Any, tmp_path: Path
) -> None:
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=10_000, then=1.0), max_lag=1)
    rig.config = rig.config.model_copy(update={"target_reward": 0.9})
    orchestrator, journal = rig.build()
    end, step = orchestrator.end, orchestrator.groups.batcher.state
    with journal:
        step.step = 1
        await end.decided()
        step.step = 2
        waiting = asyncio.create_task(end.decided())
        end.look()
        await asyncio.sleep(0)
        assert not waiting.done(), "batch 2 waits for the record of step 0"
        end.goal.note({"episode/reward/mean": 0.5}, 0)
        end.look()
        async with asyncio.timeout(60):
            await waiting
        step.step = 9
        waiting = asyncio.create_task(end.decided())
        await asyncio.sleep(0)
        end.batcher.end(EmptyBatchError("another cause"))
        end.look()
        async with asyncio.timeout(60):
            await waiting  # what has ended waits for no record


async def test_an_alarm_that_stops_saves_what_was_trained_and_ends_well(
    build_rig: Any, tmp_path: Path
) -> None:
    alarm = {"metric": "weights/version", "above": 3, "action": "stop"}
    environment = playing(learns_for=10_000, then=1.0)
    rig = saving_rig(build_rig, tmp_path, environment, alarm=[alarm])
    await rig.play()
    trained = len(rig.trainer.batches)
    assert 3 <= trained < MAX_STEPS
    assert saved_steps(rig) == [trained]
    said = (rig.root / "control" / "alarmed.txt").read_text()
    assert said.startswith("alarm weights.version at step ")
    assert rig.journal[-1]["event"] == "run_ended"
    assert {"alarm/weights.version": 1.0}.items() <= rig.monitor.records[-1][1].items()


async def test_a_stop_that_a_kill_left_undone_ends_the_next_run(
    build_rig: Any, tmp_path: Path
) -> None:
    alarm = {"metric": "x", "above": 1, "action": "stop"}
    rig = saving_rig(build_rig, tmp_path, playing(learns_for=10_000, then=1.0), alarm=[alarm])
    with closing(JsonlMonitor(RunDirectory(rig.root).metrics)) as before:
        for step in range(10):
            before.record({"x": 2.0}, step=step)
    await rig.play()
    assert len(rig.trainer.batches) < MAX_STEPS
    assert (rig.root / "control" / "alarmed.txt").read_text().startswith("alarm x at step 10")
