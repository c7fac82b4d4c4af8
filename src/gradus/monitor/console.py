"""One line per step for a person: reward, mismatch KL, entropy, lengths, speed, staleness, and
what went wrong."""

from __future__ import annotations

import re
import shutil
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from gradus.monitor.catalogue import describe_metric
from gradus.run.settings import planned_steps

_WIDTH = 100
_LABEL = re.compile(r"\s*\S+(?: \S+)*\s{2,}")
"""What stands before the text of a line: words, and two spaces or more."""


@dataclass(frozen=True)
class Column:
    """One number of the line."""

    label: str
    keys: tuple[str, ...]
    """The first key that is present is shown."""
    format: str
    suffix: str = ""
    is_note: bool = False
    """Shown only when it is there and not zero."""
    is_detail: bool = False
    """Left out of a line that would be too wide, the last one first."""
    instead: Callable[[Mapping[str, float]], str] = field(default=lambda _: "")
    """Shown when none of the keys is there, and "-" where this is empty."""


_MISSING = "-"
_MAX_AGENTS = 3


LAST_STEPS = 3
"""Steps whose mean is what a run reached, on the console, in `summary.json` and in the report."""


def mean(values: Sequence[float]) -> float:
    """Also of numbers whose sum is none, such as an environment may return as rewards."""
    try:
        return statistics.fmean(values)
    except OverflowError:
        return sum(value / len(values) for value in values)


def first_and_last(values: Sequence[float]) -> tuple[float, float] | None:
    """What a run began with, its first step, and what it reached, the mean of its last steps.

    >>> first_and_last([0.0, 5.0, 1.0, 2.0, 3.0])
    (0.0, 2.0)
    """
    return (values[0], mean(values[-LAST_STEPS:])) if values else None


def agents_rewards(metrics: Mapping[str, float]) -> str:
    """The mean reward of each agent that trains; of more than a few, the lowest and the highest.
    Empty where the record names no agent.

    >>> agents_rewards({"episode/go/agent/black/reward/mean": 0.25,
    ...                 "episode/go/agent/black/trained/share": 1.0})
    'black 0.250'
    """
    found: dict[str, float] = {}
    for name, reward in metrics.items():
        about = describe_metric(name) if "/agent/" in name else None
        if about is None or about.family != "episode/source/agent/agent/reward/mean":
            continue
        source, agent = about.labels["source"], about.labels["agent"]
        if metrics.get(f"episode/{source}/agent/{agent}/trained/share"):
            found[f"{source}/{agent}"] = reward
    agents = [name.partition("/")[2] for name in found]
    is_plain = len(set(agents)) == len(agents)
    if len(found) > _MAX_AGENTS:
        return f"{min(found.values()):.3f} to {max(found.values()):.3f}"
    named = zip(agents if is_plain else found, found.values(), strict=True)
    return " ".join(f"{name} {reward:.3f}" for name, reward in named)


RL_COLUMNS = (
    Column("reward", ("episode/reward/mean",), "6.3f", instead=agents_rewards),
    Column("mismatch", ("loss/mismatch_kl/mean",), ".1e", is_detail=True),
    Column("entropy", ("loss/entropy/mean",), "5.3f"),
    Column("length", ("episode/length_tokens/mean",), "6.1f", is_detail=True),
    Column("trained", ("throughput/trained_tokens_per_second",), "6,.0f", " tok/s", is_detail=True),
    Column(
        "generated", ("throughput/generated_tokens_per_second",), "6,.0f", " tok/s", is_detail=True
    ),
    Column("stale", ("sample/staleness/max",), ".0f", is_detail=True),
    Column("", ("time/step_seconds",), "6.2f", " s"),
    Column("failed", ("episode/error/share",), ".1%", is_note=True),
    Column("flat", ("episode/flat/share",), ".1%", is_note=True),
    Column("dropped", ("episode/dropped/share",), ".1%", is_note=True),
    Column("truncated", ("episode/truncated/share",), ".1%", is_note=True),
)
"""The line of an RL step; the notes say what keeps episodes from training as they should."""

SFT_COLUMNS = (
    Column("loss", ("loss/total/mean", "loss/ce/mean"), "7.4f"),
    Column("validation", ("validation/loss/mean",), "7.4f", is_note=True),
    Column("rows left out", ("sample/skipped/share",), ".0%", is_note=True),
    Column("epoch", ("batch/epoch",), ".2f", is_detail=True),
    Column("lr", ("optimizer/lr",), ".1e", is_detail=True),
    Column("grad norm", ("optimizer/grad_norm",), "7.3f", is_detail=True),
    Column("trained", ("throughput/trained_tokens_per_second",), "6,.0f", " tok/s", is_detail=True),
    Column("", ("time/step_seconds",), "6.2f", " s"),
)
"""The line of a step of supervised fine-tuning."""

BENCH_COLUMNS = (
    Column("trained", ("throughput/trained_tokens_per_second",), "7,.0f", " tok/s"),
    Column("", ("throughput/model_teraflops_per_second",), "7.3f", " TFLOP/s"),
    Column("mfu", ("throughput/mfu/share",), "6.2%"),
    Column("memory", ("throughput/peak_memory_gib",), "6.2f", " GiB"),
    Column("padding", ("batch/padding/share",), "5.1%"),
    Column("", ("time/step_seconds",), "6.2f", " s"),
)
"""The line of a step on made-up samples."""


def format_step(
    metrics: Mapping[str, float],
    *,
    step: int,
    max_steps: int | None = None,
    columns: tuple[Column, ...] = RL_COLUMNS,
    width: int | None = None,
) -> str:
    """The line of one step; a number that is missing shows as "-", a note that is zero not at all.

    A line of more than `width` characters loses details, never the other columns.

    >>> format_step({"loss/total/mean": 1.5}, step=0, max_steps=9, columns=SFT_COLUMNS[:1])
    'step 1/9  loss  1.5000'
    """
    max_steps = planned_steps(max_steps)
    total = "" if max_steps is None else f"/{max_steps}"
    places = len(str(max_steps or 0))
    shown = [it for it in columns if not it.is_note or _value(it, metrics)]
    while True:
        cells = [_cell(column, metrics) for column in shown]
        line = "  ".join([f"step {step + 1:>{places}}{total}", *cells])
        details = [column for column in shown if column.is_detail]
        if width is None or len(line) <= width or not details:
            return line
        shown.remove(details[-1])


def aligned(rows: Sequence[Sequence[str]], *, num_left: int = 1) -> list[str]:
    """Lines whose columns stand below each other, the first `num_left` to the left.

    >>> aligned([["name", "avg"], ["words", "0.5"]])
    ['name   avg', 'words  0.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def terminal_width() -> int:
    """Columns of the terminal, or those that COLUMNS says; else 100, as in a file."""
    return shutil.get_terminal_size((_WIDTH, 24)).columns


def wrapped(lines: Iterable[str], *, width: int | None = None) -> list[str]:
    """The lines, long ones continued below where their text begins, after a label or an indent.

    >>> wrapped(["  trainer  1 process, bfloat16"], width=24)
    ['  trainer  1 process,', '           bfloat16']
    """
    most, found = width or terminal_width(), []
    for line in lines:
        label = _LABEL.match(line)
        indent = len(label[0]) if label and len(label[0]) < most / 2 else 4
        found += textwrap.wrap(
            line,
            most,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return found


def format_seconds(seconds: float) -> str:
    """A time for a person, rounded to what matters.

    >>> [format_seconds(s) for s in (42, 130, 3900, 400_000)]
    ['42 s', '2 min', '1 h 5 min', '4 d 15 h']
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


class ConsoleMonitor:
    """Writes one line per record to a stream.

    >>> ConsoleMonitor(sys.stderr).record({"episode/reward/mean": 0.5}, step=0)  # doctest: +SKIP
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        max_steps: int | None = None,
        columns: tuple[Column, ...] = RL_COLUMNS,
    ) -> None:
        self._write: Callable[[str], object] = stream.write
        self._flush = stream.flush
        self._max_steps = max_steps
        self._columns = columns

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:
        line = format_step(metrics, step=step, max_steps=self._max_steps, columns=self._columns)
        self._write(line + "\n")
        self._flush()

    def close(self) -> None:
        """The stream belongs to whoever passed it."""


def _value(column: Column, metrics: Mapping[str, float]) -> float | None:
    return next((metrics[key] for key in column.keys if metrics.get(key) is not None), None)


def _cell(column: Column, metrics: Mapping[str, float]) -> str:
    value = _value(column, metrics)
    number = None if value is None else f"{value:{column.format}}{column.suffix}"
    shown = number or column.instead(metrics) or _MISSING
    return f"{column.label} {shown}" if column.label else shown
