"""Gives tokens to turns that came without, from a model behind a plain chat API.

The student's own template renders the conversation twice: up to the turn, with the header of a
reply, and with the turn. What both share is the prompt. The rest is the turn, up to the token at
which the student itself would stop; what the template writes after it is context of the next turn.
A reply that was cut off at a length limit did not stop, so its end token is context too. The policy
sampled none of this: logprobs are 0.0, and the mask comes from the turn's `sampled` flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, WireTrace

from gradus.orchestrator.traces import message_images
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.wire.control_tokens import common_prefix, end_of_content, end_of_turn

UNSEEN_IMAGE = "unseen_image"
"""Kind of failure of an episode that shows an image, where a model is asked without it."""
UNSTABLE = "unstable_rendering"
"""Kind of failure of an episode whose earlier turns the template writes differently later on."""


class Tokenizes(Protocol):
    """Renders conversations into tokens."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens at which the model ends its turn; empty when they are not known."""

    async def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
    ) -> list[int]: ...


async def tokenize_trace(trace: WireTrace, template: Tokenizes) -> None:
    """Give tokens to every branch of a trace that came without; others stay as they are.

    EpisodeFailed when the template changes what it wrote for earlier turns, so that the branch is
    no longer one sequence of tokens, and for an image.
    """
    if any(node.token_ids for node in trace.nodes):
        return
    cut_off = [trace.nodes[number] for number in _cut_off(trace)]
    for branch in trace.branches:
        refuse_images(branch.nodes)
        await _tokenize_branch(branch, template, cut_off)


def refuse_images(nodes: Sequence[MessageNode]) -> None:
    """EpisodeFailed where one of these messages shows an image: a model that is asked by tokens or
    by text alone would not see it."""
    for number, node in enumerate(nodes):
        if message_images(node):
            text = (
                f"message {number} shows an image, which a model that is asked by text alone would "
                "not see; use grpo without algo.reference for such tasks"
            )
            raise EpisodeFailed(Failure(UNSEEN_IMAGE, text))


def _cut_off(trace: WireTrace) -> set[int]:
    """Numbers of the turns that ended at a length limit."""
    return {
        call.node
        for call in trace.calls
        if call.finish_reason == "length" and call.node is not None
    }


async def _tokenize_branch(
    branch: Branch, template: Tokenizes, cut_off: Sequence[MessageNode]
) -> None:
    messages = [_chat_message(node) for node in branch.nodes]
    tools = [_chat_tool(tool) for tool in branch.tools]
    written: list[int] = []
    first = 0
    for position, node in enumerate(branch.nodes):
        if not node.sampled:
            continue
        if not node.token_ids:
            asked = await template.tokenize(
                messages[:position], tools=tools, add_generation_prompt=True
            )
            answered = await template.tokenize(
                messages[: position + 1], tools=tools, add_generation_prompt=False
            )
            split = common_prefix(asked, answered)
            if split < len(written) or answered[: len(written)] != written:
                text = f"turn {position} rewrites the tokens of earlier turns in this template"
                raise EpisodeFailed(Failure(UNSTABLE, text))
            find_end = end_of_content if any(node is cut for cut in cut_off) else end_of_turn
            end = find_end(answered, split, template.stop_token_ids)
            between = branch.nodes[first:position]
            _fill(between, answered[len(written) : split])
            # A turn right after another has no message between them to hold its header.
            header = [] if between else answered[len(written) : split]
            _set_tokens(node, header, answered[split:end])
            written = answered[:end]
        else:
            written = [t for n in branch.nodes[: position + 1] for t in n.token_ids]
        first = position + 1


def _fill(nodes: Sequence[MessageNode], token_ids: Sequence[int]) -> None:
    """The last message before a turn gets all tokens before it; the others get none."""
    for node in nodes[:-1]:
        _set_tokens(node, [], [])
    if nodes:
        _set_tokens(nodes[-1], token_ids, [])


def _set_tokens(node: MessageNode, context: Sequence[int], sampled: Sequence[int]) -> None:
    node.token_ids = [*context, *sampled]
    node.mask = [False] * len(context) + [True] * len(sampled)
    node.is_content = []
    node.logprobs = [0.0] * len(sampled)


def _chat_message(node: MessageNode) -> dict[str, Any]:
    """The message as chat APIs write it."""
    message = node.message.model_dump(exclude_none=True, mode="json")
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("id", ""),
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    kept = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
    return {key: message[key] for key in kept if key in message}


def _chat_tool(tool: Any) -> dict[str, Any]:
    """The tool as chat APIs write it."""
    definition = tool.model_dump(exclude_none=True, mode="json")
    kept = {k: definition[k] for k in ("name", "description", "parameters") if k in definition}
    return {"type": "function", "function": kept}
