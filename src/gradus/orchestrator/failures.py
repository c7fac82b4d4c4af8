"""Failures: which plug-in is to blame, what to report, what to play again, what ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import getproxies

from gradus.config import ErrorPolicyConfig
from gradus.errors import CreditError, GradusError, ProtocolError, first_line
from gradus.files import add_line, started_threads
from gradus.gate import CALL_SECONDS, Awaited, BlockWatch, PluginFailed, guarded, plugin_name
from gradus.log import get_logger, printable
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.run.paths import RunDirectory
from gradus.wire.episode import LOST

T = TypeVar("T")
MAX_BACKOFF_SECONDS = 60.0
NUM_THREADS = 16
"""Beside an event loop, for what would block it."""
_MAX_TRACEBACK_LINES = 16
log = get_logger(__name__)

ALGORITHM_FAILED = "algorithm_failed"
"""Kind of failure of an episode or group on which an algorithm raised an error."""
SCORING_TIMEOUT = "scoring_timeout"
"""Kind of failure of an episode or group that an algorithm did not score in time."""
PROVIDER_ERROR = "ProviderError"
"""The kind of verifiers for a model that could not be asked."""
FILTER_FAILED = "filter_failed"
CURRICULUM_FAILED = "curriculum_failed"
INVALID_CREDIT = "invalid_credit"
"""Kind of failure of an episode or group on which an algorithm wrote what cannot be trained."""


_REWARD = "RewardError"
_MOST_OF_A_KIND = 4
_NUMBERS = re.compile(r"[-\d.e]+")


class FirstFailures:
    """Reports the first failure of each kind in each source, with its cause.

    A launch reports each kind once, however many episodes fail with it; the shares are in the line
    of the step and the counts in the metrics. A reward that fails in training is not told of again
    where it fails in an evaluation, which has reports of its own.
    """

    def __init__(self, run_dir: RunDirectory, purpose: str) -> None:
        """`purpose` is that of the sources: `train` or `eval`."""
        self._run_dir = run_dir
        self._purpose = purpose
        self._reported: dict[tuple[str, str], set[str]] = {}
        self.first = ""
        """What the first of all said."""
        self._before = _size(run_dir.notices)
        """Of the notices of earlier launches."""

    def add(self, source: str, place: str, failure: Failure) -> None:
        """An episode of `source` failed; `place` says which one."""
        told = self._reported.setdefault((source, failure.kind), set())
        # A reward fails in different ways for different replies.
        what = _NUMBERS.sub("", first_line(failure.message)) if failure.kind == _REWARD else ""
        if what in told or len(told) >= _MOST_OF_A_KIND:
            return
        told.add(what)
        path = self._run_dir.environment_log(self._purpose, source)
        where = f"{place}; log: {path}" if path.exists() else place
        cause = first_line(failure.message)
        if failure.kind == PROVIDER_ERROR and (proxy := _named_proxy()):
            cause += f"; this shell names the proxy {proxy}"
        self.first = self.first or cause
        if failure.kind == _REWARD and self._was_told(cause):
            return
        line = f"first {failure.kind} in {self._purpose} environment {source!r}: {cause} ({where})"
        notify(self._run_dir, "\n".join([line, *_traceback_in(failure.message)]))

    def _was_told(self, cause: str) -> bool:
        with contextlib.suppress(OSError), self._run_dir.notices.open("rb") as file:
            file.seek(self._before)
            return f"{_REWARD} in ".encode() in (said := file.read()) and cause.encode() in said
        return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _traceback_in(message: str) -> list[str]:
    """The lines of the user's own code that a message ends with, if it does."""
    lines = message.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('  File "')), len(lines))
    return [printable(line) for line in lines[start:][:_MAX_TRACEBACK_LINES]]


def notify(run_dir: RunDirectory, line: str) -> None:
    """Show a line to the user: on the console, in `notices.log` and in the log; what stands below
    it, as the lines of a traceback, is not for the log, whose end is shown when a run fails."""
    log.warning("%s", line.partition("\n")[0])
    add_line(run_dir.notices, line)


def _named_proxy() -> str:
    """The proxy that programs of this shell ask, without its password; empty without one."""
    proxies = getproxies()
    found = proxies.get("http") or proxies.get("https") or proxies.get("all") or ""
    return found.rpartition("@")[2]


@contextlib.contextmanager
def blaming(
    kind: str,
    plugin: object,
    where: str,
    *,
    failure: str = ALGORITHM_FAILED,
    seconds: float = CALL_SECONDS,
) -> Iterator[None]:
    """Errors of a plug-in become an EpisodeFailed of kind `failure` that names class and place.

    Errors of gradus pass, so that a plug-in can end the run with a ConfigError; except credit that
    cannot be trained, which is `invalid_credit`. One that blocks for more than `seconds` ends the
    process.

        >>> with blaming("filter", object(), "source 'words'", failure=FILTER_FAILED):
        ...     pass
    """
    try:
        with guarded(lambda: f"{plugin_name(kind, plugin)}, {where}", seconds=seconds):
            yield
    except CreditError as error:
        text = f"{plugin_name(kind, plugin)}, {where}: {error}"
        raise EpisodeFailed(Failure(INVALID_CREDIT, text)) from error
    except PluginFailed as error:
        if isinstance(error.cause, EpisodeFailed):
            raise error.cause from error
        raise EpisodeFailed(Failure(failure, f"{error}")) from error


async def scored_within(
    seconds: float,
    kind: str,
    scorer: object,
    where: str,
    score: Callable[[], Awaitable[None] | None],
    *,
    watch: contextlib.AbstractContextManager[None] | None = None,
) -> None:
    """Wait inside `watch` for the score of a scorer, named by its kind; EpisodeFailed for what it
    does wrong, or not in time.

    In the task that asks: a snapshot between the score and the group's grade would count it twice.
    """
    watch = watch or contextlib.nullcontext()
    was_asked = is_asked_to_end()
    try:
        async with asyncio.timeout(seconds) as deadline:
            with blaming(kind, scorer, where, seconds=seconds), watch:
                answer = score()
                if answer is not None:
                    await Awaited(answer)
    except TimeoutError:
        if not deadline.expired():
            raise
    if is_asked_to_end() and not was_asked:  # which the scorer kept to itself
        raise asyncio.CancelledError
    if deadline.expired():
        text = (
            f"{plugin_name(kind, scorer)}, {where}: no score after {seconds:g} s; use a faster "
            "server for the model that it asks, or raise algo.scoring_timeout_seconds"
        )
        raise EpisodeFailed(Failure(SCORING_TIMEOUT, text))


def is_asked_to_end() -> bool:
    """Whether the task that runs was cancelled, and not only something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def to_its_end(name: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of a part of the run; ProtocolError when it ends although nothing asked it to.

    A task group takes a task that was cancelled from inside for one that has ended well.
    """
    try:
        return await work()
    except asyncio.CancelledError as error:
        if is_asked_to_end():
            raise
        raise ProtocolError(
            f"`{name}` of the orchestrator was cancelled from inside, so it does not run any more"
        ) from error


def run_loops(
    main: Coroutine[Any, Any, None], *, tell: Callable[[str], None] = log.warning
) -> None:
    """Run a process's loops to their end; of several errors the one to show is raised.

    `tell` gets a line about a plug-in that blocks them.
    """

    async def watched() -> None:
        asyncio.get_running_loop().set_default_executor(started_threads(NUM_THREADS))
        async with BlockWatch(tell):
            await main

    try:
        asyncio.run(watched())
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


class ErrorPolicy:
    """Which failures of one source are worth another attempt, and when.

    >>> policy = ErrorPolicy(ErrorPolicyConfig(retry_on=["SandboxError"], retries=1))
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
        """Seconds before the given retry, counted from 0: they double with each. None when the
        failure is final, as every one is from some retry on, or its slot would never be free."""
        status = failure.status_code
        is_lasting = (
            status is not None
            and status // 100 == 4
            and status not in ErrorPolicyConfig.passing_statuses
        )
        # The loss of its process uses up no retries, so none are needed for it.
        retries = max(1, self._retries) if failure.kind == LOST else self._retries
        if is_lasting or failure.kind not in self._retry_on or retry >= retries:
            return None
        wait: float = min(self._backoff_seconds * 2.0 ** min(retry, 30), MAX_BACKOFF_SECONDS)
        return wait
