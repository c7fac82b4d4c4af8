"""Hostile deeds of plug-ins: each ends in an error under the name of its class, none in silence."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from configs import (
    build_algorithm_config,
    build_curriculum_config,
    build_filter_config,
)

from gradus.config import CurriculumConfig
from gradus.errors import ConfigError, GradusError
from gradus.orchestrator.algorithms.base import Algorithm, assign_advantage
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.failures import scored_within
from gradus.orchestrator.play.curriculum import TaskDraw, Uniform
from gradus.orchestrator.play.tasks import SourceShare, TaskSource
from gradus.orchestrator.resume.checkpoint import take_plugins
from gradus.orchestrator.traces import trainable_traces

Deed = Callable[..., Any]
TIMEOUT_SECONDS = 0.3


class Hostile:
    """What all of them share: the deed of the test."""

    deed: Deed


class GroupScorer(Hostile, GroupRelative):
    def score_group(self, episodes: Any, context: Any) -> None:
        super().score_group(episodes, context)
        type(self).deed(episodes, context)


class Judge(Hostile, GroupRelative):
    async def score_group(self, episodes: Any, context: Any) -> None:
        super().score_group(episodes, context)
        done = type(self).deed(episodes, context)
        if asyncio.iscoroutine(done):
            await done


class EpisodeJudge(Hostile, Algorithm):
    async def score_episode(self, episode: Any, context: Any) -> None:
        for trace in trainable_traces([episode]):
            assign_advantage(trace, 1.0)
        done = type(self).deed([episode], context)
        if asyncio.iscoroutine(done):
            await done


class Sieve(Hostile):
    name = "sieve"
    needs_context = True

    def keeps(self, sample: Any, context: Any) -> Any:
        return type(self).deed(sample, context)


class Recorder(Hostile, Uniform):
    def record(self, index: int, result: Any) -> None:
        type(self).deed(index, result)


class Drawer(Hostile, Uniform):
    def next_task(self) -> Any:
        return type(self).deed(self, None)


class Keeper(Hostile, Uniform):
    def state(self) -> Any:
        return type(self).deed(self, None)


class Odd(BaseException):
    """No Exception, and without a text that can be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raising(error: BaseException) -> Deed:
    def deed(*_: Any) -> None:
        raise error

    return deed


def leave(*_: Any) -> None:
    sys.exit(0)


def cancel_its_task(*_: Any) -> bool:
    task = asyncio.current_task()
    if task is not None:
        task.cancel()
    return True


async def cancel_and_wait(*_: Any) -> None:
    cancel_its_task()
    await asyncio.Event().wait()


def stop_the_loop(*_: Any) -> bool:
    asyncio.get_running_loop().stop()
    return True


async def stop_after_a_wait(*_: Any) -> None:
    await asyncio.sleep(0)
    stop_the_loop()
    await asyncio.sleep(0)


def take_a_trace(episodes: Any, _: Any) -> None:
    episodes[0].traces.pop()


def other_notes(episodes: Any, _: Any) -> None:
    episodes[0].traces[0].info = {"quarantined_turns": ["x"]}


def fail_twice(*_: Any) -> None:
    raise ExceptionGroup("both", [LookupError("first"), ValueError("second")])


def recurse(*_: Any) -> None:
    without_end()


def without_end() -> None:
    """Without arguments, since Python 3.13 counts only such calls before 3.13.8."""
    without_end()


RAISED: dict[str, tuple[Deed, str]] = {
    "raises": (raising(KeyError("grade")), "KeyError: 'grade' (test_hostile_plugins.py:"),
    "exits": (leave, "SystemExit: 0"),
    "makes up a cancellation": (raising(asyncio.CancelledError()), "CancelledError: something"),
    "makes up a Ctrl-C": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "ends a generator": (raising(GeneratorExit()), "GeneratorExit"),
    "raises what is no Exception": (raising(Odd()), "Odd: an error without a readable text"),
    "raises a group": (fail_twice, "LookupError: first"),
    "recurses": (recurse, "RecursionError"),
    "needs memory": (raising(MemoryError()), "MemoryError"),
}


def reply(episodes: Any) -> Any:
    """The first message that the model wrote."""
    return episodes[0].traces[0].nodes[1]


def other_tokens(episodes: Any, _: Any) -> None:
    reply(episodes).token_ids[0] += 1


def new_tokens(episodes: Any, _: Any) -> None:
    node = reply(episodes)
    node.token_ids = [1 for _ in node.token_ids]


def shorter_logprobs(episodes: Any, _: Any) -> None:
    del reply(episodes).logprobs[0]


def certain_logprobs(episodes: Any, _: Any) -> None:
    node = reply(episodes)
    node.logprobs = [30.0] * len(node.logprobs)


def other_mask(episodes: Any, _: Any) -> None:
    reply(episodes).mask[0] = not reply(episodes).mask[0]


def another_reward(episodes: Any, _: Any) -> None:
    episodes[0].traces[0].rewards["reward"].score = 9.0


def untrainable(episodes: Any, _: Any) -> None:
    episodes[0].traces[0].agent.trainable = False


def no_messages(episodes: Any, _: Any) -> None:
    episodes[0].traces[0].nodes.pop()


def another_text(episodes: Any, _: Any) -> None:
    reply(episodes).message.content = "I say nothing"


def another_metric(episodes: Any, _: Any) -> None:
    episodes[0].traces[0].metrics["solved"] = 1.0


def quarantined(episodes: Any, _: Any) -> None:
    episodes[0].traces[0].info["quarantined_turns"] = ["x"]


CHANGED: dict[str, tuple[Deed, str]] = {
    "other tokens": (other_tokens, "it changed token_ids of message 1 of agent"),
    "new tokens": (new_tokens, "it changed token_ids of message 1 of agent"),
    "shorter logprobs": (shorter_logprobs, "it changed logprobs of message 1"),
    "logprobs of 30": (certain_logprobs, "it changed logprobs of message 1"),
    "another mask": (other_mask, "it changed mask of message 1"),
    "another reward": (another_reward, "it changed rewards of agent"),
    "no trainable agent": (untrainable, "it changed agent of agent"),
    "no messages": (no_messages, "it changed nodes of agent"),
    "another text": (another_text, "it changed message of message 1"),
    "another metric": (another_metric, "it changed metrics of agent"),
    "fewer traces": (take_a_trace, "it changed traces"),
    "turns put away in other notes": (other_notes, "it changed info.quarantined_turns of agent"),
    "turns put away": (quarantined, "it changed info.quarantined_turns of agent"),
}


def credit(values: Any) -> Deed:
    def deed(episodes: Any, _: Any) -> None:
        reply(episodes).advantages = values

    return deed


def number_past_the_door(_: Any, context: Any) -> None:
    context.numbers["spread"] = float("nan")


def text_as_number(_: Any, context: Any) -> None:
    context.numbers["spread"] = "text"


def nameless_number(_: Any, context: Any) -> None:
    context.numbers[3] = 1.0


def unknown_component(episodes: Any, _: Any) -> None:
    reply(episodes).loss_weights = {"kl": [1.0] * 5}


CREDITED: dict[str, tuple[Deed, str]] = {
    "too short": (credit([0.5]), "advantages has 1 values for 4 sampled tokens"),
    "not a number": (credit([float("nan")] * 4), "advantages is nan"),
    "infinite": (credit([float("inf")] * 4), "advantages is inf"),
    "huge": (credit([1e300] * 4), "advantages is 1e+300"),
    "text": (credit("abcd"), "advantages is 'abcd'"),
    "objects": (credit([object()] * 4), "values that are not numbers"),
    "unknown component": (unknown_component, "loss_weights names 'kl'"),
    "a metric that is no number": (number_past_the_door, "must be a finite number"),
    "a metric without a name": (nameless_number, "the name must be a text"),
    "a metric of text": (text_as_number, "must be a finite number"),
}


async def hang(*_: Any) -> None:
    await asyncio.Event().wait()


async def hang_on(*_: Any) -> None:
    """Ignores that it is cancelled, once: a task that never ends would outlive the test."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0)


CANCELS = {
    "cancels its task": (cancel_its_task, "it cancelled the task that it runs in"),
    "stops the loop": (stop_the_loop, "it stopped the event loop"),
}
WAITING: dict[str, tuple[Deed, str]] = {
    "cancels its task and waits": (cancel_and_wait, "something that it awaits was cancelled"),
    "stops the loop after a wait": (stop_after_a_wait, "it stopped the event loop"),
    "hangs": (hang, f"no score after {TIMEOUT_SECONDS:g} s"),
    "ignores its end": (hang_on, f"no score after {TIMEOUT_SECONDS:g} s"),
}


def write_into(name: str) -> Deed:
    def deed(sample: Any, _: Any) -> bool:
        getattr(sample.arrays, name)[:] = 0
        return True

    return deed


def replace_weights(sample: Any, _: Any) -> bool:
    sample.arrays.loss_weights["rl"] = np.zeros(1)
    return True


def replace_reward(sample: Any, _: Any) -> bool:
    sample.reward = 9.0
    return True


def change_trace(_: Any, context: Any) -> bool:
    context.trace.nodes[1].token_ids[0] += 1
    return True


def change_group(_: Any, context: Any) -> bool:
    context.episodes[0].traces[0].agent.trainable = False
    return True


FILTERED: dict[str, tuple[Deed, str]] = {
    "writes tokens": (write_into("token_ids"), "ValueError: assignment destination is read-only"),
    "writes credit": (write_into("advantages"), "assignment destination is read-only"),
    "writes logprobs": (write_into("sampling_logprobs"), "assignment destination is read-only"),
    "replaces weights": (replace_weights, "does not support item assignment"),
    "replaces a reward": (replace_reward, "immutable type: 'Sample'"),
    "changes its trace": (change_trace, "it changed token_ids of message 1"),
    "changes the group": (change_group, "it changed agent of agent"),
    "says yes": (lambda *_: "yes", "keeps gives 'yes'; give True or False"),
    "says nothing": (lambda *_: None, "keeps gives None"),
}


def draws(*answer: Any) -> Deed:
    return lambda *_: TaskDraw(*answer)


DRAWN: dict[str, tuple[Deed, str]] = {
    "nothing": (lambda *_: None, "AttributeError"),
    "a text": (draws("a", 0), "TypeError"),
    "beyond the end": (draws(100, 0), "it draws task 100"),
    "before the start": (draws(-1, 0), "it draws task -1"),
    "no episodes": (draws(0, 0, 0), "group_size = 0"),
    "endless episodes": (draws(0, 0, 1 << 40), "group_size = 1099511627776"),
    "half an episode": (draws(0, 0, 0.5), "TypeError"),
}


class Unreadable(Mapping[str, int]):
    """A state whose entries cannot be read."""

    def items(self) -> Any:
        raise LookupError("no entries")

    def __getitem__(self, key: str) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 1


def raced(*_: Any) -> Any:
    """What the interpreter says when a thread adds a key while the state is copied."""
    state: dict[str, Any] = {}

    class Racing:
        def tolist(self) -> list[int]:
            state[f"{len(state)}"] = 1
            return [1]

    state["a"] = Racing()
    return state


KEPT: dict[str, tuple[Deed, str]] = {
    "entries that cannot be read": (lambda *_: Unreadable(), "LookupError: no entries"),
    "a race": (raced, "dictionary changed size during iteration"),
    "no dict": (lambda *_: 3, "gives int; it must give a dict"),
    "not a number": (lambda *_: {"a": float("nan")}, "holds nan at 'a'"),
    "an object": (lambda *_: {"a": object()}, "holds a object at 'a'"),
}

TABLES: dict[type[Hostile], dict[str, tuple[Deed, str]]] = {
    GroupScorer: RAISED | CHANGED | CREDITED | CANCELS,
    Judge: RAISED | CHANGED | CREDITED | CANCELS | WAITING,
    EpisodeJudge: RAISED | CHANGED | CREDITED | CANCELS | WAITING,
    Sieve: RAISED | FILTERED | CANCELS,
    Recorder: RAISED | CANCELS,
    Drawer: RAISED | DRAWN,
}
ROWS = [
    pytest.param(kind, *row, id=f"{kind.__name__} {name}")
    for kind, table in TABLES.items()
    for name, row in table.items()
]


def with_plugin(build_rig: Any, kind: type[Hostile]) -> Any:
    """A run with this plug-in, which ends when two groups in a row train nothing."""
    changes: dict[str, Any] = {"max_empty_attempts": 2}
    path = f"{__name__}:{kind.__name__}"
    if issubclass(kind, Sieve):
        changes["filters"] = [build_filter_config(path)]
    if issubclass(kind, Uniform):
        changes["curriculum"] = build_curriculum_config(path)
    rig = build_rig(**changes)
    if issubclass(kind, Algorithm):
        algo = build_algorithm_config(path, scoring_timeout_seconds=TIMEOUT_SECONDS)
        sources = [source.model_copy(update={"algo": algo}) for source in rig.config.sources]
        rig.config = rig.config.model_copy(update={"sources": sources})
    return rig


async def test_what_ignores_the_end_of_its_run_scores_nothing_after_it() -> None:
    asked = asyncio.create_task(scored_within(60.0, "algorithm", object(), "words", hang_on))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


@pytest.mark.parametrize(("kind", "deed", "said"), ROWS)
async def test_a_deed_ends_the_run_under_the_name_of_the_class(
    kind: type[Hostile],
    deed: Deed,
    said: str,
    build_rig: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kind, "deed", staticmethod(deed), raising=False)
    rig = with_plugin(build_rig, kind)
    with pytest.raises(GradusError) as ended:
        await rig.play()
    told = f"{ended.value}\n{caplog.text}"
    assert f"{__name__}:{kind.__name__}" in told
    assert said in told
    assert rig.trainer.batches == []


@pytest.mark.parametrize("name", sorted(RAISED | KEPT))
def test_a_state_that_cannot_be_had_is_refused_under_the_name_of_the_class(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deed, said = (RAISED | KEPT)[name]
    monkeypatch.setattr(Keeper, "deed", staticmethod(deed), raising=False)
    curriculum: CurriculumConfig = build_curriculum_config(f"{__name__}:Keeper")
    tasks = TaskSource([SourceShare("words", 1.0, 5, curriculum)], seed=0)
    with pytest.raises(ConfigError) as refused:
        take_plugins({"curriculum words": tasks.curricula["words"]})
    assert f"state() of curriculum words {__name__}:Keeper" in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("scorer", [GroupScorer, Judge, EpisodeJudge])
async def test_what_a_plug_in_changes_after_its_call_reaches_no_sample(
    scorer: Any, build_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    def late(episodes: Any, _: Any) -> None:
        for episode in kept:
            new_tokens([episode], None)
            certain_logprobs([episode], None)
        kept.extend(episodes)

    monkeypatch.setattr(scorer, "deed", staticmethod(late), raising=False)
    rig = with_plugin(build_rig, scorer)
    await rig.play()
    trained = [it.arrays for batch in rig.trainer.batches for it in batch.ranks[0]]
    assert len(kept) > 4
    assert trained
    assert all(arrays.sampling_logprobs.max() < 30 for arrays in trained)
