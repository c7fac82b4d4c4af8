"""What a run shows about learning: numbers from its metrics and its episodes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poker_value import Strategy, chips_against, estimate_strategy, exploitability

EDGE_STEPS = 3
"""Steps that "before" and "after" cover."""


@dataclass(frozen=True)
class Measure:
    """A quantity that learning changes."""

    words: str
    """With its unit, as in the table."""
    read: Callable[[Path], list[float]]
    """Run directory → values in step order."""
    steps_per_value: int = 1
    """How many steps each value is computed from."""


@dataclass(frozen=True)
class Edge:
    """The mean over one end of a run."""

    mean: float
    error: float | None
    """Standard error of the mean, from the values of the steps; None for a single value."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Edge:
        """The mean of some values, at least one."""
        error = None
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), error)

    def text(self) -> str:
        """As in the table: `0.512 ± 0.010`."""
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.mean:.3f}{error}"


def edges(values: Sequence[float], *, steps_per_value: int = 1) -> tuple[Edge, Edge]:
    """The first and the last `EDGE_STEPS` steps of a run; ValueError when the two overlap."""
    width = max(1, EDGE_STEPS // steps_per_value)
    if len(values) < 2 * width:
        raise ValueError(f"{len(values)} values have no beginning and end of {width} each")
    return Edge.of(values[:width]), Edge.of(values[-width:])


def metric(name: str) -> Callable[[Path], list[float]]:
    """Reads a metric that steps record."""

    def read(run_dir: Path) -> list[float]:
        rows = read_lines(run_dir / "metrics.jsonl")
        values = {row["step"]: row[name] for row in rows if row.get(name) is not None}
        return [values[step] for step in sorted(values)]

    return read


def read_mistakes(run_dir: Path) -> list[float]:
    """Share of the clear decisions in poker (K or J against a bet) that give chips away."""
    shares = []
    for traces in read_steps(run_dir):
        decisions = sum(trace["metrics"].get("clear_decisions") or 0 for trace in traces)
        wrong = sum(trace["metrics"].get("mistakes") or 0 for trace in traces)
        if decisions:
            shares.append(wrong / decisions)
    return shares


def read_chips_against_start(run_dir: Path) -> list[float]:
    """What the policy wins against the policy of the first steps, chips per game; begins with 0."""
    strategies = pooled_strategies(run_dir)
    return [chips_against(strategy, strategies[0]) for strategy in strategies]


def read_exploitability(run_dir: Path) -> list[float]:
    """What a perfect opponent wins, chips per game.

    A best answer also exploits the noise of the frequencies, so few games look worse than they are.
    """
    return [exploitability(strategy) for strategy in pooled_strategies(run_dir)]


def pooled_strategies(run_dir: Path) -> list[Strategy]:
    """How the policy played, from the moves of `EDGE_STEPS` steps at a time."""
    steps = read_steps(run_dir)
    starts = range(len(steps) % EDGE_STEPS, len(steps), EDGE_STEPS)
    pooled = [steps[start : start + EDGE_STEPS] for start in starts]
    return [strategy_of([trace for step in part for trace in step]) for part in pooled]


def strategy_of(traces: Sequence[Mapping[str, Any]]) -> Strategy:
    """How often the players of these traces made which move."""
    return estimate_strategy(move for trace in traces for move in moves_of(trace))


def moves_of(trace: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a player was told, and what it answered."""
    told = ""
    for node in trace["nodes"]:
        content = node["message"].get("content") or ""
        if node["message"]["role"] == "user":
            told = content
        elif node["sampled"]:
            yield told, content


def read_steps(run_dir: Path) -> list[list[Mapping[str, Any]]]:
    """The traces that each step's episodes left, in step order."""
    folders = (run_dir / "episodes").glob("step_*")
    ordered = sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))
    files = (folder / "train.jsonl" for folder in ordered)
    return [
        [trace for record in read_lines(file) for trace in record.get("traces", ())]
        for file in files
        if file.exists()
    ]


def read_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


REWARD = Measure("mean reward", metric("episode/reward/mean"))
MISTAKES = Measure("mistakes per clear decision", read_mistakes)
AGAINST_START = Measure(
    "chips per game against its own start", read_chips_against_start, steps_per_value=EDGE_STEPS
)
EXPLOITABILITY = Measure(
    "chips per game that a perfect opponent wins", read_exploitability, steps_per_value=EDGE_STEPS
)
SURPRISE = Measure("surprise at tool outputs, nats per token", metric("loss/ce/nll/mean"))
SURPRISE_IN_BATCH = Measure(SURPRISE.words, metric("loss/ce_batch/nll/mean"))
TEACHER_DISTANCE = Measure("loss `ref_kl`, nats per token", metric("loss/ref_kl/mean"))
IMITATION = Measure("loss `ce`, nats per token", metric("loss/ce/nll/mean"))
EVALUATED = Measure(
    "mean reward, evaluated before and after",
    metric("eval/gradus-reverse-text/avg@2"),
    steps_per_value=EDGE_STEPS,
)
