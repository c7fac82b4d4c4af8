"""The end of a log, and the cause that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.log_tail import last_cause, last_lines, last_rank_exit_code


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_last_lines_leave_out_empty_ones(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "".join(f"line {n}\n\n" for n in range(50)))
    assert last_lines(log, count=2) == ["line 48", "line 49"]


def test_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "x" * 1_000_000 + "\nthe end\n")
    lines = last_lines(log)
    assert lines[-1] == "the end"
    assert max(len(line) for line in lines) < 500


def test_a_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "log") == []
    assert last_cause(tmp_path / "log") == ""


def test_control_characters_cannot_reach_a_terminal(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "\x1b[2Jgone\n")
    assert last_lines(log) == ["\\x1b[2Jgone"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "loading\ngradus trainer: model 'x' is missing\ntorchrun: failed\n",
            "model 'x' is missing",
        ),
        ("gradus env-server: a\ngradus env-server: b\n", "b"),
        ("Traceback\nValueError: seven\n", "ValueError: seven"),
    ],
)
def test_the_cause_is_the_processs_own_word_else_its_last_line(
    tmp_path: Path, text: str, cause: str
) -> None:
    assert last_cause(write(tmp_path / "log", text)) == cause


TORCHRUN_REPORT = """
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 22603)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 78 (pid: 22602)
  error_file: <N/A>
============================================================
"""


def test_torchruns_report_names_the_exit_code_of_the_guilty_rank(tmp_path: Path) -> None:
    assert last_rank_exit_code(write(tmp_path / "log", TORCHRUN_REPORT)) == 78


def test_a_log_without_a_report_of_torchrun_names_no_rank(tmp_path: Path) -> None:
    assert last_rank_exit_code(write(tmp_path / "log", "my exitcode  : 3\n")) is None
