"""The algorithm of gradus in one file: play, compare within the group, move the weights.

    python examples/one_file_loop.py

A tiny model first learns, from conversations, to answer a word with the same word or, less often,
with the reversed word. Then reinforcement learning pays for reversed words only. One process, one
step after the other, about a minute on a CPU. The package does the same with real servers, several
processes, and the next batch being played while this one trains.

Words: a task is a word; an episode is one reply to it; the episodes of one task form a group; an
advantage is an episode's reward against the mean of its group. Shapes: E episodes, T tokens of the
longest of them, V symbols.
"""

from __future__ import annotations

import argparse
import difflib
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from gradus.testing.tiny_model import build_tiny_model
from gradus_reverse_text.words import WORDS


@dataclass(frozen=True)
class Settings:
    """Everything that one may want to turn."""

    warm_up_steps: int = 300
    warm_up_lr: float = 3e-3
    warm_up_batch: int = 64
    reversed_share: float = 0.3
    """Share of warm-up replies that reverse the word; the others copy it."""
    rl_steps: int = 40
    rl_lr: float = 5e-4
    tasks_per_step: int = 8
    group_size: int = 8
    temperature: float = 1.0
    """Divides the logits when a token is drawn and when its logprob is computed for the loss."""
    max_reply_tokens: int = 12
    threshold: float = 0.2
    """Tokens whose probability moved further than this get no policy gradient."""
    kl_coefficient: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class Episode:
    """One reply to one task."""

    task: str
    prompt: list[int]
    reply: list[int]
    """Sampled tokens; the last one ends the turn, unless the reply was cut off."""
    sampling_logprobs: list[float]
    """Logprob of each token of the reply under the weights that sampled it."""
    reward: float = 0.0
    advantage: float = 0.0


@dataclass(frozen=True)
class Policy:
    """The model and the tokenizer of its prompts."""

    model: Any
    tokenizer: Any

    def prompt(self, task: str) -> list[int]:
        """The task, one token per character, and a line break where the reply begins."""
        token_ids: list[int] = self.tokenizer.encode(task + "\n")
        return token_ids

    def text(self, reply: Sequence[int]) -> str:
        """The words of a reply, without the token that ends the turn."""
        return str(self.tokenizer.decode(reply, skip_special_tokens=True))


# ------------------------------------------------------------------------------------------ playing


def compute_reward(task: str, reply: str) -> float:
    """Similarity of the reply and the reversed task, in [0, 1]."""
    return difflib.SequenceMatcher(None, reply, task[::-1], autojunk=False).ratio()


@torch.no_grad()
def sample_replies(
    policy: Policy, prompts: Sequence[list[int]], settings: Settings
) -> list[tuple[list[int], list[float]]]:
    """For each prompt the sampled tokens and the logprob of each, all prompts at once.

    Prompts are padded on the left, so that all replies begin in the same column.
    """
    width = max(map(len, prompts))
    end, pad = policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id
    tokens = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])  # [E, width]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    cache, columns, logprob_columns = DynamicCache(), [], []
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(settings.max_reply_tokens):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = policy.model(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        logprobs = (output.logits[:, -1].float() / settings.temperature).log_softmax(
            dim=-1
        )  # [E,V]
        tokens = torch.multinomial(logprobs.exp(), num_samples=1)
        columns.append(tokens)
        logprob_columns.append(logprobs.gather(1, tokens))
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        is_done |= tokens[:, 0] == end
        if is_done.all():
            break
    sampled = zip(
        torch.cat(columns, 1).tolist(), torch.cat(logprob_columns, 1).tolist(), strict=True
    )
    return [cut_behind(end, tokens, logprobs) for tokens, logprobs in sampled]


def cut_behind(end: int, tokens: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    """The reply up to and with the token that ends the turn, where there is one."""
    length = tokens.index(end) + 1 if end in tokens else len(tokens)
    return tokens[:length], logprobs[:length]


def play_group_of_each(policy: Policy, tasks: Sequence[str], settings: Settings) -> list[Episode]:
    """`group_size` episodes of each task, rewarded and compared."""
    prompts = [policy.prompt(task) for task in tasks for _ in range(settings.group_size)]
    replies = sample_replies(policy, prompts, settings)
    episodes = []
    for i, task in enumerate(tasks):
        group = []
        for j in range(i * settings.group_size, (i + 1) * settings.group_size):
            reply, logprobs = replies[j]
            reward = compute_reward(task, policy.text(reply))
            group.append(Episode(task, prompts[j], reply, logprobs, reward))
        episodes += compare(group)
    return episodes


def compare(group: Sequence[Episode]) -> list[Episode]:
    """Group-relative advantages: better than the other replies to the same task, or worse."""
    mean = sum(episode.reward for episode in group) / len(group)
    return [replace(episode, advantage=episode.reward - mean) for episode in group]


# ----------------------------------------------------------------------------------------- learning


@dataclass(frozen=True)
class Batch:
    """Episodes as aligned arrays [E, T]; padding and prompts are outside `is_sampled`."""

    tokens: Tensor
    is_sampled: Tensor
    sampling_logprobs: Tensor
    advantages: Tensor


def build_batch(episodes: Sequence[Episode]) -> Batch:
    """Prompt and reply end to end, one episode per row, padded on the right."""

    def rows(values: Sequence[list[Any]]) -> Tensor:
        return pad_sequence([torch.tensor(v) for v in values], batch_first=True)

    return Batch(
        tokens=rows([e.prompt + e.reply for e in episodes]),
        is_sampled=rows([[False] * len(e.prompt) + [True] * len(e.reply) for e in episodes]),
        sampling_logprobs=rows([[0.0] * len(e.prompt) + e.sampling_logprobs for e in episodes]),
        advantages=rows([[e.advantage] * (len(e.prompt) + len(e.reply)) for e in episodes]),
    )


def compute_policy_logprobs(policy: Policy, batch: Batch, temperature: float) -> Tensor:
    """[E, T] logprob of each token given those before it; the first column is 0.

    Rows are padded on the right, where causal attention cannot see, so no mask is needed.
    """
    logits = policy.model(batch.tokens, use_cache=False).logits[:, :-1].float() / temperature
    logprobs = logits.log_softmax(dim=-1).gather(2, batch.tokens[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(logprobs, (1, 0))


def compute_loss(policy_logprobs: Tensor, batch: Batch, settings: Settings) -> Tensor:
    """Mean over the sampled tokens of -advantage·ratio, as long as the token moved little.

    ratio = probability now / probability when sampled. A token whose probability already moved by
    more than the threshold in the direction that its advantage wants gives no further push. The
    squared log ratio keeps the policy near the one that sampled.
    """
    log_ratio = torch.where(batch.is_sampled, policy_logprobs - batch.sampling_logprobs, 0.0)
    shift = (policy_logprobs.exp() - batch.sampling_logprobs.exp()).detach()
    is_too_far = torch.where(
        batch.advantages > 0, shift > settings.threshold, shift < -settings.threshold
    )
    ratio = torch.where(is_too_far, 0.0, log_ratio).exp()
    gain = torch.where(is_too_far, 0.0, batch.advantages * ratio)
    per_token = -gain + settings.kl_coefficient * log_ratio.square()
    return torch.where(batch.is_sampled, per_token, 0.0).sum() / batch.is_sampled.sum()


def update(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One optimizer update; gradients longer than 1 are scaled down to 1."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


# --------------------------------------------------------------------------------------- two phases


def warm_up(policy: Policy, settings: Settings, draw: random.Random) -> None:
    """Supervised: show both behaviours, the one that will pay less often."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=settings.warm_up_lr, weight_decay=0)
    end = policy.tokenizer.eos_token_id
    for step in range(settings.warm_up_steps):
        shown = []
        for task in draw.choices(WORDS, k=settings.warm_up_batch):
            reply = task[::-1] if draw.random() < settings.reversed_share else task
            tokens = [*policy.tokenizer.encode(reply), end]
            shown.append(Episode(task, policy.prompt(task), tokens, [0.0] * len(tokens)))
        batch = build_batch(shown)
        logits = policy.model(batch.tokens, use_cache=False).logits[:, :-1].float()
        is_learned = batch.is_sampled[:, 1:]
        for group in optimizer.param_groups:
            group["lr"] = settings.warm_up_lr * (1 - step / settings.warm_up_steps)
        update(
            policy, optimizer, cross_entropy(logits[is_learned], batch.tokens[:, 1:][is_learned])
        )


def reinforce(policy: Policy, settings: Settings, draw: random.Random) -> list[float]:
    """Reinforcement learning; returns the mean reward of every step, before its update."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=settings.rl_lr, weight_decay=0)
    rewards = []
    for step in range(settings.rl_steps):
        tasks = draw.choices(WORDS, k=settings.tasks_per_step)
        episodes = play_group_of_each(policy, tasks, settings)
        batch = build_batch(episodes)
        policy_logprobs = compute_policy_logprobs(policy, batch, settings.temperature)
        update(policy, optimizer, compute_loss(policy_logprobs, batch, settings))
        rewards.append(sum(episode.reward for episode in episodes) / len(episodes))
        example = episodes[0]
        print(f"step {step:2}  reward {rewards[-1]:.3f}  {example.task} -> ", end="")
        print(policy.text(example.reply))
    return rewards


def build_policy(directory: Path, settings: Settings) -> Policy:
    """An untrained model of 0.3 million parameters, in float32."""
    build_tiny_model(directory, seed=settings.seed, hidden_size=96, num_layers=3)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return Policy(model, AutoTokenizer.from_pretrained(directory))


def run(settings: Settings) -> list[float]:
    """Both phases from the seed on; returns the mean reward of every step."""
    torch.manual_seed(settings.seed)
    draw = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as directory:
        policy = build_policy(Path(directory), settings)
    start = time.perf_counter()
    warm_up(policy, settings, draw)
    print(f"warm-up: {settings.warm_up_steps} steps in {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    rewards = reinforce(policy, settings, draw)
    print(f"reinforcement: {settings.rl_steps} steps in {time.perf_counter() - start:.1f} s")
    return rewards


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Reinforcement learning in one file.")
    parser.add_argument("--steps", type=int, default=Settings.rl_steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # With matrices this small, threads only wait for each other.
    run(Settings(rl_steps=arguments.steps, seed=arguments.seed))


if __name__ == "__main__":
    main()
