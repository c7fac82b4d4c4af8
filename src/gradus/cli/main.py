"""The command table: one word chooses what runs, and only that is imported."""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import gradus
from gradus.cli.roles import ROLES, Role, run_role
from gradus.errors import ConfigError, ExitCode, GradusError, UnwritableError, first_line
from gradus.files import DISK_ERRORS, free_bytes, storage_error
from gradus.installed import load_part, see_folder
from gradus.log import printable

INTERRUPTED = 130
"""Exit code after Ctrl-C, as every shell expects it."""


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    entry: str
    """`module:function` that takes the words after the command and returns the exit code.

    Or the extra whose package says which, by an entry point.
    """
    summary: str
    """One line for the list of commands."""

    def load(self, name: str) -> Callable[[Sequence[str]], int]:
        """What runs it; ConfigError where its package is not installed."""
        module, _, function = self.entry.partition(":")
        if function:
            found: Callable[[Sequence[str]], int] = getattr(
                importlib.import_module(module), function
            )
            return found
        return load_part("gradus.commands", name, module)  # type: ignore[no-any-return]


_COMMANDS = """
init | gradus.cli.init:run | write a config, a task set and a tiny model to begin with
rl | gradus.cli.runs:rl | train a policy by reinforcement learning
sft | gradus.cli.runs:sft | train a model on conversations
eval | gradus.cli.runs:evaluate | measure a model on the tasks of environments
bench-trainer | gradus.cli.runs:bench_trainer | measure the trainer on made-up samples
serve | gradus.cli.serve:run | serve a model or what a run has trained to any client
chat | gradus.cli.chat:run | talk to a model, to what a run has trained, or to a server
agent | gradus.cli.agents.command:run | run an agent of yours against a model, and show it
export | gradus.cli.results:export | write a checkpoint as a Hugging Face model
view | gradus.cli.results:view | show runs in a browser or a page, list episodes, feed trackers
compare | gradus.cli.results:compare | show metrics of runs side by side
check | gradus.cli.check.command:run | say what of a config and this machine works, and the plan
convert | convert | print a file of prime-rl as a config of gradus
env | gradus.cli.env:run | check an environment before you train on it, or begin one
node | cluster | own the processes of one more machine of a run
render | cluster | print what runs a config on Kubernetes
lab | lab | replay or hurt runs, sweep settings, prove losses and numbers
completion | gradus.cli.completion:run | print what makes a shell complete commands and keys
"""
COMMANDS = {
    name: Command(*rest)
    for name, *rest in (line.split(" | ") for line in _COMMANDS.strip().splitlines())
}
"""What a user types."""

_FORMER = {
    "report": "gradus view RUN --export report.html",
    **{name: f"gradus lab {name}" for name in ("chaos", "check-loss", "sweep")},
    "rl --replay": "gradus lab replay RUN",
    "check --replay": "gradus lab replay RUN --dry-run",
    "doctor --mismatch": "gradus lab mismatch RUN",
    "episodes": "gradus view RUN --list",
    "track": "gradus view RUN --to TRACKER",
    "doctor": "gradus check --level train",
    "rl --sanity": "gradus check rl --level train",
    "check --fast": "gradus check --level config",
}
"""Names that a command had, and what to write for it until 0.2."""
LEAVE_AT_ONCE = {"trainer", "sft-trainer", "bench-rank"}
"""Roles that end without Python's own clean-up, see `leave`."""

_REFUSED_PATHS = {
    errno.ENAMETOOLONG: "too long for the file system, which takes 255 bytes between two slashes; "
    "choose a shorter name",
    errno.EACCES: "this user may not read or write there; change its permissions or choose another",
    errno.EPERM: "this user may not do that there; change its permissions or choose another",
    errno.ENOTDIR: "a file lies where a folder is needed; move it away or choose another",
    errno.EISDIR: "a folder lies where a file is needed; move it away or choose another",
}
"""Errors of a path that the user named, with what to do; all else of the system is our mistake."""


def main(arguments: Sequence[str] | None = None) -> int:
    see_folder()
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        print(overview())
        return ExitCode.DONE
    return run_command(name, words[1:])


def version(words: Sequence[str]) -> int:
    """The version, or with `--all` what belongs in a report of a bug."""
    if words not in ([], ["--all"]):
        raise ConfigError(f"only --all may follow, not {' '.join(words)}")
    if words:
        from gradus.cli.check.about import about

        print(about())
    else:
        print(f"gradus {gradus.__version__}")
    return ExitCode.DONE


def run_command(name: str, words: Sequence[str]) -> int:
    """Run one command and turn every error into lines on stderr and an exit code."""
    try:
        return _find(name, words)(words)
    except GradusError as error:
        _complain(name, str(error))
        return _exit_code(name, error)
    except KeyboardInterrupt:
        _complain(name, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`gradus rl --help | head`); Python would complain
        # again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except SystemExit as error:
        # A subclass is our own way to stop; what others call ends a process too early.
        if name not in ROLES or type(error) is not SystemExit:
            raise
        traceback.print_exc()
        at = traceback.extract_tb(error.__traceback__)[-1]
        _complain(name, f"sys.exit({error.code!r}) was called at {at.filename}:{at.lineno}")
        return ExitCode.INTERNAL
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            failed = storage_error(error, disk_to_blame(error, words))
            _complain(name, str(failed))
            return _exit_code(name, failed)
        if name in COMMANDS and (refused := _refused_path(error)) is not None:
            _complain(name, refused)
            return ExitCode.CONFIG
        traceback.print_exc()
        said = f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ")
        _complain(name, f"internal error: {first_line(said)}. Please report it")
        return ExitCode.INTERNAL


def _exit_code(name: str, error: GradusError) -> int:
    """The launcher starts no process again whose disk takes nothing."""
    is_unwritable = name in ROLES and isinstance(error, UnwritableError)
    return ExitCode.UNWRITABLE if is_unwritable else error.exit_code


def _refused_path(error: Exception) -> str | None:
    """What is wrong with a path that the user named; None for every other error."""
    if not isinstance(error, OSError) or error.errno not in _REFUSED_PATHS or not error.filename:
        return None
    place = os.fsdecode(error.filename)
    shown = f"{place[:80]}…" if error.errno == errno.ENAMETOOLONG else place
    return f"{shown}: {_REFUSED_PATHS[error.errno]}"


def overview() -> str:
    lines = [
        f"gradus {gradus.__version__}: reinforcement learning for language-model agents",
        "",
        "usage: gradus COMMAND [@ file.toml ...] [--some.key value ...]",
    ]
    tables: dict[str, Mapping[str, Command | Role]]
    tables = {"commands:": COMMANDS, "processes of a run:": ROLES}
    for title, table in tables.items():
        lines += ["", title, *(f"  {name:<14}{it.summary}" for name, it in table.items())]
    lines += [
        "",
        "'gradus COMMAND --help' shows what it takes, '--help all' every key with its default.",
        "'gradus --version --all' shows what belongs in a report of a bug.",
    ]
    return "\n".join(lines)


def _find(name: str, words: Sequence[str]) -> Callable[[Sequence[str]], int]:
    for former in (*(f"{name} {word.partition('=')[0]}" for word in words), name):
        if former in _FORMER:
            raise ConfigError(f"gradus {former} is now `{_FORMER[former]}`")
    if name == "--version":
        return version
    if name in ROLES:
        return partial(run_role, name)
    if name in COMMANDS:
        return COMMANDS[name].load(name)
    known = (*COMMANDS, *ROLES)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? There" if near else "there"
    raise ConfigError(f"no command '{name}'; {hint} are: {', '.join(COMMANDS)}")


def _complain(name: str, message: str) -> None:
    """One line on stderr for each line of the message, without control characters."""
    for line in message.splitlines() or [""]:
        print(f"gradus {name}: {printable(line)}", file=sys.stderr, flush=True)


def disk_to_blame(error: OSError, words: Sequence[str] = ()) -> Path:
    """The file that the error names; else the place with the least room among those in use.

    A write to an open file names none. In use are the folder of the process, the one of temporary
    files, shared memory, and every path on the command line (for a role: its config in the run).
    """
    if error.filename:
        return Path(os.fsdecode(error.filename))
    on_line = [Path(word) for word in words if os.sep in word]
    places = [Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm"), *on_line]
    rooms = {place: free_bytes(place) for place in places if place.exists()}
    known = {place: room for place, room in rooms.items() if room is not None}
    return min(known, key=known.__getitem__, default=Path.cwd())


def leave(code: int) -> NoReturn:
    """End the process now, with everything that was printed and logged.

    Threads of torch may still run while Python takes itself apart, and one of them sometimes
    aborted a rank that had saved its model ("terminate called without an active exception").
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    if LEAVE_AT_ONCE.intersection(sys.argv[1:2]):
        leave(main())
    sys.exit(main())
