"""Learning from a model that does not change: `opd`, `opsd` and `sft`.

`opd` and `opsd` weigh the `ref_kl` component on what the policy sampled; a reference model says how
likely it would have been to say the same. `sft` weighs `ce` on what a frozen model sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, WireTrace

from gradus.config import algorithms
from gradus.orchestrator.algorithms.base import Algorithm, CreditContext, write_credit
from gradus.orchestrator.algorithms.credit import is_at_least
from gradus.orchestrator.algorithms.retokenize import Tokenizes, refuse_images, tokenize_trace
from gradus.orchestrator.traces import trainable_traces
from gradus.orchestrator.types import EpisodeFailed, Failure

NO_DEMONSTRATION = "no_demonstration"
"""Kind of failure of an episode whose task has no demonstration to show."""


class Scorer(Tokenizes, Protocol):
    """What a distilling algorithm needs of its reference model."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token given those before it, [T] nats; NaN for the first."""


@runtime_checkable
class TokenizesExternal(Protocol):
    """An algorithm that trains on what other models sampled."""

    async def tokenize_external(self, episode: WireEpisode) -> None:
        """Runs before the episode is checked, when it is known which agents train: give the
        traces that may train tokens."""


class OnPolicyDistillation(Algorithm):
    """`opd`: the policy plays, a frozen teacher scores every token that it sampled.

    The teacher must read the policy's tokens: the same tokenizer, and temperature 1, because it
    scores at temperature 1.
    """

    needs_reference = True
    reads_policy_tokens = True

    def __init__(self, *, reference: Scorer) -> None:
        """`reference` is the frozen teacher, from `algo.reference`."""
        self._reference = reference

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:  # noqa: ARG002
        for trace in trainable_traces([episode]):
            await score_branches(trace, self._reference, component="ref_kl")


def demonstration_refusal(task_data: Mapping[str, Any], name: str) -> str | None:
    """Why a task has no demonstration in the field `name`, and what to write; None when it has."""
    if task_data.get(name) not in (None, ""):
        return None
    return f"the task has no field {name!r}; set algo.demonstration"


class SelfDistillation(Algorithm):
    """`opsd`: the live policy, shown a demonstration first, is its own teacher.

    The demonstration is a system message before the conversation; the logprobs of its own tokens
    are dropped.
    """

    needs_reference = True

    def __init__(self, config: algorithms.OpsdConfig, *, reference: Scorer) -> None:
        self._config = config
        self._reference = reference

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:  # noqa: ARG002
        """Ask the policy with the hint before each branch."""
        for trace in trainable_traces([episode]):
            text = self._config.hint.replace("{demonstration}", self._demonstration(trace))
            hint = await self._reference.tokenize(
                [{"role": "system", "content": text}], add_generation_prompt=False
            )
            await score_branches(trace, self._reference, hint=hint, component="ref_kl")

    def _demonstration(self, trace: WireTrace) -> str:
        data = trace.task.data.model_dump()
        if refusal := demonstration_refusal(data, self._config.demonstration):
            raise EpisodeFailed(Failure(NO_DEMONSTRATION, refusal))
        return str(data[self._config.demonstration])


class FrozenSampler(Algorithm):
    """`sft`: cross-entropy on what a frozen model sampled.

    A frozen model behind a plain chat API plays the source's agents (`agents.<role>.base_url`). The
    policy's own template turns its replies into tokens, and the policy learns them.
    """

    needs_reference = True

    def __init__(self, config: algorithms.SftAlgorithmConfig, *, reference: Scorer) -> None:
        """`reference` is the policy, whose template is used."""
        self._min_reward = config.min_reward
        self._reference = reference

    async def tokenize_external(self, episode: WireEpisode) -> None:
        """Give the traces that may train tokens of the policy's template.

        A frozen player's may; a judge, or a user whom the environment simulates, is not an example.
        """
        for trace in trainable_traces([episode]):
            await tokenize_trace(trace, self._reference)

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:  # noqa: ARG002
        for trace in trainable_traces([episode]):
            if self._min_reward is None or is_at_least(trace.reward, self._min_reward):
                for node in sampled_nodes(trace.nodes):
                    weigh_sampled(node, "ce")


async def score_branches(
    trace: WireTrace, scorer: Scorer, *, hint: Sequence[int] = (), component: str | None = None
) -> None:
    """Write the scorer's logprobs on the sampled tokens of a trace, and weight 1 in `component`.

    A turn that branches share is scored once, in the first branch, which trains it. EpisodeFailed
    for one that shows an image.
    """
    for branch in trace.branches:
        if not branch.trainable or all(n.reference_logprobs is not None for n in _sampled(branch)):
            continue
        refuse_images(branch.nodes)
        scores = (await scorer.score([*hint, *branch.token_ids]))[len(hint) :]
        _write_scores(branch, scores, component)


def weigh_sampled(node: MessageNode, component: str) -> None:
    write_credit(node, loss_weights={component: [float(is_sampled) for is_sampled in node.mask]})


def sampled_nodes(nodes: Iterable[MessageNode]) -> list[MessageNode]:
    return [node for node in nodes if any(node.mask)]


def _sampled(branch: Branch) -> list[MessageNode]:
    return sampled_nodes(branch.nodes)


def _write_scores(branch: Branch, scores: Sequence[float], component: str | None) -> None:
    start = 0
    for node in branch.nodes:
        end = start + len(node.token_ids)
        if any(node.mask) and node.reference_logprobs is None:
            known = np.where(node.mask, scores[start:end], np.nan)
            write_credit(node, reference_logprobs=known)
            if component is not None:
                weigh_sampled(node, component)
        start = end
