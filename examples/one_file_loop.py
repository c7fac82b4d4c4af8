"""The loop of gradus in one file, from real parts: play, compare, batch, learn, serve, play on.

    python examples/one_file_loop.py

A task is a word, and a reply of eight tokens is paid for each that is a lower-case letter; a tiny
model learns that in seconds on a CPU. Two loops run at once: `play` starts a group for every free
slot, and `train` takes a batch as soon as one is full. In a real run the loops are processes, vLLM
serves the policy, and batches and weights travel as files.

First page of the reading path. Next page: `src/gradus/orchestrator/types.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

import gradus  # noqa: F401 - before transformers, from which it hides what does not fit torch

# isort: split
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradus.config import AdamWConfig, ModelConfig, TrainerConfig, algorithms
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.groups.batcher import Batcher, ReadyGroup
from gradus.orchestrator.groups.grading import SourceGrader
from gradus.orchestrator.groups.packing import Layout, build_batch
from gradus.orchestrator.groups.slots import GroupSlots
from gradus.orchestrator.types import EpisodeOutcome, Group, PlayedEpisode, Task, TaskPointer
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.testing.tiny_model import build_tiny_model
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.learner import Learner
from gradus.trainer.publish import serving_tensors
from gradus.trainer.throughput import Stopwatch
from gradus.wire.versions import VersionSpan, staleness

WORDS = ("apple", "river", "stone", "cloud", "tiger", "lemon")
STEPS = 30
GROUPS_PER_BATCH = 4
GROUP_SIZE = 8
MAX_LAG = 1
"""Batches that may be played ahead of the one that trains."""
MAX_STALENESS = 4
REPLY_TOKENS = 8
LEARNING_RATE = 2e-3


@dataclass
class ServedPolicy:
    """The weights that play, and how many batches they were trained on."""

    model: Any
    tokenizer: Any
    version: int = 0

    async def reply(self, prompt: list[int]) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and their logprobs of a whole group. Between two tokens the weights may change."""
        tokens, logprobs = torch.tensor([prompt] * GROUP_SIZE), []
        for _ in range(REPLY_TOKENS):
            with torch.no_grad():
                scores = self.model(tokens).logits[:, -1].log_softmax(-1)
            chosen = torch.multinomial(scores.exp(), 1)
            tokens = torch.cat([tokens, chosen], dim=1)
            logprobs.append(scores.gather(1, chosen))
            await asyncio.sleep(0)
        return tokens[:, len(prompt) :].tolist(), torch.cat(logprobs, dim=1).tolist()

    def apply(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Serve new weights; replies that are being written continue with them."""
        self.model.load_state_dict(weights)
        self.version = version


@dataclass
class Loop:
    """What both loops share."""

    policy: ServedPolicy
    learner: Learner
    grader: SourceGrader
    slots: GroupSlots
    batcher: Batcher
    slot_freed: asyncio.Event = field(default_factory=asyncio.Event)
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each batch."""
    staleness: list[int] = field(default_factory=list)
    """Of the oldest sample of each batch."""

    async def play(self) -> None:
        """Start a group for every slot that is free, for ever."""
        async with asyncio.TaskGroup() as playing:
            for number in itertools.count():
                while not self.slots.free_slots:
                    self.slot_freed.clear()
                    await self.slot_freed.wait()
                group_id = f"g{number:06d}"
                episode_ids = self.slots.open(group_id, size=GROUP_SIZE)
                playing.create_task(self.play_group(group_id, episode_ids, number))

    async def play_group(self, group_id: str, episode_ids: list[str], number: int) -> None:
        """A task, its episodes, their credit, their samples."""
        word = WORDS[number % len(WORDS)]
        group = Group(group_id, TaskPointer("letters", 0, number), Task({"word": word}, key=word))
        prompt: list[int] = self.policy.tokenizer.encode(f"{word}\n")
        oldest = self.policy.version
        for episode_id in episode_ids:
            self.slots.start(episode_id, version=oldest)
        replies = await self.policy.reply(prompt)
        versions = VersionSpan(oldest, newest=self.policy.version)
        for episode_id, tokens, logprobs in zip(episode_ids, *replies, strict=True):
            letters = [self.policy.tokenizer.decode([token]) for token in tokens]
            reward = sum(letter in ascii_lowercase for letter in letters) / REPLY_TOKENS
            reply = build_message(0, tokens, sampled=len(tokens))
            reply.logprobs = logprobs
            trace = build_trace([build_message(None, prompt), reply], reward=reward)
            episode = build_episode([trace])
            group.played.append(PlayedEpisode(episode_id, group_id, versions, episode))
            self.slots.end(episode_id, EpisodeOutcome.FINISHED)
        self.grader.grade(group)
        self.slots.complete(group_id)
        self.batcher.add(ReadyGroup(group_id, tuple(group.samples)))

    async def train(self) -> None:
        """Step v trains version v on batch v and makes version v + 1, which frees its slots."""
        for step in range(STEPS):
            batch = await self.batcher.next_batch()
            self.slots.ship(batch.group_ids, step=step)
            packed = build_batch(batch.samples, step=step, term=0, layout=Layout(1, 4096))
            # On a thread, so that the next batch is played meanwhile.
            loss, _ = await asyncio.to_thread(
                self.learner.learn, step, [packed.ranks[0]], Stopwatch()
            )
            weights = dict(serving_tensors(self.learner.model, torch.float32))
            self.policy.apply(weights, version=step + 1)
            self.slots.release_trained(version=step + 1)
            self.slot_freed.set()
            self.rewards.append(sum(s.reward for s in batch.samples) / len(batch.samples))
            # The step minus the oldest version that sampled a token of the batch.
            self.staleness.append(staleness(step, packed.versions))
            print(
                f"step {step:2}  reward {self.rewards[-1]:.2f}  loss {loss.total:+.4f}  "
                f"sampled by versions {packed.versions.oldest} to {packed.versions.newest}"
            )


async def run(directory: Path) -> Loop:
    """Train the tiny model in `directory` for all steps."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    policy = ServedPolicy(model, AutoTokenizer.from_pretrained(directory))
    settings = TrainerConfig(compute_dtype="float32", optimizer=AdamWConfig(lr=LEARNING_RATE))
    with join_world(CPU) as world:
        learner = Learner.build(
            ModelConfig(name=str(directory)), settings, settings.loss, max_steps=STEPS, world=world
        )
        loop = Loop(
            policy,
            learner,
            SourceGrader(
                GroupRelative(algorithms.GrpoConfig()),
                filters=[],
                temperature=1.0,
                max_length_tokens=64,
            ),
            GroupSlots(budget=(MAX_LAG + 1) * GROUPS_PER_BATCH),
            Batcher(
                groups_per_batch=GROUPS_PER_BATCH, max_staleness=MAX_STALENESS, max_empty_attempts=9
            ),
        )
        async with asyncio.TaskGroup() as loops:
            playing = loops.create_task(loop.play())
            await loop.train()
            playing.cancel()
    return loop


def main() -> None:
    """Build a model, train it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = build_tiny_model(Path(name), hidden_size=64, num_layers=2)
        asyncio.run(run(directory))


if __name__ == "__main__":
    main()
