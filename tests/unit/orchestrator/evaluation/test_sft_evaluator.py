"""The evaluator of a supervised run: order, resumes, records, and what it leaves on disk."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import Crash, FaultyFiles
from evaluated import read_gradus_fields
from scripted_peers import ScriptedEnvironment, ScriptedPolicy

from gradus.config import ModelConfig, SftDataConfig, SftEvalConfig, SftProcessConfig
from gradus.errors import ConfigError, FencedError, ProcessError, ProtocolError
from gradus.files import DurableFiles, read_json, write_json
from gradus.monitor import JsonlMonitor
from gradus.orchestrator.evaluation.episodes import EvaluationSource
from gradus.orchestrator.evaluation.evaluator import SftEvaluation, build_evaluator
from gradus.orchestrator.evaluation.process import run
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode
from gradus.wire.events import CheckpointStaged, Event, PolicyPublished, TrainerDone
from gradus.wire.inference import EngineStatus

LIMIT_SECONDS = 60.0
BROKEN = EpisodeFailed(Failure("TaskError", "scripted"))


@dataclass
class Events:
    """What a trainer says, as far as it is there; then it waits for ever."""

    waiting: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    async def receive_event(self) -> Event:
        return await self.waiting.get()


@dataclass
class Rig:
    """An evaluator with scripted peers; versions lie on disk as the trainer writes them."""

    root: Path
    environment: ScriptedEnvironment = field(default_factory=ScriptedEnvironment)
    policy: ScriptedPolicy = field(default_factory=ScriptedPolicy)
    events: Events = field(default_factory=Events)
    settings: dict[str, Any] = field(default_factory=dict)
    max_steps: int = 5
    resume_step: int | None = None
    term: int = 1
    files: DurableFiles = field(default_factory=DurableFiles)

    @property
    def run_dir(self) -> RunDirectory:
        return RunDirectory(self.root)

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = self.run_dir.metrics.read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def measured(self) -> list[int]:
        return [row["step"] for row in self.records if "eval/version" in row]

    def publish(self, *versions: int, is_done: bool = True) -> None:
        for version in versions:
            folder = self.run_dir.version(version)
            folder.mkdir(parents=True, exist_ok=True)
            event = PolicyPublished(version, self.term, str(folder), "digest")
            self.events.waiting.put_nowait(event)
        if is_done:
            self.events.waiting.put_nowait(TrainerDone(self.max_steps - 1, self.term))

    def config(self) -> SftProcessConfig:
        section = {"env": [{"id": "words"}], "interval_steps": 2, **self.settings}
        return SftProcessConfig(
            run_dir=str(self.root),
            term=self.term,
            model=ModelConfig(name="tiny", renderer="qwen3"),
            data=SftDataConfig(path="words.jsonl"),
            max_steps=self.max_steps,
            evaluation_sources=[],
            eval=SftEvalConfig.model_validate(section),
            identity={"model": "tiny", "base_url": None, "sources": {}},
            resume_step=self.resume_step,
        )

    async def play(self) -> None:
        config = self.config()
        assert config.eval is not None
        sources = [EvaluationSource("words", 2, 2, self.environment)]
        monitor = JsonlMonitor(self.run_dir.metrics)
        evaluator = SftEvaluation(
            config=config,
            evaluator=build_evaluator(config.eval, sources, self.run_dir, self.policy),
            policy=self.policy,
            events=self.events,
            monitor=monitor,
            files=self.files,
        )
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await evaluator.run()
        finally:
            monitor.close()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_the_base_model_and_each_published_version_are_measured_in_order(rig: Rig) -> None:
    rig.publish(2, 4, 5)
    await rig.play()
    assert rig.measured == [0, 2, 4, 5]
    assert [call.version for call in rig.environment.calls] == [
        v for v in (0, 2, 4, 5) for _ in "1234"
    ]


async def test_a_record_has_the_names_of_an_evaluation_in_a_reinforcement_run(rig: Rig) -> None:
    rig.publish(2)
    await rig.play()
    (row,) = [row for row in rig.records if row["step"] == 2]
    assert row["eval/version"] == 2
    assert row["eval/words/avg@2"] == row["eval/avg@2"] == 0.5
    assert {"eval/words/pass@2", "eval/words/pass^2", "eval/seconds", "time"} <= set(row)
    assert read_json(rig.run_dir.evaluation(2))["eval/words/avg@2"] == 0.5


async def test_the_base_model_can_be_left_out(rig: Rig) -> None:
    rig.settings = {"base_model_first": False}
    rig.publish(2)
    await rig.play()
    assert rig.measured == [2]


async def test_a_version_leaves_the_disk_only_when_its_numbers_are_on_it(rig: Rig) -> None:
    seen: list[tuple[bool, bool]] = []

    async def look(_: int) -> None:
        seen.append((rig.run_dir.version(2).is_dir(), rig.run_dir.version(4).is_dir()))

    rig.environment = ScriptedEnvironment(wait=look)
    rig.settings = {"base_model_first": False}
    rig.publish(2, 4)
    await rig.play()
    assert seen == [(True, True)] * 4 + [(False, True)] * 4
    assert list(rig.run_dir.weights.iterdir()) == []


async def test_a_kill_in_a_deletion_leaves_no_half_of_a_version(rig: Rig) -> None:
    rig.files = FaultyFiles(1)
    rig.publish(2, is_done=False)
    with pytest.raises(Crash):
        await rig.play()
    assert rig.files.operations == ["rename", "delete"]
    assert not rig.run_dir.version(2).exists()
    rig.files = DurableFiles()
    rig.publish(4)
    await rig.play()
    assert rig.measured == [0, 2, 4]


async def test_versions_that_come_during_an_evaluation_wait_their_turn(rig: Rig) -> None:
    """All of them are published while the base model plays; none is applied before its turn."""
    served: list[int] = []

    async def publish_more(number: int) -> None:
        if number == 0:
            rig.publish(2, 4, 5)
        served.append(rig.policy.newest_version)

    rig.environment = ScriptedEnvironment(wait=publish_more)
    await rig.play()
    assert served == [v for v in (0, 2, 4, 5) for _ in range(4)]


async def test_a_measured_version_is_not_played_again_after_a_restart(rig: Rig) -> None:
    rig.publish(2, is_done=True)
    await rig.play()
    again = Rig(rig.root, resume_step=2, term=2)
    again.publish(2, 4)
    await again.play()
    assert [call.version for call in again.environment.calls] == [4] * 4
    assert again.policy.version == 4
    assert rig.measured == [0, 2, 4], "each version has one record"
    assert not rig.run_dir.version(2).exists()


async def test_an_interrupted_evaluation_plays_only_what_is_missing_or_failed(rig: Rig) -> None:
    def play(number: int) -> Any:
        if number == 3:
            raise ZeroDivisionError("the process ends here")
        return BROKEN if number == 1 else build_episode(reward=1.0)

    rig.environment = ScriptedEnvironment(play=play)
    rig.settings = {"max_in_flight_episodes": 1}
    with pytest.raises(ExceptionGroup):
        await rig.play()
    assert not rig.run_dir.evaluation(0).exists()
    again = Rig(rig.root, environment=ScriptedEnvironment(play=lambda _: build_episode(reward=1.0)))
    again.publish()
    await again.play()
    assert [call.index for call in again.environment.calls] == [0, 1]
    found = read_gradus_fields(rig.run_dir.episodes / "step_0" / "eval.jsonl")
    names = sorted(fields["episode"] for fields in found)
    assert names == ["words/0/0", "words/0/1", "words/1/0", "words/1/1"]
    (row,) = again.records
    assert (row["eval/words/avg@2"], row["eval/episodes/sum"]) == (1.0, 4)


async def test_an_evaluation_that_ended_with_failures_is_finished(rig: Rig) -> None:
    rig.environment = ScriptedEnvironment(play=lambda _: BROKEN)
    rig.publish()
    await rig.play()
    again = Rig(rig.root, resume_step=0)
    again.publish()
    await again.play()
    assert again.environment.calls == []
    assert again.records[-1]["eval/words/error/TaskError/sum"] == 4


async def test_records_that_a_resume_cut_off_are_written_again(rig: Rig) -> None:
    """A slow evaluation of version 2 is recorded behind steps that a resume does again."""
    rig.publish(2)
    await rig.play()
    rig.run_dir.metrics.write_text('{"step": 0, "loss/total/mean": 1.0}\n{"torn')
    again = Rig(rig.root, resume_step=3)
    again.publish()
    await again.play()
    whole = rig.run_dir.metrics.read_text().replace('{"torn\n', "").splitlines()
    rows = [json.loads(line) for line in whole]
    assert [(row["step"], row.get("eval/version")) for row in rows] == [(0, None), (0, 0), (2, 2)]
    assert again.environment.calls == []


async def test_a_version_whose_weights_are_gone_is_named(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.publish(2)
    with caplog.at_level(logging.WARNING):
        await rig.play()
    assert "versions [4, 5] are not evaluated" in caplog.text


async def test_an_engine_with_another_version_ends_the_run(rig: Rig) -> None:
    async def change(number: int) -> None:
        if number == 1:
            rig.policy.version = 9

    rig.environment = ScriptedEnvironment(wait=change)
    with pytest.raises(ProtocolError, match="serves version 9 while version 0 is evaluated"):
        await rig.play()
    assert not rig.run_dir.evaluation(0).exists()


@pytest.mark.shows("F09")
async def test_a_server_that_is_replaced_is_awaited(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may not be told yet what it serves when the last episode ends."""
    monkeypatch.setattr("gradus.orchestrator.evaluation.evaluator.AWAY_SECONDS", 0.0)
    status, said = rig.policy.status, iter(["gone", "stale"])

    async def replaced() -> EngineStatus:
        now = next(said, "settled")
        if now == "gone":
            raise ProcessError("the server ended")
        changes = {"version": 0, "is_stale": True} if now == "stale" else {}
        return msgspec.structs.replace(await status(), **changes)

    monkeypatch.setattr(rig.policy, "status", replaced)
    rig.publish(2)
    await rig.play()
    assert next(said, None) is None


async def test_a_newer_owner_of_the_run_keeps_the_last_word(rig: Rig) -> None:
    async def take_over(_: int) -> None:
        write_json(rig.run_dir.lease, {"term": 2, "owner": None})

    rig.environment = ScriptedEnvironment(wait=take_over)
    with pytest.raises(FencedError, match="term 2"):
        await rig.play()
    assert not rig.run_dir.evaluation(0).exists()


async def test_a_word_that_no_supervised_trainer_says_is_refused(rig: Rig) -> None:
    rig.events.waiting.put_nowait(CheckpointStaged(0, 1))
    with pytest.raises(ProtocolError, match="a supervised trainer publishes versions"):
        await rig.play()


def test_a_run_without_inference_ends_with_what_to_start_first(rig: Rig) -> None:
    with pytest.raises(ProcessError, match="'inference' is not ready"):
        run(rig.config())


def test_other_settings_than_those_of_the_played_episodes_are_refused(rig: Rig) -> None:
    before = {"model": "other", "base_url": None, "sources": {}}
    write_json(rig.run_dir.root / "evaluation.json", before)
    with pytest.raises(ConfigError, match="model was 'other' and is 'tiny'"):
        run(rig.config())


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, [0, 2, 4, 5]),
        ({"base_model_first": False}, [2, 4, 5]),
        ({"at_end": False}, [0, 2, 4]),
        ({"interval_steps": 5, "at_end": False}, [0, 5]),
        ({"interval_steps": 9}, [0, 5]),
    ],
)
def test_what_is_due_follows_from_the_config_alone(
    rig: Rig, changes: dict[str, Any], due: list[int]
) -> None:
    rig.settings = changes
    is_due: Callable[..., bool] = rig.config().eval.is_due
    assert [v for v in range(6) if is_due(v, max_steps=5)] == due
