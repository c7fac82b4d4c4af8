"""The one-file loop computes what the package computes, and learns."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from gradus.orchestrator.algorithms.credit import centre
from gradus.trainer.losses import Dppo, LossInputs

pytestmark = pytest.mark.torch

FILE = Path(__file__).resolve().parents[3] / "examples" / "one_file_loop.py"


@pytest.fixture(scope="module")
def loop() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("one_file_loop", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_it_stays_short_enough_to_read() -> None:
    assert len(FILE.read_text().splitlines()) <= 300


@pytest.mark.parametrize(("reply", "reward"), [("olleh", 1.0), ("", 0.0), ("zzzzz", 0.0)], ids=str)
def test_the_reward_is_similarity_with_the_reversed_word(
    loop: ModuleType, reply: str, reward: float
) -> None:
    assert loop.compute_reward("hello", reply) == reward


def build_group(loop: ModuleType, rewards: list[float]) -> list[object]:
    return [
        loop.Episode(
            task="ab",
            prompt=[1, 2, 3],
            reply=[4, 5, 6][: index + 1],
            sampling_logprobs=[-0.5 - index] * (index + 1),
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]


def test_its_advantages_are_those_of_the_package(loop: ModuleType) -> None:
    rewards = [0.0, 0.25, 1.0]
    advantages = [episode.advantage for episode in loop.compare(build_group(loop, rewards))]
    assert advantages == pytest.approx(list(centre(np.array(rewards))))


def test_its_loss_is_that_of_the_package(loop: ModuleType) -> None:
    batch = loop.build_batch(loop.compare(build_group(loop, [0.0, 0.25, 1.0])))
    generator = torch.Generator().manual_seed(0)
    policy_logprobs = -3 * torch.rand(batch.tokens.shape, generator=generator)
    policy_logprobs.requires_grad_()
    own = loop.compute_loss(policy_logprobs, batch, loop.Settings())
    (own_gradient,) = torch.autograd.grad(own, policy_logprobs)
    inputs = LossInputs(
        policy_logprobs=policy_logprobs.flatten(),
        sampling_logprobs=batch.sampling_logprobs.flatten(),
        advantages=batch.advantages.flatten(),
        mask=batch.is_sampled.flatten(),
        reference_logprobs=torch.zeros(batch.tokens.numel()),
        entropies=torch.zeros(batch.tokens.numel()),
        sample_index=torch.zeros(batch.tokens.numel(), dtype=torch.int64),
        is_scored=torch.zeros(batch.tokens.numel(), dtype=torch.bool),
    )
    ours = Dppo()(inputs).per_token.sum() / batch.is_sampled.sum()
    (gradient,) = torch.autograd.grad(ours, policy_logprobs)
    torch.testing.assert_close(own, ours)
    torch.testing.assert_close(own_gradient, gradient)


def test_a_short_run_gives_one_mean_reward_per_step(loop: ModuleType) -> None:
    settings = loop.Settings(warm_up_steps=2, rl_steps=2, tasks_per_step=2, group_size=2)
    rewards = loop.run(settings)
    assert len(rewards) == 2
    assert all(0.0 <= reward <= 1.0 for reward in rewards)


def test_a_reply_is_cut_behind_its_end(loop: ModuleType) -> None:
    assert loop.cut_behind(9, [4, 9, 5], [-1.0, -2.0, -3.0]) == ([4, 9], [-1.0, -2.0])
    assert loop.cut_behind(9, [4, 5], [-1.0, -2.0]) == ([4, 5], [-1.0, -2.0])


def test_an_update_moves_probability_towards_the_better_reply(
    loop: ModuleType, tmp_path: Path
) -> None:
    settings = loop.Settings(seed=1)
    torch.manual_seed(1)
    policy = loop.build_policy(tmp_path, settings)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)
    episodes = loop.play_group_of_each(policy, random.Random(0).sample(loop.WORDS, 2), settings)
    better = [e if i % 2 else replace(e, reward=1.0) for i, e in enumerate(episodes)]
    batch = loop.build_batch(loop.compare(better))
    before = loop.compute_policy_logprobs(policy, batch, settings.temperature)
    loop.update(policy, optimizer, loop.compute_loss(before, batch, settings))
    after = loop.compute_policy_logprobs(policy, batch, settings.temperature)
    gained = torch.where(batch.is_sampled, (after - before) * batch.advantages, 0.0).sum()
    assert gained.item() > 0
