"""The compact harness: new branches from notes, the engine's tokens, each trained once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from policy_talks import CALL, TOKEN, AddServer, UserOpens, path_of, policy_seat
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients import train
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import content_text
from verifiers.v1.utils.loaders import harness_class

from gradus.environments.verifiers import replies
from gradus.environments.verifiers.engine_client import RequestSeeds
from gradus.orchestrator.algorithms.base import assign_advantage
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import GenerateCall, Reply
from gradus.testing.episodes import build_episode
from gradus.wire.episode import CONTEXT_FULL
from gradus.wire.versions import VersionSpan
from gradus_chat import tools
from gradus_compact.harness import CompactHarness, CompactHarnessConfig

pytestmark = pytest.mark.torch

ORIGIN = SampleOrigin("e", "g0", "g0.0", VersionSpan(0, 0), 1.0, max_length_tokens=4000)
SHORT = {"ask_for_notes": "notes?", "go_on": "N: {notes}"}


@dataclass
class Play:
    """A conversation and what it left."""

    replies: list[str]
    users: list[str] = field(default_factory=lambda: ["go"])
    answers: list[str] = field(default_factory=list)
    """Of the tool, one for each call; then "3"."""
    config: dict[str, Any] = field(default_factory=dict)
    system: str | None = "be brief"
    max_length_tokens: int = 2048
    max_turns: int = 20


@dataclass(frozen=True)
class Played:
    trace: vf.Trace
    calls: list[GenerateCall]

    @property
    def prompts(self) -> list[list[str]]:
        """Messages of each branch, as text."""
        return [
            [f"{m.role}: {content_text(m.content)}" for m in branch.messages]
            for branch in self.trace.branches
        ]


@pytest.fixture(autouse=True)
def _as_in_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(train, "build_async_openai", train.build_async_openai)
    replies.use_engine_client(RequestSeeds())
    monkeypatch.setattr(tools, "open_server", tools.open_server)
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    monkeypatch.setenv("GRADUS_INFERENCE_TOKEN", TOKEN)
    return


async def play(case: Play, model: Path, tokenizer: PreTrainedTokenizerFast) -> Played:
    replies = iter([*case.replies, *["end"] * 60])

    def reply(_: list[int]) -> Reply:
        return Reply(tokenizer.encode(next(replies), add_special_tokens=False))

    async def open_server(*_: Any, **__: Any) -> Any:
        return AddServer(case.answers)

    tools.open_server = open_server
    async with ScriptedEngine(
        reply=reply, data_token=TOKEN, max_length_tokens=case.max_length_tokens
    ) as engine:
        harness = {"id": "gradus-compact", "max_retries": 0, **SHORT, **case.config}
        agent = vf.make_agent(
            policy_seat(
                engine, model, harness, sampling={"max_tokens": 300}, max_turns=case.max_turns
            )
        )
        async with (
            agent,
            agent.interaction(UserOpens(vf.TaskData(system_prompt=case.system))) as talk,
        ):
            for text in case.users:
                if (await talk.turn(text)).terminated:
                    break
        calls = [call for call in engine.calls if call.reply is not None]
    assert talk.trace.errors == []
    return Played(talk.trace, calls)


def assert_each_call_is_a_path_and_trains_once(played: Played) -> None:
    """Invariant 1, and every sampled token has weight in exactly one sample."""
    trace, calls = played.trace, played.calls
    sampled = [node for node in trace.nodes if node.sampled]
    assert len(sampled) == len(calls)
    for node, call in zip(sampled, calls, strict=True):
        assert call.reply is not None
        assert path_of(trace, node) == [*call.prompt_token_ids, *call.reply.token_ids]
    wire = WireTrace.model_validate(trace.model_dump(mode="json"))
    wire.agent.trainable = True
    assign_advantage(wire, 1.0)
    samples = build_samples(build_episode([wire]), ORIGIN)
    weights = sum(float(sample.arrays.loss_mask.sum()) for sample in samples)
    assert weights == sum(len(call.reply.token_ids) for call in calls if call.reply is not None)


def test_verifiers_finds_the_harness_by_its_id() -> None:
    assert harness_class("gradus-compact") is CompactHarness
    assert CompactHarnessConfig().id == "gradus-compact"


def test_a_text_without_a_place_for_the_notes_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"go_on must hold \{notes\}"):
        CompactHarnessConfig(go_on="Go on.")


async def test_notes_after_every_two_turns_begin_a_new_branch(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    case = Play([CALL, CALL, "so far 3", CALL, "done"], config={"every_turns": 2})
    played = await play(case, model, tokenizer)
    first, second = played.prompts
    assert first[-2:] == ["user: notes?", "assistant: so far 3"]
    assert second[:2] == ["system: be brief", "user: N: so far 3"]
    assert second[-1] == "assistant: done"
    assert played.trace.metrics["notes"] == 1
    assert_each_call_is_a_path_and_trains_once(played)


async def test_what_the_user_said_last_stands_behind_the_notes(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    case = Play(["a", "noted", "b"], users=["x", "y"], config={"every_turns": 1})
    played = await play(case, model, tokenizer)
    assert played.prompts[1] == [
        "system: be brief",
        "user: N: noted",
        "user: y",
        "assistant: b",
    ]
    assert_each_call_is_a_path_and_trains_once(played)


async def test_the_prompt_stays_when_it_shall(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = {"every_turns": 1, "keep_prompt": True}
    played = await play(Play([CALL, "noted", "b"], config=config), model, tokenizer)
    assert played.prompts[-1][:3] == ["system: be brief", "user: go", "user: N: noted"]
    assert_each_call_is_a_path_and_trains_once(played)


async def test_an_overflow_is_answered_with_notes_of_what_did_fit(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    case = Play([CALL, "noted", "done"], answers=["long " * 400], max_length_tokens=900)
    played = await play(case, model, tokenizer)
    assert played.trace.stop_condition == "user_closed"
    assert played.prompts[-1][1].startswith("user: N: noted\n\n(The messages after these notes")
    assert_each_call_is_a_path_and_trains_once(played)


async def test_a_prompt_that_never_fits_ends_as_with_chat(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    played = await play(Play([], users=["long " * 400], max_length_tokens=300), model, tokenizer)
    assert (played.trace.stop_condition, played.calls) == (CONTEXT_FULL, [])


async def test_notes_are_taken_from_so_many_tokens_on(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    case = Play([CALL, "noted", "done"], config={"at_tokens": 1})
    played = await play(case, model, tokenizer)
    assert played.prompts[0][-1] == "assistant: noted"
    assert played.trace.metrics["notes"] == 1


async def test_a_limit_of_turns_ends_also_notes(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    case = Play([CALL, CALL, CALL], config={"every_turns": 1}, max_turns=1)
    played = await play(case, model, tokenizer)
    assert (played.trace.stop_condition, len(played.calls)) == ("max_turns", 1)


async def test_after_the_last_notes_the_conversation_grows_to_its_end(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = {"every_turns": 1, "max_notes": 2}
    case = Play([CALL, "n1", CALL, "n2", *[CALL] * 20], config=config, max_length_tokens=1200)
    played = await play(case, model, tokenizer)
    assert played.trace.metrics["notes"] == 2
    # A reply that the end of the context cuts holds no call, and so the user has nothing to answer.
    assert played.trace.stop_condition in (CONTEXT_FULL, "max_turns", "user_closed")
    assert_each_call_is_a_path_and_trains_once(played)


@pytest.mark.parametrize("instead", [CALL, "", " \n"])
async def test_a_model_that_writes_no_notes_keeps_its_conversation(
    model: Path, tokenizer: PreTrainedTokenizerFast, instead: str
) -> None:
    case = Play([CALL, instead, CALL, "noted", "done"], config={"every_turns": 1})
    played = await play(case, model, tokenizer)
    (first, second, third) = played.prompts
    assert first[-2] == "user: notes?"
    assert second[:2] == ["system: be brief", "user: go"]
    assert second[-1] == "assistant: noted"
    assert third[1:] == ["user: N: noted", "assistant: done"]
    metrics = played.trace.metrics
    assert (metrics["notes"], metrics["notes_missing"]) == (1, 1)
    assert_each_call_is_a_path_and_trains_once(played)


async def test_without_notes_a_full_context_ends_the_episode(
    model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    case = Play([CALL, CALL, "done"], answers=["long " * 400], max_length_tokens=900)
    played = await play(case, model, tokenizer)
    assert (played.trace.stop_condition, len(played.calls)) == (CONTEXT_FULL, 2)
    assert played.trace.metrics == {"notes_missing": 1}


PIECES = (
    "word",
    " ",
    "\n",
    "<think>\n",
    "\n</think>\n\n",
    CALL,
    "{notes}",
    "<|im_start|>",
    "\u00e9",
)
PLAYS = st.builds(
    Play,
    replies=st.lists(st.lists(st.sampled_from(PIECES), max_size=4).map("".join), max_size=10),
    users=st.lists(st.sampled_from(["x", "say more"]), min_size=1, max_size=3),
    answers=st.lists(st.sampled_from(["3", "long " * 60]), max_size=4),
    config=st.fixed_dictionaries(
        {"max_notes": st.integers(1, 3), "keep_prompt": st.booleans()},
        optional={"every_turns": st.integers(1, 3), "at_tokens": st.integers(400, 800)},
    ),
    system=st.none() | st.just("be brief"),
    max_length_tokens=st.sampled_from([600, 900, 2048]),
)


@given(case=PLAYS)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_is_said_every_call_is_a_path_and_every_token_trains_once(
    case: Play, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    played = asyncio.run(play(case, model, tokenizer))
    event(f"{played.trace.metrics.get('notes', 0)} notes")
    assert_each_call_is_a_path_and_trains_once(played)
