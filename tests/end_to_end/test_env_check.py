"""`gradus env check` on an environment with known faults, each found and named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from running import TEST_PATH

from gradus.cli.env import sources_of, subject_of
from gradus.conformance.check import describe_reading
from gradus.conformance.findings import Checked, Outcome
from gradus.conformance.lifecycle import left_by_episodes
from gradus.conformance.reading import Reading, Subject
from gradus.conformance.stage import Stage
from gradus.conformance.tasks import TaskChecks

pytestmark = pytest.mark.end_to_end

Lines = dict[str, dict[str, Checked]]


def subject(*words: str) -> Subject:
    (source,) = sources_of([*words, "--agent.timeout.scoring", "0.5"])
    found = subject_of(source)
    return Subject(found.process, {**found.variables, "PYTHONPATH": TEST_PATH})


async def play_faults(folder: Path) -> Lines:
    """Fault → the lines of its task by name. A dead tool server comes last: all tasks share it.

    The prompts are other ones at each reading, which is the fault of the set as a whole.
    """
    faulty = subject("gradus-test-faulty", "--taskset.is_random", "true")
    seen = Reading(faulty, folder).result()
    found: Lines = {"prompts_differ": {line.check: line for line in describe_reading(seen)}}
    async with Stage(faulty, folder, seen) as stage:
        number = 0
        while (task := await stage.task(number)).task_data["fault"] != "tool_server_dies":
            checks = TaskChecks(stage)
            lines = [line async for line in checks.rewards(task, {})]
            if task.task_data["fault"] == "shares_state":
                lines = [await checks.at_once([task, await stage.task(number + 1)])]
            if task.task_data["fault"] == "none":
                lines.append(await checks.at_once([task, await stage.task(number + 1)]))
            if task.task_data["fault"] == "leaks_a_process":
                lines = [await left_by_episodes(stage, checks.known, len(checks.played))]
            found[task.task_data["fault"]] = {line.check: line for line in lines}
            number += 1
        checks = TaskChecks(stage)
        lines = [line async for line in checks.lines(task, {})]
        found["tool_server_dies"] = {line.check: line for line in lines}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return asyncio.run(play_faults(tmp_path_factory.mktemp("stage")))


def test_nothing_is_said_against_a_sound_task(found: Lines) -> None:
    assert {line.outcome for line in found["none"].values()} == {Outcome.OK}
    assert found["none"]["gold reply"].seen == "its field 'answer' as {}: reward 1"


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        ("pays_for_the_echo", "echoed prompt", "as much as the perfect reply"),
        ("reward_is_nan", "empty reply", "'right' is nan"),
        ("exits_in_scoring", "gold reply", "asked the interpreter to exit"),
        ("hangs_in_scoring", "gold reply", "the episode fails"),
        ("reads_only_utf8", "invalid UTF-8", "AssertionError"),
        ("leaks_a_process", "leaves nothing", "sleep 600"),
        ("shares_state", "at once", "with the same reply"),
        ("tool_server_dies", "tool bad_leave", "the episode fails"),
    ],
)
def test_a_fault_is_named(found: Lines, fault: str, check: str, said: str) -> None:
    line = found[fault][check]
    assert line.outcome is Outcome.BROKEN
    assert said in line.seen
    assert line.advice


def test_a_reward_beyond_the_usual_range_is_noted(found: Lines) -> None:
    line = found["reward_is_huge"]["gold reply"]
    assert (line.outcome, line.seen) == (
        Outcome.NOTE,
        "the reward of agent is 100, outside [-1, 1]",
    )


def test_tasks_that_differ_from_one_reading_to_the_next_are_named(found: Lines) -> None:
    line = found["prompts_differ"]["same tasks"]
    assert line.outcome is Outcome.BROKEN
    assert "task 0 has another 'prompt'" in line.seen
