"""Turn order, prompts and scores hold whatever is said, and whoever answers first."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import msgspec
import pytest
from dialogue_games import MEMBERS, SLOTS, Game, build_pack, games
from hypothesis import event, given
from hypothesis import strategies as st

from gradus.errors import ConfigError
from gradus_kit.multiagent.answers import read_choice
from gradus_kit.multiagent.channels import VISIBILITIES, Said
from gradus_kit.multiagent.fields import FieldSpec
from gradus_kit.multiagent.kernel import (
    DialogueState,
    StaticSchedule,
    TurnOrderError,
    TurnSlot,
    apply_action,
)
from gradus_kit.multiagent.prompts import BETWEEN, Case, Prompter, _notices, channels_of
from gradus_kit.multiagent.schedule import MAX_TURNS, Schedule
from gradus_kit.multiagent.scores import DialogueScorer, EpisodeScores, Truth

PACK = build_pack()
CHANNELS = channels_of(PACK, MEMBERS)
TRUTH = Truth("B", {}, lambda text: read_choice(text, "AB"))
JUDGED = SLOTS.map(lambda slots: [*slots[:4], TurnSlot(9, ("judge",), "final")])


@given(game=games(), order=st.integers(1, 99))
def test_the_order_of_arrival_inside_a_barrier_changes_nothing(game: Game, order: int) -> None:
    assert game.play(PACK) == game.play(PACK, order=order)


@given(game=games(), up_to=st.integers(0, 5), said=st.builds(Said, st.text(max_size=3)))
def test_who_may_not_speak_changes_nothing(game: Game, up_to: int, said: Said) -> None:
    state, program = game.play(PACK, up_to=up_to), game.schedule.program
    slot = program.current_slot(state)
    outside = [m for m in MEMBERS if slot is None or m not in slot.members]
    before = repr(state)
    for member in outside:
        with pytest.raises(TurnOrderError, match="spoke"):
            apply_action(state, program, member, said, 1, CHANNELS)
    if slot is not None and slot.is_barrier:
        held, committed = apply_action(state, program, slot.members[0], said, 1, CHANNELS)
        assert committed == ()
        with pytest.raises(TurnOrderError, match="twice"):
            apply_action(held, program, slot.members[0], said, 1, CHANNELS)
        # Whoever gives the barrier up keeps the state from before it.
        assert held.transcript == state.transcript
    assert repr(state) == before


def test_a_barrier_commits_all_or_none_in_the_order_of_its_slot() -> None:
    program = StaticSchedule((TurnSlot(0, ("debater_b", "debater_a"), "propose"),))
    state, none = apply_action(DialogueState(), program, "debater_a", Said("one"), 1, CHANNELS)
    assert (none, state.transcript, state.num_turns) == ((), (), 0)
    state, both = apply_action(state, program, "debater_b", Said("two"), 2, CHANNELS)
    assert [said.member for said in both] == ["debater_b", "debater_a"]
    assert {said.turn_index for said in both} == {0}
    assert program.current_slot(state) is None


def test_a_reply_without_public_text_commits_and_the_schedule_goes_on() -> None:
    program = StaticSchedule((TurnSlot(0, ("judge",), "final"), TurnSlot(1, ("judge",), "final")))
    state, (said,) = apply_action(DialogueState(), program, "judge", Said(""), 0, CHANNELS)
    assert said.parse_error
    assert program.current_slot(state) == program.slots[1]


def whole_prompt(
    prompter: Prompter, state: DialogueState, member: str, slot: TurnSlot
) -> list[tuple[str, str]]:
    """Role and text of each message up to a turn, told from the beginning. Its own words come first
    in a barrier: a member could not see the others when it spoke."""
    messages = [("system", prompter.system(member))]
    told = [prompter._question(member)]
    number = 0
    for _, turn in groupby(state.transcript, key=lambda said: said.turn_index):
        for said in sorted(turn, key=lambda said: said.member != member):
            if said.member != member:
                told.append(prompter._heard(said, member))
                continue
            told.append(prompter._instruction(member, said.phase, number))
            messages += [("user", BETWEEN.join(told)), ("assistant", said.raw)]
            told = list(_notices(said))
            number += 1
    told.append(prompter._instruction(member, slot.phase, number))
    return [*messages, ("user", BETWEEN.join(told))]


@given(game=games(), visibility=st.sampled_from(VISIBILITIES))
def test_deltas_and_own_replies_are_the_whole_prompt(game: Game, visibility: str) -> None:
    """So each prompt continues the one before it, with and without quarantined turns."""
    pack = build_pack(visibility)
    prompter = game.prompter(pack)
    for member in MEMBERS:
        conversation = [("system", prompter.system(member))]
        for number, slot in enumerate(game.slots):
            if member not in slot.members:
                continue
            state = game.play(pack, up_to=number)
            conversation.append(("user", prompter.delta(state, member, slot)))
            assert conversation == whole_prompt(prompter, state, member, slot)
            said = game.said[slot.slot_id, member]
            conversation.append(("assistant", said.content))
    event(f"{sum(said.is_quarantined for said in game.play(pack).transcript)} quarantined")


@given(game=games(JUDGED), visibility=st.sampled_from(VISIBILITIES))
def test_private_text_reaches_only_whom_the_policy_names(game: Game, visibility: str) -> None:
    marked = {
        key: replace(said, reasoning=f"SECRET-OF-{key[1]}-") for key, said in game.said.items()
    }
    game = replace(game, said=marked)
    pack = build_pack(visibility)
    prompter = game.prompter(pack)
    for number, slot in enumerate(game.slots):
        state = game.play(pack, up_to=number)
        for viewer in slot.members:
            text = prompter.delta(state, viewer, slot)
            for author in MEMBERS:
                may_see = visibility == "open" or (
                    visibility == "visible_to_judge" and viewer == "judge"
                )
                if author != viewer and not may_see:
                    assert f"SECRET-OF-{author}-" not in text
    judge = prompter.delta(game.play(pack, up_to=-1), "judge", game.slots[-1])
    spoke = [s for s in game.play(pack, up_to=-1).transcript if s.private and s.member != "judge"]
    heard = game.play(pack, up_to=-1).turns_of("judge")
    news = [s for s in spoke if not heard or s.turn_index >= heard[-1].turn_index]
    if visibility in ("open", "visible_to_judge") and news:
        assert "SECRET-OF-" in judge


@given(game=games(JUDGED))
def test_rewards_of_a_decided_debate_sum_to_zero_and_scores_survive_json(game: Game) -> None:
    members = tuple(dict.fromkeys([*MEMBERS[:2], *game.schedule.members]))
    scores = DialogueScorer(PACK, members).score(game.play(PACK), TRUTH)
    assert msgspec.json.decode(msgspec.json.encode(scores), type=EpisodeScores) == scores
    assert (scores.undecided is None) == bool(scores.rewards)
    if scores.rewards:
        event(f"winner {scores.winner}")
        assert sum(scores.rewards.values()) == 0.0
        assert scores.rewards["judge"] == 0.0
    else:
        assert scores.winner is None
    for value in (*scores.metrics().values(), *scores.members["debater_a"].metrics().values()):
        assert 0.0 <= value <= 5.0


def debate(first: str, second: str, decision: str, **kinds: str) -> EpisodeScores:
    slots = [TurnSlot(0, MEMBERS[:2], "propose"), TurnSlot(1, ("judge",), "final")]
    said = {
        (0, "debater_a"): Said(first),
        (0, "debater_b"): Said(second),
        (1, "judge"): Said(decision),
    }
    assigned = Truth("B", kinds, TRUTH.read_choice)
    return DialogueScorer(PACK, MEMBERS).score(Game(slots, said).play(PACK), assigned)


def test_the_winner_is_what_the_judge_decides_and_nothing_else() -> None:
    won = debate("<answer>A</answer>", "B", "<decision>Debater_B</decision>")
    assert won.rewards == {"debater_a": -1.0, "debater_b": 1.0, "judge": 0.0}
    assert (won.judge_selected_correct, won.truth_member_won, won.agreement) == (True, True, False)
    assert won.categories() == {
        "winner": "debater_b",
        "answer/debater_a": "A",
        "answer/debater_b": "B",
    }
    tie = debate("A", "B", "<decision>tie</decision>")
    assert set(tie.rewards.values()) == {0.0}
    assert (tie.judge_selected_correct, tie.truth_member_won) == (False, False)


@pytest.mark.parametrize(
    "decision",
    [
        "debater_a",
        "<decision>judge</decision>",
        "<decision>debater_a</decision><decision>tie</decision>",
        "<thinking><decision>debater_a</decision></thinking> hm",
        "",
    ],
)
def test_a_decision_that_cannot_be_read_is_nobody_s_win(decision: str) -> None:
    scores = debate("A", "B", decision)
    assert scores.rewards == {}
    assert scores.undecided


def test_answers_are_counted_turn_by_turn() -> None:
    slots = [TurnSlot(0, ("debater_a",), "propose"), TurnSlot(1, ("debater_a",), "critique")]
    slots += [TurnSlot(2, ("debater_a",), "critique"), TurnSlot(3, ("judge",), "final")]
    texts = ["<answer>A</answer>", "<think>", "<answer>B</answer>"]
    said = {(i, "debater_a"): Said(text) for i, text in enumerate(texts)}
    game = Game(slots, said | {(3, "judge"): Said("<decision>tie</decision>")})
    own = DialogueScorer(PACK, MEMBERS).score(game.play(PACK), TRUTH).members["debater_a"]
    assert own.metrics() == {
        **{"turns": 3.0, "commits": 2.0, "unique_commits": 2.0, "flipped": 1.0},
        **{"extraction_failed": 1.0, "parse_errors": 1.0, "lost_turns": 1.0},
        **{"initial_correct": 0.0, "final_correct": 1.0},
    }


@pytest.mark.parametrize(
    "last", ["<answer>A</answer><answer>B</answer>", "I'd say B. But A is also possible", "<think>"]
)
def test_a_last_turn_without_one_answer_is_wrong_whatever_was_said_before(last: str) -> None:
    slots = [TurnSlot(0, ("debater_a",), "propose"), TurnSlot(1, ("debater_a",), "critique")]
    slots.append(TurnSlot(2, ("judge",), "final"))
    said = {(0, "debater_a"): Said("<answer>B</answer>"), (1, "debater_a"): Said(last)}
    game = Game(slots, said | {(2, "judge"): Said("<decision>tie</decision>")})
    own = DialogueScorer(PACK, MEMBERS).score(game.play(PACK), TRUTH).members["debater_a"]
    assert (own.initial_correct, own.final_correct, own.final_answer) == (True, False, None)
    assert own.flipped is False


def test_assigned_sides_say_who_stands_for_the_truth() -> None:
    scores = debate("A", "A", "<decision>debater_b</decision>", debater_a="A", debater_b="B")
    assert scores.truth_member_won is True
    assert scores.judge_selected_correct is False
    assert scores.judge_reward == 1.0


@pytest.mark.parametrize(
    ("picked", "reward"), [("<answer>A</answer>", 1.0), ("<answer>B</answer>", 0.0)]
)
def test_a_consultant_is_rewarded_when_the_judge_picks_its_answer(
    picked: str, reward: float
) -> None:
    answer = {"answer": PACK.fields_of("debater_a", "final")["answer"]}
    fields = {("consultant", "propose"): answer, ("judge", "final"): answer}
    pack = replace(PACK, reward="picked", fields=fields)
    slots = (TurnSlot(0, ("consultant",), "propose"), TurnSlot(1, ("judge",), "final"))
    state, program = DialogueState(), StaticSchedule(slots)
    members = ("consultant", "judge")
    for member, text in (("consultant", "<answer>A</answer>"), ("judge", picked)):
        channels = channels_of(pack, members)
        state, _ = apply_action(state, program, member, Said(text), 1, channels)
    truth = Truth("B", {"consultant": "A"}, TRUTH.read_choice)
    scores = DialogueScorer(pack, members).score(state, truth)
    assert scores.rewards == {"consultant": reward, "judge": 0.0}
    assert scores.judge_selected_correct is (picked == "<answer>B</answer>")
    silent = DialogueScorer(pack, members).score(replace(state, transcript=()), truth)
    assert silent.undecided


def test_a_function_as_schedule_is_played_once_before_it_is_used() -> None:
    def until_two(state: DialogueState) -> TurnSlot | None:
        number = state.num_turns
        return None if number == 2 else TurnSlot(number, ("judge",), f"round {number}")

    schedule = Schedule.of_function(until_two, "mine")
    assert schedule.turns == (("judge", "round 0"), ("judge", "round 1"))
    assert schedule.num_rounds("judge") == 2
    assert schedule.explained() == "1. round 0: judge\n2. round 1: judge"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda state: TurnSlot(0, ("judge",), "final"), f"after {MAX_TURNS} turns"),
        (lambda state: "judge", "gives str"),
        (lambda state: 1 / 0, "ZeroDivisionError"),
        (lambda state: None, "no first slot"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(function: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Schedule.of_function(function, "mine")  # type: ignore[arg-type]


@pytest.mark.parametrize("members", [(), ("judge", "judge")])
def test_a_slot_needs_different_members(members: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="different names"):
        TurnSlot(0, members, "final")


def test_the_last_round_is_known_to_the_instruction() -> None:
    slots = [TurnSlot(i, ("judge",), "final") for i in range(2)]
    game = Game(slots, {(0, "judge"): Said("x"), (1, "judge"): Said("x")})
    prompter: Prompter = game.prompter(PACK)
    assert prompter.delta(DialogueState(), "judge", slots[0]).endswith("\n\nfinal 0/2 True False")
    assert prompter.delta(game.play(PACK, up_to=1), "judge", slots[1]) == "final 1/2 False True"


def test_the_author_of_an_unreadable_turn_is_told_and_the_others_get_a_notice() -> None:
    slots = [TurnSlot(0, MEMBERS[:2], "propose"), TurnSlot(1, MEMBERS[:2], "critique")]
    said = {(0, "debater_a"): Said("<think>SECRET"), (0, "debater_b"): Said("fine")}
    game = Game(slots, said)
    prompter, state = game.prompter(PACK), game.play(PACK, up_to=1)
    own = prompter.delta(state, "debater_a", slots[1])
    assert own.startswith("The others did not see your last reply: <think> is never closed.\n\n")
    other = prompter.delta(state, "debater_b", slots[1])
    assert other.startswith("[debater_a, propose] The reply could not be read.\n\n")
    assert "SECRET" not in other


def test_a_function_that_leaves_what_was_played_before_is_refused_by_name() -> None:
    def next_slot(state: DialogueState) -> TurnSlot | None:
        if not state.transcript:
            return TurnSlot(0, ("judge",), "final")
        told = {"a crowd": ("crowd",), "a phase": ("judge",)}
        member = told.get(state.transcript[0].public)
        return TurnSlot(1, member, "unknown") if member and state.num_turns == 1 else None

    schedule = Schedule.of_function(next_slot, "test:next_slot")
    prompter = Prompter(PACK, schedule, Case("7 or 12?"))

    def told(text: str) -> DialogueState:
        channels = channels_of(PACK, ("judge",))
        said = Said(text)
        return apply_action(DialogueState(), schedule.program, "judge", said, 1, channels)[0]

    with pytest.raises(ConfigError, match="gives slot 1 to crowd; with made-up replies only judge"):
        schedule.program.current_slot(told("a crowd"))
    slot = schedule.program.current_slot(told("a phase"))
    assert slot is not None
    with pytest.raises(ConfigError, match="no instruction of judge for the phase 'unknown'"):
        prompter.delta(told("a phase"), "judge", slot)


def test_numbers_are_compared_as_numbers() -> None:
    answer = {"answer": FieldSpec("answer")}
    pack = replace(PACK, reward="exact", fields={("debater_a", "propose"): answer})
    slot = TurnSlot(0, ("debater_a",), "propose")

    def reward(said: str, right: str) -> float:
        channels = channels_of(pack, ("debater_a",))
        program = StaticSchedule((slot,))
        reply = Said(f"<answer>{said}</answer>")
        state, _ = apply_action(DialogueState(), program, "debater_a", reply, 1, channels)
        scorer = DialogueScorer(pack, ("debater_a",))
        return scorer.score(state, Truth(right)).rewards["debater_a"]

    assert (reward(".5", "5"), reward("0.50", ".5"), reward(" Seven. ", "seven")) == (0.0, 1.0, 1.0)
