"""The numbers of an evaluation as a table, while it runs and in the end."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gradus.launch.episodes import (
    PROGRESS_NAME,
    RESULTS_NAME,
    Episodes,
    LiveTable,
    TableView,
    _write,
    error_lines,
    is_complete,
    lowest_replies,
    progress_line,
    table,
)
from gradus.launch.summary import PhaseSeconds
from gradus.run.paths import RunDirectory

ROW: dict[str, Any] = {
    "name": "words",
    "planned_episodes": 8,
    "num_episodes": 4,
    "group_size": 4,
    "avg": 0.5,
    "pass_at": {"1": 0.5, "4": 0.75},
    "pass_all": {"1": 0.5, "4": 0.25},
    "errors": {"ProviderError": 1},
    "truncated_share": 0.25,
    "mean_length_tokens": 12.4,
    "values": {"agent/first/reward": 0.25, "agent/first/reward/chips": 2.0},
    "is_shared": False,
}
PROGRESS = {
    "environments": [ROW],
    "overall": ROW | {"name": "overall"},
    "error_messages": {"ProviderError": "upstream 500:\x1b[2J scripted"},
}


def test_the_table_has_a_column_for_each_number() -> None:
    head, row = table(PROGRESS, width=160)
    assert head.split() == [
        *("environment", "episodes", "avg", "pass@1", "pass@4", "pass^4"),
        *("errors", "truncated", "length"),
    ]
    assert row.split() == [
        *("words", "4/8", "0.500", "(@4)", "0.500", "0.750", "0.250", "1", "0.250", "12")
    ]


def test_an_average_stands_with_half_of_its_interval() -> None:
    _, row = table({"environments": [ROW | {"low": 0.4, "high": 0.6}]})
    assert row.split()[2:6] == ["0.500", "±", "0.100", "(@4)"]
    _, row = table({"environments": [ROW | {"low": 0.5, "high": 0.5}]})
    assert "±" not in row


def ended(folder: Path, episodes: Episodes) -> list[str]:
    """What is printed of a finished evaluation."""
    whole = ROW | {"num_episodes": 8, "errors": {}, "low": 0.4, "high": 0.6}
    results = {"environments": [whole], "overall": whole, "error_messages": {}}
    (folder / "results.json").write_text(json.dumps(results))
    printed = io.StringIO()
    TableView(printed, RunDirectory(folder), episodes).sum_up(
        "done", None, PhaseSeconds(0.0, 0.0, 0.0)
    )
    return printed.getvalue().splitlines()


def test_an_evaluation_ends_with_what_to_type_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    *_, interval, _, compare, report = ended(tmp_path, Episodes())
    assert interval.endswith("half of the 95 % interval, over tasks")
    assert f"gradus compare {tmp_path.name} OTHER" in compare
    assert f"gradus view {tmp_path.name} " in report


def test_a_function_of_python_is_told_no_command_and_replies_no_table(tmp_path: Path) -> None:
    assert "next" not in "\n".join(ended(tmp_path, Episodes(from_python=True)))
    assert ended(tmp_path, Episodes(from_python=True, is_rated=False)) == []
    assert progress_line(PROGRESS, is_rated=False) == "episodes 4/8  errors 1"


def test_a_narrow_terminal_has_the_table_without_the_last_columns() -> None:
    head, row = table(PROGRESS, width=80)
    assert "pass^4" not in head
    assert head.split()[-3:] == ["errors", "truncated", "length"]
    assert row.split()[-3:] == ["1", "0.250", "12"]
    assert max(len(head), len(row)) <= 80


def test_several_environments_have_a_line_over_all() -> None:
    both = PROGRESS | {"environments": [ROW, ROW | {"name": "sums", "avg": None}]}
    assert [line.split()[0] for line in table(both)] == ["environment", "words", "sums", "overall"]


def test_an_average_over_different_group_sizes_shows_no_k() -> None:
    _, row = table({"environments": [ROW | {"group_size": None}]})
    assert row.split()[2:4] == ["0.500", "0.500"]


def test_the_agents_of_a_game_have_a_line_each() -> None:
    _, game, agent, words = table(
        {"environments": [ROW | {"is_shared": True, "avg": None}, ROW], "overall": ROW}
    )[:4]
    assert game.split()[2] == "-"
    assert agent.split() == ["first", "0.250"]
    assert words.split()[0] == "words"


def test_errors_are_counted_by_kind_and_cannot_move_the_cursor() -> None:
    assert error_lines(PROGRESS) == ["error       1 x ProviderError: upstream 500: [2J scripted"]


def test_an_evaluation_with_errors_or_holes_is_not_complete() -> None:
    whole = ROW | {"num_episodes": 8, "errors": {}}
    assert is_complete({"overall": whole})
    assert not is_complete({"overall": whole | {"num_episodes": 7}})
    assert not is_complete({"overall": whole | {"errors": {"TaskError": 1}}})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_table_and_a_file_gets_lines(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        live = LiveTable(stream)
        live.show(path)
        path.write_text(json.dumps(PROGRESS))
        live.show(path)
        live.clear()
    assert terminal.getvalue().startswith(table(PROGRESS)[0])
    assert "\x1b[2A" in terminal.getvalue()
    assert file.getvalue() == f"{progress_line(PROGRESS)}\n"


def test_a_notice_is_not_written_into_the_table(tmp_path: Path) -> None:
    terminal = Terminal()
    view = TableView(terminal, RunDirectory(tmp_path))
    (tmp_path / "progress.json").write_text(json.dumps(PROGRESS))
    view.show()
    (tmp_path / "notices.log").write_text("first TaskError\n")
    view.show()
    head, two_lines_up, notice = table(PROGRESS)[0], "\x1b[2A", "first TaskError"
    shown = terminal.getvalue()
    assert shown.index(head) < shown.index(two_lines_up) < shown.index(notice)


def reply_record(key: str, score: float | None, text: str, *, ok: bool = True) -> str:
    nodes = [
        {"message": {"role": "user", "content": "?"}, "sampled": False},
        {"message": {"role": "assistant", "content": text}, "sampled": True},
    ]
    trace = {"nodes": nodes, "rewards": {"right": {"score": score, "weight": 2.0}}}
    return json.dumps({"ok": ok, "task": {"key": key}, "traces": [trace]}) + "\n"


def test_the_lowest_replies_of_different_tasks_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    lines = [
        reply_record("a", 0.5, "half"),
        reply_record("b", 0.0, "worst\x1b[2J\n  of all"),
        reply_record("b", 0.1, "the same task"),
        reply_record("c", None, "x" * 1_000),
        reply_record("d", 0.0, "failed", ok=False),
        reply_record("e", 0.2, ""),
    ]
    path.write_text("".join(lines) + '{"torn')
    asked = "            asked   ?"
    assert lowest_replies(path, 3) == [
        *("reply       reward 0.000", asked, "            replied worst [2J of all"),
        *("reply       reward 0.000", asked, f"            replied ...{'x' * 300}"),
        *("reply       reward 0.400", asked, "            replied (nothing)"),
    ]


def test_a_reply_stands_between_its_question_and_what_was_wanted(tmp_path: Path) -> None:
    record = json.loads(reply_record("a", 0.0, "4"))
    record["task"]["data"] = {"answer": 5}
    nodes = record["traces"][0]["nodes"]
    nodes[:0] = [{"message": {"role": "system", "content": "Count."}, "sampled": False}]
    nodes += [
        {"message": {"role": "user", "content": "Are you sure?"}, "sampled": False},
        {"message": {"role": "assistant", "content": "Yes."}, "sampled": True},
        {"message": {"role": "user", "content": "Too late."}, "sampled": False},
    ]
    (tmp_path / "eval.jsonl").write_text(json.dumps(record) + "\n")
    assert lowest_replies(tmp_path / "eval.jsonl", 1)[1:] == [
        "            asked   Are you sure?",
        "            wanted  5",
        "            replied Yes.",
    ]


def test_without_episodes_or_wishes_no_reply_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    assert lowest_replies(path, 3) == []
    path.write_text(reply_record("a", 0.0, "x"))
    assert lowest_replies(path, 0) == []


def test_an_evaluation_that_continues_has_no_results_of_the_one_before(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.ready.mkdir()
    for name in (PROGRESS_NAME, RESULTS_NAME):
        (tmp_path / name).write_text("{}")
    _write(run_dir, {})
    assert not (tmp_path / PROGRESS_NAME).exists()
    assert not (tmp_path / RESULTS_NAME).exists()
