"""A judge asked again with the sides in the other order: what it hears, and what it cannot move."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from debate_play import TOKEN, MemberEngine, Room, trace_of
from pydantic import ValidationError

from gradus.testing.engine_script import GenerateCall, Reply, Status
from gradus.testing.tiny_model import build_tiny_tokenizer
from gradus_debate import DebateEnvConfig
from gradus_debate.other_order import in_other_order, is_asked_again
from gradus_kit.multiagent.kernel import DialogueState, Utterance

pytestmark = pytest.mark.torch

FLIPPED = "episode/judge_flipped"
ALWAYS = {"ask_judge_again": 1.0}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    directory = tmp_path_factory.mktemp("model")
    return Room(directory, build_tiny_tokenizer(directory))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADUS_INFERENCE_TOKEN", TOKEN)
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    # A lock belongs to the event loop of one test.
    monkeypatch.setattr("renderers.client._max_prompt_len_lock", asyncio.Lock())


def of(member: str, turn: int) -> Utterance:
    return Utterance(member, turn, turn, "propose", member, member, None, 1)


def judge_who(engine: MemberEngine, *verdicts: str) -> list[str]:
    """Lets the judge say these, one in each conversation; returns what it hears."""
    answer, heard = engine.answer_to, list[str]()

    def answer_to(call: GenerateCall) -> Reply:
        reply = answer(call)
        if len(engine.by_member.get("judge", ())) == len(heard):
            return reply
        heard.append(engine._tokenizer.decode(call.prompt_token_ids))
        said = verdicts[min(len(heard), len(verdicts)) - 1]
        return Reply(engine._tokenizer.encode(said, add_special_tokens=False))

    engine.answer_to = answer_to  # type: ignore[method-assign]
    return heard


def says(name: str) -> str:
    return f"<decision>{name}</decision>"


async def play(room: Room, *verdicts: str, **config: Any) -> tuple[vf.Episode, list[str]]:
    async with room.open(config=ALWAYS | config) as debates:
        heard = judge_who(debates.engine, *verdicts)
        return await debates.play(), heard


def seen(episode: vf.Episode) -> dict[str, Any]:
    """What of an episode must not depend on the second verdict."""
    return {
        t.info["seat"]: ([str(n.message.content) for n in t.nodes], t.reward, t.agent.trainable)
        for t in episode.traces
    }


@pytest.mark.parametrize("pack", ["selfplay", "sequential"])
async def test_the_judge_hears_the_same_texts_in_the_other_order(room: Room, pack: str) -> None:
    _, (first, second) = await play(room, says("debater_a"), pack=pack)
    assert first.index("debater_a says") < first.index("debater_b says")
    assert second.index("debater_b says") < second.index("debater_a says")
    assert sorted(first.split()) == sorted(second.split())


@pytest.mark.parametrize(
    ("second", "flipped"), [("debater_b", 1.0), ("tie", 1.0), ("debater_a", 0.0)]
)
async def test_a_verdict_that_changes_is_counted_and_moves_nothing(
    room: Room, second: str, flipped: float
) -> None:
    asked, heard = await play(room, says("debater_a"), says(second))
    alone, _ = await play(room, says("debater_a"), ask_judge_again=0.0)
    assert len(heard) == 2
    assert trace_of(asked, "judge").metrics[FLIPPED] == flipped
    assert FLIPPED not in trace_of(alone, "judge").metrics
    assert asked.ok
    assert seen(asked) == seen(alone)


async def test_a_second_verdict_that_cannot_be_read_is_noted_and_not_counted(room: Room) -> None:
    episode, _ = await play(room, says("debater_a"), "who knows")
    judge = trace_of(episode, "judge")
    assert episode.ok
    assert judge.info["judge_again"] == {"failure": "the judge's last turn names no winner"}
    assert FLIPPED not in judge.metrics


async def test_a_second_call_that_fails_does_not_cost_the_episode(room: Room) -> None:
    async with room.open(config=ALWAYS) as debates:
        answer, engine = debates.engine.answer_to, debates.engine

        def answer_to(call: GenerateCall) -> Reply:
            reply = answer(call)
            if "judge" in engine.by_member:
                engine.inject(Status(400))
            return reply

        engine.answer_to = answer_to  # type: ignore[method-assign]
        episode = await debates.play()
    assert episode.ok
    assert {trace.info["seat"] for trace in episode.traces} == {"debater_a", "debater_b", "judge"}
    assert "failure" in trace_of(episode, "judge").info["judge_again"]


async def test_a_judge_that_decides_nothing_is_not_asked_again(room: Room) -> None:
    episode, heard = await play(room, "who knows")
    assert len(heard) == 1
    assert episode.errors[-1].type == "UndecidedDebate"


def test_a_share_of_the_tasks_is_asked_always_the_same() -> None:
    questions = [f"question {number}" for number in range(1_000)]
    asked = {question for question in questions if is_asked_again(question, 0.25)}
    assert 200 < len(asked) < 300
    assert asked < {question for question in questions if is_asked_again(question, 0.5)}
    assert all(is_asked_again(question, 1.0) for question in questions)
    assert not any(is_asked_again(question, 0.0) for question in questions)


def test_turns_change_places_and_keep_their_words() -> None:
    state = DialogueState((of("a", 0), of("b", 1), of("a", 2), of("b", 3)))
    swapped = in_other_order(state, ("a", "b"))
    assert swapped is not None
    assert [said.public for said in swapped.transcript] == ["b", "a", "b", "a"]
    assert [said.turn_index for said in swapped.transcript] == [0, 1, 2, 3]
    assert in_other_order(swapped, ("a", "b")) == state


def test_sides_of_which_one_spoke_more_have_no_other_order() -> None:
    assert in_other_order(DialogueState((of("a", 0), of("b", 1), of("a", 2))), ("a", "b")) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pack": "direct"}, "needs two sides that speak equally often"),
        (
            {
                "schedule": [
                    {"members": ["debater_a", "debater_b"], "phase": "propose"},
                    {"members": ["judge"], "phase": "final"},
                    {"members": ["judge"], "phase": "final"},
                ]
            },
            "a judge who speaks once; it speaks 2 times",
        ),
        (
            {
                "schedule": [
                    {"members": ["debater_a"], "phase": "propose"},
                    {"members": ["debater_a", "debater_b"], "phase": "critique"},
                    {"members": ["judge"], "phase": "final"},
                ]
            },
            "needs two sides that speak equally often",
        ),
        ({"ask_judge_again": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_without_another_order_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DebateEnvConfig.model_validate({"taskset": {"id": "gradus-debate"}, **ALWAYS, **settings})
