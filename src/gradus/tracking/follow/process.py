"""The process of a run that sends to all its trackers, and the same work for `gradus view --to`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gradus.config import MonitorConfig, TrackerProcessConfig
from gradus.errors import ConfigError, DeadlineError, GradusError, RunDirectoryError
from gradus.files import add_line
from gradus.heartbeat import beat
from gradus.log import get_logger
from gradus.run.lease import check_term, is_in_use
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launched
from gradus.tracking.follow.feed import Feed

TICK_SECONDS = 0.1
MOST_TRIES = 5
"""Of `gradus view --to` on a run that has ended, without one that sent something."""

_NICENESS = 10
"""Where cores are scarce, training goes first."""

_LOG = get_logger(__name__)


def run(config: TrackerProcessConfig) -> None:
    """Follow the run until the launcher says that it has ended, then send what is left.

    Ends without waiting for threads that hang in a tracker's library.
    """
    run_dir = RunDirectory(Path(config.run_dir))
    check_term(run_dir, config.term)
    os.nice(_NICENESS)
    is_over = threading.Event()
    # The launcher asks so; what it kills later is sent by the next launch or by `gradus view --to`.
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    feeds = _open_feeds(run_dir, config.monitor, lambda line: tell(run_dir, line))
    while not is_over.wait(TICK_SECONDS):
        beat("following the run")
        for feed in feeds:
            feed.is_hung()
    if not _finish(run_dir, feeds):
        os._exit(0)


def send_run(
    run_dir: RunDirectory, monitor: MonitorConfig, *, say: Callable[[str], None] = print
) -> int:
    """Send what a tracker has not got; of a running run, until it ends.

    Returns the records that were sent. DeadlineError when the tracker is not reached, ConfigError
    when no other try can help.
    """
    feed = Feed(run_dir, monitor, say=say)
    unsent, before = feed.unsent(), feed.num_records()
    is_finishing = False
    try:
        while not (feed.is_done or feed.is_hung()):
            if not is_finishing and not is_in_use(run_dir):
                is_finishing = True
                feed.finish()
            if is_finishing and feed.failed_in_a_row >= MOST_TRIES:
                break
            time.sleep(TICK_SECONDS)
        left = feed.unsent()
        if feed.cause is not None:
            kind = ConfigError if feed.is_done else DeadlineError
            what = f"{left} records are not sent" if left else "the end is not confirmed"
            raise kind(f"{feed.title}: {what}: {feed.cause}")
        return max(0, unsent - left + feed.num_records() - before)
    finally:
        feed.close()


def choose_monitor(run_dir: RunDirectory, name: str) -> dict[str, object]:
    """What the run's config says of a tracker of that name; else an empty table of that type."""
    written = read_launched(run_dir).config.get("monitor") or []
    for table in written:
        if isinstance(table, dict) and name in (table.get("name"), _title(table)):
            return dict(table)
    known = MonitorConfig.registered()
    if name in known or ":" in name:
        return {"type": name}
    own = [str(_title(table)) for table in written if isinstance(table, dict)]
    raise ConfigError(
        f"--to {name}: no such tracker; the run names {', '.join(own) or 'none'}, and gradus knows "
        f"{', '.join(sorted(known))}"
    )


def _title(table: dict[str, object]) -> object:
    return table.get("name") or str(table.get("type")).rpartition(":")[2]


def tell(run_dir: RunDirectory, line: str) -> None:
    """A line for the person at the terminal of the run, and for the log, which has errors apart."""
    _LOG.info("%s", line)
    add_line(run_dir.notices, line)


def _open_feeds(
    run_dir: RunDirectory, monitors: Sequence[MonitorConfig], say: Callable[[str], None]
) -> list[Feed]:
    feeds = []
    for monitor in monitors:
        try:
            feeds.append(Feed(run_dir, monitor, say=say))
        except (RunDirectoryError, OSError) as error:
            say(f"{monitor.title}: {error}")
    return feeds


def _finish(run_dir: RunDirectory, feeds: Sequence[Feed]) -> bool:
    """Send what is left, each within its time, and say what could not be sent.

    False where a thread still stands in a call of a tracker.
    """
    started = time.monotonic()
    for feed in feeds:
        feed.finish()
    waiting, has_ended = list(feeds), True
    while waiting:
        elapsed = time.monotonic() - started
        for feed in list(waiting):
            if feed.is_done or elapsed > feed.config.flush_seconds:
                waiting.remove(feed)
                has_ended &= _sum_up(run_dir, feed)
        time.sleep(TICK_SECONDS)
    return has_ended


def _sum_up(run_dir: RunDirectory, feed: Feed) -> bool:
    try:
        left: int | None = feed.unsent()
    except (GradusError, OSError):  # The cause says it, and the others have their turn.
        left = None
    is_closed = feed.is_done and feed.cause is None
    has_ended = feed.close()
    if is_closed:
        return has_ended
    cause = feed.cause or f"not done within {feed.config.flush_seconds:g} s"
    if left == 0:
        what = f"got everything and has not confirmed the end ({cause}); make sure"
    else:
        what = f"{left or 'some'} records are not sent ({cause}); send them"
    tell(run_dir, f"{feed.title}: {what} with: gradus view {run_dir.root} --to {feed.title}")
    return has_ended
