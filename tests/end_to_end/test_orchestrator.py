"""The orchestrator with a real environment process, the spool on disk and a scripted engine.

The trainer is a thread that reads the spool as the real one does and publishes empty versions.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from configs import build_algorithm_config
from running import RunningEnvironment
from transformers import PreTrainedTokenizerFast

from gradus.config import (
    EnvironmentProcessConfig,
    ModelConfig,
    RunProcessConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from gradus.config.schema.environment import EnvironmentTimeoutConfig
from gradus.config.schema.orchestrator import OrchestratorConfig
from gradus.errors import EnvironmentFailure
from gradus.files import write_json
from gradus.orchestrator.build import build_orchestrator, connect
from gradus.orchestrator.failures import root_cause
from gradus.orchestrator.records.journal import read_journal
from gradus.run.paths import RunDirectory
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply
from gradus.transport import SpoolReceiver
from gradus.wire.events import PolicyPublished, StepFinished, TrainerDone
from gradus.wire.micro_batch import RankBatch
from gradus.wire.versions import staleness

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

MAX_STEPS = 3
LIMIT_SECONDS = 120.0


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, because sockets lie below it."""
    return tmp_path_factory.mktemp("r")


def build_config(run_dir: Path, model: str) -> RunProcessConfig:
    source = SourceConfig(
        name="echo",
        ratio=1.0,
        group_size=4,
        sampling=SamplingConfig(temperature=0.8, top_p=1.0, max_completion_tokens=32),
        algo=build_algorithm_config("grpo"),
        timeout=EnvironmentTimeoutConfig(),
        address=None,
        state_columns=[],
    )
    section: dict[str, Any] = {"train": {"env": [{"id": "gradus-test-echo"}]}}
    section |= {
        "groups_per_batch": 3,
        "max_empty_attempts": 1,
        "filters": [{"type": "zero_advantage"}],
    }
    return RunProcessConfig(
        run_dir=str(run_dir),
        term=1,
        # Without a renderer by name: the run finds it from the chat template of the folder.
        model=ModelConfig(name=model, max_length_tokens=256),
        max_steps=MAX_STEPS,
        seed=0,
        sources=[source],
        orchestrator=OrchestratorConfig.model_validate(section),
        trainer=TrainerConfig(num_processes=2, micro_batch_tokens=256),
    )


def environment_config(run_dir: Path, behaviour: str) -> EnvironmentProcessConfig:
    return EnvironmentProcessConfig(
        run_dir=str(run_dir),
        term=1,
        name="echo",
        verifiers={
            "taskset": {"id": "gradus-test-echo", "num_tasks": 50, "behaviour": behaviour},
            "agent": {"harness": {"id": "gradus-chat"}, "runtime": {"type": "subprocess"}},
        },
    )


@contextmanager
def environment_process(run_dir: Path, behaviour: str) -> Iterator[RunningEnvironment]:
    secrets = run_dir / "secrets"
    secrets.mkdir()
    (secrets / "inference_token").write_text("data-token")
    (secrets / "admin_token").write_text("admin-token")
    config = environment_config(run_dir, behaviour)
    # A killed process leaves its private folder of sockets; pytest removes it with the run.
    sockets = run_dir / "s"
    sockets.mkdir()
    variables = {"TMPDIR": str(sockets)}
    with RunningEnvironment(config, variables=variables) as environment:
        environment.wait_ready()
        yield environment


@asynccontextmanager
async def engine_in(
    run_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[ScriptedEngine]:
    """Every second reply to a prompt repeats it, so that each group has something to learn."""
    asked_before: Counter[str] = Counter()

    def reply(prompt: list[int]) -> Reply:
        text = tokenizer.decode(prompt)
        asked = text[text.index("repeat ") :].split("<|im_end|>")[0]
        asked_before[asked] += 1
        text = asked if asked_before[asked] % 2 else "no"
        return Reply(tokenizer.encode(text, add_special_tokens=False))

    async with ScriptedEngine(reply=reply, run_dir=run_dir, term=1) as engine:
        engine.check_weights = None
        ready = {"base_url": engine.base_url, "pid": os.getpid(), "term": 1, "version": 0}
        write_json(RunDirectory(run_dir).ready_file("inference"), ready)
        yield engine


def train(run_dir: Path) -> list[RankBatch]:
    """Both ranks in one thread: read, publish."""
    receivers = [SpoolReceiver(RunDirectory(run_dir), 1, rank) for rank in range(2)]
    parts: list[RankBatch] = []
    for step in range(MAX_STEPS):
        parts += [r.receive(step, timeout_seconds=LIMIT_SECONDS) for r in receivers]
        directory = RunDirectory(run_dir).version(step + 1)
        directory.mkdir(parents=True)
        for event in (
            PolicyPublished(step + 1, 1, str(directory), f"digest {step + 1}"),
            StepFinished(step, 1, {"loss/total/mean": 0.5}),
        ):
            receivers[0].send_event(event)
    receivers[0].send_event(TrainerDone(MAX_STEPS - 1, 1))
    return parts


async def play(config: RunProcessConfig) -> None:
    try:
        async with asyncio.timeout(LIMIT_SECONDS), connect(config) as components:
            await build_orchestrator(config, components).play()
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


def assert_samples_are_the_engine_s(parts: list[RankBatch], engine: ScriptedEngine) -> None:
    """Invariant 1 up to the trainer: each packed sample is the tokens of one engine call."""
    calls = {
        (*call.prompt_token_ids, *call.reply.token_ids): call.reply
        for call in engine.calls
        if call.reply is not None
    }
    num_samples = 0
    for part in parts:
        for micro_batch in part.micro_batches:
            start = 0
            for length in micro_batch.sequence_lengths[: len(micro_batch.sample_ids)]:
                end = start + length
                reply = calls[tuple(micro_batch.arrays.token_ids[start:end].tolist())]
                mask = micro_batch.arrays.loss_mask[start:end]
                assert int(mask.sum()) == len(reply.token_ids)
                assert micro_batch.arrays.temperatures[start:end][mask].tolist() == pytest.approx(
                    [0.8] * len(reply.token_ids)
                )
                assert micro_batch.arrays.sampling_logprobs[start:end][
                    mask
                ].tolist() == pytest.approx(reply.logprobs)
                num_samples += 1
                start = end
    assert num_samples == MAX_STEPS * 3 * 4


@pytest.mark.shows("F37")
async def test_an_environment_that_returns_nan_ends_the_run_by_that_name(
    run_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = build_config(run_dir, tokenizer.name_or_path)
    with environment_process(run_dir, "nan_reward"):
        async with engine_in(run_dir, tokenizer):
            with pytest.raises(EnvironmentFailure, match="12 x error:invalid_reward"):
                await play(config)


@pytest.mark.shows("F07")
async def test_an_environment_process_that_is_started_anew_costs_no_run_and_the_last_one_does(
    run_dir: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = build_config(run_dir, tokenizer.name_or_path)
    with environment_process(run_dir, "plain") as environment:
        async with engine_in(run_dir, tokenizer) as engine:
            engine.hold()
            training = asyncio.create_task(asyncio.to_thread(train, run_dir))
            playing = asyncio.create_task(play(config))
            await engine.wait_until(lambda e: e.running > 0, timeout_seconds=LIMIT_SECONDS)
            os.kill(environment.process.pid, signal.SIGKILL)
            environment.process.wait()
            ready = RunDirectory(run_dir).ready_file("env_echo")
            ready.unlink()
            variables = {"TMPDIR": str(run_dir / "s")}
            new = environment_config(run_dir, "plain")
            with RunningEnvironment(new, variables=variables) as again:
                await asyncio.to_thread(again.wait_ready)
                engine.release()
                await asyncio.wait_for(playing, LIMIT_SECONDS)
                parts = await training
                other = tmp_path_factory.mktemp("r")
                shutil.copytree(ready.parent, other / ready.parent.name)
                shutil.copytree(run_dir / "secrets", other / "secrets")
                await kill_the_last(other, tokenizer, again.process.pid)
    assert_run_is_whole(run_dir, parts, engine)
    lines = read_journal(RunDirectory(run_dir).journal)
    retried = [line for line in lines if line["event"] == "episode_retried"]
    assert {line["error"] for line in retried} == {"EnvironmentLost"}
    assert lines[-1]["event"] == "run_ended"


def assert_run_is_whole(run_dir: Path, parts: list[RankBatch], engine: ScriptedEngine) -> None:
    """What went over real sockets and files is what the engine said, in order and complete."""
    assert engine.version == MAX_STEPS
    assert_samples_are_the_engine_s(parts, engine)
    assert {call.cache_salt for call in engine.calls} <= {"v0", "v1", "v2"}
    assert all(staleness(part.step, part.versions) <= 1 for part in parts)
    metrics = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line) for line in metrics]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[0]["episode/echo/reward/mean"] == pytest.approx(0.5)
    assert records[0]["loss/total/mean"] == 0.5
    lines = (run_dir / "episodes" / "step_0" / "train.jsonl").read_bytes().splitlines()
    assert len(lines) == 12


async def kill_the_last(run_dir: Path, tokenizer: PreTrainedTokenizerFast, pid: int) -> None:
    """A run with this environment, which may not be started anew, ends by its name."""
    config = build_config(run_dir, tokenizer.name_or_path)
    never = config.launch.model_copy(update={"environment_restarts": 0})
    async with engine_in(run_dir, tokenizer) as engine:
        engine.hold()
        playing = asyncio.create_task(play(config.model_copy(update={"launch": never})))
        await engine.wait_until(lambda e: e.running > 0, timeout_seconds=LIMIT_SECONDS)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailure, match=r"'echo' \(pid \d+\) ended"):
            await asyncio.wait_for(playing, 60)
