"""Roles that play minted tasks, through the real environment process and a scripted engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from running import RunningEnvironment
from transformers import PreTrainedTokenizerFast
from verifiers.v1.serve import EnvClient

from gradus.config import EnvironmentProcessConfig, algorithms
from gradus.orchestrator.algorithms.base import CreditContext
from gradus.orchestrator.algorithms.group_relative import HierarchicalGroupRelative
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.play.agents import mark_trainable
from gradus.orchestrator.play.episode_check import find_failure
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply
from gradus.testing.tiny_model import build_tiny_tokenizer
from gradus.wire.versions import VersionSpan

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

TOKEN = "the-data-token"
ORIGIN = SampleOrigin("e", "g0", "g0.0", VersionSpan(0, 0), 1.0, max_length_tokens=4000)


def start(run_dir: Path, taskset: dict[str, Any], seats: list[str]) -> RunningEnvironment:
    (run_dir / "secrets").mkdir(parents=True)
    (run_dir / "secrets" / "inference_token").write_text(TOKEN)
    agent = {"harness": {"id": "gradus-chat"}, "runtime": {"type": "subprocess"}}
    config = EnvironmentProcessConfig(
        run_dir=str(run_dir),
        term=1,
        name="e",
        verifiers={"taskset": taskset, **dict.fromkeys(seats, agent)},
    )
    return RunningEnvironment(config)


async def play(
    environment: RunningEnvironment, model: Path, says: Callable[[str], str]
) -> vf.WireEpisode:
    """One episode of the first task; `says` gives the reply to a prompt as text."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(model)

    def reply(prompt: list[int]) -> Reply:
        return Reply(tokenizer.encode(says(tokenizer.decode(prompt)), add_special_tokens=False))

    client = EnvClient(environment.wait_ready()["run_address"])
    task = (await environment.ask("task", index=0))["task_data"]
    engine = ScriptedEngine(reply=reply, data_token=TOKEN, max_length_tokens=4000)
    async with engine:
        endpoint = vf.TrainClientConfig(
            base_url=engine.base_url,
            api_key_var="GRADUS_INFERENCE_TOKEN",
            renderer=Qwen3RendererConfig(),
            renderer_model_name=str(model),
        )
        sampling = vf.SamplingConfig(temperature=1.0, max_tokens=200, cache_salt="v0")
        try:
            episode = await client.run(endpoint, "policy", sampling, task)
        finally:
            await client.close()
    assert (episode.ok, episode.errors) == (True, [])
    assert mark_trainable(episode, []) is None
    assert find_failure(episode) is None
    return episode


async def test_a_problem_is_proposed_checked_and_solved_and_all_three_roles_train(
    tmp_path: Path,
) -> None:
    build_tiny_tokenizer(tmp_path / "model")
    attempts = Counter[str]()

    def school(prompt: str) -> str:
        if "Invent one short problem" in prompt:
            return "Problem: 3 bags of 4 nuts?\nAnswer: 12"
        attempts["solve"] += 1
        return "12" if attempts["solve"] in (1, 3) else "13"

    roles = ["proposer", "solver", "checker"]
    with start(tmp_path / "run", {"id": "gradus-proposer-solver"}, roles) as environment:
        episode = await play(environment, tmp_path / "model", school)
    rewards = sorted((trace.agent.name, trace.reward) for trace in episode.traces)
    assert rewards == [
        ("checker", 1.0),
        ("proposer", 0.75),
        *[("solver", 0.0)] * 3,
        ("solver", 1.0),
    ]
    HierarchicalGroupRelative(
        algorithms.HierarchicalGrpoConfig(episode_agents=["solver"])
    ).score_group([episode], CreditContext("school", "k"))
    samples = build_samples(episode, ORIGIN)
    credit = [float(s.arrays.advantages[s.arrays.loss_mask].mean()) for s in samples]
    assert sorted(credit) == [-0.25, -0.25, -0.25, 0.0, 0.0, 0.75]
