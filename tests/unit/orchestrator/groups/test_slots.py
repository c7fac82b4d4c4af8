"""Life cycle and slots of groups, and the property that nothing is lost or counted twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gradus.orchestrator.groups.slots import GroupSlots
from gradus.orchestrator.types import EpisodeOutcome, GroupPhase


def play(slots: GroupSlots, group_id: str, *, size: int = 1, version: int = 0) -> None:
    """Open a group and let all its episodes finish."""
    for episode_id in slots.open(group_id, size=size):
        slots.start(episode_id, version=version)
        slots.end(episode_id, EpisodeOutcome.FINISHED)
    slots.complete(group_id)


def test_slot_is_freed_only_when_the_new_version_is_served() -> None:
    slots = GroupSlots(budget=1)
    play(slots, "g0")
    slots.ship(["g0"], step=0)
    assert slots.free_slots == 0
    assert slots.release_trained(version=0) == 0
    assert slots.release_trained(version=1) == 1
    assert slots.free_slots == 1


def test_group_without_samples_frees_its_slot_at_once() -> None:
    slots = GroupSlots(budget=1)
    play(slots, "g0")
    slots.drop("g0")
    assert slots.free_slots == 1
    assert slots.phase("g0") is GroupPhase.GONE


def test_group_is_complete_when_its_last_episode_ended_in_whatever_way() -> None:
    slots = GroupSlots(budget=1)
    first, second = slots.open("g0", size=2)
    slots.start(first, version=0)
    assert not slots.end(first, EpisodeOutcome.FAILED)
    slots.start(second, version=1)
    assert slots.end(second, EpisodeOutcome.FINISHED)
    assert slots.phase("g0") is GroupPhase.SCORING
    slots.complete("g0")
    assert slots.phase("g0") is GroupPhase.COMPLETE


def test_episodes_of_a_group_that_is_being_scored_are_played_again_after_a_restart() -> None:
    slots = GroupSlots(budget=2)
    play(slots, "g0")
    (episode_id,) = slots.open("g1", size=1)
    slots.start(episode_id, version=0)
    slots.end(episode_id, EpisodeOutcome.FINISHED)
    assert slots.state.of_outcomes == {"finished": 1, "failed": 0, "cancelled": 0}


def test_abandoned_group_frees_its_slot_once_and_waits_for_its_running_episodes() -> None:
    slots = GroupSlots(budget=1)
    first, _second = slots.open("g0", size=2)
    slots.start(first, version=0)
    assert slots.abandon("g0") == [first]
    assert slots.free_slots == 1
    assert not slots.end(first, EpisodeOutcome.CANCELLED)
    assert slots.phase("g0") is GroupPhase.GONE
    assert slots.free_slots == 1


def test_abandoned_group_without_running_episodes_is_gone_at_once() -> None:
    slots = GroupSlots(budget=1)
    first, _ = slots.open("g0", size=2)
    slots.start(first, version=0)
    slots.end(first, EpisodeOutcome.FINISHED)
    assert slots.abandon("g0") == []
    assert slots.phase("g0") is GroupPhase.GONE


def test_too_old_is_what_started_more_than_the_bound_before_the_next_batch() -> None:
    slots = GroupSlots(budget=3)
    for group_id, version in (("g0", 0), ("g1", 2)):
        slots.start(slots.open(group_id, size=2)[0], version=version)
    slots.open("g2", size=1)
    assert slots.must_end_too_old(step=2, max_staleness=2) == []
    assert slots.must_end_too_old(step=3, max_staleness=2) == ["g0"]
    slots.abandon("g0")
    assert slots.must_end_too_old(step=3, max_staleness=2) == []


def test_the_oldest_version_of_a_group_is_that_of_its_first_start() -> None:
    slots = GroupSlots(budget=1)
    first, second = slots.open("g0", size=2)
    slots.start(first, version=0)
    slots.start(second, version=5)
    assert slots.must_end_too_old(step=3, max_staleness=2) == ["g0"]


def test_an_episode_that_starts_again_is_as_old_as_its_last_start() -> None:
    slots = GroupSlots(budget=1)
    (episode_id,) = slots.open("g0", size=1)
    slots.start(episode_id, version=0)
    slots.restart(episode_id, version=2)
    assert slots.must_end_too_old(step=4, max_staleness=2) == []
    assert slots.must_end_too_old(step=5, max_staleness=2) == ["g0"]


def test_a_frozen_group_is_never_too_old() -> None:
    slots = GroupSlots(budget=1)
    slots.start(slots.open("g0", size=1, is_frozen=True)[0], version=0)
    assert slots.must_end_too_old(step=9, max_staleness=0) == []


def test_no_more_groups_open_than_the_rest_of_the_run_trains() -> None:
    slots = GroupSlots(budget=4, total_groups=3)
    for number in range(3):
        play(slots, f"g{number}")
    assert slots.free_slots == 0
    slots.ship(["g0", "g1"], step=0)
    slots.release_trained(version=1)
    assert slots.free_slots == 0


def test_opening_without_a_free_slot_is_our_own_mistake() -> None:
    slots = GroupSlots(budget=1)
    slots.open("g0", size=1)
    with pytest.raises(AssertionError, match="without a free slot"):
        slots.open("g1", size=1)


def test_shipping_an_open_group_is_our_own_mistake() -> None:
    slots = GroupSlots(budget=1)
    slots.open("g0", size=1)
    with pytest.raises(AssertionError, match="not complete"):
        slots.ship(["g0"], step=0)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events: every started episode ends once, every slot is freed once."""

    @initialize(budget=st.integers(1, 4))
    def build(self, budget: int) -> None:
        self.budget = budget
        self.slots = GroupSlots(budget=budget)
        self.version = 0
        self.step = 0
        self.number = 0
        self.planned: dict[str, str] = {}
        self.running: dict[str, str] = {}
        self.holding: set[str] = set()
        self.complete: list[str] = []
        self.shipped: dict[str, int] = {}
        self.started = 0
        self.ended = 0

    @precondition(lambda self: self.slots.free_slots > 0)
    @rule(size=st.integers(1, 3))
    def open_group(self, size: int) -> None:
        group_id = f"g{self.number}"
        self.number += 1
        for episode_id in self.slots.open(group_id, size=size):
            self.planned[episode_id] = group_id
        self.holding.add(group_id)

    @precondition(lambda self: self.planned)
    @rule(choice=st.randoms(use_true_random=False))
    def start_episode(self, choice: object) -> None:
        episode_id = choice.choice(sorted(self.planned))  # type: ignore[attr-defined]
        self.running[episode_id] = self.planned.pop(episode_id)
        self.slots.start(episode_id, version=self.version)
        self.started += 1

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False), outcome=st.sampled_from(list(EpisodeOutcome)))
    def end_episode(self, choice: object, outcome: EpisodeOutcome) -> None:
        episode_id = choice.choice(sorted(self.running))  # type: ignore[attr-defined]
        group_id = self.running.pop(episode_id)
        self.ended += 1
        if self.slots.end(episode_id, outcome):
            assert group_id in self.holding
            self.slots.complete(group_id)
            self.complete.append(group_id)

    @precondition(lambda self: self.complete)
    @rule(is_trained=st.booleans())
    def settle_group(self, is_trained: bool) -> None:
        group_id = self.complete.pop(0)
        if is_trained:
            self.slots.ship([group_id], step=self.step)
            self.shipped[group_id] = self.step
            self.step += 1
            return
        self.slots.drop(group_id)
        self.holding.remove(group_id)

    @precondition(lambda self: self.version < self.step)
    @rule()
    def serve_next_version(self) -> None:
        self.version += 1
        trained = [g for g, step in self.shipped.items() if step < self.version]
        assert self.slots.release_trained(version=self.version) == len(trained)
        for group_id in trained:
            del self.shipped[group_id]
            self.holding.remove(group_id)

    @rule(max_staleness=st.integers(0, 2))
    def abandon_too_old(self, max_staleness: int) -> None:
        for group_id in self.slots.must_end_too_old(step=self.step, max_staleness=max_staleness):
            cancelled = self.slots.abandon(group_id)
            assert sorted(cancelled) == sorted(e for e, g in self.running.items() if g == group_id)
            self.planned = {e: g for e, g in self.planned.items() if g != group_id}
            self.holding.remove(group_id)

    @invariant()
    def every_started_episode_runs_or_ended_once(self) -> None:
        assert self.slots.started == self.started
        assert self.slots.ended.total() == self.ended
        assert self.slots.started - self.slots.ended.total() == len(self.running)

    @invariant()
    def every_slot_is_held_by_one_group(self) -> None:
        assert self.slots.free_slots == self.budget - len(self.holding)


LedgerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
