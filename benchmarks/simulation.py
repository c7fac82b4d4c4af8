"""The real orchestrator with scripted peers on a clock of its own, for benchmarks.

Nobody waits for real: where the event loop would sleep, its clock jumps. On a `virtual` clock time
passes only so, and a run is the same each time. On a `busy` clock the time that the processor
computes for this process passes too, so that its load shows in waits as it would in a real run.
What else the machine does meanwhile does not count.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from configs import build_algorithm_config
from scripted_peers import ScriptedEnvironment, ScriptedPolicy, ScriptedTrainer

from gradus.config import (
    ModelConfig,
    RunProcessConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from gradus.config.schema.environment import EnvironmentTimeoutConfig
from gradus.config.schema.orchestrator import OrchestratorConfig
from gradus.orchestrator.build import Components, build_orchestrator
from gradus.orchestrator.groups.grading import build_grader
from gradus.orchestrator.play.player import Source
from gradus.orchestrator.play.tasks import SourceShare
from gradus.orchestrator.records.episodes import EpisodeWriter
from gradus.orchestrator.records.journal import Journal

T = TypeVar("T")
SOURCE = "words"
LONGEST_SILENCE_SECONDS = 5.0


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for the next timer it moves the clock there.

    What happens for real is waited for: bytes on a socket or a watch, and work on a thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped_seconds = 0.0
        self.num_on_threads = 0
        self.longest_turn_seconds = 0.0
        """Most computing time between two looks for news: so long the event loop was deaf."""
        self._looked_at = time.process_time()

    def select(self, timeout: float | None = None) -> Any:
        self.longest_turn_seconds = max(
            self.longest_turn_seconds, time.process_time() - self._looked_at
        )
        # Without a timer only a thread that asyncio itself started can bring news, and soon.
        is_real = self.num_on_threads > 0 or timeout is None
        ready = super().select(LONGEST_SILENCE_SECONDS if timeout is None else timeout * is_real)
        if not ready and timeout is None:
            raise RuntimeError("nothing is scheduled: the simulated run is in a deadlock")
        if not ready and not is_real:
            self.skipped_seconds += max(timeout or 0.0, 0.0)
        self._looked_at = time.process_time()
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps over every idle moment."""

    def __init__(self, *, is_busy: bool) -> None:
        self.jumps = _JumpingSelector()
        self._is_busy = is_busy
        super().__init__(self.jumps)

    def time(self) -> float:
        """Seconds skipped, on a busy clock plus the seconds that this process computed."""
        return self.jumps.skipped_seconds + (time.process_time() if self._is_busy else 0.0)

    def run_in_executor(self, *args: Any) -> asyncio.Future[Any]:
        """While a thread works, time passes for real."""
        working = super().run_in_executor(*args)
        self.jumps.num_on_threads += 1
        working.add_done_callback(self._note_end_of_thread)
        return working

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Wait without the deadline that Python 3.12 sets: the clock would jump over it."""
        await super().shutdown_default_executor()

    def _note_end_of_thread(self, _: asyncio.Future[Any]) -> None:
        self.jumps.num_on_threads -= 1


def run_simulated(work: Coroutine[Any, Any, T], *, is_busy: bool = False) -> T:
    """Run `work` to its end on a loop of its own."""
    with asyncio.Runner(loop_factory=lambda: JumpingLoop(is_busy=is_busy)) as runner:
        return runner.run(work)


@dataclass
class RecordingMonitor:
    """Keeps every record."""

    records: list[dict[str, float]] = field(default_factory=list)

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:  # noqa: ARG002
        """Keep one."""
        self.records.append(dict(metrics))

    def close(self) -> None:
        """Nothing is held open."""


@dataclass(frozen=True)
class Simulation:
    """What is simulated; times are in seconds of the simulated clock."""

    max_steps: int
    settings: Mapping[str, Any]
    """The orchestrator's section."""
    episode_seconds: Callable[[random.Random], float]
    train_seconds: float
    group_size: int = 4
    apply_seconds: float = 0.5
    seed: int = 0


@dataclass
class SimulatedRun:
    """One run and what it left."""

    environment: ScriptedEnvironment
    trainer: ScriptedTrainer
    monitor: RecordingMonitor
    journal: Path
    seconds: float
    """On the simulated clock."""
    idle_seconds: list[float]
    """Per step, how long the trainer waited for its batch."""


def build_config(simulation: Simulation, root: Path) -> RunProcessConfig:
    """One source with the simulated settings."""
    source = SourceConfig(
        name=SOURCE,
        ratio=1.0,
        group_size=simulation.group_size,
        sampling=SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=16),
        algo=build_algorithm_config("grpo"),
        timeout=EnvironmentTimeoutConfig(),
        address=None,
        state_columns=[],
    )
    section = {"train": {"env": [{"id": SOURCE}]}, **simulation.settings}
    return RunProcessConfig(
        run_dir=str(root),
        term=1,
        model=ModelConfig(name="simulated", max_length_tokens=64),
        max_steps=simulation.max_steps,
        seed=simulation.seed,
        sources=[source],
        orchestrator=OrchestratorConfig.model_validate(section),
        trainer=TrainerConfig(micro_batch_tokens=4096),
    )


async def play(simulation: Simulation, root: Path) -> SimulatedRun:
    """Play a whole run; call it through `run_simulated`."""
    loop = asyncio.get_running_loop()
    idle: list[float] = []
    trained_at = loop.time()

    async def wait(number: int) -> None:
        await asyncio.sleep(
            simulation.episode_seconds(random.Random(f"{simulation.seed}/{number}"))
        )

    async def train(_: int) -> None:
        nonlocal trained_at
        idle.append(loop.time() - trained_at)
        await asyncio.sleep(simulation.train_seconds)
        trained_at = loop.time()

    async def apply(_: int) -> None:
        await asyncio.sleep(simulation.apply_seconds)

    config = build_config(simulation, root)
    environment = ScriptedEnvironment(wait=wait, num_tasks=None)
    trainer = ScriptedTrainer(max_steps=simulation.max_steps, wait=train)
    monitor = RecordingMonitor()
    path = root / "journal.jsonl"
    with Journal(path, term=1, now=loop.time) as journal:
        share = SourceShare(SOURCE, 1.0, None)
        grading = build_grader(config, config.sources[0])
        components = Components(
            sources={SOURCE: Source(share, simulation.group_size, environment, grading)},
            policy=ScriptedPolicy(wait=apply),
            sender=trainer,
            monitor=monitor,
            journal=journal,
            episodes=EpisodeWriter(root / "episodes", {}),
            check_lease=lambda: None,
            clock=loop.time,
        )
        begun = loop.time()
        training = asyncio.create_task(trainer.train())
        await build_orchestrator(config, components).play()
        await training
    return SimulatedRun(environment, trainer, monitor, path, loop.time() - begun, idle)
