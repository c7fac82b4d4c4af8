"""What is launched: the processes of a config, how they go on, and what must be checked first."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

from gradus.config import (
    EvalConfig,
    LaunchConfig,
    LaunchedConfig,
    RunConfig,
    SftConfig,
    resolve,
    run_name,
    without_secrets,
)
from gradus.launch.console import View
from gradus.launch.endpoints import check_external_models
from gradus.launch.episodes import Episodes
from gradus.launch.plan import LaunchPlan, Machine, plan_config, plan_processes
from gradus.launch.resume import Entry, ResumePoint
from gradus.launch.steps import Steps
from gradus.monitor import BENCH_COLUMNS, RL_COLUMNS, SFT_COLUMNS
from gradus.run.lease import RunKind, RunLease
from gradus.run.paths import RunDirectory
from gradus.run.recording import note_launch

Planner = Callable[[RunDirectory, int, int | None], LaunchPlan]
"""Run directory, term, step of the checkpoint to go on from → the plan."""


class Work(Protocol):
    """What a launch works on: the steps of a run or the episodes of an evaluation."""

    @property
    def title(self) -> str:
        """What its directory is called on the terminal."""

    def resume_point(self, lease: RunLease) -> ResumePoint:
        """Where it goes on; refuses what cannot go on."""

    def enter(self, lease: RunLease, plan: LaunchPlan, point: ResumePoint | None) -> Entry:
        """Compare the run directory with this launch; changes nothing."""

    def view(self, stream: TextIO, lease: RunLease) -> View:
        """What shows it to a person."""


@dataclass(frozen=True)
class Job:
    """What is launched, and where."""

    name: str
    output_dir: Path
    kind: RunKind
    launch: LaunchConfig
    plan: Planner
    work: Work
    check: Callable[[], None] = lambda: None
    """Asks the endpoints of others that it needs; not called in a dry run."""
    saves: bool = False
    """Whether a stop from outside waits for a checkpoint."""
    evaluation_seconds: float = 0.0
    """Time that evaluations at the end may take."""


def job_of(config: LaunchedConfig) -> Job:
    """What `gradus rl`, `gradus sft` and `gradus eval` launch."""
    start = partial(
        Job,
        name=run_name(config, secrets.token_hex(4)),
        output_dir=Path(config.output_dir),
        launch=config.launch,
        plan=partial(plan_config, config, Machine.current()),
        check=partial(check_external_models, config, os.environ),
    )
    if isinstance(config, EvalConfig):
        return start(kind="eval", work=Episodes())
    if isinstance(config, SftConfig):
        return start(
            kind="sft",
            work=Steps(
                "sft", config.max_steps, SFT_COLUMNS, keeps_versions=config.eval is not None
            ),
            saves=config.checkpoint.is_on,
            evaluation_seconds=all_evaluations_seconds(config),
        )
    evaluation = config.orchestrator.eval
    return start(
        kind="rl",
        work=Steps("rl", config.max_steps, RL_COLUMNS, note=partial(_note, config)),
        saves=config.checkpoint.is_on,
        evaluation_seconds=0.0 if evaluation is None else evaluation.timeout_seconds,
    )


def bench_job(config: RunConfig) -> Job:
    """The trainer of an RL run by itself, on made-up samples."""

    def planned(run_dir: RunDirectory, term: int, _: int | None) -> LaunchPlan:
        configs = resolve(config, run_dir=run_dir.root, term=term)
        return plan_processes(
            {"trainer": configs.by_process()["trainer"]},
            configs.env_vars,
            run_dir,
            Machine.current(),
            roles={"trainer": "bench-rank"},
        )

    num_steps = config.trainer.bench.warmup_steps + config.trainer.bench.steps
    return Job(
        name=f"bench--{Path(config.model.name).name}--{secrets.token_hex(4)}",
        output_dir=Path(config.output_dir),
        kind="bench",
        launch=config.launch,
        plan=planned,
        work=Steps("bench", num_steps, BENCH_COLUMNS),
    )


def all_evaluations_seconds(config: SftConfig) -> float:
    """The most that evaluations may take when all of them wait for the end of training."""
    section = config.eval
    if section is None:
        return 0.0
    versions = range(config.max_steps + 1)
    num_due = sum(section.is_due(version, max_steps=config.max_steps) for version in versions)
    return num_due * (section.timeout_seconds + section.apply_timeout_seconds)


def _note(config: RunConfig, lease: RunLease) -> None:
    """What a replay needs to know of this launch."""
    if config.orchestrator.recording:
        note_launch(lease.run_dir, lease.term, without_secrets(config))
