"""A plug-in that raises, answers wrongly or not at all fails its episode or group, not the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from configs import (
    build_algorithm_config,
    build_curriculum_config,
    build_filter_config,
)

from gradus.config import algorithms
from gradus.errors import ConfigError, EnvironmentFailure
from gradus.orchestrator.algorithms import build_algorithm
from gradus.orchestrator.algorithms.base import Algorithm, assign_advantage
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.groups.filters import build_filters
from gradus.orchestrator.play.curriculum import Uniform, build_curriculum
from gradus.orchestrator.traces import trainable_traces
from gradus.orchestrator.types import EpisodeFailed, Failure


class Judge(GroupRelative):
    """Waits before it compares."""

    wait: Callable[[], Awaitable[None]]

    async def score_group(self, episodes: Any, context: Any) -> None:
        await type(self).wait()
        super().score_group(episodes, context)


class Picky(Algorithm):
    """Does `deed` to every second group that it sees."""

    deed: Callable[[Any], None]

    def __init__(self) -> None:
        self.num_groups = 0

    def score_group(self, episodes: Any, context: Any) -> None:
        GroupRelative(algorithms.GrpoConfig()).score_group(episodes, context)
        self.num_groups += 1
        if self.num_groups % 2:
            type(self).deed(episodes)


class PickyEpisode(Algorithm):
    """Gives every episode credit, but does `deed` to the second one of each group."""

    deed: Callable[[Any], Any]

    async def score_episode(self, episode: Any, context: Any) -> None:
        (trace,) = trainable_traces([episode])
        assign_advantage(trace, 1.0)
        if int(episode.id.rpartition("-")[2]) % 2:
            done = type(self).deed([episode])
            if done is not None:
                await done


class Crossed:
    """A filter with a bug."""

    name = "crossed"

    def keeps(self, sample: Any) -> bool:
        return bool({}[sample.id])


class Forgetful(Uniform):
    """A curriculum that cannot take rewards."""

    def record(self, index: int, rewards: Any) -> None:
        raise LookupError(f"task {index} is unknown")


class Lost(Uniform):
    """A curriculum that has nothing to give."""

    def next_task(self) -> Any:
        raise LookupError("no task")


def reply(episodes: Any) -> Any:
    """The first message that the model wrote."""
    return episodes[0].traces[0].nodes[1]


def wrong_length(episodes: Any) -> None:
    reply(episodes).advantages = [0.5]


def not_a_number(episodes: Any) -> None:
    reply(episodes).advantages[0] = float("nan")


def no_number(episodes: Any) -> None:
    reply(episodes).advantages = [object()] * 4


def unknown_name(episodes: Any) -> None:
    reply(episodes).loss_weights = {"kl": [1.0] * 5}


def unsampled(episodes: Any) -> None:
    reply(episodes).loss_weights = {"rl": [1.0] * 5}


def raising(episodes: Any) -> None:
    raise KeyError("grade")


WRONG = {
    "wrong_length": (wrong_length, "invalid_credit", "advantages has 1 values for 4 sampled"),
    "nan": (not_a_number, "invalid_credit", "advantages is nan at token 0"),
    "object": (no_number, "invalid_credit", "values that are not numbers"),
    "unknown_name": (unknown_name, "invalid_credit", "loss_weights names 'kl'"),
    "unsampled": (unsampled, "invalid_credit", "which the model did not sample"),
    "raising": (raising, "algorithm_failed", "KeyError: 'grade' (test_plugin_errors.py:"),
}


def with_plugins(rig: Any, **changes: Any) -> Any:
    """The rig with other settings of its source."""
    algo = changes.pop("algo", None)
    if algo is not None:
        timeout = changes.pop("timeout", 60.0)
        path = f"{__name__}:{algo.__name__}"
        changes["algo"] = build_algorithm_config(path, scoring_timeout_seconds=timeout)
    sources = [source.model_copy(update=changes) for source in rig.config.sources]
    rig.config = rig.config.model_copy(update={"sources": sources})
    return rig


def reasons(rig: Any) -> set[str]:
    """Why groups were dropped."""
    return {reason for line in rig.events("group_dropped") for reason in line["reasons"]}


@pytest.mark.parametrize("name", sorted(WRONG))
async def test_a_group_on_which_an_algorithm_does_wrong_is_dropped_and_the_run_goes_on(
    name: str, build_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deed, kind, message = WRONG[name]
    monkeypatch.setattr(Picky, "deed", staticmethod(deed), raising=False)
    rig = with_plugins(build_rig(max_steps=2), algo=Picky)
    await rig.play()
    assert rig.journal[-1]["event"] == "run_ended"
    assert f"error:{kind}" in reasons(rig)
    assert message in caplog.text
    for part in ("test_plugin_errors:Picky", "source 'words'", "group g000000"):
        assert part in caplog.text


@pytest.mark.parametrize("name", sorted(WRONG))
async def test_an_episode_on_which_an_algorithm_does_wrong_fails_alone(
    name: str, build_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deed, kind, message = WRONG[name]
    monkeypatch.setattr(PickyEpisode, "deed", staticmethod(deed), raising=False)
    rig = with_plugins(build_rig(max_steps=2), algo=PickyEpisode)
    await rig.play()
    errors = {line["error"] for line in rig.events("episode_ended")}
    assert errors == {None, kind}
    assert message in caplog.text
    assert "episode g00000" in caplog.text


async def test_when_every_group_fails_the_run_ends_with_class_source_and_group(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> None:
        raise KeyError("grade")

    monkeypatch.setattr(Judge, "wait", staticmethod(refuse), raising=False)
    rig = with_plugins(build_rig(max_empty_attempts=2), algo=Judge)
    with pytest.raises(EnvironmentFailure, match=r"algorithm_failed.*:Judge, source 'words', gr"):
        await rig.play()


async def test_groups_are_scored_beside_the_loops_and_each_other(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first verdict waits until a second group ended and is being judged too."""
    both = asyncio.Event()
    waiting = []

    async def wait() -> None:
        waiting.append(1)
        if len(waiting) >= 2:
            both.set()
        await both.wait()

    monkeypatch.setattr(Judge, "wait", staticmethod(wait), raising=False)
    rig = with_plugins(build_rig(max_steps=2), algo=Judge)
    await rig.play()
    advantages = {
        float(a)
        for b in rig.trainer.batches
        for r in b.ranks
        for m in r
        for a in m.arrays.advantages
    }
    assert len(waiting) >= 4
    assert any(advantages)


async def cancel_what_it_awaits(_: Any = None) -> None:
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    waiting.cancel()
    await waiting


async def fail_in_a_task_group(_: Any = None) -> None:
    async def fail() -> None:
        raise LookupError("no verdict")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())


async def leave(_: Any = None) -> None:
    sys.exit(0)


DEPARTURES = {
    "cancelled": (cancel_what_it_awaits, "CancelledError: something that it awaits was cancelled"),
    "task_group": (fail_in_a_task_group, "LookupError: no verdict (test_plugin_errors.py:"),
    "exit": (leave, "SystemExit: 0"),
}


@pytest.mark.parametrize("name", sorted(DEPARTURES))
async def test_a_judge_that_ends_without_an_answer_fails_its_group_by_name(
    name: str, build_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deed, message = DEPARTURES[name]
    calls = []

    async def once() -> None:
        calls.append(1)
        if len(calls) == 1:
            await deed()

    monkeypatch.setattr(Judge, "wait", staticmethod(once), raising=False)
    rig = with_plugins(build_rig(max_steps=2), algo=Judge)
    await rig.play()
    assert rig.journal[-1]["event"] == "run_ended"
    assert "error:algorithm_failed" in reasons(rig)
    assert f":Judge, source 'words', group g000000: {message}" in caplog.text


@pytest.mark.parametrize("name", sorted(DEPARTURES))
async def test_an_episode_whose_judge_ends_without_an_answer_fails_by_name(
    name: str, build_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deed, message = DEPARTURES[name]
    monkeypatch.setattr(PickyEpisode, "deed", staticmethod(deed), raising=False)
    rig = with_plugins(build_rig(max_steps=1), algo=PickyEpisode)
    await rig.play()
    ended = {(line["outcome"], line["error"]) for line in rig.events("episode_ended")}
    assert ended == {("finished", None), ("failed", "algorithm_failed")}
    assert message in caplog.text


async def test_a_judge_that_is_too_slow_fails_its_group(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Judge, "wait", staticmethod(never), raising=False)
    rig = with_plugins(build_rig(max_empty_attempts=1), algo=Judge, timeout=0.01)
    with pytest.raises(EnvironmentFailure, match=r"scoring_timeout.*no score after 0\.01 s"):
        await rig.play()


async def test_a_judge_of_one_episode_that_is_too_slow_fails_the_episode(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(PickyEpisode, "deed", staticmethod(never), raising=False)
    rig = with_plugins(build_rig(max_steps=1), algo=PickyEpisode, timeout=0.01)
    await rig.play()
    assert {line["error"] for line in rig.events("episode_ended")} == {None, "scoring_timeout"}


async def test_a_group_that_could_not_be_judged_is_judged_again_when_the_policy_says_so(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def fail_first() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("judge is away")

    monkeypatch.setattr(Judge, "wait", staticmethod(fail_first), raising=False)
    errors = {"retries": 1, "retry_on": ["algorithm_failed"]}
    rig = with_plugins(build_rig(max_steps=1, errors=errors), algo=Judge)
    await rig.play()
    assert reasons(rig) <= {"zero_advantage"}
    assert {line["error"] for line in rig.events("group_graded")} == {None}


class Adding(Algorithm):
    """Adds to the credit of each episode, and fails after the first one of its first group."""

    num_calls = 0

    async def score_episode(self, episode: Any, context: Any) -> None:
        (trace,) = trainable_traces([episode])
        assign_advantage(trace, 1.0)

    async def score_group(self, episodes: Any, context: Any) -> None:
        self.num_calls += 1
        for episode in episodes:
            node = reply([episode])
            node.advantages[:] = [a + 1.0 for a in node.advantages]
            if self.num_calls == 1:
                context.record("failed", 1.0)
                raise ConnectionError("judge is away")


async def test_credit_of_a_judge_that_failed_is_taken_back_before_it_judges_again(
    build_rig: Any,
) -> None:
    errors = {"retries": 1, "retry_on": ["algorithm_failed"]}
    rig = with_plugins(build_rig(max_steps=1, errors=errors), algo=Adding)
    await rig.play()
    arrays = [m.arrays.advantages for b in rig.trainer.batches for rank in b.ranks for m in rank]
    assert set(np.concatenate(arrays)) == {0.0, 2.0}
    assert "group/words/failed/mean" not in rig.monitor.records[0][1]


async def test_groups_that_are_judged_when_the_run_ends_train_nothing(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def some() -> None:
        calls.append(1)
        if len(calls) > 2:
            await asyncio.Event().wait()

    monkeypatch.setattr(Judge, "wait", staticmethod(some), raising=False)
    rig = with_plugins(build_rig(max_steps=1, max_lag=1), algo=Judge)
    await rig.play()
    assert rig.journal[-1]["event"] == "run_ended"


async def test_a_filter_that_raises_drops_its_episode_by_name(
    build_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    filters = [build_filter_config(f"{__name__}:Crossed")]
    rig = build_rig(max_steps=1, filters=filters, max_empty_attempts=1)
    with pytest.raises(
        EnvironmentFailure, match=r"filter 'crossed' .*:Crossed, source 'words', sam"
    ):
        await rig.play()
    assert reasons(rig) == {"error:filter_failed"}


class Undecided:
    """A filter that forgets its answer."""

    name = "undecided"

    def keeps(self, sample: Any) -> None: ...


class Hesitant:
    """A filter that would answer later."""

    name = "hesitant"

    async def keeps(self, sample: Any) -> bool:
        return False


class Nameless:
    """A filter without a name, which no options can help."""

    def __init__(self, *, share: float = 1.0) -> None:
        if share < 0:
            raise ValueError("share must be 0 or more")

    def keeps(self, sample: Any) -> bool:
        return True


class Absent(Uniform):
    """A curriculum that would hear later."""

    async def record(self, index: int, result: Any) -> None: ...  # type: ignore[override]


class Amnesiac(GroupRelative):
    """An algorithm that would take its state over later."""

    async def load_state(self, state: Any) -> None: ...  # type: ignore[override]


class Explosive(GroupRelative):
    """An algorithm that cannot be built."""

    def __init__(self) -> None:
        raise ZeroDivisionError("division by zero")


async def test_a_filter_without_an_answer_fails_the_episode(build_rig: Any) -> None:
    filters = [build_filter_config(f"{__name__}:Undecided", enforce=True)]
    rig = build_rig(max_steps=1, filters=filters, max_empty_attempts=1)
    with pytest.raises(EnvironmentFailure, match="keeps gives None; give True or False"):
        await rig.play()


@pytest.mark.parametrize(
    ("filter_type", "options", "message"),
    [
        ("Hesitant", {}, "filter .*:Hesitant': keeps is an `async def`"),
        ("Nameless", {}, "filter .*:Nameless' must have a `name`"),
        ("Nameless", {"share": -1}, "filter .*:Nameless' .* ValueError: share must be 0 or more"),
    ],
)
def test_a_filter_that_cannot_judge_is_refused_at_the_start(
    filter_type: str, options: dict[str, Any], message: str
) -> None:
    chosen = build_filter_config(f"{__name__}:{filter_type}", options=options)
    with pytest.raises(ConfigError, match=message):
        build_filters([chosen], vocabulary_size=None)


def test_a_plug_in_whose_answer_nothing_awaits_is_refused_at_the_start() -> None:
    curriculum = build_curriculum_config(f"{__name__}:Absent")
    with pytest.raises(ConfigError, match=r"source 'words': .*:Absent': record is an `async def`"):
        build_curriculum(curriculum, source="words", num_tasks=3, seed=0)
    with pytest.raises(ConfigError, match=r"algorithm .*:Amnesiac': load_state is an `async def`"):
        build_algorithm(build_algorithm_config(f"{__name__}:Amnesiac"))


def test_an_algorithm_that_cannot_be_built_is_named() -> None:
    with pytest.raises(ConfigError, match=r":Explosive' .* ZeroDivisionError: division by zero"):
        build_algorithm(build_algorithm_config(f"{__name__}:Explosive"))


async def test_a_curriculum_that_cannot_take_rewards_costs_the_group(build_rig: Any) -> None:
    curriculum = build_curriculum_config(f"{__name__}:Forgetful")
    rig = with_plugins(build_rig(max_empty_attempts=1), curriculum=curriculum)
    with pytest.raises(EnvironmentFailure, match=r":Forgetful, source 'words', record of task \d+"):
        await rig.play()


async def test_a_curriculum_without_a_task_ends_the_run_by_name(build_rig: Any) -> None:
    curriculum = build_curriculum_config(f"{__name__}:Lost")
    rig = with_plugins(build_rig(), curriculum=curriculum)
    with pytest.raises(
        ConfigError, match=r":Lost, source 'words', next_task: LookupError: no task"
    ):
        await rig.play()


async def test_numbers_of_numpy_from_an_algorithm_are_trained_and_kept(
    build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numpy_values(episodes: Any) -> None:
        reply(episodes).advantages = np.full(4, 0.25, np.float64)

    monkeypatch.setattr(Picky, "deed", staticmethod(numpy_values), raising=False)
    rig = with_plugins(build_rig(max_steps=1), algo=Picky)
    await rig.play()
    arrays = [m.arrays.advantages for rank in rig.trainer.batches[0].ranks for m in rank]
    assert 0.25 in np.concatenate(arrays)


def fail_always(number: int) -> Any:
    raise EpisodeFailed(Failure("SandboxError", "no box"))
