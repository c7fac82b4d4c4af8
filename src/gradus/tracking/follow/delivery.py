"""One connection to a tracker: opened, fed from the cursor on, and given up at the first error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from gradus.config import MonitorConfig
from gradus.plugins import building, find_plugin
from gradus.run.paths import RunDirectory
from gradus.tracking.base import Tracker
from gradus.tracking.describe import describe_run, read_outcome
from gradus.tracking.episodes import is_evaluation, sample_rows
from gradus.tracking.follow.cursor import Cursor, CursorFile
from gradus.tracking.follow.records import Block, first_cursor, read_block, records_again

POLL_SECONDS = 1.0
"""Between two looks at the files; so a record is at most this late, and one flush serves many."""


class GivenUp(Exception):
    """The follower gave this connection up while it hung; nothing of it counts any more."""


def build_tracker(config: MonitorConfig) -> Tracker:
    """The tracker that a table of the config names; ConfigError when it cannot be made."""
    kind = find_plugin("monitor", config.target)
    options = config.arguments()
    with building(f"monitor {config.title!r}", options):
        tracker: Tracker = kind(**options)
    return tracker


class Delivery:
    """Sends from the cursor on until it is told to finish; runs in a thread of its own.

    The thread calls the tracker and nobody else does. `busy_since` says since when a call lasts,
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
    ) -> None:
        self.error: BaseException | None = None
        """Why it ended, when it did not end by itself."""
        self.is_finished = False
        """Everything was sent and the tracker is closed."""
        self.num_flushed = 0
        """Flushes that succeeded; more than zero means that the tracker works."""
        self.busy_since: float | None = None
        """When the call that runs now began; None between calls."""
        self._run_dir = run_dir
        self._config = config
        self._file = cursor
        self._finishing = finishing
        self._clock = clock
        self._lock = threading.Lock()
        self._is_abandoned = False

    def run(self) -> None:
        """Work until the end, an error, or a cut of the file, after which a new one goes on."""
        try:
            tracker = build_tracker(self._config)
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
        run = describe_run(self._run_dir, self._config, cursor)
        with self._calling():
            tracker.open(run)
        again = records_again(self._run_dir, cursor)
        if cursor.resume_step is not None:
            for record in again:
                self._log(tracker, Block([record], cursor))
            cursor = self._flush(tracker, cursor)
        while True:
            # Asked before the look: what is written before the end is seen by the last look.
            is_last = self._finishing.is_set()
            block = read_block(self._run_dir, cursor)
            if block.was_cut:
                self._save(block.after)
                return
            if block.records:
                self._log(tracker, block)
                cursor = self._flush(tracker, block.after)
            elif is_last:
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
        """The cursor with every cut that there was; at the first time, that of an empty tracker."""
        cursor = self._file.load()
        if cursor is None:
            return first_cursor(self._run_dir)
        block = read_block(self._run_dir, cursor)
        while not block.records and block.after != cursor:
            cursor = block.after
            block = read_block(self._run_dir, cursor)
        return cursor

    def _log(self, tracker: Tracker, block: Block) -> None:
        for record in block.records:
            with self._calling():
                tracker.log(record)
            every = self._config.episodes_interval_steps
            if every is None or (record.step % every and not is_evaluation(record)):
                continue
            rows = sample_rows(self._run_dir, record, num_rows=self._config.episodes_per_table)
            if rows:
                with self._calling():
                    tracker.log_episodes(record.step, rows)

    def _flush(self, tracker: Tracker, cursor: Cursor) -> Cursor:
        with self._calling():
            mark = tracker.flush()
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
