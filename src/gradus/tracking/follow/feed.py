"""Keeps one tracker fed from one thread: from its cursor on, and again after each error."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gradus.config import MonitorConfig
from gradus.errors import ConfigError, CorruptStateError, GradusError, first_line
from gradus.log import get_logger
from gradus.monitor.machine import MachineTail
from gradus.plugins import building, find_plugin
from gradus.redact import without_any_secret
from gradus.run.paths import RunDirectory
from gradus.run.records import Place, Record, RecordTail, read_block, read_records
from gradus.tracking.base import EpisodeRow, Tracker
from gradus.tracking.describe import (
    alarm_lines,
    alarms_before,
    describe_run,
    read_outcome,
    sample_rows,
)
from gradus.tracking.follow.cursor import Cursor, CursorFile

POLL_SECONDS = 1.0
"""Between two looks at the files; so a record is at most this late, and one flush serves many."""

FIRST_WAIT_SECONDS = 1.0
MOST_WAIT_SECONDS = 60.0
"""Between two tries: doubled with each that fails, up to the most."""

CALL_SECONDS = 120.0
"""How long a call of a tracker may take before a person hears of it."""

MOST_LEFT_OUT = 3
"""Records that are left out one after the other, before the tracker gets nothing more."""

_REFUSALS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What libraries raise for what they cannot take. An outage raises something else."""
_NO_REFUSALS = (OSError, json.JSONDecodeError)
"""A server or a proxy that answers something strange is out of order."""
_FINAL = (ConfigError, CorruptStateError, ImportError)

_BLOCK_BYTES = 1 << 18
_JOIN_SECONDS = 2.0
_TITLE_CHARACTERS = 63
_ROWS_PER_TABLE = 8
_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Portion:
    """What a tracker takes or refuses as a whole."""

    kind: Literal["numbers", "episodes"]
    step: int
    time: float


class _Closed(Exception):
    """Nothing that the thread still does counts any more."""


def build_tracker(config: MonitorConfig) -> Tracker:
    """The tracker that a table of the config names; ConfigError when it cannot be made."""
    kind = find_plugin("monitor", config.target)
    options = config.arguments()
    # The message of an error shows them.
    shown = without_any_secret(options, os.environ)
    with building(f"monitor {config.title!r}", shown):
        tracker: Tracker = kind(**options)
    return tracker


class Feed:
    """Owns the cursor of one tracker, and the thread that sends from there on.

    Only the thread calls the tracker, so one that hangs holds up neither the others nor the end of
    the process.
    """

    def __init__(
        self, run_dir: RunDirectory, config: MonitorConfig, *, say: Callable[[str], None]
    ) -> None:
        """`say` gets lines for a person; RunDirectoryError while another process feeds it."""
        self.config = config
        self.title = config.title
        self.is_done = False
        """Everything was sent, or nothing more can be."""
        self.failed_in_a_row = 0
        """Tries since the last that sent something."""
        self.cause: str | None = None
        """Why it does not work now. None while it works."""
        self._run_dir = run_dir
        self._machine = MachineTail(run_dir)
        self._say = say
        self._file = CursorFile(run_dir, config.title)
        self._finishing = threading.Event()
        self._closed = threading.Event()
        self._busy_since: float | None = None
        """When the call that runs now began."""
        self._has_said_where = False
        self._unconfirmed: Portion | None = None
        """What came last since the tracker confirmed something."""
        self._left_out: set[Portion] | None = None
        """Since the tracker refused something, and so gets one record at a time: what it gets no
        more. None while it takes all."""
        self._num_left_out_in_a_row = 0
        self._saving = threading.Lock()
        self._thread = threading.Thread(
            target=self._work, name=f"tracker-{self.title}", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Send what is left, now, and close; the process says how long it may take."""
        self._finishing.set()

    def unsent(self) -> int:
        """Records that are not safe at the tracker."""
        cursor = self._file.load() or Cursor()
        return sum(1 for _ in RecordTail(self._run_dir, cursor).read())

    def num_records(self) -> int:
        return sum(1 for _ in RecordTail(self._run_dir, Place()).read())

    def is_hung(self) -> bool:
        """Whether a call lasts too long; said once, and again only after it came back."""
        since = self._busy_since
        if since is None or time.monotonic() - since <= CALL_SECONDS:
            return False
        if self.cause is None:
            self.cause = f"it did not answer within {CALL_SECONDS:g} s"
            self._say(f"{self.title}: {self.cause}; waits for it, nothing is lost")
        return True

    def close(self) -> bool:
        """Nothing that the thread still does counts; False where it stands in a call."""
        self._closed.set()
        self._finishing.set()  # So that it does not wait for records.
        self._thread.join(_JOIN_SECONDS if self._busy_since is None else 0.0)
        with self._saving:
            self._file.close()
        return not self._thread.is_alive()

    def _work(self) -> None:
        """Connect and send, again and again, until all is sent or no other try can help."""
        while not (self.is_done or self._closed.is_set()):
            tracker: Tracker | None = None
            try:
                with self._calling():
                    tracker = build_tracker(self.config)
                self._deliver(tracker)
            except BaseException as error:  # A tracker may raise anything, SystemExit too.
                if not self.is_done and tracker is not None:
                    with contextlib.suppress(BaseException), self._calling():
                        tracker.close("unknown")
                if not self._closed.is_set():
                    self._fail(error)

    def _deliver(self, tracker: Tracker) -> None:
        """Send from the cursor on, until the run has ended or its file was cut back."""
        cursor = self._load()
        run = describe_run(self._run_dir, self.config, cursor)
        with self._calling():
            tracker.open(run)
        self._run, self._alarms_on = run, alarms_before(self._run_dir, cursor.offset)
        if cursor.resume_step is not None:
            self._log(tracker, _lost_records(self._run_dir, cursor), tells_alarms=False)
            cursor = self._flush(tracker, cursor)
        while True:
            # Asked before the look: what is written before the end is seen by the last look.
            is_last = self._finishing.is_set()
            size = _BLOCK_BYTES if self._left_out is None else 1
            block = read_block(self._run_dir, cursor, num_bytes=size)
            if block.was_cut:
                with contextlib.suppress(Exception), self._calling():
                    tracker.close("unknown")
                return
            if block.broken.count:
                _LOG.warning("%s: %s", self._run_dir.metrics, block.broken)
            is_end = is_last and block.after == cursor
            cursor = block.after
            if block.records:
                self._log(tracker, block.records)
                # What was only left out is noted as sent when something behind it is safe.
                if self._unconfirmed is not None:
                    cursor = self._flush(tracker, cursor)
            elif is_end:
                with self._calling():
                    tracker.close(read_outcome(self._run_dir))
                self._works_again()
                self.is_done = True
                return
            else:
                self._finishing.wait(POLL_SECONDS)

    def _load(self) -> Cursor:
        """The cursor, behind every cut that there was."""
        cursor = self._file.load() or Cursor()
        block = read_block(self._run_dir, cursor, num_bytes=1)
        return block.after if block.was_cut else cursor

    def _log(
        self, tracker: Tracker, records: Iterable[Record], *, tells_alarms: bool = True
    ) -> None:
        for record in records:
            if self._begins(Portion("numbers", record.step, record.time)):
                taken = self._machine.at(record.time)
                whole = replace(record, metrics={**record.metrics, **taken})
                with self._calling():
                    tracker.log(self._run.chosen(whole))
                if tells_alarms:
                    self._alert(tracker, record)
            rows = self._sample(record)
            if rows and self._begins(Portion("episodes", record.step, record.time)):
                with self._calling():
                    tracker.log_episodes(record.step, rows)

    def _alert(self, tracker: Tracker, record: Record) -> None:
        """Tell a tracker that has a place for it of each alarm that begins or is over."""
        alert = getattr(tracker, "alert", None)
        if alert is None or record.is_evaluation:
            return
        for name, line in alarm_lines(self._run_dir, record, self._alarms_on).items():
            with self._calling():
                alert(f"{self._run.name}: {name}"[:_TITLE_CHARACTERS], line, record.step)
            self._alarms_on ^= {name}

    def _begins(self, portion: Portion) -> bool:
        """Note what comes now; False when it is left out."""
        if portion in (self._left_out or ()):
            return False
        self._unconfirmed = portion
        return True

    def _sample(self, record: Record) -> Sequence[EpisodeRow]:
        """The table that belongs to a record; a file that cannot be read costs the table only."""
        every = self.config.episodes_interval_steps
        if every is None or (record.step % every and not record.is_evaluation):
            return ()
        try:
            return sample_rows(self._run_dir, record, num_rows=_ROWS_PER_TABLE)
        except (OSError, ValueError, ArithmeticError, RecursionError) as error:
            kind = type(error).__name__
            _LOG.warning("no sample episodes of step %d: %s: %s", record.step, kind, error)
            return ()

    def _flush(self, tracker: Tracker, cursor: Cursor) -> Cursor:
        with self._calling():
            mark = tracker.flush()
        self._unconfirmed = None
        cursor = replace(cursor, mark=mark, resume_step=None)
        with self._saving:
            if not self._closed.is_set():
                self._file.save(cursor)
        self._works_again()
        shown_by = getattr(tracker, "shown_by", None)
        if isinstance(shown_by, str) and not self._has_said_where:
            self._has_said_where = True
            self._say(f"{self.title}: {_safe(shown_by)}")
        return cursor

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Around each call of the tracker, so that another thread sees since when it lasts."""
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None
        if self._closed.is_set():
            raise _Closed

    def _works_again(self) -> None:
        self.failed_in_a_row = self._num_left_out_in_a_row = 0
        if self.cause is not None:
            self.cause = None
            self._say(f"{self.title}: sends again, and what it missed")

    def _fail(self, error: BaseException) -> None:
        """Say why, once, and wait for the next try, where one can help."""
        is_final = self._leave_out(error) or isinstance(error, _FINAL)
        cause = _cause(error)
        self.failed_in_a_row += 1
        doubled = min(self.failed_in_a_row - 1, 30)  # a day of outage would overflow
        wait = min(MOST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0**doubled)
        _LOG.warning("%s: %s (try %d)", self.title, cause, self.failed_in_a_row)
        if self.cause is None:
            then = "sends nothing" if is_final else "tries again, nothing is lost"
            self._say(f"{self.title}: {cause}; {then}")
        self.cause = cause
        self.is_done = is_final
        if not is_final:
            (self._closed if self._finishing.is_set() else self._finishing).wait(wait)

    def _leave_out(self, error: BaseException) -> bool:
        """Leave out what is refused by itself; True when too much is."""
        portion, self._unconfirmed = self._unconfirmed, None
        if portion is None or not isinstance(error, _REFUSALS) or isinstance(error, _NO_REFUSALS):
            return False
        if self._left_out is None:
            self._left_out = set()  # Several came at once; from now on they come one by one.
            return False
        if self._num_left_out_in_a_row == MOST_LEFT_OUT:
            return True
        self._num_left_out_in_a_row += 1
        self._left_out.add(portion)
        self.failed_in_a_row = 0
        what = f"the {portion.kind} of step {portion.step}"
        self._say(f"{self.title}: does not take {what}, which are left out: {_cause(error)}")
        return False


def _lost_records(run_dir: RunDirectory, cursor: Cursor) -> Iterator[Record]:
    """Records before the cursor that a tracker loses when it voids `resume_step` and later.

    The evaluation of the version that a run continues from is one: it has the number of the next
    step and is not done again.
    """
    sent = read_records(run_dir.metrics, stop=cursor.offset)
    return (record for record in sent if record.step >= (cursor.resume_step or 0))


def _cause(error: BaseException) -> str:
    """What went wrong, in one line."""
    safe = _safe(str(error))
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the module {error.name!r}, which is not installed"
    return safe if isinstance(error, GradusError) else f"{type(error).__name__}: {safe}"


def _safe(text: str) -> str:
    # Secrets are hidden before anything is cut: half of one would not be found.
    return first_line(str(without_any_secret(text, os.environ)))
