"""What a person is told of the first failure of each kind."""

from __future__ import annotations

from pathlib import Path

from gradus.orchestrator.failures import FirstFailures
from gradus.orchestrator.types import Failure
from gradus.run.paths import RunDirectory


def told(folder: Path, message: str) -> list[str]:
    failures = FirstFailures(RunDirectory(folder), "train")
    for number in range(2):
        failures.add("tasks", f"task {number}", Failure("RewardError", message))
    return (folder / "notices.log").read_text().splitlines()


def test_a_reward_that_fails_is_told_once_with_its_lines(tmp_path: Path) -> None:
    lines = ['  File "mine.py", line 3, in score', "    return 1 / 0"]
    assert told(tmp_path, "\n".join(["reward 'score' failed: ZeroDivisionError", *lines])) == [
        "first RewardError in train environment 'tasks': reward 'score' failed: ZeroDivisionError "
        "(task 0)",
        *lines,
    ]


def test_a_reward_that_fails_in_an_evaluation_too_is_told_once(tmp_path: Path) -> None:
    failure = Failure("RewardError", "reward 'score' failed: ZeroDivisionError")
    for _ in ("a launch", "another"):
        both = [FirstFailures(RunDirectory(tmp_path), purpose) for purpose in ("eval", "train")]
        for failures in both:
            failures.add("tasks", "task 0", failure)
    assert [failures.first for failures in both] == [failure.message] * 2
    assert len((tmp_path / "notices.log").read_text().splitlines()) == 2  # one of each launch


def test_each_way_in_which_a_reward_fails_is_told_once_up_to_four(tmp_path: Path) -> None:
    failures = FirstFailures(RunDirectory(tmp_path), "train")
    said = ["returned 'x'", "returned 0.1e3 twice", "returned 7 twice", "returned None", "key 'a'"]
    for message in [*said, *said, "returned []", "returned ()"]:
        failures.add("tasks", "task 0", Failure("RewardError", message))
        failures.add("tasks", "task 0", Failure("TaskError", message))
    lines = (tmp_path / "notices.log").read_text().splitlines()
    assert [it for it in lines if "TaskError" in it] == [lines[1]]
    told = [it.partition(": ")[2] for it in lines if "RewardError" in it]
    assert told == [f"{it} (task 0)" for it in (said[0], said[1], said[3], said[4])]


def test_no_line_of_a_failure_drives_the_terminal(tmp_path: Path) -> None:
    lines = told(tmp_path, 'failed\n  File "x", line 1, in f\n    \x1b]0;mine\x07\x1b[2J')
    assert lines[1:] == ['  File "x", line 1, in f', r"    \x1b]0;mine\x07\x1b[2J"]


def test_other_long_messages_are_told_by_their_first_line(tmp_path: Path) -> None:
    assert len(told(tmp_path, "no answer\nand so on\nand on")) == 1


def test_of_a_deep_stack_only_some_lines_are_told(tmp_path: Path) -> None:
    assert len(told(tmp_path, "too deep\n" + '  File "x", line 1, in f\n' * 99)) < 20
