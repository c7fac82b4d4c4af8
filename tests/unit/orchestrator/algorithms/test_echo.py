"""Which tokens `echo` learns to predict, and with what weight."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import AssistantMessage, Message, ToolCall, ToolMessage, UserMessage

from gradus.config import algorithms
from gradus.errors import ConfigError
from gradus.orchestrator.algorithms.base import CreditContext
from gradus.orchestrator.algorithms.echo import Echo, tool_name
from gradus.orchestrator.groups.filters import FilterContext, ZeroAdvantage
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

CONTEXT = CreditContext("words", task_key=0)
ORIGIN = SampleOrigin("words", "g0", "g0.0", VersionSpan(0, 0), 1.0, max_length_tokens=100)


def observation(parent: int, message: Message, *, body: int = 2) -> MessageNode:
    """A message of one scaffold token, `body` tokens of content, and one more of scaffold."""
    node = build_message(parent, list(range(10, 12 + body)))
    node.message = message
    node.is_content = [False, *[True] * body, False]
    return node


def build_dialogue() -> WireTrace:
    """question → call → output of `search` → remark of the user → reply."""
    call = build_message(0, [20, 21], sampled=2)
    call.message = AssistantMessage(tool_calls=[ToolCall(id="c0", name="search", arguments="{}")])
    nodes = [
        build_message(None, [3, 4]),
        call,
        observation(1, ToolMessage(tool_call_id="c0", content="x", name="search")),
        observation(2, UserMessage(content="y")),
        build_message(3, [30, 31], sampled=2),
    ]
    return build_trace(nodes)


async def weights_of(trace: WireTrace, component: str = "ce", **options: Any) -> list[list[float]]:
    """Weights per message, empty where a message has none."""
    await Echo(algorithms.EchoAlgorithmConfig(**options)).score_episode(
        build_episode([trace]), CONTEXT
    )
    return [(node.loss_weights or {}).get(component, []) for node in trace.nodes]


async def test_tool_outputs_have_the_default_weight_on_their_body() -> None:
    assert await weights_of(build_dialogue()) == [[], [], [0, 0.1, 0.1, 0], [], []]


async def test_every_role_has_a_weight_of_its_own() -> None:
    found = await weights_of(build_dialogue(), roles={"user": 0.5, "tool": 0.25})
    assert found == [[], [], [0, 0.25, 0.25, 0], [0, 0.5, 0.5, 0], []]


async def test_nothing_before_the_first_sampled_turn_is_an_observation() -> None:
    trace = build_dialogue()
    found = await weights_of(trace, roles={"user": 1.0})
    assert found[0] == []
    assert found[3] == [0, 1, 1, 0]


@pytest.mark.parametrize(("names", "is_chosen"), [(["search"], True), (["add"], False)])
async def test_tools_are_chosen_by_name(names: list[str], is_chosen: bool) -> None:
    found = await weights_of(build_dialogue(), tool_names=names)
    assert any(found[2]) is is_chosen


async def test_tool_names_do_not_concern_other_roles() -> None:
    found = await weights_of(build_dialogue(), roles={"user": 1.0}, tool_names=["add"])
    assert found[3] == [0, 1, 1, 0]


def test_a_tool_message_without_a_name_has_that_of_its_call() -> None:
    trace = build_dialogue()
    trace.nodes[2].message = ToolMessage(tool_call_id="c0", content="x")
    assert tool_name(trace, trace.nodes[2]) == "search"
    trace.nodes[2].message = ToolMessage(tool_call_id="c7", content="x")
    assert tool_name(trace, trace.nodes[2]) is None
    assert tool_name(trace, trace.nodes[3]) is None


@pytest.mark.parametrize("marks", [[], [True]])
async def test_without_attribution_there_is_no_token_and_no_error(marks: list[bool]) -> None:
    trace = build_dialogue()
    trace.nodes[2].is_content = marks
    assert not any(await weights_of(trace))


async def test_traces_that_do_not_train_have_no_observations() -> None:
    judge = build_dialogue()
    judge.agent.trainable = False
    assert not any(await weights_of(judge))


async def test_observations_have_a_component_of_their_own_or_share_that_of_rl() -> None:
    assert any(await weights_of(build_dialogue(), "ce", normalize="own"))
    assert any(await weights_of(build_dialogue(), "ce_batch", normalize="batch"))
    assert not any(await weights_of(build_dialogue(), "ce", normalize="batch"))


def only_short(trace: WireTrace, node: MessageNode) -> bool:
    assert node in trace.nodes
    return len(node.token_ids) < 4


def only_first(trace: WireTrace, node: MessageNode) -> list[bool]:
    return [number == 1 for number, _ in enumerate(node.token_ids)]


def too_few(trace: WireTrace, node: MessageNode) -> list[bool]:
    return [True]


@pytest.fixture
def filters_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own, importable by name."""
    module = type("module", (), {f.__name__: staticmethod(f) for f in FILTERS})
    monkeypatch.setitem(sys.modules, "my_echo_filters", module)


FILTERS = (only_short, only_first, too_few)


@pytest.mark.usefixtures("filters_of_a_user")
async def test_a_filter_of_the_user_chooses_messages_or_tokens() -> None:
    found = await weights_of(build_dialogue(), filter="my_echo_filters:only_short")
    assert not any(found)
    found = await weights_of(build_dialogue(), filter="my_echo_filters:only_first")
    assert found[2] == [0, 0.1, 0, 0]


@pytest.mark.usefixtures("filters_of_a_user")
async def test_a_filter_that_misses_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="among 1 tokens of a message of 4"):
        await weights_of(build_dialogue(), filter="my_echo_filters:too_few")


async def build_sample(reward: float = 1.0) -> Sample:
    """The sample of a dialogue beside another of reward 0."""
    algorithm, trace = Echo(algorithms.EchoAlgorithmConfig()), build_dialogue()
    trace.rewards["reward"].score = reward
    episodes = [build_episode([trace]), build_episode([build_dialogue()])]
    episodes[1].traces[0].rewards["reward"].score = 0.0
    for episode in episodes:
        await algorithm.score_episode(episode, CONTEXT)
    algorithm.score_group(episodes, CONTEXT)
    (sample,) = build_samples(episodes[0], ORIGIN)
    return sample


async def test_a_sample_trains_replies_with_rl_and_observations_with_ce() -> None:
    sample = await build_sample()
    assert sample.arrays.loss_weights["rl"].tolist() == [0, 0, 1, 1, *[0] * 8, 1, 1]
    ce = sample.arrays.loss_weights["ce"]
    assert ce.tolist() == pytest.approx([*[0] * 5, 0.1, 0.1, *[0] * 7])
    assert sample.arrays.advantages[ce > 0].tolist() == [0.0, 0.0]
    assert sample.arrays.advantages[2] == pytest.approx(0.5)
    assert (
        sample.arrays.loss_mask.tolist() == ((sample.arrays.loss_weights["rl"] + ce) > 0).tolist()
    )


async def test_a_group_of_equal_rewards_still_teaches_its_observations() -> None:
    sample = await build_sample(reward=0.0)
    assert not sample.arrays.advantages.any()
    context = FilterContext(build_trace(), is_truncated=False, task_key=0, episodes=())
    assert ZeroAdvantage().keeps(sample, context)
    # Members without an advantage would only make the rl loss of other groups smaller.
    assert not sample.arrays.loss_weights["rl"].any()


async def test_the_number_of_observations_is_recorded() -> None:
    context = CreditContext("words", task_key=0)
    algorithm, episode = Echo(algorithms.EchoAlgorithmConfig()), build_episode([build_dialogue()])
    await algorithm.score_episode(episode, context)
    algorithm.score_group([episode], context)
    assert context.numbers == {"echo_tokens": 2.0}


def test_a_filter_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot import"):
        Echo(algorithms.EchoAlgorithmConfig(filter="no_such_module_here:keep"))


@pytest.mark.parametrize("unread", [[], [1], [0, 1]])
async def test_a_trace_divides_its_observations_by_what_the_normalisation_says(
    unread: list[int],
) -> None:
    """Two tokens of a tool with alpha 0.1, two of a user with 0.4, among all of the trace."""
    roles, alphas = {"tool": 0.1, "user": 0.4}, np.array([0.1, 0.1, 0.4, 0.4])
    nodes = build_dialogue().nodes
    sampled = [sum(node.mask) for node in nodes if node.sampled]
    num_rl = sum(count for turn, count in enumerate(sampled) if turn not in unread)
    expected = {
        "tokens": alphas / sum(len(node.token_ids) for node in nodes),
        "observations": alphas / 4,
        "ratio": alphas * num_rl / 4,
        "none": alphas,
    }
    for name, weights in expected.items():
        trace = build_trace(build_dialogue().nodes)
        trace.info["quarantined_turns"] = unread
        found = await weights_of(trace, "ce_trace", roles=roles, normalize=name)
        learned = [weight for of_node in found for weight in of_node if weight]
        assert learned == pytest.approx(weights[weights > 0].tolist()), name
