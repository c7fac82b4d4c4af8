"""Failures: which plug-in is to blame, what to report, what to play again, what ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol

from gradus.config import PASSING_STATUSES, ErrorPolicyConfig
from gradus.errors import CreditError, GradusError
from gradus.log import get_logger
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.plugins import describe
from gradus.run.paths import RunDirectory

_SHOWN_CHARACTERS = 300
MAX_BACKOFF_SECONDS = 60.0
log = get_logger(__name__)

ALGORITHM_FAILED = "algorithm_failed"
"""Kind of failure of an episode or group on which an algorithm raised an error."""
SCORING_TIMEOUT = "scoring_timeout"
"""Kind of failure of an episode or group that an algorithm did not score in time."""
FILTER_FAILED = "filter_failed"
CURRICULUM_FAILED = "curriculum_failed"
INVALID_CREDIT = "invalid_credit"
"""Kind of failure of an episode or group on which an algorithm wrote what cannot be trained."""


class FirstFailures:
    """Reports the first failure of each kind in each source, with its cause.

    A launch reports each kind once, however many episodes fail with it; the shares are in the line
    of the step and the counts in the metrics.

    >>> failures = FirstFailures(run_dir, "train")  # doctest: +SKIP
    >>> failures.add("words", "task 12, episode g000003.1", Failure("TaskError", "no answer"))
    ... # doctest: +SKIP
    """

    def __init__(self, run_dir: RunDirectory, purpose: str) -> None:
        """`purpose` is that of the sources: `train` or `eval`."""
        self._run_dir = run_dir
        self._purpose = purpose
        self._reported: set[tuple[str, str]] = set()

    def add(self, source: str, place: str, failure: Failure) -> None:
        """An episode of `source` failed; `place` says which one."""
        kind = (source, failure.kind)
        if kind in self._reported:
            return
        self._reported.add(kind)
        path = self._run_dir.environment_log(self._purpose, source)
        where = f"{place}; log: {path}" if path.exists() else place
        cause = _first_line(failure.message)
        line = f"first {failure.kind} in {self._purpose} environment {source!r}: {cause} ({where})"
        notify(self._run_dir, line)


def notify(run_dir: RunDirectory, line: str) -> None:
    """Show a line to the user: on the console, in `notices.log` and in the log."""
    log.warning("%s", line)
    # What cannot be written is in the log at least.
    with contextlib.suppress(OSError), run_dir.notices.open("a") as file:
        file.write(f"{line}\n")


def _first_line(message: str) -> str:
    said = next((line.strip() for line in message.splitlines() if line.strip()), "no message")
    safe = "".join(c if c.isprintable() else repr(c)[1:-1] for c in said)
    return safe if len(safe) <= _SHOWN_CHARACTERS else f"{safe[:_SHOWN_CHARACTERS]}…"


@contextlib.contextmanager
def blaming(kind: str, plugin: object, where: str, *, failure: str) -> Iterator[None]:
    """Errors of a plug-in become an EpisodeFailed of kind `failure` that names class and place.

    Errors of gradus pass, so that a plug-in can end the run with a ConfigError; except credit that
    cannot be trained, which is `invalid_credit`. `sys.exit()` is an error like any other: a plug-in
    must not end the run that way.

        >>> with blaming("filter", object(), "source 'words'", failure=FILTER_FAILED):
        ...     pass
    """
    try:
        yield
    except CreditError as error:
        text = f"{describe(kind, plugin)}, {where}: {error}"
        raise EpisodeFailed(Failure(INVALID_CREDIT, text)) from error
    except (EpisodeFailed, GradusError):
        raise
    except (Exception, SystemExit) as error:
        cause = root_cause(error) if isinstance(error, BaseExceptionGroup) else error
        text = f"{describe(kind, plugin)}, {where}: {type(cause).__name__}: {cause}{_line(cause)}"
        raise EpisodeFailed(Failure(failure, text)) from error


@contextlib.asynccontextmanager
async def scored_within(seconds: float, plugin: object, where: str) -> AsyncIterator[None]:
    """EpisodeFailed of kind `scoring_timeout` when an algorithm takes longer.

    It is `algorithm_failed` when something that the algorithm awaits was cancelled, and not the
    scoring itself: passed on, it would leave the group without an outcome.
    """
    task = asyncio.current_task()
    cancelled_before = task.cancelling() if task else 0
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except asyncio.CancelledError as error:
        if task is None or task.cancelling() > cancelled_before:
            raise
        text = (
            f"{describe('algorithm', plugin)}, {where}: CancelledError: something that it awaits "
            "was cancelled"
        )
        raise EpisodeFailed(Failure(ALGORITHM_FAILED, text)) from error
    except TimeoutError as error:
        if not deadline.expired():
            raise
        text = (
            f"{describe('algorithm', plugin)}, {where}: no score after {seconds:g} s; make its "
            "judge faster or raise algo.scoring_timeout_seconds"
        )
        raise EpisodeFailed(Failure(SCORING_TIMEOUT, text)) from error


def _line(error: BaseException) -> str:
    """Where the plug-in's code stood."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def run_loops(main: Coroutine[Any, Any, None]) -> None:
    """Run a process's loops to their end; of several errors the one to show is raised."""
    try:
        asyncio.run(main)
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


def root_cause(raised: BaseException) -> BaseException:
    """The error to show of a group: the first that names itself, else the first of all."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [raised]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting[:0] = error.exceptions
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, GradusError)), leaves[0])


class ErrorPolicy(Protocol):
    """What one source does with failed episodes."""

    def wait_before_retry(self, failure: Failure, *, retry: int) -> float | None:
        """Seconds before the given retry, counted from 0; None when the failure is final.

        Must be final from some retry on, or the slot of the group is never free again.
        """
        ...


class ListedErrors:
    """Owns the list of one source.

    >>> policy = ListedErrors(ErrorPolicyConfig(retry_on=["SandboxError"], retries=1))
    >>> policy.wait_before_retry(Failure("SandboxError", "no box"), retry=0)
    1.0
    >>> policy.wait_before_retry(Failure("TaskError", "bug"), retry=0) is None
    True

    An answer 4xx of a provider comes again however often it is asked (a wrong key, a prompt that is
    too long), so that only those that ask for patience are played again.
    """

    def __init__(self, config: ErrorPolicyConfig) -> None:
        self._retry_on = frozenset(config.retry_on)
        self._retries = config.retries
        self._backoff_seconds = config.backoff_seconds

    def wait_before_retry(self, failure: Failure, *, retry: int) -> float | None:
        """The backoff, doubled with each retry; None for what is not listed or cannot pass."""
        status = failure.status_code
        is_lasting = status is not None and status // 100 == 4 and status not in PASSING_STATUSES
        if is_lasting or failure.kind not in self._retry_on or retry >= self._retries:
            return None
        wait: float = min(self._backoff_seconds * 2.0 ** min(retry, 30), MAX_BACKOFF_SECONDS)
        return wait
