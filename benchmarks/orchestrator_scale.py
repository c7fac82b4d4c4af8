"""The real orchestrator from 256 to 16,384 episodes in flight: CPU, lag, memory, bytes, idle time.

Its own loops, journal, credit, packing, spool and records run for real; an episode, a training step
and a new version only take time, on a clock that jumps over idle moments but counts the time that
the processor needs. Episodes are heavy-tailed in time and tokens. At every size as many episodes
end per second, so what is compared is the cost of having more of them in flight. Each size runs in
a process of its own, two at a time: about four minutes. `--size 102400 --steps 3` is larger; its
batches are smaller than what is in flight, so that its trainer waits.

    python benchmarks/orchestrator_scale.py --output benchmarks/results/orchestrator_scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from verifiers.v1.episode import WireEpisode

from gradus.orchestrator.build import build_orchestrator

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from scripted_peers import ScriptedEnvironment, ScriptedPolicy
from simulation import SOURCE, JumpingLoop, Simulation, build_config, run_simulated

from gradus.config import ModelConfig
from gradus.log import configure_logging
from gradus.monitor import JsonlMonitor
from gradus.orchestrator.build import Components
from gradus.orchestrator.groups.grading import build_grader
from gradus.orchestrator.play.environment import AgentConfigs
from gradus.orchestrator.play.player import Source
from gradus.orchestrator.play.tasks import SourceShare
from gradus.orchestrator.records.episodes import EpisodeWriter
from gradus.orchestrator.records.journal import Journal
from gradus.orchestrator.records.recording import open_recording
from gradus.processes.child import tune_collector
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.transport import SpoolReceiver, SpoolSender
from gradus.wire.events import Event, PolicyPublished, StepFinished
from gradus.wire.micro_batch import Batch

SIZES = {256: 40, 1024: 14, 4096: 7, 16384: 5}
"""Episodes in flight → steps that are measured."""
LARGEST_BATCH = 20_480
"""Episodes of a batch, where more are in flight."""
GROUP_SIZE = 8
MAX_LAG = 4
"""Five batches of groups: two and a half play, because a group waits for its slowest episode, one
trains, and the rest waits ready."""
MAX_STALENESS = 16
EPISODES_PER_SECOND = 128.0
"""Generation, and as much training."""
NUM_PAYLOADS = 256
LONGEST = 5.0
"""Of an episode, in mean episodes."""
WARM_UP_STEPS = 2
LENGTHS = {
    "model": ModelConfig(name="simulated", max_length_tokens=4096),
    "micro_batch_tokens": 16384,
}


def heavy_tailed(source: random.Random) -> float:
    """Log-normal with mean 1, one in fifty would be above 5; cut at `LONGEST`, as by a deadline."""
    return min(source.lognormvariate(-0.5, 1.0), LONGEST)


def mean_of_heavy_tailed() -> float:
    """With the cut."""
    cut = math.log(LONGEST)
    below = 0.5 * math.erfc(-(cut - 0.5) / math.sqrt(2))
    above = 0.5 * math.erfc((cut + 0.5) / math.sqrt(2))
    return below + LONGEST * above


@dataclass
class SpoolTrainer:
    """The trainer's end of a real spool; it reads no batch, it only takes the time to train one."""

    sender: SpoolSender
    receiver: SpoolReceiver
    num_steps: int
    train_seconds: float
    idle_seconds: list[float] = field(default_factory=list)
    """Per step, how long it waited for its batch."""
    trained_at: list[float] = field(default_factory=list)
    _arrived: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    async def train(self) -> None:
        """Train and publish batch after batch, then return."""
        loop = asyncio.get_running_loop()
        waiting_since = loop.time()
        for step in range(self.num_steps):
            assert await self._arrived.get() == step
            self.idle_seconds.append(loop.time() - waiting_since)
            await asyncio.sleep(self.train_seconds)
            await self._say(StepFinished(step, 1, {"loss/total/mean": 0.0}))
            await self._say(PolicyPublished(step + 1, 1, f"version_{step + 1}", "digest"))
            waiting_since = loop.time()
            self.trained_at.append(waiting_since)

    async def send(self, batch: Batch) -> None:
        """Into the spool; from there the trainer has it."""
        await self.sender.send(batch)
        self._arrived.put_nowait(batch.step)

    @property
    def last_handled(self) -> int:
        """The last event that was handled."""
        return self.sender.last_handled

    async def forget(self, step: int) -> None:
        """Delete the batches before a step."""
        await self.sender.forget(step)

    async def forget_events(self, last: int) -> None:
        """Delete events."""
        await self.sender.forget_events(last)

    async def receive_event(self) -> Event:
        """From the spool."""
        return await self.sender.receive_event()

    async def _say(self, event: Event) -> None:
        await asyncio.to_thread(self.receiver.send_event, event)


@dataclass
class Engine:
    """How many episodes it plays over time, and how late the event loop noticed each end."""

    mean_seconds: float
    seed: int = 0
    late_seconds: list[float] = field(default_factory=list)
    busy_until: list[tuple[float, float]] = field(default_factory=list)
    """At each start or end: the time, and the sum of episodes in flight x seconds until then."""
    _in_flight: int = 0

    async def generate(self, number: int) -> None:
        """As long as episode `number` takes."""
        loop = asyncio.get_running_loop()
        seconds = self.mean_seconds * heavy_tailed(random.Random(f"{self.seed}/{number}"))
        self.note(loop.time(), +1)
        due = loop.time() + seconds
        try:
            await asyncio.sleep(seconds)
            self.late_seconds.append(loop.time() - due)
        finally:
            self.note(loop.time(), -1)

    def mean_in_flight(self, begun: float, ended: float) -> float:
        """Between two times."""
        inside = [(at, area) for at, area in self.busy_until if begun <= at <= ended]
        (first, area), (last, whole) = inside[0], inside[-1]
        return (whole - area) / (last - first)

    def note(self, now: float, change: int) -> None:
        """So many episodes more or fewer are in flight from now on."""
        before, area = self.busy_until[-1] if self.busy_until else (now, 0.0)
        self.busy_until.append((now, area + self._in_flight * (now - before)))
        self._in_flight += change


def build_payload(seed: int) -> bytes:
    """One episode as an environment process sends it: a turn or two, heavy-tailed in tokens."""
    source = random.Random(seed)
    messages = []
    for turn in range(source.choice([1, 1, 1, 2])):
        prompt = [source.randrange(3, 50_000) for _ in range(32)]
        sampled = [source.randrange(3, 50_000) for _ in range(int(80 * heavy_tailed(source)) + 1)]
        messages.append(build_message(2 * turn - 1 if turn else None, prompt))
        messages.append(build_message(2 * turn, sampled, sampled=len(sampled)))
    episode = build_episode([build_trace(messages, reward=float(seed % 2))])
    return msgspec.msgpack.encode(episode.model_dump(mode="json"))


def receive_episode(payloads: list[bytes], configs: AgentConfigs, number: int) -> WireEpisode:
    """As the client of an environment process does."""
    record = msgspec.msgpack.decode(payloads[number % len(payloads)])
    for trace in record["traces"]:
        trace["agent"]["config"] = configs.parsed(trace["agent"]["config"])
    return WireEpisode.model_validate(record)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def build_simulation(in_flight: int, steps: int) -> Simulation:
    """The settings of one size."""
    batch = min(in_flight, LARGEST_BATCH)
    return Simulation(
        # More than are measured, so that generation continues until the end of the measurement.
        max_steps=steps + MAX_LAG + 1,
        settings={
            "groups_per_batch": batch // GROUP_SIZE,
            "max_lag": MAX_LAG,
            "max_staleness": MAX_STALENESS,
            "min_in_flight_episodes": in_flight,
            "max_in_flight_episodes": in_flight,
        },
        episode_seconds=heavy_tailed,
        train_seconds=batch / EPISODES_PER_SECOND,
        group_size=GROUP_SIZE,
        apply_seconds=0.1,
    )


@dataclass
class Played:
    """What a run leaves for the summary."""

    engine: Engine
    trainer: SpoolTrainer
    num_ended: int
    cpu_seconds: float
    seconds: float
    longest_turn_seconds: float


async def play(simulation: Simulation, root: Path, payloads: list[bytes]) -> Played:
    """Play a whole run; call it through `run_simulated`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    in_flight = int(simulation.settings["max_in_flight_episodes"])
    engine = Engine(in_flight / EPISODES_PER_SECOND / mean_of_heavy_tailed())
    config = build_config(simulation, root).model_copy(update=LENGTHS)
    run_dir = RunDirectory(root)
    trainer = SpoolTrainer(
        SpoolSender(run_dir, term=1),
        SpoolReceiver(run_dir, term=1, rank=0),
        simulation.max_steps - MAX_LAG - 1,
        simulation.train_seconds,
    )
    environment = ScriptedEnvironment(
        wait=engine.generate,
        play=partial(receive_episode, payloads, AgentConfigs()),
        num_tasks=None,
    )
    source = Source(
        SourceShare(SOURCE, 1.0, None),
        simulation.group_size,
        environment,
        build_grader(config, config.sources[0]),
    )
    with Journal(run_dir.journal, term=1, now=time.time) as journal:
        components = Components(
            sources={SOURCE: source},
            policy=ScriptedPolicy(wait=lambda _: asyncio.sleep(simulation.apply_seconds)),
            sender=trainer,
            monitor=JsonlMonitor(run_dir.metrics),
            journal=journal,
            episodes=EpisodeWriter(run_dir.episodes, {}),
            check_lease=lambda: None,
            clock=loop.time,
            recording=open_recording(config),
        )
        begun, cpu = loop.time(), time.process_time()
        playing = asyncio.create_task(build_orchestrator(config, components).play())
        training = asyncio.create_task(trainer.train())
        await asyncio.wait({playing, training}, return_when=asyncio.FIRST_COMPLETED)
        played = Played(
            engine=engine,
            trainer=trainer,
            num_ended=len(engine.late_seconds),
            cpu_seconds=time.process_time() - cpu,
            seconds=loop.time() - begun,
            longest_turn_seconds=loop.jumps.longest_turn_seconds,
        )
        await training
        playing.cancel()
        await asyncio.wait({playing})
        if components.recording is not None:
            components.recording.close()
        components.monitor.close()
    return played


def summarize(played: Played, simulation: Simulation) -> dict[str, Any]:
    """The numbers of one size."""
    in_flight = int(simulation.settings["max_in_flight_episodes"])
    engine, trainer = played.engine, played.trainer
    warm = trainer.trained_at[WARM_UP_STEPS - 1]
    idle = sum(trainer.idle_seconds[WARM_UP_STEPS:]) / (trainer.trained_at[-1] - warm)
    in_use = engine.mean_in_flight(warm, trainer.trained_at[-1]) / in_flight
    return {
        "in_flight": in_flight,
        "steps": trainer.num_steps,
        "episodes": played.num_ended,
        "simulated_seconds": round(played.seconds, 1),
        "cpu_ms_per_episode": round(1000 * played.cpu_seconds / played.num_ended, 3),
        "lag_p50_ms": round(1000 * quantile(engine.late_seconds, 0.5), 2),
        "lag_p99_ms": round(1000 * quantile(engine.late_seconds, 0.99), 2),
        "lag_max_ms": round(1000 * max(engine.late_seconds), 1),
        "longest_turn_ms": round(1000 * played.longest_turn_seconds, 1),
        "trainer_idle_share": round(idle, 4),
        "engine_idle_share": round(1 - in_use, 4),
    }


def run_size(in_flight: int, steps: int, root: Path) -> dict[str, Any]:
    """Simulate one size in this process; its files go into `root`."""
    configure_logging("orchestrator")
    simulation = build_simulation(in_flight, steps)
    payloads = [build_payload(seed) for seed in range(NUM_PAYLOADS)]
    tune_collector()
    lease = RunLease.take(RunDirectory(root))
    before = peak_mebibytes()
    found = summarize(run_simulated(play(simulation, root, payloads), is_busy=True), simulation)
    lease.release()
    found |= {"memory_mib": round(peak_mebibytes() - before)}
    return found | bytes_between(RunDirectory(root), payloads, min(in_flight, LARGEST_BATCH))


def bytes_between(run_dir: RunDirectory, payloads: list[bytes], batch: int) -> dict[str, int]:
    """Of an episode that its environment sends, and of its samples in a batch."""
    batches = list(run_dir.spool.glob("batch_*"))
    sent = sum(it.stat().st_size for folder in batches for it in folder.iterdir())
    return {
        "episode_bytes": round(sum(map(len, payloads)) / len(payloads)),
        "sample_bytes": round(sent / len(batches) / batch),
    }


def peak_mebibytes() -> float:
    """Most memory that this process had until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_in_process(in_flight: int, steps: int) -> dict[str, Any]:
    """`run_size` in a fresh process."""
    command = [sys.executable, __file__, "--size", f"{in_flight}", "--steps", f"{steps}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_all(num_processes: int) -> list[dict[str, Any]]:
    """Every size, the longest first; each counts the computing time of its own process only."""
    with ThreadPoolExecutor(num_processes) as pool:
        running = {
            size: pool.submit(run_in_process, size, SIZES[size]) for size in sorted(SIZES)[::-1]
        }
    return [running[size].result() for size in SIZES]


def main() -> None:
    """Simulate every size, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--size", type=int, help="one size, in this process")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--processes", type=int, default=2, help="how many sizes run at once")
    parser.add_argument("--profile", action="store_true", help="where the time of --size goes")
    chosen = parser.parse_args()
    if chosen.size is not None:
        with tempfile.TemporaryDirectory(prefix="gradus-bench-") as folder:
            steps = chosen.steps or SIZES[chosen.size]
            work = partial(run_size, chosen.size, steps, Path(folder))
            print(json.dumps(profiled(work) if chosen.profile else work()))
        return
    results = run_all(chosen.processes)
    for result in results:
        print(json.dumps(result))
    growth = results[-1]["cpu_ms_per_episode"] / results[0]["cpu_ms_per_episode"]
    print(f"CPU per episode, largest to smallest: {growth:.2f}")
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(results, indent=1) + "\n")


def profiled(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`work` with the dearest functions on stderr."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    found = profile.runcall(work)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    return found


if __name__ == "__main__":
    main()
