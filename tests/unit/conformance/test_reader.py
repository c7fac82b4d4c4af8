"""What the check reads of an environment before it plays it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gradus.cli.env import sources_of, subject_of
from gradus.conformance.check import describe_reading
from gradus.conformance.findings import Outcome
from gradus.conformance.reader import read
from gradus.errors import ConfigError

WRITE_ROWS = """
import json
rows = [json.dumps({"prompt": f"task {n}"}) for n in range(4)]
open("rows.jsonl", "w").write("\\n".join(rows))
"""


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rate.py").write_text("def rate(reply, row):\n    return 1.0\n")
    return tmp_path


def reading_of(*words: str) -> dict[str, Any]:
    """What the reader sees of rows that the source's own command makes."""
    command = json.dumps([sys.executable, "-S", "-c", WRITE_ROWS])
    rows = ["--taskset.path", "rows.jsonl", "--taskset.reward", "rate.py:rate"]
    (source,) = sources_of(["jsonl", *rows, "--prepare", command, *words])
    return read(subject_of(source).process)


def test_the_command_of_a_source_runs_before_it_is_loaded() -> None:
    assert reading_of()["num_tasks"] == 4


def test_only_the_selected_tasks_are_read_and_both_times_the_same() -> None:
    seen = reading_of("--tasks.shuffle", "1", "--tasks.limit", "2")
    assert len(seen["again"]) == 2
    assert [task["task_data"] for task in seen["tasks"]] == seen["again"]


def test_a_task_without_the_headers_that_it_should_carry_is_named() -> None:
    lines = describe_reading(reading_of("--headers_from", "routing"))
    (line,) = [line for line in lines if line.check == "headers"]
    assert line.outcome is Outcome.BROKEN
    assert "its data has no field 'routing'" in line.seen
    assert [line for line in describe_reading(reading_of()) if line.check == "headers"] == []


def test_conversations_have_an_end_that_is_the_authors_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settings(*words: str) -> dict[str, Any]:
        (source,) = sources_of(words)
        found: dict[str, Any] = read(subject_of(source).process)["settings"]
        return found

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "environments"))
    pair = settings("gradus-test-pair")
    assert "max_turns" not in pair["one"], "verifiers merges the author's 2 in"
    assert settings("reverse-text")["agent"]["max_turns"] == 64
    assert settings("reverse-text", "--agent.max-turns", "5")["agent"]["max_turns"] == 5
    with pytest.raises(ConfigError, match=r"`agent.max_turns` has no effect.* one, two"):
        settings("gradus-test-pair", "--agent.max-turns", "5")


def test_a_file_with_sources_alone_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "env.toml"
    file.write_text('[[orchestrator.train.env]]\nid = "reverse-text"\nagent.max_turns = 2\n')
    (source,) = sources_of(["@", str(file)])
    assert (source.id, source.agent.max_turns) == ("reverse-text", 2)
