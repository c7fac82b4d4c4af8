"""One thread that makes versions available and tells of them, while the next step runs.

What it is given it does in order, so no version is announced before it is whole, nor are two in
the wrong order. The first failure ends it: what was given later is not done, and whoever gives,
waits or looks gets the error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Self

from gradus.heartbeat import BEAT_SECONDS, DISK_SECONDS, beat, strand
from gradus.log import get_logger

CLOSING_SECONDS = 10.0
"""How long an end with an error waits for a version in the air. What is cut off then stays hidden,
and it was not announced."""

logger = get_logger(__name__)

Task = Callable[[], None]


class PublishingThread:
    """Owns the order of what is written and told behind the trainer's back.

    >>> with PublishingThread() as thread:
    ...     thread.submit(lambda: print("version 1"))
    ...     thread.wait()
    version 1
    """

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._is_working = False
        self._heartbeat = strand("publish")
        # A daemon: it may wait for room on a disk, which must not hold up the end of the process.
        self._thread = threading.Thread(target=self._work, name="publish", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, task: Task) -> None:
        """Do `task` after all that was submitted before; raises the error of an earlier one."""
        with self._changed:
            self._refuse_failed()
            self._tasks.append(task)
            self._changed.notify_all()

    def check(self) -> None:
        with self._changed:
            self._refuse_failed()

    def wait(self) -> None:
        """Return when everything is done; raises the error of what could not be.

        waits for: the tasks, each of which has its own deadline
        """
        with self._changed:
            is_over = partial(
                self._changed.wait_for,
                lambda: self._failure is not None or self._is_idle,
                timeout=BEAT_SECONDS,
            )
            while not is_over():
                beat("waits for the publishing thread")
            self._refuse_failed()

    def close(self) -> None:
        """End the thread, once it has done what it can do in CLOSING_SECONDS; raises nothing."""
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._failure is not None or self._is_idle, timeout=CLOSING_SECONDS
            )
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify_all()
        if is_over:
            self._thread.join()
        else:
            logger.warning("what was to be published or told last is left undone")

    @property
    def _is_idle(self) -> bool:
        return not self._tasks and not self._is_working

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (task := self._next()) is not None:
            failure: BaseException | None = None
            try:
                with self._heartbeat.working("publishing", DISK_SECONDS):
                    task()
            except BaseException as error:
                failure = error
                logger.warning("publishing stopped: %s", error)
            with self._changed:
                self._is_working = False
                self._failure = failure
                self._changed.notify_all()
            if failure is not None:
                return

    def _next(self) -> Task | None:
        """The next task; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._tasks))
            if self._is_closed:
                return None
            self._is_working = True
            return self._tasks.popleft()
