"""What the first groups say of the tasks of a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gradus.orchestrator.play.curriculum import TaskResult
from gradus.orchestrator.records.probe import StartProbe
from gradus.orchestrator.types import EpisodeOutcome


def told(
    groups: Sequence[Sequence[float]], *, truncated: int = 0, failed: int = 0, version: int = 0
) -> list[str]:
    lines: list[str] = []
    probe = StartProbe(lines.append)
    for rewards in groups:
        failures = ("TaskError",) * failed
        result = TaskResult(rewards=tuple(rewards), num_truncated=truncated, failures=failures)
        probe.add_result(result, version=version)
    probe.shipped()
    return lines


MIXED, NONE, ALL = [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]


def test_it_speaks_once_after_32_groups_or_with_a_batch_of_at_least_8() -> None:
    assert told([MIXED] * 7) == []
    assert told([MIXED] * 8) == [
        "probe     8 groups of 2 by version 0: pass@1 0.50, pass@2 1.00",
    ]
    assert told([MIXED] * 50)[0].startswith("probe     32 groups of 2")
    lines: list[str] = []
    probe = StartProbe(lines.append)
    for _ in range(100):
        probe.add_result(TaskResult(rewards=(0.0, 1.0)), version=0)
        probe.shipped()
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("outcomes", "is_quiet", "says"),
    [
        ("F" * 16, False, "16 of 16 episodes failed, threshold 0.5"),
        ("F" * 15, False, ""),
        ("K" * 16 + "F" * 16, False, "16 of 32 episodes failed"),
        ("K" * 17 + "F" * 16, False, ""),
        ("C" * 30 + "F" * 15, False, ""),
        ("F" * 40, True, ""),
    ],
)
def test_most_episodes_failing_is_told_before_the_first_record(
    outcomes: str, is_quiet: bool, says: str
) -> None:
    names = {
        "F": EpisodeOutcome.FAILED,
        "K": EpisodeOutcome.FINISHED,
        "C": EpisodeOutcome.CANCELLED,
    }
    lines: list[str] = []
    probe, later = (StartProbe(lines.append, is_quiet=is_quiet, is_over=it) for it in (False, True))
    for letter in outcomes:
        probe.ended("words", names[letter])
        later.ended("words", names[letter])
    assert (len(lines), says in "".join(lines)) == (1 if says else 0, True)
    probe.shipped()
    for _ in range(40):
        probe.ended("sums", EpisodeOutcome.FAILED)
    assert len(lines) == (1 if says else 0)


@pytest.mark.parametrize(
    ("groups", "flat", "advice"),
    [
        ([NONE] * 28 + [MIXED] * 4, "28 earn 0", "too hard"),
        ([ALL] * 20 + [MIXED] * 12, "20 earn 1", "too easy"),
        ([NONE] * 10 + [ALL] * 4 + [MIXED] * 18, "10 earn 0, 4 earn 1", "curriculum.type"),
        ([NONE] * 32, "32 earn 0", "too hard"),
        ([ALL] * 32, "32 earn 1", "too easy"),
        ([[0.4, 0.5]] + [[0.5, 0.5]] * 31, "31 earn 0.5", "nothing told these replies apart"),
        ([NONE] * 5 + [MIXED] * 27, "5 earn 0", ""),
    ],
)
def test_flat_groups_are_told_with_what_to_do(
    groups: list[list[float]], flat: str, advice: str
) -> None:
    lines = told(groups)
    assert f" of them are flat and teach nothing: {flat} throughout" in lines[1]
    assert all(len(line) <= 80 for line in lines)
    assert (advice in lines[2]) if advice else len(lines) == 2


def test_a_reward_that_never_differs_is_told_early_and_loudly() -> None:
    lines: list[str] = []
    probe = StartProbe(lines.append)
    for _ in range(8):
        probe.add_result(TaskResult(rewards=(0.5, 0.5)), version=0)
    assert lines[0] == "probe     8 groups of 2 by version 0: every reply earned 0.5"
    assert lines[1].startswith("warning   a reward that is the same for every reply")
    assert all(len(line) <= 80 for line in lines)


def test_rewards_near_zero_are_too_hard_however_much_they_differ() -> None:
    assert "`gradus sft` first" in told([[0.0, 0.01]] * 32)[-1]


def test_what_fails_or_is_cut_off_comes_before_difficulty() -> None:
    assert "fail" in told([NONE] * 32, failed=2)[-1]
    assert "100% of the replies are cut off" in told([NONE] * 32, truncated=2)[-1]


def test_other_rewards_are_means_and_the_versions_are_named() -> None:
    (line,) = told([[0.2, 0.8]] * 32, version=3)
    assert line.endswith("by versions 0 to 3: mean reward 0.50, best of each 0.80")


def test_a_group_whose_equal_rewards_train_is_not_flat() -> None:
    lines: list[str] = []
    probe = StartProbe(lines.append)
    for _ in range(32):
        probe.add_result(TaskResult(rewards=(1.0, 1.0)), version=0, trains=True)
    assert lines == ["probe     32 groups of 2 by version 0: pass@1 1.00, pass@2 1.00"]


def test_a_run_that_continues_and_groups_of_one_say_nothing() -> None:
    lines: list[str] = []
    probe = StartProbe(lines.append, is_over=True)
    for _ in range(32):
        probe.add_result(TaskResult(rewards=(0.0, 1.0)), version=0)
    assert lines == told([[1.0]] * 32) == []
