"""`echo`: grpo on what the policy says, and cross-entropy on what the world answers.

Learning to predict the outputs of tools teaches how they behave, also in groups whose rewards are
all equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import AssistantMessage, ToolMessage

from gradus.config import algorithms
from gradus.errors import ConfigError
from gradus.orchestrator.algorithms.base import CreditContext, write_credit
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.traces import image_places, trainable_traces
from gradus.plugins import find_function
from gradus.wire.episode import QUARANTINED_TURNS

ObservationFilter = Callable[[WireTrace, MessageNode], bool | Sequence[bool]]
"""A user's choice among observations: of the whole message, or token by token."""

_COMPONENTS: dict[str, str] = {"own": "ce", "batch": "ce_batch"}
"""Of the others: ce_trace, whose weights hold what the trace divides by."""


class Echo(GroupRelative):
    """`grpo`, and cross-entropy with weight alpha on observation tokens.

    A token is an observation when it follows the first sampled turn, was not sampled itself, is
    part of a message's body but not of an image, its role has an alpha, and its tool is among
    `tool_names`. A message whose body the renderer does not mark has none.

    >>> algorithm = Echo(algorithms.EchoAlgorithmConfig(tool_names=["search"]))
    """

    def __init__(self, config: algorithms.EchoAlgorithmConfig) -> None:
        super().__init__(config)
        self.observed_roles = {role: alpha for role, alpha in config.roles.items() if alpha}
        """Whose messages are learned; the renderer must mark their bodies."""
        self._tool_names = config.tool_names
        self._filter: ObservationFilter | None = None
        if config.filter is not None:
            self._filter = find_function("echo filter", config.filter)
        self._normalize = config.normalize
        self._component = _COMPONENTS.get(config.normalize, "ce_trace")

    @property
    def calls_foreign_code(self) -> bool:
        return self._filter is not None

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:  # noqa: ARG002
        for trace in trainable_traces([episode]):
            found = [(node, self._weights(trace, node)) for node in _nodes_after_first_turn(trace)]
            factor = self._factor(trace, sum(w > 0 for _, weights in found for w in weights))
            for node, weights in found:
                if any(weights) and factor:
                    scaled = [factor * weight for weight in weights]
                    write_credit(node, loss_weights={self._component: scaled})

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:
        """Advantages as in `grpo`; none in a group of equal rewards.

        Its samples stay in the batch for their observations, and advantages of 0 would count in
        the denominator of rl.
        """
        super().score_group(episodes, context)
        nodes = [node for trace in trainable_traces(episodes) for node in trace.nodes]
        if not any(any(node.advantages or ()) for node in nodes):
            for node in nodes:
                node.advantages = None
        weighed = [
            weight
            for trace in trainable_traces(episodes)
            for node in trace.nodes
            for weight in (node.loss_weights or {}).get(self._component, ())
        ]
        context.record("echo_tokens", float(sum(weight > 0 for weight in weighed)))

    def _factor(self, trace: WireTrace, num_observed: int) -> float:
        """What each alpha of a trace is multiplied by."""
        if self._normalize == "tokens":
            return 1.0 / max(1, sum(len(node.token_ids) for node in trace.nodes))
        if self._normalize == "observations":
            return 1.0 / max(1, num_observed)
        if self._normalize == "ratio":
            turns = [node for node in trace.nodes if node.sampled]
            unread = set(trace.info.get(QUARANTINED_TURNS, ()))
            num_rl = sum(sum(it.mask) for number, it in enumerate(turns) if number not in unread)
            return num_rl / max(1, num_observed)
        return 1.0

    def _weights(self, trace: WireTrace, node: MessageNode) -> list[float]:
        """The alpha of each token of one message, 0 where it is not an observation."""
        alpha = self.observed_roles.get(node.message.role, 0.0)
        if alpha == 0.0 or node.sampled or len(node.is_content) != len(node.token_ids):
            return []
        if self._tool_names is not None and isinstance(node.message, ToolMessage):
            name = tool_name(trace, node)
            if name not in self._tool_names:
                return []
        chosen = self._chosen(trace, node)
        weights = [
            alpha if is_body and is_chosen else 0.0
            for is_body, is_chosen in zip(node.is_content, chosen, strict=True)
        ]
        for first, length in image_places(trace, node):
            weights[first : first + length] = [0.0] * length
        return weights

    def _chosen(self, trace: WireTrace, node: MessageNode) -> Sequence[bool]:
        verdict = True if self._filter is None else self._filter(trace, node)
        if isinstance(verdict, bool):
            return [verdict] * len(node.token_ids)
        if len(verdict) != len(node.token_ids):
            raise ConfigError(
                f"echo: the filter chose among {len(verdict)} tokens of a message of "
                f"{len(node.token_ids)}; return one bool for each token, or one for the message"
            )
        return verdict


def tool_name(trace: WireTrace, node: MessageNode) -> str | None:
    """Name of the tool that a message answers for: its own, else that of the call it answers."""
    message = node.message
    if not isinstance(message, ToolMessage):
        return None
    if message.name is not None:
        return str(message.name)
    parent = node.parent
    while parent is not None:
        caller = trace.nodes[parent]
        if isinstance(caller.message, AssistantMessage):
            for call in caller.message.tool_calls or ():
                if call.id == message.tool_call_id:
                    return str(call.name)
        parent = caller.parent
    return None


def _nodes_after_first_turn(trace: WireTrace) -> list[MessageNode]:
    """The messages with a sampled turn among those before them."""
    follows: list[bool] = []
    for node in trace.nodes:
        parent = node.parent
        follows.append(parent is not None and (trace.nodes[parent].sampled or follows[parent]))
    return [node for node, is_later in zip(trace.nodes, follows, strict=True) if is_later]
