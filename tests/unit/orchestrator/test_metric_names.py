"""The catalogue and the code of the orchestrator know the same metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import build_sample
from metric_names import families_in_the_catalogue, families_of
from scripted_peers import ScriptedPolicy
from verifiers.v1.trace import TimeSpan
from verifiers.v1.types import ToolMessage

from gradus.monitor.metric_table import Maker
from gradus.orchestrator.evaluation.results import EpisodeScore, evaluate, result_metrics
from gradus.orchestrator.live import LiveWriter
from gradus.orchestrator.play.concurrency import EngineWatch, InFlightController
from gradus.orchestrator.play.inference_client import AppliedPolicy
from gradus.orchestrator.records.health import Alarms
from gradus.orchestrator.records.metrics import PendingStepMetrics, StepCounters, batch_metrics
from gradus.orchestrator.records.starvation import Starvation, group_time
from gradus.orchestrator.types import Failure, Group, PlayedEpisode, Task, TaskPointer, Verdict
from gradus.testing.episodes import build_episode, build_trace
from gradus.wire.inference import EngineStatus
from gradus.wire.versions import VersionSpan

STAGES = ("boot", "setup", "agent", "finalize", "scoring")


def measured_group(source: str = "words", *, is_game: bool = False) -> Group:
    """A group to which everything happened."""
    group = Group("g0", TaskPointer(source, 0, 0), Task({}, 0), numbers={"baseline/a": 1.0})
    for number in range(3):
        traces = [build_trace(reward=float(number), agent="a", turns=2)]
        said = "Error: now <|im_end|>"
        traces[0].nodes[2].message = ToolMessage(tool_call_id="a", content=said)
        traces[0].stop("max_turns")
        traces[0].metrics = {"moves": 1.0, "episode/length": 2.0}
        traces[0].info = {"gradus_cut": {"bytes": 9}}
        traces[0].record_reward("style", float(number), 1.0)
        for stage in STAGES:
            setattr(traces[0].timing, stage, TimeSpan(start=1.0, end=2.0))
        if is_game:
            traces.append(build_trace(reward=0.0, agent="b"))
            traces[1].metrics = {"moves": 1.0}
            traces[1].record_reward("style", 0.0, 1.0)
        played = PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), build_episode(traces))
        group.played.append(played)
    group.played.append(PlayedEpisode("g0.3", "g0", VersionSpan(0, 0)))
    failure = Failure("TaskError", "no")
    group.played.append(PlayedEpisode("g0.4", "g0", VersionSpan(0, 0), failure=failure))
    group.samples = [msgspec.structs.replace(build_sample(), id="g0.0/0/0", episode_id="g0.0")]
    group.dropped = {"g0.1/0/0": "stale"}
    group.verdicts = {"g0.0/0/0": {"repetition": Verdict.FLAG}}
    return group


def counted() -> dict[str, float]:
    counters, starvation = StepCounters(), Starvation()
    for group in (measured_group(), measured_group("game", is_game=True)):
        counters.add_group(group)
        starvation.add(group.source, group_time(group))
    flood = measured_group("flood")
    flood.finished_episodes[0].traces[0].metrics = {f"task {n}": 1.0 for n in range(300)}
    counters.add_group(flood)
    counters.add("group", "words", "abandoned", "too_old")
    counters.add("episode", "words", "retried", "TaskError")
    counters.add("task", "words", "given_up")
    counters.add("task", "words", "set_aside", "lost")
    counters.add("group", "words", "dropped")
    return counters.take(["idle"]) | starvation.metrics() | batch_metrics([build_sample()], step=3)


def served() -> dict[str, float]:
    pending = PendingStepMetrics(now=0.0)
    pending.held(0, 1.0)
    pending.finished(0, {})
    status = EngineStatus(1, 1, 0, 0, 0.0, 0, 0, 9, is_paused=False)
    found = pending.applied(AppliedPolicy(1, 0.5, 0.25, status), now=1.0)
    assert found is not None
    return found


async def watched() -> dict[str, float]:
    policy = ScriptedPolicy()
    watch = EngineWatch(
        policy,
        InFlightController(least=1, most=9, initial=4),
        count=lambda: (1, 1),
        on_limit=lambda _: None,
    )
    for queries in (1, 5):
        policy.load = {"prefix_queries": queries}
        policy.load["parts"] = {"inference_0": await policy.status()}
        await watch.poll()
    return watch.take()


def evaluated() -> dict[str, float]:
    values = {
        "reward/style": 1.0,
        "metric/moves": 1.0,
        "info_cut_bytes": 9.0,
        "control_spellings": 1.0,
        **{f"{stage}_seconds": 1.0 for stage in STAGES},
    }
    of_agents = {f"agent/a/{name}": 1.0 for name in ("reward", "reward/style", "metric/moves")}
    flood = {f"metric/{n}": 1.0 for n in range(300)}
    scores = [
        EpisodeScore(0, 1.0, length_tokens=3, values=values),
        EpisodeScore(0, error="TaskError"),
    ]
    one = evaluate(scores, group_size=1)
    game = evaluate([EpisodeScore(0, 1.0, values=of_agents, is_shared=True)], group_size=2)
    flooded = evaluate([EpisodeScore(0, 0.5, values=flood)], group_size=2)
    found = result_metrics({"words": one, "game": game, "flood": flooded})
    alone = result_metrics({"words": one}) | {"eval/version": 1.0, "eval/seconds": 1.0}
    return found | alone


def alarmed() -> dict[str, float]:
    alarms = Alarms(sources=["words"], tell=lambda _: None)
    record = {"loss/mismatch_kl/mean": 0.5, "episode/words/flat/share": 1.0}
    return [alarms.add(record, step=step) for step in range(20)][-1]


@pytest.fixture
async def names(build_rig: Any, tmp_path: Path) -> set[str]:
    """Of a scripted run, and of all that seldom happens in one."""
    rig = build_rig(max_steps=2)
    orchestrator, journal = rig.build()
    with journal:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(rig.trainer.train())
            tasks.create_task(orchestrator.play())
        await orchestrator.engine.poll()
        live = LiveWriter(tmp_path / "live.json", orchestrator, term=1).numbers()
    of_run = {name for _, record in rig.monitor.records for name in record} | live.keys()
    assert "time/generate_wait_seconds" in of_run
    pieces = (counted(), served(), await watched(), evaluated(), alarmed())
    return of_run.union(*pieces)


async def test_every_metric_of_the_orchestrator_has_one_entry(names: set[str]) -> None:
    assert "episode/source/reward/mean" in families_of(names)


async def test_every_entry_of_the_orchestrator_has_a_metric(names: set[str]) -> None:
    mine = families_in_the_catalogue(Maker.ORCHESTRATOR, Maker.BATCHER, Maker.EVALUATOR)
    assert sorted(mine - families_of(names)) == []
