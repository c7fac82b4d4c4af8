"""One connection to a tracker: opened, fed from the cursor on, and given up at the first error."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gradus.config import MonitorConfig
from gradus.log import get_logger
from gradus.monitor.machine import MachineTail
from gradus.plugins import building, find_plugin
from gradus.redact import without_any_secret
from gradus.run.paths import RunDirectory
from gradus.run.records import Block, Record, read_block, read_records
from gradus.tracking.base import EpisodeRow, TrackedRun, Tracker
from gradus.tracking.describe import alarm_lines, describe_run, read_outcome, sample_rows
from gradus.tracking.follow.cursor import Cursor, CursorFile

_LOG = get_logger(__name__)

POLL_SECONDS = 1.0
_TITLE_CHARACTERS = 63
_ROWS_PER_TABLE = 8
"""Between two looks at the files; so a record is at most this late, and one flush serves many."""


@dataclass(frozen=True)
class Portion:
    """What a tracker takes or refuses as a whole."""

    kind: Literal["numbers", "episodes"]
    step: int
    time: float


class GivenUp(Exception):
    """The follower gave this connection up while it hung; nothing of it counts any more."""


def build_tracker(config: MonitorConfig) -> Tracker:
    """The tracker that a table of the config names; ConfigError when it cannot be made."""
    kind = find_plugin("monitor", config.target)
    options = config.arguments()
    # The message of an error shows them.
    shown = without_any_secret(options, os.environ)
    with building(f"monitor {config.title!r}", shown):
        tracker: Tracker = kind(**options)
    return tracker


class Delivery:
    """Sends from the cursor on until it is told to finish; runs in a separate thread.

    Only the thread calls the tracker. `busy_since` says since when a call lasts,
    so that another thread can see that it hangs, and abandon it.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        config: MonitorConfig,
        cursor: CursorFile,
        *,
        finishing: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        left_out: Collection[Portion] | None = None,
        alarms_on: set[str] | None = None,
    ) -> None:
        """`left_out`, empty or not, makes it send one record at a time, and not those portions;
        of `alarms_on`, which it changes, the tracker was told."""
        self.error: BaseException | None = None
        """Why it ended, when it did not end by itself."""
        self.is_finished = False
        """Everything was sent and the tracker is closed."""
        self.num_flushed = 0
        """Flushes that succeeded; more than zero means that the tracker works."""
        self.shown_by: str | None = None
        """Where the tracker says that its numbers are seen, once it is open."""
        self.busy_since: float | None = None
        """When the call that runs now began; None between calls."""
        self.last_portion: Portion | None = None
        """What came last since the tracker confirmed something."""
        self._left_out = left_out
        self._alarms_on = set() if alarms_on is None else alarms_on
        self._run_dir = run_dir
        self._machine = MachineTail(run_dir)
        self._config = config
        self._file = cursor
        self._finishing = finishing
        self._clock = clock
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._run: TrackedRun

    def run(self) -> None:
        """Work until the end, an error, or a cut of the file, after which a new one continues."""
        try:
            with self._calling():
                tracker = build_tracker(self._config)
        except GivenUp:
            return
        except BaseException as error:
            self.error = error
            return
        try:
            self._deliver(tracker)
        except GivenUp:
            pass
        except BaseException as error:  # A tracker may raise anything, SystemExit too.
            self.error = error
        if not self.is_finished:
            self._let_go(tracker)

    def abandon(self) -> None:
        """Let nothing that the thread still does count."""
        with self._lock:
            self._is_abandoned = True

    def _deliver(self, tracker: Tracker) -> None:
        cursor = self._settled()
        run = self._run = describe_run(self._run_dir, self._config, cursor)
        with self._calling():
            tracker.open(run)
        said = getattr(tracker, "shown_by", None)
        self.shown_by = said if isinstance(said, str) else None
        if cursor.resume_step is not None:
            lost = _lost_records(self._run_dir, cursor, cursor.resume_step)
            self._log(tracker, lost, tells_alarms=False)
            cursor = self._flush(tracker, cursor)
        while True:
            # Asked before the look: what is written before the end is seen by the last look.
            is_last = self._finishing.is_set()
            block = self._next_block(cursor)
            if block.was_cut:
                self._save(block.after)
                return
            if block.broken.count:
                _LOG.warning("%s: %s", self._run_dir.metrics, block.broken)
            if block.records:
                self._log(tracker, block.records)
                # What was only left out is noted as sent when something behind it is safe.
                is_sent = self._left_out is None or self.last_portion is not None
                cursor = self._flush(tracker, block.after) if is_sent else block.after
            elif is_last and block.after == cursor:
                with self._calling():
                    tracker.close(read_outcome(self._run_dir))
                self.is_finished = True
                return
            else:
                cursor = block.after
                self._finishing.wait(POLL_SECONDS)

    def _let_go(self, tracker: Tracker) -> None:
        """Free its files and ports for the connection that comes next."""
        self.busy_since = self._clock()
        with contextlib.suppress(BaseException):
            tracker.close("unknown")
        self.busy_since = None

    def _settled(self) -> Cursor:
        """The cursor with every cut that there was."""
        cursor = self._file.load() or Cursor()
        block = read_block(self._run_dir, cursor)
        while not block.records and block.after != cursor:
            cursor = block.after
            block = read_block(self._run_dir, cursor)
        return cursor

    def _next_block(self, cursor: Cursor) -> Block[Cursor]:
        if self._left_out is None:
            return read_block(self._run_dir, cursor)
        return read_block(self._run_dir, cursor, num_bytes=1)

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
        self.last_portion = portion
        return True

    def _sample(self, record: Record) -> Sequence[EpisodeRow]:
        """The table that belongs to a record; a file that cannot be read costs the table only."""
        every = self._config.episodes_interval_steps
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
        self.last_portion = None
        cursor = replace(cursor, mark=mark, resume_step=None)
        self._save(cursor)
        self.num_flushed += 1
        return cursor

    def _save(self, cursor: Cursor) -> None:
        with self._lock:
            if self._is_abandoned:
                raise GivenUp
            self._file.save(cursor)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Around each call of the tracker, none of which may take longer than its deadline."""
        self._refuse_abandoned()
        self.busy_since = self._clock()
        try:
            yield
        finally:
            self.busy_since = None
        self._refuse_abandoned()

    def _refuse_abandoned(self) -> None:
        with self._lock:
            if self._is_abandoned:
                raise GivenUp


def _lost_records(run_dir: RunDirectory, cursor: Cursor, resume_step: int) -> Iterator[Record]:
    """Records before the cursor that a tracker loses when it voids `resume_step` and later.

    The evaluation of the version that a run continues from is one: it has the number of the next
    step and is not done again.
    """
    sent = read_records(run_dir.metrics, stop=cursor.offset)
    return (record for record in sent if record.step >= resume_step)
