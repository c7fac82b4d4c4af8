"""The end of a log, and the cause that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.processes.log_tail import (
    find_cause,
    find_crash,
    last_lines,
    last_rank_exit_code,
    log_end,
)


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
    assert find_cause(tmp_path / "log") == ""


def test_control_characters_cannot_reach_a_terminal(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "\x1b[2Jgone\n")
    assert last_lines(log) == ["\\x1b[2Jgone"]


LEAKS = """\
nanobind: leaked 3 instances!
 - leaked instance 0x7f0c of type "xgrammar.Grammar"
nanobind: leaked 2 types!
 - leaked type "xgrammar.Grammar"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_leaks_of_a_library_push_no_line_out_of_the_tail(tmp_path: Path) -> None:
    log = write(tmp_path / "log", f"the story\n{LEAKS}")
    assert last_lines(log, count=1) == ["the story"]


TORCHRUN_REPORT = """
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 22603)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_01:00:00
  host      : machine
  rank      : 0 (local_rank: 0)
  exitcode  : 78 (pid: 22602)
  error_file: <N/A>
============================================================
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "run.py", line 3, in <module>
    raise error
"""
PROGRESS = "2026-11-22T01:02:03.004Z INFO demo trainer step=3 gradus.trainer: step 3 done\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param(
            "loading\ngradus trainer: model 'x' is missing\ntorchrun: failed\n",
            "model 'x' is missing",
            id="its own word",
        ),
        pytest.param(
            "gradus trainer: the disk is full\ngradus trainer: rank 0 has left\n",
            "the disk is full",
            id="the first of several ranks",
        ),
        pytest.param(
            "gradus trainer: these keys are wrong:\ngradus trainer:   lr\ngradus trainer: .\n",
            "these keys are wrong:",
            id="the first of several lines",
        ),
        pytest.param(
            "gradus trainer: internal error: ValueError:\ngradus trainer: no room\n",
            "internal error: ValueError: no room",
            id="a message that begins with a line break",
        ),
        pytest.param(f"{TRACEBACK}ValueError: seven\n", "ValueError: seven", id="a traceback"),
        pytest.param(
            f"{TRACEBACK}ValueError: seven\nis too\n  much\n{LEAKS}",
            "ValueError: seven",
            id="a message of several lines",
        ),
        pytest.param(
            f"{TRACEBACK}torch.cuda.OutOfMemoryError: 3 GiB\n{TORCHRUN_REPORT}",
            "torch.cuda.OutOfMemoryError: 3 GiB",
            id="above the report of torchrun",
        ),
        pytest.param(
            "[rank0]: Traceback (most recent call last):\n"
            '[rank0]:   File "a.py", line 1, in b\n'
            "[rank0]: RuntimeError: [1] is gone\n",
            "RuntimeError: [1] is gone",
            id="behind the name of a rank",
        ),
        pytest.param(
            f"usage: trainer\n{PROGRESS}", "usage: trainer", id="before a line of progress"
        ),
        pytest.param(f"{PROGRESS}{TORCHRUN_REPORT}", "", id="nothing but progress and a report"),
        pytest.param(PROGRESS + LEAKS, "", id="nothing but progress and leaks"),
    ],
)
def test_the_cause_is_the_first_line_of_the_error(tmp_path: Path, text: str, cause: str) -> None:
    assert find_cause(write(tmp_path / "log", text)) == cause


def test_an_engine_that_points_above_is_believed_less_than_what_stands_there(
    tmp_path: Path,
) -> None:
    text = (
        f"{TRACEBACK}ValueError: no room for the cache\n"
        f"{TRACEBACK}RuntimeError: Engine failed. See root cause above.\n"
        "gradus inference: internal error: RuntimeError: Engine failed. See root cause above.\n"
    )
    assert find_cause(write(tmp_path / "log", text)).startswith("ValueError: no room for the cache")


def test_what_an_earlier_launch_wrote_is_no_cause(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "gradus trainer: the disk is full\n")
    since = log_end(log)
    assert find_cause(log, since=since) == ""
    assert last_lines(log, since=since) == []


def test_a_crash_is_told_as_the_interpreter_told_it(tmp_path: Path) -> None:
    log = write(tmp_path / "log", "Fatal Python error: Segmentation fault\n\nThread 0x1:\n  a\n")
    assert find_crash(log) == "Fatal Python error: Segmentation fault"


def test_torchruns_report_names_the_exit_code_of_the_guilty_rank(tmp_path: Path) -> None:
    assert last_rank_exit_code(write(tmp_path / "log", TORCHRUN_REPORT)) == 78


def test_a_log_without_a_report_of_torchrun_names_no_rank(tmp_path: Path) -> None:
    assert last_rank_exit_code(write(tmp_path / "log", "my exitcode  : 3\n")) is None


def test_the_cause_of_an_exception_stands_below_its_line_of_asterisks(tmp_path: Path) -> None:
    log = tmp_path / "env.log"
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1, in load']
    lines += ["LookupError: ", "*" * 70, "  Resource words not found.", "*" * 70]
    log.write_text("\n".join(lines) + "\n")
    assert find_cause(log) == "LookupError: Resource words not found."
