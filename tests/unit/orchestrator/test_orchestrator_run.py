"""Whole runs of the orchestrator against scripted peers, in one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from configs import build_curriculum_config
from scripted_peers import ScriptedEnvironment, ScriptedPolicy, ScriptedTrainer

from gradus.errors import (
    DeadlineError,
    EnvironmentFailure,
    FencedError,
    FullDiskError,
    ProtocolError,
)
from gradus.orchestrator.orchestrator import Orchestrator
from gradus.orchestrator.play.curriculum import Ending, TaskDraw, TaskResult, Uniform
from gradus.orchestrator.play.environment import TaskRefused
from gradus.orchestrator.play.tasks import SourceShare, TaskSource
from gradus.orchestrator.records.writer import RecordWriter
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode, build_trace
from gradus.wire.events import PolicyPublished, StepFinished, TrainerDone
from gradus.wire.versions import staleness


def staleness_by_batch(rig: Any) -> list[int]:
    return [staleness(batch.step, batch.versions) for batch in rig.trainer.batches]


def assert_conserved(rig: Any) -> None:
    """Every started episode has one end, every sample trained once or was dropped."""
    started = [line["episode"] for line in rig.events("episode_started")]
    ended = Counter(line["episode"] for line in rig.events("episode_ended"))
    assert len(set(started)) == len(started)
    assert ended == Counter(started)
    trained = [i for line in rig.events("batch_shipped") for i in line["samples"]]
    assert len(set(trained)) == len(trained)
    assert all(sample.rsplit("/", 2)[0] in started for sample in trained)


async def test_a_run_trains_every_step_and_records_it(build_rig: Any) -> None:
    rig = build_rig(max_steps=3)
    await rig.play()
    assert [batch.step for batch in rig.trainer.batches] == [0, 1, 2]
    assert [step for step, _ in rig.monitor.records] == [0, 1, 2]
    assert rig.journal[-1]["event"] == "run_ended"
    assert_conserved(rig)


async def test_a_batch_holds_the_samples_of_the_wanted_number_of_groups(build_rig: Any) -> None:
    rig = build_rig(max_steps=1, groups_per_batch=3, group_size=4)
    await rig.play()
    shipped = rig.events("batch_shipped")[0]
    assert len(shipped["groups"]) == 3
    assert len(shipped["samples"]) == 12


async def test_synchronous_run_is_never_stale(build_rig: Any) -> None:
    rig = build_rig(max_steps=4, max_lag=0)
    await rig.play()
    assert staleness_by_batch(rig) == [0, 0, 0, 0]
    assert {call.version for call in rig.environment.calls} == {0, 1, 2, 3}


async def test_with_a_lag_of_one_generation_overlaps_training(build_rig: Any) -> None:
    """The trainer does not finish step 0 before batch 1 was played: without overlap, a deadlock."""
    second_batch = asyncio.Event()

    async def train(step: int) -> None:
        if step == 0:
            await second_batch.wait()

    trainer = ScriptedTrainer(max_steps=3, wait=train)
    send = trainer.send

    async def noting_send(batch: Any) -> None:
        await send(batch)
        if batch.step == 1:
            second_batch.set()

    trainer.send = noting_send  # type: ignore[method-assign]
    rig = build_rig(max_steps=3, max_lag=1, trainer=trainer)
    await rig.play()
    assert max(staleness_by_batch(rig)) == 1


@pytest.mark.shows("F57")
async def test_a_slow_trainer_holds_generation_back(build_rig: Any) -> None:
    """While version 0 is served, at most max_lag + 1 batches are played."""
    first_step = asyncio.Event()

    async def train(step: int) -> None:
        await first_step.wait()

    rig = build_rig(
        max_steps=4, max_lag=1, groups_per_batch=2, trainer=ScriptedTrainer(max_steps=4, wait=train)
    )
    playing = asyncio.create_task(rig.play())
    while len(rig.trainer.batches) < 2:
        await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(rig.environment.calls) == 2 * 2 * 2
    first_step.set()
    await playing
    assert max(staleness_by_batch(rig)) <= 1


async def test_a_slow_episode_lives_through_new_versions_and_carries_their_span(
    build_rig: Any,
) -> None:
    rig = build_rig(max_steps=4, max_lag=1, groups_per_batch=1, group_size=2)
    served = asyncio.Event()

    async def wait(number: int) -> None:
        if number == 0:
            await served.wait()

    async def apply(version: int) -> None:
        if version == 2:
            served.set()

    rig.environments["words"] = ScriptedEnvironment(wait=wait)
    rig.policy = ScriptedPolicy(wait=apply)
    await rig.play()
    spans = {(b.versions.oldest, b.versions.newest) for b in rig.trainer.batches}
    assert (0, 2) in spans
    assert_conserved(rig)


async def play_beside_an_endless_episode(build_rig: Any, **changes: Any) -> Any:
    """A run whose first episode never ends, so that its group becomes too old."""

    async def wait(number: int) -> None:
        if number == 0:
            await asyncio.Event().wait()

    rig = build_rig(
        max_steps=5,
        max_lag=1,
        max_staleness=2,
        groups_per_batch=1,
        environment=ScriptedEnvironment(wait=wait),
        **changes,
    )
    await rig.play()
    return rig


async def test_groups_that_must_end_too_old_are_abandoned_and_counted(build_rig: Any) -> None:
    rig = await play_beside_an_endless_episode(build_rig)
    assert rig.environment.calls[0].outcome == "cancelled"
    (abandoned,) = rig.events("group_abandoned")
    assert abandoned["reason"] == "too_old"
    name = "group/words/abandoned/too_old/sum"
    assert sum(m.get(name, 0) for _, m in rig.monitor.records) == 1
    assert max(staleness_by_batch(rig)) <= 2
    assert_conserved(rig)


async def test_the_task_of_an_abandoned_group_is_played_again_before_new_ones(
    build_rig: Any,
) -> None:
    rig = await play_beside_an_endless_episode(build_rig)
    (returned,) = rig.events("task_returned")
    lines = [line for line in rig.journal if line["event"] in ("group_opened", "task_returned")]
    after = lines[lines.index(returned) + 1]
    first = rig.events("group_opened")[0]
    assert (after["index"], after["attempt"]) == (first["index"], 1)


@pytest.mark.shows("F49")
async def test_a_task_that_cannot_be_loaded_is_put_aside_and_the_run_goes_on(
    build_rig: Any,
) -> None:
    stream = TaskSource([SourceShare("words", 1.0, 100)], seed=0)
    order = [stream.next_task().index for _ in range(2)]
    refused = {order[1]: TaskRefused("environment 'words': KeyError: 'answer'")}
    rig = build_rig(max_steps=2, environment=ScriptedEnvironment(refused=refused))
    await rig.play()
    (aside,) = rig.events("task_set_aside")
    assert (aside["source"], aside["index"]) == ("words", order[1])
    assert aside["reason"] == "unreadable"
    assert "KeyError: 'answer'" in aside["error"]
    assert sum(m.get("task/set_aside/sum", 0) for _, m in rig.monitor.records) == 1
    numbers = [line["group"] for line in rig.events("group_opened")]
    assert numbers == [f"g{number:06d}" for number in range(len(numbers))]
    assert_conserved(rig)


async def test_a_task_set_of_which_nothing_can_be_loaded_ends_the_run_with_the_reason(
    build_rig: Any,
) -> None:
    refused = {index: TaskRefused("no such column") for index in range(100)}
    rig = build_rig(max_empty_attempts=3, environment=ScriptedEnvironment(refused=refused))
    with pytest.raises(EnvironmentFailure, match=r"6 groups in a row.* 6 x error:unreadable_task"):
        await rig.play()


class Listener(Uniform):
    """Hears everything, and plays every second task with four episodes."""

    heard: ClassVar[list[tuple[int, TaskResult]]] = []

    def next_task(self) -> TaskDraw:
        draw = super().next_task()
        return replace(draw, group_size=4 if draw.index % 2 else None)

    def record(self, index: int, result: TaskResult) -> None:
        self.heard.append((index, result))


async def test_a_curriculum_hears_failures_lengths_and_tasks_that_never_trained(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listener, "heard", [])

    def play(number: int) -> Any:
        if number == 1:
            return EpisodeFailed(Failure("TaskError", "bug"))
        return build_episode(reward=float(number % 2), seed=number)

    stream = TaskSource([SourceShare("words", 1.0, 100)], seed=0)
    first, second = (stream.next_task().index for _ in range(2))
    refused = {second: TaskRefused("no such row")}
    environment = ScriptedEnvironment(play=play, refused=refused)
    curriculum = build_curriculum_config(f"{__name__}:Listener")
    rig = build_rig(max_steps=2, environment=environment, curriculum=curriculum)
    await rig.play()
    opened = {line["index"]: line["size"] for line in rig.events("group_opened")}
    assert set(opened.values()) == {2, 4}
    assert all(size == (4 if index % 2 else 2) for index, size in opened.items())
    heard = dict(Listener.heard)
    assert heard[second] == TaskResult(Ending.SET_ASIDE)
    assert heard[first].failures == ("TaskError",)
    assert heard[first].lengths_tokens == (4,) * (opened[first] - 1)
    assert_conserved(rig)


async def test_a_curriculum_hears_of_groups_that_were_abandoned(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listener, "heard", [])
    curriculum = build_curriculum_config(f"{__name__}:Listener")
    rig = await play_beside_an_endless_episode(build_rig, curriculum=curriculum)
    abandoned = {line["group"] for line in rig.events("group_abandoned")}
    indices = [line["index"] for line in rig.events("group_opened") if line["group"] in abandoned]
    assert [i for i, result in Listener.heard if result.ending is Ending.TOO_OLD] == indices


async def test_the_task_of_a_group_that_became_stale_in_the_queue_returns_too(
    build_rig: Any,
) -> None:
    """Group 1 waits complete behind group 0's batch of two; its version falls behind meanwhile."""
    served = asyncio.Event()

    async def wait(number: int) -> None:
        if number < 2:
            await served.wait()

    async def apply(version: int) -> None:
        if version == 1:
            served.set()

    rig = build_rig(
        max_steps=2,
        max_lag=1,
        max_staleness=1,
        groups_per_batch=1,
        environment=ScriptedEnvironment(wait=wait),
        policy=ScriptedPolicy(wait=apply),
    )
    await rig.play()
    returned = {line["group"] for line in rig.events("task_returned")}
    lost = {line["group"] for line in rig.events("group_abandoned")}
    lost |= {
        line["group"] for line in rig.events("group_dropped") if "stale" in line.get("reasons", {})
    }
    assert returned == lost


async def test_episodes_of_frozen_models_are_never_stale(build_rig: Any) -> None:
    """The policy is five versions on when the first episode of another model ends."""
    served = asyncio.Event()

    async def wait(number: int) -> None:
        if number == 0:
            await served.wait()

    async def apply(version: int) -> None:
        if version == 5:
            served.set()

    rig = build_rig(
        max_steps=7,
        max_lag=1,
        max_staleness=1,
        groups_per_batch=1,
        is_frozen=True,
        environment=ScriptedEnvironment(wait=wait),
        policy=ScriptedPolicy(wait=apply),
    )
    await rig.play()
    assert rig.events("group_abandoned") == []
    assert rig.environment.calls[0].outcome == "ended"
    assert staleness_by_batch(rig) == [0] * 7
    assert any("g000000" in line["groups"] for line in rig.events("batch_shipped")[5:])


async def test_a_group_without_gradient_is_replaced_in_the_same_batch(build_rig: Any) -> None:
    """The first group has equal rewards; a synchronous run still fills its batch."""

    def play(number: int) -> Any:
        return build_episode(reward=0.0 if number < 2 else float(number % 2))

    rig = build_rig(max_steps=1, max_lag=0, environment=ScriptedEnvironment(play=play))
    await rig.play()
    (dropped,) = rig.events("group_dropped")
    assert dropped["reasons"] == {"zero_advantage": 2}
    assert rig.monitor.records[0][1]["sample/dropped/sum"] == 2.0
    assert rig.monitor.records[0][1]["sample/words/dropped/zero_advantage/sum"] == 2.0


async def test_metrics_count_all_episodes_also_those_that_did_not_train(build_rig: Any) -> None:
    def play(number: int) -> Any:
        return build_episode(reward=0.0 if number < 2 else float(number % 2))

    rig = build_rig(max_steps=1, max_lag=0, environment=ScriptedEnvironment(play=play))
    await rig.play()
    metrics = rig.monitor.records[0][1]
    assert metrics["episode/reward/mean"] == pytest.approx(2 / 6)
    assert metrics["episode/words/reward/mean"] == pytest.approx(2 / 6)
    assert metrics["batch/samples/sum"] == 4.0


@pytest.mark.shows("F43")
async def test_an_episode_with_a_token_beyond_the_vocabulary_never_trains(
    build_rig: Any, tmp_path: Path
) -> None:
    def play(number: int) -> Any:
        episode = build_episode(reward=float(number % 3))
        if number % 3 == 2:
            episode.traces[0].nodes[0].token_ids[0] = 1000
        return episode

    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    rig = build_rig(max_steps=1, group_size=3, environment=ScriptedEnvironment(play=play))
    model = rig.config.model.model_copy(update={"name": str(tmp_path)})
    await replace(rig, config=rig.config.model_copy(update={"model": model})).play()
    metrics = rig.monitor.records[0][1]
    assert metrics["batch/samples/sum"] == 4.0
    assert metrics["episode/error/invalid_tokens/sum"] == 2.0


@pytest.mark.shows("F50", "F51")
async def test_failed_episodes_give_no_sample_and_the_rest_of_the_group_trains(
    build_rig: Any,
) -> None:
    def play(number: int) -> Any:
        if number % 3 == 2:
            return EpisodeFailed(Failure("ProviderError", "connection refused"))
        return build_episode(reward=float(number % 3))

    rig = build_rig(max_steps=1, group_size=3, environment=ScriptedEnvironment(play=play))
    await rig.play()
    metrics = rig.monitor.records[0][1]
    assert metrics["batch/samples/sum"] == 4.0
    assert metrics["episode/error/share"] == pytest.approx(1 / 3)
    assert metrics["episode/error/ProviderError/sum"] == 2.0


async def test_the_first_failure_of_each_kind_is_told_once_with_its_cause(build_rig: Any) -> None:
    def play(number: int) -> Any:
        if number % 3 == 0:
            return EpisodeFailed(Failure("TaskError", "\nKeyError: 'answer'\nin line 3"))
        return build_episode(reward=float(number % 2), seed=number)

    rig = build_rig(environment=ScriptedEnvironment(play=play))
    log = RunDirectory(rig.root).environment_log("train", "words")
    log.parent.mkdir(parents=True)
    log.touch()
    await rig.play()
    (line,) = (rig.root / "notices.log").read_text().splitlines()
    assert line == (
        "first TaskError in train environment 'words': KeyError: 'answer' "
        f"(task {rig.environment.calls[0].index}, episode g000000.0; log: {log})"
    )


@pytest.mark.shows("F37")
async def test_reward_nan_is_a_failure_with_a_name_and_never_zero(build_rig: Any) -> None:
    def play(number: int) -> Any:
        return build_episode(reward=float("nan") if number % 3 == 2 else float(number % 3))

    rig = build_rig(max_steps=1, group_size=3, environment=ScriptedEnvironment(play=play))
    await rig.play()
    metrics = rig.monitor.records[0][1]
    assert metrics["episode/error/invalid_reward/sum"] == 2.0
    assert metrics["episode/reward/mean"] == pytest.approx(0.5)


@pytest.mark.shows("F47")
async def test_only_errors_end_the_run_with_the_most_frequent_one_first(build_rig: Any) -> None:
    def play(number: int) -> Any:
        kind = "ProviderError" if number % 3 else "SandboxError"
        return EpisodeFailed(Failure(kind, "connection refused"))

    rig = build_rig(max_empty_attempts=2, environment=ScriptedEnvironment(play=play))
    with pytest.raises(
        EnvironmentFailure,
        match=r"every episode failed.*\d x error:ProviderError,.*One said: connection refused",
    ):
        await rig.play()


async def test_a_step_with_almost_nothing_to_train_is_worth_a_warning(
    build_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def play(number: int) -> Any:
        return build_episode(reward=float(number % 48 == 0), seed=number)

    environment = ScriptedEnvironment(play=play)
    rig = build_rig(max_steps=1, max_empty_attempts=20, environment=environment)
    await rig.play()
    assert "filters left" in caplog.text
    assert "See sample/dropped in the metrics" in caplog.text
    assert not (rig.root / "control").exists()


async def test_a_step_with_enough_to_train_is_worth_none(
    build_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await build_rig(max_steps=1).play()
    assert "filters left" not in caplog.text


async def test_a_store_of_images_that_is_full_ends_the_run_by_name(build_rig: Any) -> None:
    async def keep(number: int) -> None:
        if number == 3:
            raise FullDiskError("images holds 34,359,738,368 bytes of images")

    rig = build_rig(environment=ScriptedEnvironment(wait=keep))
    with pytest.raises(FullDiskError, match="bytes of images"):
        await rig.play()


async def test_a_dead_environment_ends_the_run_at_once(build_rig: Any) -> None:
    async def forever(number: int) -> None:
        await asyncio.Event().wait()

    rig = build_rig(environment=ScriptedEnvironment(wait=forever))
    playing = asyncio.create_task(rig.play())
    while not rig.environment.calls:
        await asyncio.sleep(0)
    rig.environment.die(EnvironmentFailure("environment process 'words' (pid 7) ended"))
    with pytest.raises(EnvironmentFailure, match="'words'"):
        await playing


async def test_a_silent_trainer_is_named_after_its_deadline(build_rig: Any) -> None:
    async def forever(step: int) -> None:
        await asyncio.Event().wait()

    trainer = ScriptedTrainer(max_steps=3, wait=forever)
    rig = build_rig(trainer=trainer)
    rig.answer_seconds = 0.05
    with pytest.raises(DeadlineError, match=r"the trainer said nothing for 0\.05 s"):
        await rig.play()


async def test_a_trainer_without_a_batch_may_be_silent(build_rig: Any) -> None:
    """Episodes take longer than the trainer's deadline; the trainer owes nothing meanwhile."""

    async def slow(number: int) -> None:
        loop = asyncio.get_running_loop()
        elapsed = asyncio.Event()
        loop.call_later(0.1, elapsed.set)
        await elapsed.wait()

    rig = build_rig(
        max_steps=2,
        max_lag=0,
        environment=ScriptedEnvironment(wait=slow),
    )
    rig.answer_seconds = 0.05
    await rig.play()
    assert len(rig.trainer.batches) == 2


async def test_a_trainer_that_leaves_early_is_an_error(build_rig: Any) -> None:
    async def leave(step: int) -> None:
        rig.trainer.say(TrainerDone(step, 1))
        await asyncio.Event().wait()

    trainer = ScriptedTrainer(max_steps=5, wait=leave)
    rig = build_rig(max_steps=5, max_lag=0, trainer=trainer)
    with pytest.raises(ProtocolError, match="left after step 0"):
        await rig.play()


async def test_a_version_without_a_batch_is_refused(build_rig: Any) -> None:
    async def invent(step: int) -> None:
        rig.trainer.say(PolicyPublished(2, 1, "version_2", "digest"))
        await asyncio.Event().wait()

    rig = build_rig(max_lag=0, trainer=ScriptedTrainer(max_steps=3, wait=invent))
    with pytest.raises(ProtocolError, match="published version 2, but only 1 batches were sent"):
        await rig.play()


@pytest.mark.shows("F01", "I2")
async def test_what_a_trainer_says_again_is_noted_once(build_rig: Any) -> None:
    async def repeat(step: int) -> None:
        if step == 2:
            for known in (0, 1):
                rig.trainer.say(PolicyPublished(known + 1, 1, "elsewhere", "digest"))
                rig.trainer.say(StepFinished(known, 1, {"loss/total/mean": -1.0}))

    rig = build_rig(max_steps=4, max_lag=0, trainer=ScriptedTrainer(max_steps=4, wait=repeat))
    await rig.play()
    assert [step for step, _ in rig.monitor.records] == [0, 1, 2, 3]
    losses = [metrics["loss/total/mean"] for _, metrics in rig.monitor.records]
    assert losses == [0.0, 1.0, 2.0, 3.0]
    noted = Counter((line["event"], line["step"]) for line in rig.journal if "step" in line)
    assert set(noted.values()) == {1}


async def test_the_order_of_finished_and_published_does_not_matter(build_rig: Any) -> None:
    trainer = ScriptedTrainer(max_steps=2, is_published_first=True)
    rig = build_rig(max_steps=2, trainer=trainer)
    await rig.play()
    assert [step for step, _ in rig.monitor.records] == [0, 1]
    assert rig.monitor.records[1][1]["loss/total/mean"] == 1.0
    assert rig.monitor.records[1][1]["weights/version"] == 2.0


@pytest.mark.parametrize("is_published_first", [True, False])
async def test_a_step_is_recorded_before_the_next_batch_is_played(
    build_rig: Any, is_published_first: bool
) -> None:
    """In a synchronous run the trainer's last words on a step come while nothing else happens."""
    recorded: list[int] = []

    async def wait(number: int) -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        recorded.append(len(rig.monitor.records))

    trainer = ScriptedTrainer(max_steps=2, is_published_first=is_published_first)
    rig = build_rig(
        max_steps=2,
        max_lag=0,
        groups_per_batch=1,
        trainer=trainer,
        environment=ScriptedEnvironment(wait=wait),
    )
    await rig.play()
    assert recorded == [0, 0, 1, 1]


@pytest.mark.shows("F32", "I6")
async def test_a_lost_lease_ends_the_run_before_the_next_batch(build_rig: Any) -> None:
    def fenced() -> None:
        raise FencedError("term 2 owns the run")

    rig = build_rig()
    rig.check_lease = fenced
    with pytest.raises(FencedError):
        await rig.play()
    assert rig.trainer.batches == []


async def test_in_flight_episodes_stay_under_their_limit(build_rig: Any) -> None:
    running = 0
    most = 0

    async def wait(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        # Longer than the schedule loop needs to open the next group.
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1

    rig = build_rig(environment=ScriptedEnvironment(wait=wait), max_in_flight_episodes=3)
    await rig.play()
    assert most == 3


async def test_sources_share_the_batch_by_their_ratio(build_rig: Any) -> None:
    environments = {"words": ScriptedEnvironment(), "sums": ScriptedEnvironment()}
    rig = build_rig(max_steps=3, environments=environments)
    await rig.play()
    opened = Counter(line["source"] for line in rig.events("group_opened"))
    assert opened == {"words": 3, "sums": 3}
    assert "episode/sums/reward/mean" in rig.monitor.records[0][1]


async def test_episodes_are_recorded_with_their_place_in_the_run(build_rig: Any) -> None:
    rig = build_rig(max_steps=1, max_lag=0, groups_per_batch=1)
    await rig.play()
    lines = (rig.root / "episodes" / "step_0" / "train.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line) for line in lines]
    fields = records[1]["gradus"]
    assert fields["episode"] == "g000000.1"
    assert fields["advantages"] == [0.5]
    assert fields["versions"] == {"oldest": 0, "newest": 0}
    assert fields["dropped"] == {}
    assert records[1]["env"]["name"] == "words"
    assert records[1]["traces"][0]["nodes"]


async def test_no_group_is_played_that_the_run_does_not_need(build_rig: Any) -> None:
    rig = build_rig(max_steps=2, max_lag=1, groups_per_batch=2, group_size=2)
    await rig.play()
    assert len(rig.environment.calls) == 2 * 2 * 2


async def test_an_episode_of_several_agents_trains_the_trainable_ones(build_rig: Any) -> None:
    def play(number: int) -> Any:
        player = build_trace(reward=float(number % 2), agent="player")
        judge = build_trace(reward=1.0, agent="judge", trainable=False)
        return build_episode([judge, player])

    rig = build_rig(max_steps=1, environment=ScriptedEnvironment(play=play))
    await rig.play()
    samples = rig.events("batch_shipped")[0]["samples"]
    assert all(sample.endswith("/1/0") for sample in samples)


class Faithless(ScriptedEnvironment):
    """Its watch is cancelled by something that it awaits."""

    async def watch(self) -> None:
        raise asyncio.CancelledError


async def test_a_part_of_the_run_that_is_cancelled_from_inside_ends_the_run(build_rig: Any) -> None:
    """A task group takes it for one that has ended well, and the run would stand still."""
    with pytest.raises(ProtocolError, match="`a watch` of the orchestrator was cancelled from ins"):
        await build_rig(environment=Faithless()).play()


@pytest.mark.parametrize("loop", ["schedule", "collect", "ship", "record"])
async def test_a_loop_that_is_cancelled_from_inside_ends_the_run(
    loop: str, build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*_: Any) -> None:
        raise asyncio.CancelledError

    owner, name = (RecordWriter, "run") if loop == "record" else (Orchestrator, loop)
    monkeypatch.setattr(owner, name, cancelled)
    with pytest.raises(ProtocolError, match=f"`{loop}` of the orchestrator was cancelled"):
        await build_rig().play()


async def test_an_episode_that_is_cancelled_from_inside_fails(build_rig: Any) -> None:
    def play(number: int) -> Any:
        if number % 2:
            raise asyncio.CancelledError
        return build_episode(reward=float(number % 4), seed=number)

    rig = build_rig(environment=ScriptedEnvironment(play=play), max_steps=1, group_size=4)
    await rig.play()
    assert {line["error"] for line in rig.events("episode_ended")} >= {None, "CancelledError"}
