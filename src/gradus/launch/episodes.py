"""Evaluations: how their episodes continue, and the table of their numbers."""

from __future__ import annotations

import heapq
import itertools
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from gradus.config import EvalProcessConfig
from gradus.errors import ExitCode
from gradus.files import read_json, write_json
from gradus.launch.console import ConsoleProgress, View
from gradus.launch.resume import IDENTITY_NAME, Preparation, ResumePoint, empty
from gradus.monitor import aligned, terminal_width
from gradus.plan.processes import LaunchPlan
from gradus.run.episodes import read_episodes
from gradus.run.lease import RunLease
from gradus.run.model_files import MODEL_FILES, digest_files, model_folder
from gradus.run.paths import RunDirectory
from gradus.run.settings import continued_identity

PROGRESS_NAME, RESULTS_NAME = "progress.json", "results.json"

_TABLE_SECONDS = 0.5
_LINE_SECONDS = 5.0
_CLEAR_LINE = "\x1b[2K"
_REPLY_CHARACTERS = 300
"""What is shown of a reply: its end, where answers stand."""


@dataclass(frozen=True)
class Episodes:
    """The episodes of one evaluation, all or those that are missing."""

    num_replies: int = 0
    """How many replies are shown at the end."""
    is_rated: bool = True
    """Whether rewards say anything; else the replies are all that is wanted."""
    from_python: bool = False
    """Whether a function was called, to which commands are no next step."""
    in_words: Callable[[str], str] = str
    """Says a line as whoever launches would."""
    title = "evaluation"

    def resume_point(self, _: RunLease) -> ResumePoint:
        """Episodes need no checkpoint: those in the folder are not played again."""
        return ResumePoint(None)

    def prepare(self, lease: RunLease, plan: LaunchPlan, point: ResumePoint | None) -> Preparation:
        """Refuses to continue with episodes of something else."""
        run_dir = lease.run_dir
        identity = _identity(plan)
        path = run_dir.root / IDENTITY_NAME
        if point is not None and path.is_file():
            identity = continued_identity(read_json(path), identity)
        return Preparation([], partial(_write, run_dir, identity))

    def view(self, stream: TextIO, lease: RunLease) -> View:
        return TableView(stream, lease.run_dir, self)


def _identity(plan: LaunchPlan) -> dict[str, Any]:
    """What the episodes depend on, with digests of the model's files when gradus serves it."""
    evaluator = plan.launched
    assert isinstance(evaluator, EvalProcessConfig)
    folder = model_folder(evaluator.model.name) if evaluator.base_url is None else None
    # The engine reads the same files soon after, from the page cache.
    digests = {} if folder is None else digest_files(folder, MODEL_FILES)
    return evaluator.identity | {"files": digests}


def _write(run_dir: RunDirectory, identity: Mapping[str, Any]) -> None:
    # What a killed launch left would be taken for what this one writes.
    empty(run_dir.ready)
    for name in (PROGRESS_NAME, RESULTS_NAME):
        (run_dir.root / name).unlink(missing_ok=True)
    write_json(run_dir.root / IDENTITY_NAME, identity)


DEFAULT = Episodes()


class TableView(View):
    """The numbers of each environment while it is played, and all of them in the end."""

    def __init__(self, stream: TextIO, run_dir: RunDirectory, episodes: Episodes = DEFAULT) -> None:
        super().__init__(ConsoleProgress(stream), run_dir, episodes.in_words)
        self._root = run_dir.root
        self._episodes = run_dir.episodes / "step_0" / "eval.jsonl"
        self._asked = episodes
        self._table = LiveTable(stream, is_rated=episodes.is_rated)

    def lines(self, texts: Iterable[str]) -> None:
        """Lines that stay, in the place of the table, which comes back below them."""
        if found := list(texts):
            self._table.clear()
            super().lines(found)

    def show(self) -> None:
        super().show()
        self._table.show(self._root / PROGRESS_NAME)

    def end(self) -> None:
        super().show()
        self._table.clear()

    def num_done(self) -> int:
        try:
            progress = read_json(self._root / PROGRESS_NAME)
        except FileNotFoundError:
            return 0
        return int(progress["overall"]["num_episodes"])

    def continued(self, _: int) -> str:
        return "with the episodes that are missing or failed"

    def sum_up(self, outcome: str, cause: str | None, *_: object) -> int:
        """Print the results; TRY_AGAIN when an episode failed or is missing."""
        if outcome == "interrupted":
            self.line(f"interrupted {cause}; continue with --resume")
        if outcome != "done":
            return ExitCode.DONE
        path = self._root / RESULTS_NAME
        results = read_json(path)
        told = table(results) if self._asked.is_rated else []
        if any("±" in line for line in told):
            told.append("±           half of the 95 % interval, over tasks")
        told += [*error_lines(results), *lowest_replies(self._episodes, self._asked.num_replies)]
        self.lines([*told, *([f"{'results':<12}{path}"] if self._asked.is_rated else [])])
        if not self._asked.from_python:
            # As it is found from where the command was given.
            shown = shlex.quote(os.path.relpath(self._root))
            self.line(f"{'next':<12}gradus compare {shown} OTHER   task by task")
            self.line(f"{'':<12}gradus view {shown}   a page")
        if is_complete(results):
            return ExitCode.DONE
        if self._asked.is_rated:
            self.line("some episodes failed; --resume plays just those again")
        return ExitCode.TRY_AGAIN


class LiveTable:
    """The table while the evaluation runs: redrawn on a terminal, one line every 5 s elsewhere."""

    def __init__(self, stream: TextIO, *, is_rated: bool = True) -> None:
        self._stream = stream
        self._is_rated = is_rated
        self._is_terminal = stream.isatty()
        self._shown_at = float("-inf")
        self._num_lines = 0
        self._last = ""

    def show(self, path: Path) -> None:
        """Show what `path` holds, unless it was just shown."""
        pause = _TABLE_SECONDS if self._is_terminal else _LINE_SECONDS
        if time.monotonic() - self._shown_at < pause:
            return
        try:
            progress = read_json(path)
        except FileNotFoundError:
            return
        self._shown_at = time.monotonic()
        line = progress_line(progress, is_rated=self._is_rated)
        if self._is_terminal:
            self.clear()
            lines = table(progress) if self._is_rated else [line]
            self._num_lines = len(lines)
            self._stream.write("".join(f"{line}\n" for line in lines))
        elif line != self._last:
            self._last = line
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._num_lines:
            self._stream.write(f"\x1b[{self._num_lines}A")
            self._stream.write(f"{_CLEAR_LINE}\n" * self._num_lines)
            self._stream.write(f"\x1b[{self._num_lines}A")
            self._stream.flush()
        self._num_lines = 0


Row = Mapping[str, Any]


def table(progress: Mapping[str, Any], *, width: int | None = None) -> list[str]:
    """One line per environment, with a last one over all when there are several. Where several
    agents are measured at once, one for each of them too. A narrow one leaves out pass^k."""
    rows = list(progress["environments"])
    if len(rows) > 1:
        rows.append(progress["overall"])
    ks = sorted({int(k) for row in rows for k in row["pass_at"]})
    head = ["environment", "episodes", "avg", *(f"pass@{k}" for k in ks)]
    head += [*(f"pass^{k}" for k in ks if k > 1), "errors", "truncated", "length"]
    cells = [head, *(line for row in rows for line in (_cells(row, ks), *_agents(row, len(head))))]
    lines = aligned(cells)
    if max(map(len, lines)) > (width or terminal_width()):
        kept = [place for place, name in enumerate(head) if not name.startswith("pass^")]
        lines = aligned([[line[place] for place in kept] for line in cells])
    return lines


def error_lines(progress: Mapping[str, Any]) -> list[str]:
    """How often each kind of error came, the most frequent first, with an example."""
    messages = progress["error_messages"]
    return [
        f"error       {count} x {kind}: {_one_line(messages.get(kind, ''))}"
        for kind, count in progress["overall"]["errors"].items()
    ]


def progress_line(progress: Mapping[str, Any], *, is_rated: bool = True) -> str:
    """Where the evaluation stands, in one line for a log."""
    overall = progress["overall"]
    done, planned = overall["num_episodes"], overall["planned_episodes"]
    errors = sum(overall["errors"].values())
    avg = f"avg {_number(overall['avg'])}  " if is_rated else ""
    return f"episodes {done}/{planned}  {avg}errors {errors}"


def lowest_replies(episodes: Path, num: int) -> list[str]:
    """Lines for each of the `num` replies with the least reward, at most one of a task.

    Each has the last sampled text of the shown trace, what it replied to, and the task's answer
    where it has one; an episode that failed is left out.
    """
    order = itertools.count()
    rated = ((it.reward, next(order), it) for it in _replies(episodes))
    lowest: dict[str, _Reply] = {}
    # Ties keep the order of the file, so that the same file gives the same lines.
    for _, _, reply in heapq.nsmallest(num * 50, rated):
        lowest.setdefault(reply.task, reply)
    return [line for reply in list(lowest.values())[:num] for line in reply.lines()]


@dataclass(frozen=True)
class _Reply:
    """A reply beside what was asked."""

    reward: float
    task: str
    asked: str
    wanted: str
    text: str

    def lines(self) -> Iterator[str]:
        yield f"{'reply':<12}reward {self.reward:.3f}"
        yield f"{'':<12}asked   {_end_of(self.asked)}"
        if self.wanted:
            yield f"{'':<12}wanted  {_end_of(self.wanted)}"
        yield f"{'':<12}replied {_end_of(self.text)}"


def _replies(episodes: Path) -> Iterator[_Reply]:
    for episode in read_episodes(episodes):
        if episode.reward is None or episode.shown is None:
            continue
        asked, text = episode.shown.last_turn
        yield _Reply(episode.reward, episode.task, asked, episode.answer, text)


def _end_of(text: str) -> str:
    end = text[-_REPLY_CHARACTERS:]
    shown = "".join(c if c.isprintable() else " " for c in " ".join(end.split()))
    return ("..." if len(text) > len(end) else "") + (shown or "(nothing)")


def is_complete(progress: Mapping[str, Any]) -> bool:
    overall = progress["overall"]
    return overall["num_episodes"] == overall["planned_episodes"] and not overall["errors"]


def _cells(row: Row, ks: list[int]) -> list[str]:
    at = {int(k): value for k, value in row["pass_at"].items()}
    all_of = {int(k): value for k, value in row["pass_all"].items()}
    avg = _number(row["avg"])
    if row["avg"] is not None and (row.get("low") or 0) < (row.get("high") or 0):
        avg += f" ± {(row['high'] - row['low']) / 2:.3f}"
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


def _agents(row: Row, num_cells: int) -> Iterator[list[str]]:
    """The mean reward of each agent, where the mean of all says nothing."""
    for name, reward in row["values"].items() if row["is_shared"] else ():
        if found := re.fullmatch("agent/([^/]+)/reward", name):
            yield [f"  {found[1]}", "", _number(reward), *[""] * (num_cells - 3)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _one_line(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable if len(printable) <= 160 else f"{printable[:160]}..."
