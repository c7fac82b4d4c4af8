"""Every error that gradus raises for others, and the exit code each one ends a process with.

GradusError            70   something in gradus failed
├── ConfigError        64   what the user wrote cannot work
├── RunDirectoryError  64   the run directory is taken, missing or not ours
│   └── FencedError    75   a newer owner holds the run directory; this process must stop
├── ProtocolError      70   another process said something that it must not say
├── DeadlineError      75   a wait ended without the awaited event
│   └── StallError     75   nothing in the run moved for too long
├── ProcessError       70   a process that we started ended or never became ready
├── StorageError       75   a disk is full, read-only, or failing
│   └── UnwritableError    75   it takes nothing until somebody acts
│       └── FullDiskError  75   because it is full
├── HubError           75   the hub of models did not take what was sent
├── EnvironmentFailure 70   an environment process cannot serve episodes
├── SandboxError       70   the box for a program that a model wrote could not be made
├── EmptyBatchError    65   no trainable batch could be made
│   └── GoodEnd        65   or none is needed; the run that trained ends with 0
│       ├── SolvedError    65   every episode earns the most, or what was asked for
│       ├── StalledError   65   the reward no longer rises, or differs in no group any more
│       └── AlarmedError   65   an alarm rang that the user gave the action stop
├── CreditError        70   an algorithm wrote credit that cannot be trained
├── ReplayError        70   a replay came to something else than the run that it repeats
└── CorruptStateError  78   a file does not hold what its digest or format promises
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar

_SLIP = 0.85
_LONGEST_LINE = 300


class ExitCode(IntEnum):
    """Exit codes of every gradus process; 0 and the classes of sysexits.h."""

    DONE = 0
    CONFIG = 64
    UNFIT = 65
    """What was tried does not work: `gradus check`, a run that found nothing to train."""
    INTERNAL = 70
    UNWRITABLE = 74
    """Of a process of a run: its disk takes nothing. The launcher says 75, and starts nothing
    again before somebody or a scheduler does."""
    TRY_AGAIN = 75
    CORRUPT_STATE = 78


class GradusError(Exception):
    """Base of all errors for users; the message says what is wrong, where, and what to do."""

    exit_code: ExitCode = ExitCode.INTERNAL


class ConfigError(GradusError):
    """What the user wrote cannot work."""

    exit_code = ExitCode.CONFIG


class RunDirectoryError(GradusError):
    """The run directory is taken, missing, or belongs to something else."""

    exit_code = ExitCode.CONFIG


class FencedError(RunDirectoryError):
    """A newer owner holds the run directory."""

    exit_code = ExitCode.TRY_AGAIN


class ProtocolError(GradusError):
    """Another process sent a message that the protocol does not allow."""


class DeadlineError(GradusError):
    """A wait ended without the awaited event; the message names what was awaited from whom."""

    exit_code = ExitCode.TRY_AGAIN


class StallError(DeadlineError):
    """Nothing in the run moved for too long; the message names who waits for whom."""


class ProcessError(GradusError):
    """A process that gradus started ended or never became ready."""


class StorageError(GradusError):
    """A disk did not keep what it was given: full, read-only, or failing."""

    exit_code = ExitCode.TRY_AGAIN


class UnwritableError(StorageError):
    """A disk takes nothing until somebody acts: full, read-only, or without the right to write."""


class FullDiskError(UnwritableError):
    """A disk is full; another try may find room."""


class HubError(GradusError):
    """The hub of models did not take what was sent, or was not reached."""

    exit_code = ExitCode.TRY_AGAIN


class EnvironmentFailure(GradusError):
    """An environment process cannot serve episodes."""


class SandboxError(GradusError):
    """The box for a program that a model wrote could not be made; says nothing of the program."""


class EmptyBatchError(GradusError):
    """No trainable batch could be made."""

    exit_code = ExitCode.UNFIT


class GoodEnd(EmptyBatchError):
    """The run need not train on: it saves what it has, and ends with exit code 0 if it trained."""

    outcome: ClassVar[str]
    """What `summary.json` calls it."""


class SolvedError(GoodEnd):
    """Nothing is left to learn, or the reward that was asked for is reached."""

    outcome = "solved"


class StalledError(GoodEnd):
    """The reward no longer rises, or differs in no group any more."""

    outcome = "stalled"


class AlarmedError(GoodEnd):
    """An alarm rang, and its action is to stop."""

    outcome = "alarmed"


class CreditError(GradusError):
    """An algorithm wrote credit that cannot be trained."""


class ReplayError(GradusError):
    """A replay came to other batches or other weights than the run that it repeats."""


class CorruptStateError(GradusError):
    """A file does not hold what its digest or its format promises."""

    exit_code = ExitCode.CORRUPT_STATE


def first_line(said: BaseException | str) -> str:
    """The first line that says something, with nothing that moves the cursor of a terminal.

    >>> first_line(ValueError("\\nno room\\nat all"))
    'no room'
    """
    default = "no message" if isinstance(said, str) else type(said).__name__
    said = next((line.strip() for line in str(said).splitlines() if line.strip()), default)
    safe = "".join(c if c.isprintable() else repr(c)[1:-1] for c in said)
    return safe if len(safe) <= _LONGEST_LINE else f"{safe[:_LONGEST_LINE]}…"


def refuse(problems: Iterable[object]) -> None:
    """Raise one ConfigError with every problem on its own line; nothing when there is none."""
    lines = [str(problem) for problem in problems]
    if lines:
        raise ConfigError("\n".join(lines))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like `word`, if any is like it."""
    candidates = list(known)
    begun = [candidate for candidate in candidates if candidate.startswith(f"{word}_")]
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    found = begun if len(begun) == 1 and f"{word}s" not in candidates else close
    return found[0] if found else None


def is_slip(word: str, known: str) -> bool:
    """Whether a word is so like a known one that it can only be a slip of the pen."""
    return difflib.SequenceMatcher(None, word, known).ratio() >= _SLIP
