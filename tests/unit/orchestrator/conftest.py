"""One orchestrator with scripted peers, for the tests of its loops."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from configs import build_algorithm_config, build_curriculum_config
from scripted_peers import ScriptedEnvironment, ScriptedPolicy, ScriptedTrainer

from gradus.config import (
    ErrorPolicyConfig,
    ModelConfig,
    RunProcessConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from gradus.config.schema.environment import EnvironmentTimeoutConfig
from gradus.config.schema.orchestrator import OrchestratorConfig
from gradus.orchestrator.build import Components, build_orchestrator
from gradus.orchestrator.evaluation.episodes import EvaluationSource
from gradus.orchestrator.failures import ErrorPolicy, root_cause
from gradus.orchestrator.groups.grading import build_grader
from gradus.orchestrator.orchestrator import Orchestrator
from gradus.orchestrator.play.player import Source
from gradus.orchestrator.play.tasks import SourceShare
from gradus.orchestrator.records.episodes import EpisodeWriter
from gradus.orchestrator.records.journal import Journal, read_journal
from gradus.orchestrator.records.recording import EpisodeRecording
from gradus.orchestrator.resume.checkpoint import SavedOrchestrator

LIMIT_SECONDS = 60.0
"""Far beyond any run here; a deadlock fails the test instead of hanging it."""


@dataclass
class RecordingMonitor:
    """Keeps every record."""

    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.records.append((step, dict(metrics)))

    def close(self) -> None:
        """Nothing is held open."""


def build_config(root: Path, **changes: Any) -> RunProcessConfig:
    """A small run; `changes` go into the orchestrator's section, `max_steps` above it."""
    max_steps = changes.pop("max_steps", 3)
    group_size = changes.pop("group_size", 2)
    names = changes.pop("sources", ["words"])
    is_frozen = changes.pop("is_frozen", False)
    errors = changes.pop("errors", {})
    curriculum = changes.pop("curriculum", build_curriculum_config("uniform"))
    sampling = SamplingConfig(temperature=0.5, top_p=1.0, max_completion_tokens=16)
    section = {"train": {"env": [{"id": name} for name in names]}, "groups_per_batch": 2}
    return RunProcessConfig(
        run_dir=str(root),
        term=1,
        model=ModelConfig(name="tiny", renderer="qwen3", max_length_tokens=64),
        max_steps=max_steps,
        seed=0,
        sources=[
            SourceConfig(
                name=name,
                ratio=1.0,
                group_size=group_size,
                sampling=sampling,
                algo=build_algorithm_config("grpo"),
                timeout=EnvironmentTimeoutConfig(),
                address=None,
                state_columns=[],
                is_frozen=is_frozen,
                curriculum=curriculum,
                errors=ErrorPolicyConfig(**({"retries": 0, "backoff_seconds": 0.0} | errors)),
            )
            for name in names
        ],
        orchestrator=OrchestratorConfig.model_validate(section | changes),
        trainer=TrainerConfig(micro_batch_tokens=64),
    )


@dataclass
class Rig:
    """A run with its peers; `play` runs it to its end or to its first error."""

    root: Path
    config: RunProcessConfig
    environments: dict[str, ScriptedEnvironment]
    policy: ScriptedPolicy
    trainer: ScriptedTrainer
    monitor: RecordingMonitor = field(default_factory=RecordingMonitor)
    check_lease: Callable[[], None] = lambda: None
    evaluated: list[EvaluationSource] = field(default_factory=list)
    recording: EpisodeRecording | None = None
    clock: Callable[[], float] | None = None
    """By default every look moves it by one second."""
    answer_seconds: float = LIMIT_SECONDS
    """How long the trainer may owe an answer."""

    @property
    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.root / "journal.jsonl")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Journal lines of one kind."""
        return [line for line in self.journal if line["event"] == name]

    @property
    def environment(self) -> ScriptedEnvironment:
        return next(iter(self.environments.values()))

    def build(self, saved: SavedOrchestrator | None = None) -> tuple[Orchestrator, Journal]:
        ticks = itertools.count()
        journal = Journal(self.root / "journal.jsonl", term=1, now=lambda: 0.0)
        sources = {
            source.name: Source(
                SourceShare(source.name, source.ratio, 100, source.curriculum),
                source.group_size,
                self.environments[source.name],
                build_grader(self.config, source),
                ErrorPolicy(source.errors),
                is_frozen=source.is_frozen,
            )
            for source in self.config.sources
        }
        components = Components(
            sources=sources,
            policy=self.policy,
            sender=self.trainer,
            monitor=self.monitor,
            journal=journal,
            episodes=EpisodeWriter(self.root / "episodes", {}),
            check_lease=self.check_lease,
            evaluated=self.evaluated,
            recording=self.recording,
            clock=self.clock or (lambda: float(next(ticks))),
        )
        orchestrator = build_orchestrator(self.config, components, saved)
        orchestrator.trainer.answer_seconds = self.answer_seconds
        return orchestrator, journal

    async def play(self) -> None:
        orchestrator, journal = self.build()
        with journal:
            training = asyncio.create_task(self.trainer.train())
            try:
                async with asyncio.timeout(LIMIT_SECONDS):
                    await orchestrator.play()
            except BaseExceptionGroup as group:
                raise root_cause(group) from group
            finally:
                training.cancel()


@pytest.fixture
def build_rig(tmp_path: Path) -> Any:
    """Builds a rig; keyword arguments are peers by name, the rest is config."""
    numbers = itertools.count()

    def build(**changes: Any) -> Rig:
        root = tmp_path / f"run{next(numbers)}"
        environments = changes.pop("environments", None)
        environment = changes.pop("environment", None)
        policy = changes.pop("policy", None)
        trainer = changes.pop("trainer", None)
        if environments is not None:
            changes["sources"] = list(environments)
        config = build_config(root, **changes)
        return Rig(
            root,
            config,
            environments or {"words": environment or ScriptedEnvironment()},
            policy or ScriptedPolicy(),
            trainer or ScriptedTrainer(max_steps=config.max_steps),
        )

    return build


@pytest.fixture
def base_config() -> Any:
    """Builds the config of a small run: a root, then changes."""
    return build_config
