"""Invariant 7: a run that is killed at any event and resumed is one run."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until_async
from configs import (
    build_algorithm_config,
    build_curriculum_config,
    build_filter_config,
)
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from mishaps import MISHAPS, FailureProfile
from scripted_peers import ScriptedEnvironment, ScriptedPolicy, ScriptedTrainer
from verifiers.v1.episode import WireEpisode

from gradus.config import CheckpointConfig, algorithms
from gradus.files import read_json, write_json
from gradus.monitor import JsonlMonitor
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.build import Components, build_orchestrator
from gradus.orchestrator.failures import ErrorPolicy
from gradus.orchestrator.groups.grading import build_grader
from gradus.orchestrator.groups.packing import Layout, build_batch
from gradus.orchestrator.orchestrator import Orchestrator
from gradus.orchestrator.play.curriculum import TaskDraw, TaskResult, Uniform
from gradus.orchestrator.play.environment import TaskRefused
from gradus.orchestrator.play.player import Source
from gradus.orchestrator.play.tasks import SourceShare, TaskSource
from gradus.orchestrator.records.episodes import EpisodeWriter
from gradus.orchestrator.records.health import Alarms
from gradus.orchestrator.records.journal import (
    Journal,
    JournalEvent,
    check_journal,
    read_journal,
    surviving,
)
from gradus.orchestrator.records.recording import EpisodeRecording
from gradus.orchestrator.resume.checkpoint import find_saved
from gradus.run.checkpoints import CheckpointStore
from gradus.run.growing_files import truncate_to_sizes, truncate_to_step
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory
from gradus.run.recording import LaunchRecord
from gradus.wire.codec import encode
from gradus.wire.micro_batch import Batch
from gradus_lab.replay.batches import BatchMaker
from gradus_lab.replay.journal_reader import read_decisions
from gradus_lab.replay.recording import RecordedEpisodes

MAX_STEPS = 4
NUM_TASKS = 7


class Killed(BaseException):
    """The process is gone."""


@dataclass(frozen=True)
class Death:
    """When a process dies: about to write a line so many lines after its n-th checkpoint.

    None counts from its start, whatever checkpoints there were.
    """

    checkpoints: int | None
    lines: int


class MortalJournal(Journal):
    """The process dies before it writes the line that `death` says."""

    death: Death | None = None
    num_checkpoints = 0
    num_since = 0
    num_written = 0

    def write(self, event: JournalEvent, **fields: Any) -> None:
        now = {Death(self.num_checkpoints, self.num_since), Death(None, self.num_written)}
        if self.death in now:
            raise Killed
        super().write(event, **fields)
        self.num_since += 1
        self.num_written += 1
        if event is JournalEvent.CHECKPOINT_COMMITTED:
            self.num_checkpoints += 1
            self.num_since = 0


class SeededEnvironment(ScriptedEnvironment):
    """Plays what the seed says, and nothing else: the same episode for the same seed."""

    def __init__(self, lives: Lives, *, wait: Any) -> None:
        refused = {index: TaskRefused("no such row") for index in lives.unreadable}
        super().__init__(wait=wait, refused=refused)
        self._profile = lives.profile

    async def run(self, task: Any, *, version: int, seed: int | None = None) -> WireEpisode:
        await super().run(task, version=version, seed=seed)
        assert seed is not None
        return self._profile.play(seed)


class RandomJudge(GroupRelative):
    """Answers a while after a group ended, sometimes with an error; counts its verdicts."""

    def __init__(self, config: algorithms.GrpoConfig) -> None:
        super().__init__(config)
        self.num_judged = 0

    async def score_group(self, episodes: Any, context: Any) -> None:
        number = zlib.crc32(f"{context.environment}/{context.task_key}/{len(episodes)}".encode())
        for _ in range(number % 37):
            await asyncio.sleep(0)
        if number % 5 == 0:
            raise KeyError("no verdict")
        super().score_group(episodes, context)
        self.num_judged += 1

    def state(self) -> dict[str, Any]:
        return {"num_judged": self.num_judged}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_judged = state["num_judged"]


def mood(*parts: object) -> int:
    """The same number in every launch and in a replay."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def do_wrong(number: int) -> None:
    """Raise or leave, in most cases."""
    if number % 3 == 0:
        raise KeyError("no mood")
    if number % 3 == 1:
        sys.exit(0)
    raise asyncio.CancelledError


class Moody(GroupRelative):
    """Leaves, raises, or changes what it may only read, at every second task or so."""

    def score_group(self, episodes: Any, context: Any) -> None:
        super().score_group(episodes, context)
        number = mood(context.environment, context.task_key, len(episodes))
        nodes = [node for episode in episodes for node in episode.traces[0].nodes if node.sampled]
        if number % 8 == 0:
            do_wrong(number)
        if number % 8 == 1 and nodes:
            nodes[0].token_ids = [7 for _ in nodes[0].token_ids]
        if number % 8 == 2 and nodes:
            nodes[0].logprobs = [30.0 for _ in nodes[0].logprobs]
        if number % 8 == 3 and nodes:
            nodes[0].advantages = [0.5] * (len(nodes[0].logprobs) + 1)
        if number % 8 == 4 and episodes:
            episodes[0].traces[0].agent.trainable = False


class MoodyFilter:
    """Does wrong at every sixth sample or so, and writes into every seventh."""

    name = "moody"

    def keeps(self, sample: Any) -> bool:
        number = mood(sample.id)
        if number % 6 == 0:
            do_wrong(number)
        if number % 7 == 0:
            sample.arrays.token_ids[:] = 7
        return number % 9 != 0


JUDGE = f"{__name__}:RandomJudge"


def random_wait(name: str, most: int) -> Any:
    async def wait(number: int) -> None:
        for _ in range(zlib.crc32(f"{name}/{number}".encode()) % (most + 1)):
            await asyncio.sleep(0)

    return wait


@dataclass
class Lives:
    """One run directory and every launch in it."""

    root: Path
    config: Any
    profile: FailureProfile
    unreadable: tuple[int, ...]
    """Tasks that cannot be loaded."""
    sources: tuple[str, ...] = ("words", "sums")
    trainers: list[ScriptedTrainer] = field(default_factory=list)
    orchestrators: list[Orchestrator] = field(default_factory=list)

    @property
    def run_dir(self) -> RunDirectory:
        return RunDirectory(self.root)

    @property
    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.run_dir.journal)

    def batches(self) -> list[Batch]:
        """What the trainer whose weights survive was given: the last word on every step."""
        last: dict[int, Batch] = {}
        for trainer in self.trainers:
            last.update({batch.step: batch for batch in trainer.batches})
        return [last[step] for step in sorted(last)]

    async def live(self, *, death: Death | None, turns: int) -> bool:
        """Start or resume; False when it died."""
        term = len(self.trainers) + 1
        write_json(self.run_dir.lease, {"term": term, "owner": None})
        checkpoints = CheckpointStore(self.run_dir, term)
        latest = checkpoints.latest()
        checkpoints.discard_stale()
        if latest is None:
            truncate_to_step(self.run_dir, 0)
        else:
            sizes = read_json(latest.part("orchestrator") / "sizes.json")
            truncate_to_sizes(self.run_dir, latest.step, sizes)
        step = latest.step if latest else None
        config = self.config.model_copy(update={"term": term, "resume_step": step})
        trainer = ScriptedTrainer(
            max_steps=config.max_steps,
            term=term,
            wait=self._trainer_wait(term, turns),
            is_published_first=bool(term % 2),
            first_step=step or 0,
            checkpoints=checkpoints,
            checkpoint_interval=config.checkpoint.interval_steps,
        )
        self.trainers.append(trainer)
        return await self._run(config, trainer, death, turns)

    def _trainer_wait(self, term: int, turns: int) -> Any:
        """Every second step is so slow that the checkpoint before it is committed meanwhile.

        The other steps are quick: their snapshots find groups that are played and that wait.
        """
        wait = random_wait(f"train {term}", min(turns, 20))

        async def train(step: int) -> None:
            await wait(step if step % 2 else 0)
            is_saved = step % self.config.checkpoint.interval_steps == 0
            if step % 2 and is_saved:
                name = f"step_{step:08d}"
                await wait_until_async(
                    lambda: any(p.name.startswith(name) for p in self._committed()), what=name
                )

        return train

    def _committed(self) -> list[Path]:
        folder = self.run_dir.checkpoints
        return list(folder.iterdir()) if folder.is_dir() else []

    async def _run(
        self, config: Any, trainer: ScriptedTrainer, death: Death | None, turns: int
    ) -> bool:
        ticks = itertools.count()
        monitor = JsonlMonitor(self.run_dir.metrics, clock=lambda: 0.0)
        with MortalJournal(self.run_dir.journal, term=config.term, now=lambda: 0.0) as journal:
            journal.death = death
            environment = SeededEnvironment(self, wait=random_wait(f"play {config.term}", turns))
            sources = {
                source.name: Source(
                    SourceShare(source.name, source.ratio, NUM_TASKS, source.curriculum),
                    source.group_size,
                    environment,
                    build_grader(config, source),
                    ErrorPolicy(source.errors),
                )
                for source in config.sources
            }
            components = Components(
                sources=sources,
                policy=ScriptedPolicy(wait=random_wait(f"apply {config.term}", turns)),
                sender=trainer,
                monitor=monitor,
                journal=journal,
                episodes=EpisodeWriter(self.run_dir.episodes, {}),
                check_lease=lambda: None,
                clock=lambda: float(next(ticks)),
                evaluated=[],
                recording=EpisodeRecording(LaunchRecord(self.run_dir, config.term), config.model),
            )
            training = asyncio.create_task(trainer.train())
            try:
                orchestrator = build_orchestrator(config, components, find_saved(config))
                self.orchestrators.append(orchestrator)
                async with asyncio.timeout(60):  # A run that loses most groups plays hundreds.
                    await orchestrator.play()
            except BaseExceptionGroup as group:
                if group.subgroup(Killed) is None:
                    raise
                return False
            except Killed:
                return False
            finally:
                training.cancel()
                monitor.close()
                if components.recording is not None:
                    components.recording.close()
        return True


@pytest.fixture
def new_run(tmp_path: Path, base_config: Any) -> Any:
    numbers = itertools.count()

    def build(**changes: Any) -> Lives:
        root = tmp_path / f"run{next(numbers)}"
        root.mkdir()
        mark_run(RunDirectory(root), "rl")
        changes = {"max_steps": MAX_STEPS, "sources": ["words", "sums"]} | changes
        interval = changes.pop("interval_steps", 1)
        profile = changes.pop("profile", FailureProfile())
        unreadable = changes.pop("unreadable", ())
        chosen = {
            "algo": build_algorithm_config(changes.pop("algo", "grpo")),
            "curriculum": build_curriculum_config(changes.pop("curriculum", "uniform")),
        }
        config = base_config(root, **changes, max_empty_attempts=500)
        checkpoint = CheckpointConfig(interval_steps=interval)
        sources = [source.model_copy(update=chosen) for source in config.sources]
        changed = {"checkpoint": checkpoint, "sources": sources}
        return Lives(root, config.model_copy(update=changed), profile, unreadable)

    return build


def assert_one_run(lives: Lives) -> None:
    """Conservation, one training of each sample, one record of each step, the task order."""
    found = check_journal(lives.journal)
    assert found.problems == []
    assert list(found.batches) == list(range(MAX_STEPS))
    batches = lives.batches()
    assert [sorted(i for rank in b.ranks for m in rank for i in m.sample_ids) for b in batches] == [
        sorted(samples) for samples in found.batches.values()
    ]
    steps = [
        line["step"] for line in map(json.loads, lives.run_dir.metrics.read_bytes().splitlines())
    ]
    assert steps == list(range(MAX_STEPS))
    assert_task_order(lives)
    assert_counters(lives, found)
    assert_verdicts(lives)
    assert_records(lives)
    assert_alarms(lives)


def assert_task_order(lives: Lives) -> None:
    """Group n plays the task that the undisturbed stream has at place n.

    What a curriculum draws that hears rewards depends on which groups ended first. A task that
    cannot be loaded leaves its number to another one.
    """
    opened = [r for r in surviving(lives.journal) if r["event"] == "group_opened"]
    assert not {line["index"] for line in opened} & set(lives.unreadable)
    if lives.unreadable or any(
        source.curriculum.type != "uniform" for source in lives.config.sources
    ):
        return
    stream = TaskSource(
        [SourceShare(s.name, s.ratio, NUM_TASKS, s.curriculum) for s in lives.config.sources],
        seed=lives.config.seed,
    )
    numbers = [int(line["group"][1:]) for line in opened]
    assert sorted(numbers) == list(range(len(numbers)))
    for line in sorted(opened, key=lambda r: r["group"]):
        task = stream.next_task()
        expected = (task.source, task.index, task.pass_number)
        assert (line["source"], line["index"], line["pass_number"]) == expected


def assert_counters(lives: Lives, found: Any) -> None:
    slots = lives.orchestrators[-1].groups.slots
    assert {str(outcome): n for outcome, n in slots.ended.items() if n} == {
        outcome: n for outcome, n in found.ended.items() if n
    }


def assert_verdicts(lives: Lives) -> None:
    """A judge's state has counted every group that it scored, and none twice."""
    if any(source.algo.type != JUDGE for source in lives.config.sources):
        return
    graded = [r for r in surviving(lives.journal) if r["event"] == "group_graded"]
    sources = lives.orchestrators[-1].groups.sources.values()
    counted = sum(source.grader.algorithm.num_judged for source in sources)
    assert counted == sum(line["error"] != "algorithm_failed" for line in graded)


def assert_records(lives: Lives) -> None:
    """Every ended episode of the surviving lineage has one record."""
    recorded = [
        json.loads(line)["gradus"]["episode"]
        for path in lives.run_dir.episodes.rglob("train.jsonl")
        for line in path.read_bytes().splitlines()
    ]
    ended = [r["episode"] for r in surviving(lives.journal) if r["event"] == "episode_ended"]
    assert sorted(recorded) == sorted(ended)


def assert_alarms(lives: Lives) -> None:
    """They depend on the records alone: those that count, each once, in their order."""
    again = Alarms(sources=lives.sources, tell=lambda _: None)
    for record in map(json.loads, lives.run_dir.metrics.read_bytes().splitlines()):
        measured = {name: float(v) for name, v in record.items() if isinstance(v, float | int)}
        alarms = again.add(measured, step=record["step"])
        assert alarms == {name: v for name, v in record.items() if name.startswith("alarm/")}
    kept = lives.orchestrators[-1].trainer.step_metrics.alarms
    assert kept is not None
    assert [(it.value, it.is_on) for it in again._watched] == [
        (it.value, it.is_on) for it in kept._watched
    ]


class Listener(Uniform):
    """Counts what it hears, and plays more episodes of tasks that failed."""

    def __init__(self, num_tasks: int | None, *, seed: str) -> None:
        super().__init__(num_tasks, seed=seed)
        self._heard: Counter[str] = Counter()

    def next_task(self) -> TaskDraw:
        draw = super().next_task()
        return replace(draw, group_size=3 if self._heard[f"{draw.index}"] % 2 else None)

    def record(self, index: int, result: TaskResult) -> None:
        self._heard[f"{index}"] += len(result.failures)
        self._heard[result.ending] += 1

    def state(self) -> dict[str, Any]:
        return super().state() | {"heard": dict(self._heard)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._heard = Counter(state["heard"])


def random_settings(source: random.Random) -> dict[str, Any]:
    """A small run of any kind; few, half or most of its episodes go wrong."""
    curriculum = source.choice(["uniform", "uniform", "difficulty", f"{__name__}:Listener"])
    # `difficulty` ends a run whose rewards are not solve rates.
    moody = [build_filter_config(f"{__name__}:MoodyFilter")]
    kinds = [kind for kind in MISHAPS if curriculum != "difficulty" or kind != "huge"]
    return {
        "max_lag": source.choice([0, 1, 1, 2]),
        "groups_per_batch": source.choice([1, 2, 3]),
        "group_size": source.choice([2, 3]),
        "interval_steps": source.choice([1, 1, 2]),
        "normalize": source.choice(["off", "batch"]),
        "errors": {"retries": source.choice([0, 1])},
        "algo": source.choice(["grpo", "max_rl", "rae", JUDGE, f"{__name__}:Moody"]),
        "filters": [build_filter_config("zero_advantage"), *moody[: source.choice([0, 0, 1])]],
        "curriculum": curriculum,
        "unreadable": source.choice([(), (), (3,), (0, 5)]),
        "profile": FailureProfile(source.choice([0.2, 0.5, 0.5, 0.8]), kinds),
    }


def random_death(source: random.Random) -> Death:
    if source.random() < 0.5:
        return Death(None, source.randrange(60))
    return Death(source.randrange(3), source.randrange(12))


@pytest.mark.shows("F05", "F18", "I1", "I2")
@settings(
    max_examples=settings.default.max_examples // 5,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 32))
async def test_a_run_killed_at_any_events_and_resumed_is_one_run(new_run: Any, seed: int) -> None:
    """With failing episodes, hostile plug-ins, too; `--hypothesis-profile=nightly` plays 300."""
    source = random.Random(seed)
    lives = new_run(**random_settings(source))
    turns = source.choice([0, 20, 100, 100])
    deaths = [random_death(source) for _ in range(source.choice([1, 3, 5]))]
    for death in [*deaths, None]:
        if await lives.live(death=death, turns=turns):
            break
    assert_one_run(lives)
    await assert_repeated(lives)
    found = check_journal(lives.journal)
    event(f"kills and resumes: {len(lives.trainers) - 1}")
    event("episodes failed" if found.ended["failed"] else "no episode failed")


@pytest.mark.shows("F05", "I5")
@pytest.mark.parametrize("death", [Death(0, 9), Death(1, 0), Death(1, 9), Death(2, 4)])
async def test_a_synchronous_run_trains_the_same_bytes_after_any_kill(
    new_run: Any, death: Death
) -> None:
    straight, killed = new_run(max_lag=0), new_run(max_lag=0)
    await straight.live(death=None, turns=3)
    await killed.live(death=death, turns=9)
    if len(surviving(killed.journal)) and killed.journal[-1]["event"] != "run_ended":
        await killed.live(death=None, turns=0)
    assert_one_run(killed)
    pairs = zip(straight.batches(), killed.batches(), strict=True)
    assert all(encode_ranks(a) == encode_ranks(b) for a, b in pairs)


async def assert_repeated(lives: Lives) -> None:
    """Journal and recorded episodes alone give the same batches, to the byte."""
    decisions = read_decisions(lives.journal)
    assert decisions.is_finished
    layout = Layout(lives.config.data_parallel_size, lives.config.trainer.micro_batch_tokens)
    with RecordedEpisodes(lives.run_dir, decisions.terms, check=True) as episodes:
        maker = BatchMaker(lives.config, episodes)
        again = [
            build_batch(batch.samples, step=batch.step, term=1, layout=layout)
            async for batch in maker.make(decisions.order)
        ]
    pairs = zip(lives.batches(), again, strict=True)
    assert all(encode_ranks(a) == encode_ranks(b) for a, b in pairs)


def encode_ranks(batch: Batch) -> list[bytes]:
    return [encode(micro_batch) for rank in batch.ranks for micro_batch in rank]
