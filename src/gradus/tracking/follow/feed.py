"""Keeps one tracker fed: connects, connects again after an error or a hang, says so once."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable

from gradus.config import MonitorConfig
from gradus.errors import ConfigError, CorruptStateError, GradusError, first_line
from gradus.log import get_logger
from gradus.redact import without_any_secret
from gradus.run.paths import RunDirectory
from gradus.run.records import RecordTail
from gradus.tracking.describe import alarms_before
from gradus.tracking.follow.cursor import Cursor, CursorFile
from gradus.tracking.follow.delivery import Delivery, Portion

FIRST_WAIT_SECONDS = 1.0
MOST_WAIT_SECONDS = 60.0
"""Between two tries: doubled with each that fails, up to the most."""

MAX_HUNG = 3
"""Threads that may hang in a tracker's call at once; beyond them nothing new is tried."""

MOST_REFUSALS = 3
"""Of one record alone, by a tracker that could be opened, before it is left out; and of records
that are left out one after the other, before the tracker gets nothing more."""

_REFUSALS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What libraries raise for what they cannot take. An outage raises something else."""
_NO_REFUSALS = (OSError, json.JSONDecodeError)
"""A server or a proxy that answers something strange is out of order."""

_JOIN_SECONDS = 2.0
CALL_SECONDS = 120.0
"""How long a tracker may take to open, or to confirm what it got, before it counts as failed."""
_LOG = get_logger(__name__)


class Feed:
    """Owns the cursor of one tracker, and its connections, one after the other.

    The process calls `tick` often, from one thread. A connection works in a separate thread, so
    that a tracker that hangs holds up neither the others nor the end of the process.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        config: MonitorConfig,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` gets lines for a person; RunDirectoryError while another process feeds it."""
        self.config = config
        self.is_done = False
        """Everything was sent, or nothing more can be."""
        self.failed_in_a_row = 0
        """Tries since the last that sent something."""
        self.cause: str | None = None
        """Why it does not work now. None while it works."""
        self._run_dir = run_dir
        self._say = say
        self._clock = clock
        self._file = CursorFile(run_dir, config.title)
        self._finishing = threading.Event()
        self._delivery: Delivery | None = None
        self._thread: threading.Thread | None = None
        self._flushes_seen = 0
        self._has_said_where = False
        self._hung: list[threading.Thread] = []
        self._alarms_on: set[str] | None = None
        """Alarms of which the tracker was told, before this process too; None until the first
        connection."""
        self._left_out: set[Portion] | None = None
        """Since the tracker refused something: what it gets no more. None while it takes all."""
        self._refusals: Counter[Portion] = Counter()
        self._num_left_out_in_a_row = 0
        self._retry_at = clock()

    @property
    def title(self) -> str:
        return self.config.title

    def tick(self) -> None:
        """See how the connection does, and make a new one where it is time to."""
        if self.is_done:
            return
        if self._delivery is None:
            self._connect()
            return
        self._note_flushes(self._delivery)
        assert self._thread is not None
        if not self._thread.is_alive():
            self._note_end(self._delivery)
            return
        since = self._delivery.busy_since
        limit = CALL_SECONDS
        if since is not None and self._clock() - since > limit:
            self._delivery.abandon()
            self._hung.append(self._thread)
            self._fail(f"it did not answer within {limit:g} s")

    def finish(self) -> None:
        """Send what is left, now, and close; the process says how long it may take."""
        self._finishing.set()
        self._retry_at = self._clock()

    def unsent(self) -> int:
        """Records that are not safe at the tracker."""
        cursor = self._file.load() or Cursor()
        return sum(1 for _ in RecordTail(self._run_dir, cursor).read())

    def num_records(self) -> int:
        return sum(1 for _ in RecordTail(self._run_dir, Cursor()).read())

    @property
    def is_hung(self) -> bool:
        """Whether a thread still stands in a call; it must not hold up the end of the process."""
        threads = [*self._hung, *([] if self._thread is None else [self._thread])]
        return any(thread.is_alive() for thread in threads)

    def close(self) -> None:
        """Nothing that a thread still does counts; another process may feed the tracker."""
        if self._delivery is not None and self._thread is not None:
            self._delivery.abandon()
            self._finishing.set()  # So that it does not wait for records.
            self._thread.join(_JOIN_SECONDS if self._delivery.busy_since is None else 0.0)
        self._file.close()

    def _connect(self) -> None:
        self._hung = [thread for thread in self._hung if thread.is_alive()]
        if self._clock() < self._retry_at or len(self._hung) >= MAX_HUNG:
            return
        self._flushes_seen = 0
        if self._alarms_on is None:
            with contextlib.suppress(CorruptStateError):  # The delivery says so.
                self._alarms_on = alarms_before(
                    self._run_dir, (self._file.load() or Cursor()).offset
                )
        self._delivery = Delivery(
            self._run_dir,
            self.config,
            self._file,
            finishing=self._finishing,
            clock=self._clock,
            left_out=None if self._left_out is None else frozenset(self._left_out),
            alarms_on=self._alarms_on,
        )
        name = f"tracker-{self.title}"
        self._thread = threading.Thread(target=self._delivery.run, name=name, daemon=True)
        self._thread.start()

    def _note_end(self, delivery: Delivery) -> None:
        self._note_flushes(delivery)
        if delivery.is_finished:
            self.is_done = True
            self._works_again()
        elif delivery.error is None:  # The file was cut back; the next one begins there.
            self._drop()
        else:
            error = delivery.error
            no_more = self._note_refusal(delivery.last_portion, error)
            is_final = no_more or isinstance(error, ConfigError | CorruptStateError | ImportError)
            self._fail(_cause(error), is_final=is_final)

    def _note_refusal(self, portion: Portion | None, error: BaseException) -> bool:
        """Leave out what is refused again and again; True when too much is."""
        if portion is None or not isinstance(error, _REFUSALS) or isinstance(error, _NO_REFUSALS):
            return False
        if self._left_out is None:
            self._left_out = set()  # Several came at once; from now on they come one by one.
            return False
        self._refusals[portion] += 1
        if self._refusals[portion] < MOST_REFUSALS:
            return False
        if self._num_left_out_in_a_row == MOST_REFUSALS:
            return True
        self._num_left_out_in_a_row += 1
        self._left_out.add(portion)
        self.failed_in_a_row = 0
        what = f"the {portion.kind} of step {portion.step}"
        self._say(f"{self.title}: does not take {what}, which are left out: {_cause(error)}")
        return False

    def _note_flushes(self, delivery: Delivery) -> None:
        if delivery.num_flushed > self._flushes_seen:
            self._flushes_seen = delivery.num_flushed
            self._works_again()
            self._say_where(delivery.shown_by)

    def _say_where(self, shown_by: str | None) -> None:
        if shown_by is not None and not self._has_said_where:
            self._has_said_where = True
            self._say(f"{self.title}: {_safe(shown_by)}")

    def _works_again(self) -> None:
        self.failed_in_a_row = 0
        self._num_left_out_in_a_row = 0
        if self.cause is not None:
            self.cause = None
            self._say(f"{self.title}: sends again, and what it missed")

    def _fail(self, cause: str, *, is_final: bool = False) -> None:
        """`is_final` means that no other try in this process can help."""
        self._drop()
        self.failed_in_a_row += 1
        wait = min(MOST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (self.failed_in_a_row - 1))
        self._retry_at = self._clock() + wait
        _LOG.warning("%s: %s (try %d)", self.title, cause, self.failed_in_a_row)
        if is_final:
            self.is_done = True
        if self.cause is None:
            then = "sends nothing" if is_final else "tries again, nothing is lost"
            self._say(f"{self.title}: {cause}; {then}")
        self.cause = cause

    def _drop(self) -> None:
        self._delivery = self._thread = None


def _cause(error: BaseException) -> str:
    """What went wrong, in one line."""
    safe = _safe(str(error))
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the module {error.name!r}, which is not installed"
    return safe if isinstance(error, GradusError) else f"{type(error).__name__}: {safe}"


def _safe(text: str) -> str:
    # Secrets are hidden before anything is cut: half of one would not be found.
    return first_line(str(without_any_secret(text, os.environ)))
