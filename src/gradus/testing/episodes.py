"""Traces, episodes and groups in one line, for tests and examples."""

from __future__ import annotations

import random
from collections.abc import Sequence

from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import AssistantMessage, UserMessage

FIRST_TOKEN = 3
VOCABULARY = 64


def build_message(
    parent: int | None,
    token_ids: Sequence[int],
    *,
    sampled: int = 0,
    logprob: float = -0.5,
) -> MessageNode:
    """One message of a trace; its last `sampled` tokens were sampled.

    >>> build_message(0, [5, 6, 7], sampled=2).mask
    [False, True, True]
    """
    text = " ".join(map(str, token_ids))
    return MessageNode(
        parent=parent,
        message=AssistantMessage(content=text) if sampled else UserMessage(content=text),
        sampled=sampled > 0,
        timestamp=0.0,
        token_ids=list(token_ids),
        mask=[False] * (len(token_ids) - sampled) + [True] * sampled,
        is_content=[True] * len(token_ids),
        logprobs=[logprob] * sampled,
    )


def build_trace(
    messages: Sequence[MessageNode] | None = None,
    *,
    reward: float | None = 1.0,
    turns: int = 1,
    seed: int = 0,
    agent: str = "agent",
    trainable: bool = True,
    error: str | None = None,
) -> WireTrace:
    """A finished trace; by default `turns` times a question and a sampled reply.

    >>> build_trace(turns=2).num_turns
    2
    """
    nodes = list(messages) if messages is not None else _conversation(turns, seed)
    calls = [
        {
            "node": number,
            "finish_reason": "stop",
            "usage": {
                "prompt_tokens": len(node.token_ids) - len(node.logprobs),
                "completion_tokens": len(node.logprobs),
            },
        }
        for number, node in enumerate(nodes)
        if node.sampled
    ]
    record = {
        "id": f"trace-{seed}",
        "task": {"type": "Words", "data": {"idx": 0, "prompt": "a"}, "key": "key-0"},
        "agent": {
            "config": {"harness": {"id": "chat"}, "runtime": {"type": "subprocess"}},
            "name": agent,
            "trainable": trainable,
        },
        "verifiers": {"version": "0.4.0"},
        "calls": calls,
        "rewards": {"reward": None if reward is None else {"score": reward}},
        "is_completed": True,
        "ok": error is None,
        "errors": [] if error is None else [{"type": error, "message": "scripted"}],
    }
    trace = WireTrace.model_validate(record)
    trace.nodes = nodes
    return trace


def build_episode(
    traces: Sequence[WireTrace] | None = None, *, reward: float = 1.0, seed: int = 0
) -> WireEpisode:
    """An episode of these traces; by default one trace of one turn.

    >>> build_episode(reward=0.25).traces[0].reward
    0.25
    """
    chosen = list(traces) if traces is not None else [build_trace(reward=reward, seed=seed)]
    episode = WireEpisode.model_validate(
        {
            "id": f"episode-{seed}",
            "task": {"type": "Words", "data": {"idx": 0, "prompt": "a"}, "key": "key-0"},
            "ok": all(trace.ok for trace in chosen),
        }
    )
    episode.traces = chosen
    return episode


def build_group(rewards: Sequence[float]) -> list[WireEpisode]:
    """One finished episode per reward.

    >>> [episode.traces[0].reward for episode in build_group([0.0, 1.0])]
    [0.0, 1.0]
    """
    return [build_episode(reward=reward, seed=seed) for seed, reward in enumerate(rewards)]


def _conversation(turns: int, seed: int) -> list[MessageNode]:
    source = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [source.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(number)]

    nodes: list[MessageNode] = []
    for turn in range(turns):
        parent = 2 * turn - 1 if turn else None
        nodes.append(build_message(parent, tokens(3)))
        nodes.append(build_message(2 * turn, tokens(5), sampled=4))
    return nodes
