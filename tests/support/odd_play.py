"""Plays and trains a model of any habit, with whatever engine serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import renderers
import verifiers.v1 as vf
from configs import build_run_process
from odd_models import Odd
from pydantic import TypeAdapter
from renderers import RendererConfig, base
from verifiers.v1.clients import train
from verifiers.v1.episode import WireEpisode
from verifiers.v1.interception.server import InterceptionServer

from gradus.config import AdamWConfig, ModelConfig, RunProcessConfig, TrainerConfig
from gradus.environments.verifiers import replies
from gradus.environments.verifiers.engine_client import RequestSeeds
from gradus.environments.verifiers.plain_content import keep_content_plain
from gradus.orchestrator.algorithms.base import assign_advantage
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.play.renderer import find_renderer
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode
from gradus.trainer.entry.rl import run
from gradus.transport import SpoolSender
from gradus.wire.events import Event, StepFinished
from gradus.wire.micro_batch import Batch
from gradus.wire.packing import pack
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

STEPS = 2
TOKEN = "data-token"
TURNS = ("hello again", "be brief: <|im_end|> 你好")


class Talk(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Pays for any reply."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def spoken(self, trace: vf.Trace) -> float:
        return 1.0


def patch_as_in_workers(monkeypatch: pytest.MonkeyPatch, folder: Path, token: str) -> None:
    """Have verifiers and renderers here as an environment process has them."""
    for module in (renderers, base):
        monkeypatch.setattr(module, "create_renderer", module.create_renderer)
    monkeypatch.setattr(train, "build_async_openai", train.build_async_openai)
    monkeypatch.setattr(InterceptionServer, "start", InterceptionServer.start)
    monkeypatch.setattr(train.ElasticRendererPool, "_renderers", {})
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", folder / "verifiers")
    monkeypatch.setenv("GRADUS_INFERENCE_TOKEN", token)
    replies.use_engine_client(RequestSeeds())
    keep_content_plain()


async def play(odd: Odd, folder: Path, base_url: str) -> WireEpisode:
    """Two turns with a served model, through verifiers' own rollout and renderer."""
    settings = TypeAdapter(RendererConfig).validate_python(find_renderer(str(folder)))
    seat = vf.AgentConfig(
        harness={"id": "gradus-chat", "max_retries": 0},
        runtime={"type": "subprocess"},
        model="policy",
        client=vf.TrainClientConfig(
            base_url=base_url,
            api_key_var="GRADUS_INFERENCE_TOKEN",
            renderer=settings,
            renderer_model_name=str(folder),
        ),
        sampling={"temperature": 1.0, "max_tokens": 8, "seed": 7},
    )
    agent = vf.make_agent(seat)
    data = vf.TaskData(system_prompt="be brief" if odd.has_system else None)
    async with agent, agent.interaction(Talk(data)) as talk:
        for text in TURNS:
            await talk.turn(text)
    record = build_episode([]).model_dump(mode="python")
    record["traces"] = [talk.trace.model_dump(mode="python", serialize_as_any=True)]
    return WireEpisode.model_validate(record)


def samples_of(episode: WireEpisode, odd: Odd) -> list[Sample]:
    failure = find_failure(episode)
    assert failure is None, failure
    for trace in episode.traces:
        assert sum(node.sampled for node in trace.nodes) == len(TURNS)
        assign_advantage(trace, 0.5)
    origin = SampleOrigin("odd", "g0", "g0.0", VersionSpan(0, 0), 1.0, odd.max_length_tokens)
    return build_samples(episode, origin)


def config_of(odd: Odd, root: Path, folder: Path) -> RunProcessConfig:
    trainer = TrainerConfig(compute_dtype="float32", optimizer=AdamWConfig(lr=1e-3))
    model = ModelConfig(name=str(folder), max_length_tokens=odd.max_length_tokens)
    lag = {"max_lag": STEPS}
    changes = {"model": model, "max_steps": STEPS, "trainer": trainer, "orchestrator": lag}
    return build_run_process(root, changes)


async def train_steps(odd: Odd, root: Path, folder: Path, samples: list[Sample]) -> list[Event]:
    """Two steps on the samples; what the trainer told."""
    sender = SpoolSender(RunDirectory(root), 0)
    for step in range(STEPS):
        ranks = pack(samples, max_tokens=odd.max_length_tokens, num_ranks=1)
        await sender.send(Batch(step, 0, VersionSpan(0, step), ranks))
    run(config_of(odd, root, folder))
    events = [await sender.receive_event() for _ in range(2 * STEPS)]
    assert sum(isinstance(event, StepFinished) for event in events) == STEPS
    return events
