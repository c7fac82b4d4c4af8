"""One word chooses a command; every error is lines on stderr and an exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

import gradus
from gradus.cli.main import COMMANDS, INTERRUPTED, ROLES, main
from gradus.errors import ConfigError, CorruptStateError, DeadlineError, ExitCode, GradusError


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Puts a function in the place of `gradus rl`."""

    def install(run: Callable[..., int]) -> None:
        module = ModuleType("gradus.cli.runs")
        module.rl = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "gradus.cli.runs", module)

    return install


def raising(error: BaseException) -> Callable[[Sequence[str]], int]:
    def run(words: Sequence[str]) -> int:
        raise error

    return run


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_lists_every_command(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in (*COMMANDS, *ROLES))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradus {gradus.__version__}\n"


def test_a_command_gets_its_words_and_gives_the_exit_code(
    fake_command: Callable[[Callable[..., int]], None],
) -> None:
    seen: list[list[str]] = []

    def run(words: Sequence[str]) -> int:
        seen.append(list(words))
        return 3

    fake_command(run)
    assert main(["rl", "@", "a.toml"]) == 3
    assert seen == [["@", "a.toml"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), ExitCode.CONFIG),
        (DeadlineError("no"), ExitCode.TRY_AGAIN),
        (CorruptStateError("no"), ExitCode.CORRUPT_STATE),
        (GradusError("no"), ExitCode.INTERNAL),
    ],
)
def test_an_error_of_ours_is_one_line_and_its_exit_code(
    error: GradusError,
    code: int,
    fake_command: Callable[[Callable[..., int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_command(raising(error))
    assert main(["rl"]) == code
    assert capsys.readouterr().err == "gradus rl: no\n"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "this user may not read or write there"),
        (errno.ENOTDIR, "a file lies where a folder is needed"),
        (errno.EISDIR, "a folder lies where a file is needed"),
    ],
)
def test_a_path_that_the_system_refuses_is_a_mistake_of_the_caller(
    number: int,
    said: str,
    fake_command: Callable[[Callable[..., int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_command(raising(OSError(number, "refused", "runs/demo/lease.lock")))
    assert main(["rl"]) == ExitCode.CONFIG
    shown = capsys.readouterr().err
    assert shown.startswith(f"gradus rl: runs/demo/lease.lock: {said}")
    assert "Traceback" not in shown


def test_several_problems_are_several_lines_without_control_characters(
    fake_command: Callable[[Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(raising(ConfigError("one\nbad \x1b[2J name")))
    main(["rl"])
    assert capsys.readouterr().err == "gradus rl: one\ngradus rl: bad \\x1b[2J name\n"


@pytest.mark.parametrize("words", ["chaos", "rl --replay=x", "doctor --mismatch x"])
def test_a_former_name_says_the_new_one(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == ExitCode.CONFIG
    assert "`gradus lab " in capsys.readouterr().err


def test_a_command_whose_package_is_missing_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradus.installed.entry_points", lambda **_: ())
    assert main(["convert", "rl.toml"]) == ExitCode.CONFIG
    assert "pip install 'gradus-rl[convert]'" in capsys.readouterr().err


def test_a_mistake_of_ours_shows_its_traceback_and_says_so(
    fake_command: Callable[[Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(raising(KeyError("lost")))
    assert main(["rl"]) == ExitCode.INTERNAL
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.splitlines()[-1].startswith("gradus rl: internal error: KeyError: 'lost'")


def test_the_last_line_of_a_mistake_names_it_also_when_its_message_has_several_lines(
    fake_command: Callable[[Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(raising(ValueError("\nno room\nfor it\n")))
    main(["rl"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "gradus rl: internal error: ValueError: no room. Please report it"


def test_an_interrupt_ends_with_130(
    fake_command: Callable[[Callable[..., int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(raising(KeyboardInterrupt()))
    assert main(["rl"]) == INTERRUPTED == 130
    assert capsys.readouterr().err == "gradus rl: interrupted\n"


@pytest.mark.parametrize(
    ("typed", "meant"), [("chekc", "check"), ("trainr", "trainer"), ("orchestrate", "orchestrator")]
)
def test_a_mistyped_command_is_suggested(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed]) == ExitCode.CONFIG
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zzz"]) == ExitCode.CONFIG
    assert capsys.readouterr().err.startswith(
        "gradus zzz: no command 'zzz'; there are: init, rl, sft"
    )
