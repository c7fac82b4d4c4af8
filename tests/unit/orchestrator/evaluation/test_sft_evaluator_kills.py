"""Whatever is killed and whenever: in the end each version is measured once, each episode once."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluated import read_gradus_fields
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_peers import ScriptedEnvironment, ScriptedPolicy

from gradus.config import ModelConfig, SftDataConfig, SftEvalConfig, SftProcessConfig
from gradus.monitor import JsonlMonitor
from gradus.orchestrator.evaluation.episodes import EvaluationSource
from gradus.orchestrator.evaluation.evaluator import SftEvaluation, build_evaluator
from gradus.run.growing_files import truncate_to_step
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode
from gradus.wire.events import Event, PolicyPublished, TrainerDone

MAX_STEPS = 6
DUE = (0, 2, 4, 6)
GROUP_SIZE = 2
EPISODES = ["words/0/0", "words/0/1", "words/1/0", "words/1/1"]


class KilledError(BaseException):
    """The evaluator ends here, as after kill -9: nothing that follows is done."""


@dataclass(frozen=True)
class Kill:
    """When a launch ends, and what it leaves to continue from."""

    steps: int
    """Steps that the trainer makes in this launch."""
    episode: int
    """The evaluator dies in this one of its episodes, counted from 0 ..."""
    record: int
    """... or before it writes this one of its records, whatever comes first."""
    checkpoint: int
    """Steps before the last one that the newest checkpoint lies."""


@dataclass
class DyingMonitor:
    """Records into the run's file until the record that it dies before."""

    path: Path
    last: int
    num_records: int = 0

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self.num_records == self.last:
            raise KilledError
        self.num_records += 1
        monitor = JsonlMonitor(self.path)
        monitor.record(metrics, step=step)
        monitor.close()

    def close(self) -> None:
        """Nothing is held open."""


@dataclass
class Run:
    """A run directory, and the trainer and launcher as far as they touch evaluations."""

    run_dir: RunDirectory
    checkpoint: int = 0
    term: int = 0
    played: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Version and task → episodes that are on disk and must not be played again."""
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    def resume(self) -> None:
        """What the launcher and the trainer do before the first step."""
        self.term += 1
        self.events = asyncio.Queue()
        self.played = self.on_disk()
        truncate_to_step(self.run_dir, self.checkpoint)
        for version in DUE[1:]:
            folder = self.run_dir.version(version)
            if version > self.checkpoint:
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.is_dir():
                self.announce(version)
        at = self.checkpoint
        is_known = self.run_dir.version(at).is_dir() or self.run_dir.evaluation(at).is_file()
        if at in DUE[1:] and not is_known:
            self.publish(at)

    def on_disk(self) -> Counter[tuple[int, int]]:
        """Version and task of what was played on weights that training continues from."""
        found: Counter[tuple[int, int]] = Counter()
        for version in DUE:
            path = self.run_dir.episodes / f"step_{version}" / "eval.jsonl"
            if path.exists() and version <= self.checkpoint:
                found.update((version, it["task"]["index"]) for it in read_gradus_fields(path))
        return found

    def train(self, end: int) -> None:
        for step in range(self.checkpoint, end):
            monitor = JsonlMonitor(self.run_dir.metrics)
            monitor.record({"loss/total/mean": 1.0}, step=step)
            monitor.close()
            if step + 1 in DUE:
                self.publish(step + 1)
        if end == MAX_STEPS:
            self.events.put_nowait(TrainerDone(MAX_STEPS - 1, self.term))

    def publish(self, version: int) -> None:
        self.run_dir.version(version).mkdir(parents=True)
        self.announce(version)

    def announce(self, version: int) -> None:
        folder = str(self.run_dir.version(version))
        self.events.put_nowait(PolicyPublished(version, self.term, folder, "digest"))

    async def receive_event(self) -> Event:
        """What a trainer that was killed has not said never comes."""
        if self.events.empty():
            raise KilledError
        return self.events.get_nowait()

    def evaluate(self, kill: Kill | None) -> None:
        """The evaluator until it is killed, or to its end."""

        def play(number: int) -> Any:
            if kill is not None and number == kill.episode:
                raise KilledError
            return build_episode(reward=1.0, seed=number)

        environment = ScriptedEnvironment(play=play)
        section = SftEvalConfig.model_validate(
            {"env": [{"id": "words"}], "interval_steps": 2, "max_in_flight_episodes": 1}
        )
        config = SftProcessConfig(
            run_dir=str(self.run_dir.root),
            term=self.term,
            model=ModelConfig(name="tiny"),
            data=SftDataConfig(path="words.jsonl"),
            max_steps=MAX_STEPS,
            evaluation_sources=[],
            eval=section,
            identity={},
            resume_step=self.checkpoint,
        )
        policy = ScriptedPolicy()
        sources = [EvaluationSource("words", 2, GROUP_SIZE, environment)]
        evaluator = SftEvaluation(
            config=config,
            evaluator=build_evaluator(section, sources, self.run_dir, policy),
            policy=policy,
            events=self,
            monitor=DyingMonitor(self.run_dir.metrics, -1 if kill is None else kill.record),
        )
        try:
            asyncio.run(evaluator.run())
        finally:
            self.played.update((call.version, call.index) for call in environment.calls)
            assert max(self.played.values(), default=0) <= GROUP_SIZE, "played once"


def rows(run_dir: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]


KILLS = st.builds(
    Kill,
    steps=st.integers(0, MAX_STEPS),
    episode=st.integers(0, 17),
    record=st.integers(0, 5),
    checkpoint=st.integers(0, MAX_STEPS),
)


@settings(max_examples=25, deadline=None)
@given(kills=st.lists(KILLS, max_size=4))
def test_after_any_kills_each_version_is_measured_once(kills: list[Kill]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(RunDirectory(Path(folder)))
        for kill in kills:
            run.resume()
            end = min(MAX_STEPS, run.checkpoint + kill.steps)
            run.train(end)
            try:
                run.evaluate(kill)
            except (KilledError, BaseExceptionGroup):
                run.checkpoint = max(run.checkpoint, end - kill.checkpoint)
                continue
            break
        else:
            run.resume()
            run.train(MAX_STEPS)
            run.evaluate(None)
        check(run.run_dir)


def check(run_dir: RunDirectory) -> None:
    measured = [row["step"] for row in rows(run_dir) if "eval/version" in row]
    assert sorted(measured) == list(DUE), "one record of each version"
    trained = [row["step"] for row in rows(run_dir) if "loss/total/mean" in row]
    assert trained == list(range(MAX_STEPS))
    for version in DUE:
        found = read_gradus_fields(run_dir.episodes / f"step_{version}" / "eval.jsonl")
        assert sorted(fields["episode"] for fields in found) == EPISODES
        assert {fields["versions"]["oldest"] for fields in found} == {version}
    assert not run_dir.weights.exists() or list(run_dir.weights.iterdir()) == []
