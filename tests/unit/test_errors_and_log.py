"""Every error has an exit code, and a log line cannot drive a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gradus import errors
from gradus.errors import ExitCode, GradusError, first_line
from gradus.log import (
    LogFormat,
    LogSettings,
    bounded,
    configure_logging,
    engine_handler,
    get_logger,
    note_step,
)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def subclasses() -> list[type[GradusError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, GradusError)]


@pytest.mark.parametrize("kind", subclasses(), ids=lambda kind: kind.__name__)
def test_the_tree_drawn_at_the_top_names_each_error_and_its_code(kind: type[GradusError]) -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if kind.__name__ in line]
    assert len(lines) == 1
    assert str(int(kind.exit_code)) in lines[0]


def test_a_fenced_process_may_be_started_again() -> None:
    assert errors.FencedError.exit_code is ExitCode.TRY_AGAIN


@pytest.mark.shows("SEC35")
@pytest.mark.usefixtures("root_logger")
def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("trainer")
    get_logger("gradus.test").warning("reply %s", "\x1b[2Jboom\x07")
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert "\\x1b[2Jboom\\x07" in printed
    assert "WARNING trainer gradus.test" in printed


@pytest.mark.shows("SEC12")
@pytest.mark.usefixtures("root_logger")
def test_what_goes_to_a_terminal_holds_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "of-the-house")
    configure_logging("serve")
    get_logger("gradus.test").warning("refused: %s", {"key": "of-the-house"})
    assert "refused: {'key': '(removed)'}" in capsys.readouterr().err


@pytest.mark.shows("F59", "SEC35")
@pytest.mark.parametrize("text", ["\x1b[2J", "a\u202eb", "\u2028", "\x85", "\ud800", "a\r\nb"])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_message_can_forge_a_line_or_drive_a_terminal(
    text: str, log_format: LogFormat, root_logger: logging.Logger
) -> None:
    written = io.StringIO()
    configure_logging("trainer", LogSettings("demo", format=log_format))
    with contextlib.redirect_stderr(written):
        root_logger.error("%s", text)
        root_logger.error("next")
    lines = [line for line in written.getvalue().split("\n") if not line.startswith("  | ")]
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    if log_format == "json":
        assert json.loads(lines[0])["message"] == text


def test_the_engine_only_warns_on_a_terminal(root_logger: logging.Logger) -> None:
    root_logger.handlers[:] = []
    handler = engine_handler()
    assert root_logger.level == logging.WARNING
    assert engine_handler() is handler


def test_a_record_names_the_step_that_was_noted(root_logger: logging.Logger) -> None:
    written = io.StringIO()
    configure_logging("trainer", LogSettings("demo"))
    with contextlib.redirect_stderr(written):
        note_step(4)
        root_logger.error("a")
    assert "Z ERROR demo trainer step=4 root: a\n" in written.getvalue()


def test_a_mistake_in_a_call_of_a_logger_ends_nothing(root_logger: logging.Logger) -> None:
    written = io.StringIO()
    configure_logging("trainer", LogSettings("demo"))
    with contextlib.redirect_stderr(written):
        root_logger.error("%d", "x")
        root_logger.error("next")
    assert "next" in written.getvalue()


@pytest.mark.usefixtures("root_logger")
def test_chatty_libraries_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("env")
    logging.getLogger("httpx").info("HTTP Request")
    get_logger("gradus.test").info("state changed")
    assert "HTTP Request" not in (printed := capsys.readouterr().err)
    assert "state changed" in printed


def test_what_libraries_say_behind_the_end_stays_out_of_the_log() -> None:
    program = (
        "import atexit, os, sys\n"
        "from gradus.log import end_quietly\n"
        "atexit.register(os.write, 2, b'leaked\\n')\n"
        "end_quietly()\n"
        "atexit.register(os.write, 2, b'own last word\\n')\n"
        "sys.stderr.write('story\\n')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ended.stderr == b"story\nown last word\n"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("\n  no room\nat all", "no room"),
        ("", "no message"),
        (ValueError("\n"), "ValueError"),
        (ValueError("x\x1b[2Jy"), r"x\x1b[2Jy"),
        ("x" * 400, f"{'x' * 300}…"),
    ],
)
def test_the_first_line_of_an_error_is_short_and_moves_no_cursor(
    said: Exception | str, line: str
) -> None:
    assert first_line(said) == line


def test_a_long_text_keeps_its_beginning_and_its_end_within_the_limit() -> None:
    text = bounded("begin" + "x" * 10_000 + "end", 100)
    assert len(text) <= 100
    assert (text[:5], text[-3:]) == ("begin", "end")
    assert bounded("short", 5) == "short"
