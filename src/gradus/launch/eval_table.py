"""The numbers of an evaluation as a table for a person (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def table(progress: Mapping[str, Any]) -> list[str]:
    """One line per environment, with a last one over all when there are several.

    >>> table(progress)[0].split()[:3]  # doctest: +SKIP
    ['environment', 'episodes', 'avg@4']
    """
    rows = list(progress["environments"])
    if len(rows) > 1:
        rows.append(progress["overall"])
    ks = sorted({int(k) for row in rows for k in row["pass_at"]})
    head = ["environment", "episodes", "avg", *(f"pass@{k}" for k in ks)]
    head += [*(f"pass^{k}" for k in ks if k > 1), "errors", "truncated", "length"]
    lines = [head, *(_cells(row, ks) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def error_lines(progress: Mapping[str, Any]) -> list[str]:
    """How often each kind of error came, the most frequent first, with an example."""
    messages = progress["error_messages"]
    return [
        f"error       {count} x {kind}: {_one_line(messages.get(kind, ''))}"
        for kind, count in progress["overall"]["errors"].items()
    ]


def progress_line(progress: Mapping[str, Any]) -> str:
    """Where the evaluation stands, in one line for a log."""
    overall = progress["overall"]
    done, planned = overall["num_episodes"], overall["planned_episodes"]
    errors = sum(overall["errors"].values())
    return f"episodes {done}/{planned}  avg {_number(overall['avg']).strip()}  errors {errors}"


def is_complete(progress: Mapping[str, Any]) -> bool:
    """Whether every episode ended, and none with an error."""
    overall = progress["overall"]
    return overall["num_episodes"] == overall["planned_episodes"] and not overall["errors"]


def _cells(row: Row, ks: list[int]) -> list[str]:
    at = {int(k): value for k, value in row["pass_at"].items()}
    all_of = {int(k): value for k, value in row["pass_all"].items()}
    avg = _number(row["avg"])
    if row["avg"] is not None and row["group_size"] is not None:
        avg += f" (@{row['group_size']})"
    length = row["mean_length_tokens"]
    return [
        str(row["name"]),
        f"{row['num_episodes']}/{row['planned_episodes']}",
        avg,
        *(_number(at.get(k)) for k in ks),
        *(_number(all_of.get(k)) for k in ks if k > 1),
        str(sum(row["errors"].values())),
        _number(row["truncated_share"]),
        "-" if length is None else f"{length:.0f}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _one_line(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable if len(printable) <= 160 else f"{printable[:160]}..."
