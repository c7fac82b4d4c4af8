"""What a person sees of a launch: a line per starting process, per notice, and per step."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TextIO, cast

from tqdm import tqdm

from gradus.launch.summary import PhaseSeconds
from gradus.monitor import RL_COLUMNS, Column, format_seconds, format_step
from gradus.run.json_lines import LineTail
from gradus.run.paths import RunDirectory
from gradus.run.records import Record
from gradus.run.settings import planned_steps

FLUSH_SECONDS = 5.0
"""For a slow reader at the end."""
MAX_WAITING = 1_000
"""Texts that wait for a reader."""
_REDRAW_SECONDS = 0.2
_BAR_COLUMNS = 80
"""Of a terminal that does not say how wide it is."""
_SHORT_STEPS = 50
_LINE_STEPS = 10
_LINE_SECONDS = 60.0
"""In a file, a run of more than so many steps has a line for every tenth, and one a minute."""
_PACE_STEPS = 20
"""Recent steps whose pace predicts the rest."""
_END = bytes([4])
_CLEAR_LINE = "\x1b[2K"


@contextlib.contextmanager
def unblocked(stream: TextIO) -> Iterator[TextIO]:
    """`stream`, but nobody who writes to it waits for a reader that does not read: a full pipe or
    a stopped terminal would also keep the launcher from its processes and from signals.

    At the end of the block the reader has FLUSH_SECONDS for what is left.
    """
    try:
        kind = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        kind = 0  # A stream of Python's own, as in a notebook.
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or stat.S_ISCHR(kind)):
        yield stream
        return
    output = _Unblocked(stream)
    try:
        yield cast("TextIO", output)
    finally:
        output.close(FLUSH_SECONDS)


class _Unblocked:
    """A text stream whose thread writes; what finds the queue full is dropped and counted."""

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self.encoding = stream.encoding
        self.isatty, self.fileno = stream.isatty, stream.fileno
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._num_dropped = 0
        self._is_writing = False
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._num_dropped += text.count("\n")
                return len(text)
            if self._num_dropped:
                note = f"({self._num_dropped:,} lines were not shown: nobody read them)\n"
                self._waiting.append(note.encode())
                self._num_dropped = 0
            self._waiting.append(text.encode(self.encoding, errors="replace"))
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """The thread writes at once."""

    def close(self, seconds: float) -> None:
        """Wait so long for a reader; without one, what is said later goes nowhere."""
        with self._changed:
            is_idle = lambda: not self._waiting and not self._is_writing  # noqa: E731
            is_read = self._changed.wait_for(is_idle, timeout=seconds)
            self._waiting.append(_END)
            self._changed.notify_all()
        if is_read:
            self._thread.join()
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        full = os.fstat(self.fileno())
        for descriptor in (1, 2):
            if os.path.samestat(os.fstat(descriptor), full):
                os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting))
                text = self._waiting.popleft()
                self._is_writing = True
            if text is _END:
                return
            with contextlib.suppress(OSError):  # Whoever read has gone; the run has its own files.
                while text:
                    text = text[os.write(self.fileno(), text) :]


class ConsoleProgress:
    """Writes to one stream; lines are redrawn and a bar is shown only on a terminal."""

    def __init__(
        self,
        stream: TextIO,
        *,
        max_steps: int = 0,
        log_every: int | None = None,
        columns: tuple[Column, ...] = RL_COLUMNS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._planned = planned_steps(max_steps)
        self._log_every = log_every
        self._columns = columns
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._lines: dict[str, str | None] = {}
        self._started_at = self._redrawn_at = clock()
        self._height = 0  # rows of the terminal that `_lines` take
        self._bar: Any = None
        self._line_at = self._started_at
        self._seen: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS)

    def started(self, names: Sequence[str]) -> None:
        self._lines = dict.fromkeys(names)
        self._started_at = self._redrawn_at = self._clock()
        if self._is_terminal:
            self._draw()

    def ready(self, name: str, seconds: float, detail: str) -> None:
        """A process is ready; `detail` says where it serves."""
        line = f"{name:<17} starting … ready in {seconds:.1f} s  {detail}".rstrip()
        if not self._is_terminal:
            self.line(line)
            return
        self._lines[name] = line
        self._redraw()

    def waiting(self) -> None:
        """Time passes; on a terminal the seconds of the starting processes move."""
        is_due = self._clock() - self._redrawn_at >= _REDRAW_SECONDS
        if self._is_terminal and is_due and None in self._lines.values():
            self._redraw()

    def evaluation(self, record: Record) -> None:
        names = [name.removeprefix("eval/") for name in record.metrics]
        averaged = {name.partition("/avg")[0] for name in names if "/avg@" in name}
        numbers = "  ".join(
            f"{name.removesuffix('/mean')} {record.metrics[f'eval/{name}']:.3f}"
            for name in names
            if "/" in name and _is_headline(name, averaged)
        )
        self.line(f"evaluation of version {record.step}  {numbers}")

    def step(self, record: Record) -> None:
        """A step is done: a terminal shows the newest on one line, a file some of them."""
        left = self._seconds_left(record.step)
        end = "" if left is None else f"  left {format_seconds(left)}"
        if self._has_line(record.step + 1):
            self._line_at = self._seen[-1][1]
            self.line(self._in_words(record, end, self._width()))
        if not self._is_terminal:
            return
        width = self._width() or _BAR_COLUMNS
        text = self._in_words(record, end, width * 7 // 8 - 2)
        bar = max(1, min(width // 8, width - len(text) - 2))
        look: dict[str, Any] = {"ncols": width, "bar_format": f"{{bar:{bar}}} {{desc}}"}
        look["desc"] = text
        if self._bar is None:
            tqdm.monitor_interval = 0  # Without tqdm's thread: the launcher moves the bar.
            shown = record.step + 1
            self._bar = tqdm(
                total=self._planned, initial=shown, file=self._stream, leave=False, **look
            )
            return
        vars(self._bar).update(look, n=record.step + 1)
        self._bar.refresh()

    def _has_line(self, number: int) -> bool:
        """Whether a step, counted from 1, leaves a line that stays."""
        if number == self._planned:
            return True
        if self._log_every is not None:
            return number == 1 or number % self._log_every == 0
        if self._is_terminal:
            return False
        is_short = self._planned is not None and self._planned <= _SHORT_STEPS
        every = 1 if is_short else _LINE_STEPS
        is_due = number == 1 or number % every == 0
        return is_due or self._seen[-1][1] - self._line_at >= _LINE_SECONDS

    def _in_words(self, record: Record, end: str, width: int | None) -> str:
        line = format_step(
            record.metrics,
            step=record.step,
            max_steps=self._planned,
            columns=self._columns,
            width=None if width is None else width - len(end),
        )
        return line + end

    def _width(self) -> int | None:
        """Characters of a line on the terminal; None where there is none, as in a file."""
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self._stream.fileno()).columns or None
        return None

    def _seconds_left(self, step: int) -> float | None:
        """Seconds until the last step, by the pace of recent steps; None before there are two.

        By the clock and not by the steps' own seconds: evaluations and checkpoints take time too.
        """
        self._seen.append((step, self._clock()))
        (first, since), (last, now) = self._seen[0], self._seen[-1]
        steps_left = (self._planned or 0) - 1 - last
        if last <= first or steps_left <= 0:
            return None
        return (now - since) / (last - first) * steps_left

    def line(self, text: str) -> None:
        """One line, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
            return
        if not self._is_terminal or None not in self._lines.values():
            self._stream.write(text + "\n")
            self._stream.flush()
            return
        # Above the processes that still start, whose lines move.
        self._stream.write(f"\x1b[{self._height}A\x1b[J{text}\n")
        self._draw()

    def lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.line(text)

    def end_steps(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _redraw(self) -> None:
        self._stream.write(f"\x1b[{self._height}A")
        self._draw()

    def _draw(self) -> None:
        self._redrawn_at = self._clock()
        seconds = self._redrawn_at - self._started_at
        width, self._height = self._width() or sys.maxsize, 0
        for name, line in self._lines.items():
            shown = line or f"{name:<17} starting … {seconds:.0f} s"
            self._height += -(-len(shown) // width)
            self._stream.write(f"{_CLEAR_LINE}{shown}\n")
        self._stream.flush()


def _is_headline(name: str, averaged: Collection[str]) -> bool:
    """Whether a number of an evaluation, without `eval/`, belongs into its line.

    An agent's reward does where the environment has no average, as in a game of several agents.
    """
    if "/agent/" in name:
        return name.endswith("/reward/mean") and name.partition("/")[0] not in averaged
    return "@" in name or "^" in name or name.endswith("error/share")


class View(ABC):
    """Shows one launch and sums it up; this base shows the notices of its processes."""

    def __init__(
        self,
        console: ConsoleProgress,
        run_dir: RunDirectory,
        in_words: Callable[[str], str] = str,
    ) -> None:
        """`in_words` says a line as whoever launches would: in keywords of a call."""
        self.console = console
        self._in_words = in_words
        self._notices = LineTail(run_dir.notices, skips_old=True)

    def line(self, text: str) -> None:
        self.lines([text])

    def lines(self, texts: Iterable[str]) -> None:
        self.console.lines(map(self._in_words, texts))

    def show(self) -> None:
        """What is new since the last call."""
        self.lines(self._notices.read())

    def end(self) -> None:
        """Show what came last, and take away what moves."""
        self.show()

    @abstractmethod
    def num_done(self) -> int:
        """Steps or episodes of the run that are finished, as far as they were shown."""

    @abstractmethod
    def continued(self, checkpoint_step: int) -> str:
        """Where a restart continues, and what it does again; 0 without a checkpoint."""

    @abstractmethod
    def sum_up(
        self, outcome: str, cause: str | None, seconds: PhaseSeconds, restarts: Sequence[str]
    ) -> int:
        """The last lines; returns the exit code of an outcome `done`."""
