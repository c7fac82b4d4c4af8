"""The checker finds what must not be, and follows only the lineage that survives."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gradus.orchestrator.records.journal import check_journal, surviving

Line = dict[str, Any]


def line(event: str, **fields: Any) -> Line:
    return {"event": event, "term": 1, "time": 0.0, **fields}


def group(name: str = "g000000", *, outcome: str = "finished") -> list[Line]:
    """One group of one episode, played to its end."""
    return [
        line("group_opened", group=name, source="words", index=0),
        line("episode_started", episode=f"{name}.0", version=0),
        line("episode_ended", episode=f"{name}.0", outcome=outcome),
    ]


def shipped(step: int, name: str) -> Line:
    return line("batch_shipped", step=step, groups=[name], samples=[f"{name}.0/0/0"])


SOUND = [
    line("run_started"),
    *group("g000000"),
    shipped(0, "g000000"),
    line("policy_applied", version=1),
    *group("g000001"),
    line("group_dropped", group="g000001", reasons={}),
    line("run_ended", step=0),
]


def test_a_sound_journal_has_no_problem_and_is_counted() -> None:
    found = check_journal(SOUND)
    assert found.problems == []
    assert found.ended == {"finished": 2}
    assert found.groups == {"g000000": "trained", "g000001": "dropped"}
    assert found.batches == {0: ["g000000.0/0/0"]}


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ([line("episode_started", episode="g000000.0", version=0)], "started twice"),
        ([line("episode_ended", episode="g9.0", outcome="failed")], "without a start, or twice"),
        (group("g000000"), "opened twice"),
        ([shipped(1, "g000000")], r"trains in batch 0 and 1"),
        ([shipped(5, "g000002")], "batch 5 came after 1 batches"),
        ([line("samples_dropped", samples=["g000000.0/0/0"])], "dropped after it trained"),
        ([line("group_abandoned", group="g000000")], "abandoned and was not open"),
        ([line("policy_applied", version=1)], "version 1 was applied after 1"),
        ([line("episode_started", episode="g000001.1", version=0)], "has no end"),
        (group("g000003")[:1], "neither trained, dropped nor abandoned"),
        ([*group("g000004", outcome="failed"), shipped(1, "g000004")], "did not finish"),
        (
            [*group("g7"), line("samples_dropped", samples=["g7.0/0/0"]), shipped(1, "g7")],
            "trains in batch 1 and was dropped",
        ),
    ],
)
def test_what_must_not_be_is_named(extra: list[Line], problem: str) -> None:
    found = check_journal([*SOUND[:-1], *extra, SOUND[-1]])
    assert any(re.search(problem, p) for p in found.problems), found.problems


def test_a_journal_that_was_cut_off_may_have_open_ends() -> None:
    found = check_journal(SOUND[:3])
    assert found.problems == []
    assert found.open_episodes == {"g000000.0"}


def test_after_a_resume_only_the_surviving_lineage_counts() -> None:
    resumed = line("run_resumed", step=1, lines=6, reopened=[], cut_off=[])
    lines = [*SOUND[:-1], resumed, *group("g000001"), shipped(1, "g000001"), line("run_ended")]
    found = check_journal(lines)
    assert found.problems == []
    assert found.groups == {"g000000": "trained", "g000001": "trained"}


def test_groups_that_are_played_again_lose_all_their_lines() -> None:
    opened = group("g000001")[:2]
    resumed = line("run_resumed", step=1, lines=8, reopened=["g000001"], cut_off=[])
    lines = [*SOUND[:6], *opened, resumed, *group("g000001"), shipped(1, "g000001")]
    assert check_journal(lines).problems == []
    assert sum(r["event"] == "group_opened" for r in surviving(lines)) == 2


def test_a_batch_that_is_sent_again_after_a_resume_is_the_same_batch() -> None:
    resumed = line("run_resumed", step=0, lines=5, reopened=[], cut_off=[])
    found = check_journal([*SOUND[:5], resumed, SOUND[4]])
    assert found.problems == []
    assert list(found.batches) == [0]


def test_what_ran_of_an_abandoned_group_is_cancelled_by_the_restart() -> None:
    lines = [*group("g000000")[:2], line("group_abandoned", group="g000000")]
    resumed = line("run_resumed", step=0, lines=3, reopened=[], cut_off=["g000000"])
    found = check_journal([*lines, resumed, line("run_ended")])
    assert found.problems == []
    assert found.ended == {"cancelled": 1}


def test_a_new_start_voids_everything_before_it() -> None:
    assert check_journal([*SOUND, *SOUND]).groups == check_journal(SOUND).groups


def test_a_second_resume_counts_lines_of_the_whole_file() -> None:
    first = line("run_resumed", step=1, lines=6, reopened=[], cut_off=[])
    second = line("run_resumed", step=1, lines=6, reopened=[], cut_off=[])
    kept = surviving([*SOUND[:6], *group("g000008"), first, *group("g000009"), second])
    assert [r["event"] for r in kept] == [*[r["event"] for r in SOUND[:6]], "run_resumed"]
