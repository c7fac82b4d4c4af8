"""A journal gives back the decisions that were written into it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import CorruptStateError
from gradus.orchestrator.records.journal import Journal, JournalEvent, read_journal
from gradus.orchestrator.types import TaskPointer
from gradus_lab.replay.journal_reader import (
    CutBatch,
    Decision,
    GradedGroup,
    RecordKey,
    read_decisions,
)

GROUPS_PER_BATCH = 2


def graded(number: int, *, samples: int = 2) -> GradedGroup:
    name = f"g{number:06d}"
    episodes = tuple(RecordKey(1, f"{name}.{play}") for play in range(2))
    pointer = TaskPointer("words", number // 5, number % 5, attempt=number % 2)
    ids = tuple(f"{name}.{sample}/0/0" for sample in range(samples))
    return GradedGroup(name, pointer, f"key-{number}", episodes, ids)


def random_decisions(source: random.Random) -> list[Decision]:
    """Batches of two groups in random order; some groups keep nothing, some are cut much later."""
    order: list[Decision] = []
    waiting: list[GradedGroup] = []
    step = 0
    for number in source.sample(range(12), 12):
        group = graded(number, samples=source.choice([0, 1, 2]))
        order.append(group)
        waiting += [group] if group.samples else []
        if len(waiting) >= GROUPS_PER_BATCH and source.random() < 0.5:
            chosen = sorted(waiting[:GROUPS_PER_BATCH], key=lambda it: it.id)
            del waiting[:GROUPS_PER_BATCH]
            samples = tuple(sample for it in chosen for sample in it.samples)
            groups = tuple(it.id for it in chosen)
            order.append(CutBatch(step, groups, samples, {"token_ids": f"{step:x}"}))
            step += 1
    return order


def write_group(journal: Journal, group: GradedGroup) -> None:
    journal.write(
        JournalEvent.GROUP_OPENED,
        group=group.id,
        source=group.pointer.source,
        index=group.pointer.index,
        key=group.task_key,
        pass_number=group.pointer.pass_number,
        attempt=group.pointer.attempt,
    )
    for episode in group.episodes:
        journal.write(JournalEvent.EPISODE_STARTED, episode=episode.id, version=0)
    for episode in group.episodes:
        journal.write(JournalEvent.EPISODE_ENDED, episode=episode.id, outcome="finished", version=0)
    journal.write(JournalEvent.GROUP_GRADED, group=group.id, samples=group.samples, error=None)
    if not group.samples:
        journal.write(JournalEvent.GROUP_DROPPED, group=group.id, reasons={})


def write_decisions(path: Path, decisions: list[Decision]) -> list[dict[str, Any]]:
    """As an orchestrator would: a batch is shipped some lines after it was cut."""
    with Journal(path, term=1, now=lambda: 0.0) as journal:
        journal.write(JournalEvent.RUN_STARTED, version=0)
        for decision in decisions:
            if isinstance(decision, GradedGroup):
                write_group(journal, decision)
                continue
            journal.write(JournalEvent.BATCH_CUT, step=decision.step, groups=decision.groups)
            journal.write(
                JournalEvent.BATCH_SHIPPED,
                step=decision.step,
                groups=decision.groups,
                samples=decision.samples,
                digests=decision.digests,
            )
            version = decision.step + 1
            journal.write(JournalEvent.POLICY_APPLIED, version=version, weights=f"w{version}")
    return read_journal(path)


@given(seed=st.integers(0, 1 << 32))
def test_decisions_survive_the_journal(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    decisions = random_decisions(random.Random(seed))
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    found = read_decisions(write_decisions(path, decisions))
    batches = [it for it in decisions if isinstance(it, CutBatch)]
    needed = decisions[: decisions.index(batches[-1]) + 1] if batches else []
    assert list(found.order) == needed
    assert (found.num_batches, found.num_trained) == (len(batches), len(batches))
    assert found.weights == {batch.step + 1: f"w{batch.step + 1}" for batch in batches}
    assert not found.is_finished


def two_batches(tmp_path: Path) -> list[dict[str, Any]]:
    order: list[Decision] = []
    for step in range(2):
        groups = [graded(2 * step), graded(2 * step + 1)]
        samples = tuple(sample for group in groups for sample in group.samples)
        order += [*groups, CutBatch(step, tuple(g.id for g in groups), samples, {})]
    return write_decisions(tmp_path / "journal.jsonl", order)


def test_only_what_the_first_steps_need_is_given(tmp_path: Path) -> None:
    decisions = read_decisions(two_batches(tmp_path))
    assert [type(it).__name__ for it in decisions.first(1)] == ["GradedGroup"] * 2 + ["CutBatch"]
    assert decisions.first(2) == decisions.order
    assert decisions.terms == (1,)


def test_a_batch_that_was_sent_and_not_trained_is_told_apart(tmp_path: Path) -> None:
    records = two_batches(tmp_path)
    assert records.pop()["event"] == "policy_applied"
    decisions = read_decisions(records)
    assert (decisions.num_batches, decisions.num_trained) == (2, 1)
    assert records.pop()["event"] == "batch_shipped"
    assert read_decisions(records).num_batches == 1


def test_a_launch_that_only_trained_what_was_cut_before_counts(tmp_path: Path) -> None:
    records = two_batches(tmp_path)
    assert records[-2]["event"] == "batch_shipped"
    resumed = {"event": "run_resumed", "lines": len(records) - 2, "reopened": [], "cut_off": []}
    again = [line | {"term": 2} for line in records[-2:]]
    decisions = read_decisions([*records, resumed | {"term": 2, "step": 1}, *again])
    assert (decisions.terms, decisions.num_trained) == ((1, 2), 2)


def test_a_run_is_finished_when_its_journal_says_so(tmp_path: Path) -> None:
    records = two_batches(tmp_path)
    end = {"event": "run_ended", "term": 1, "step": 1}
    assert read_decisions([*records, end]).is_finished


@pytest.mark.parametrize(
    ("event", "field", "noticed"),
    [
        ("group_opened", "key", "group_opened"),
        ("batch_shipped", "digests", "batch_shipped"),
        ("policy_applied", "weights", "policy_applied"),
    ],
)
def test_a_journal_that_says_too_little_is_refused(
    tmp_path: Path, event: str, field: str, noticed: str
) -> None:
    records = two_batches(tmp_path)
    del next(line for line in records if line["event"] == event)[field]
    with pytest.raises(CorruptStateError, match=f"'{noticed}', does not say enough.*{field}"):
        read_decisions(records)


def test_batches_without_graded_groups_are_left_to_fail_when_they_are_cut(tmp_path: Path) -> None:
    records = [line for line in two_batches(tmp_path) if line["event"] != "group_graded"]
    assert [type(it).__name__ for it in read_decisions(records).order] == ["CutBatch"] * 2


def test_a_journal_that_breaks_its_rules_is_refused(tmp_path: Path) -> None:
    records = two_batches(tmp_path)
    twice = next(line for line in records if line["event"] == "group_opened")
    with pytest.raises(CorruptStateError, match="contradicts itself in 1 places: group g000000"):
        read_decisions([*records, twice])


def test_a_batch_that_was_cut_otherwise_than_it_was_sent_is_refused(tmp_path: Path) -> None:
    records = two_batches(tmp_path)
    cut = next(line for line in records if line["event"] == "batch_cut")
    cut["groups"] = ["g000001", "g000000"]
    with pytest.raises(CorruptStateError, match="batch 0 was cut from groups"):
        read_decisions(records)
