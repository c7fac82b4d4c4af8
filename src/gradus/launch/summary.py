"""What the records of a run sum up to: the last lines on the terminal, and `summary.json`."""

from __future__ import annotations

import re
import shlex
import statistics
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gradus.monitor import (
    LAST_STEPS,
    LearningVerdict,
    agents_rewards,
    evaluated_average,
    first_and_last,
    mean,
    verdict_on,
)
from gradus.run.model_files import BestVersion
from gradus.run.records import Record
from gradus.run.settings import planned_steps

STEP_PARTS = {
    "step": ("time/step_seconds",),
    "generation wait": ("time/generate_wait_seconds",),
    "weights publish": ("weights/publish_seconds",),
    "weights apply": ("weights/apply_seconds",),
    "training": ("time/forward_backward_seconds", "time/optimize_seconds"),
    "trainer waiting": ("time/receive_seconds",),
}
"""Name of a part of a step → the metrics whose sum it is. The parts overlap: roles run at once."""


_FAILURES = re.compile(r"episode/error/([^/]+)/sum")
_UNTRAINED = re.compile(r"episode/(.+)/tokens/untrained/([^/]+)/share")
_TRAINED = "trained"
_WARNING = re.compile(
    rb'^\S+Z WARNING [^:]* gradus(?:\.|:)|"level": ?"WARNING".*"logger": ?"gradus'
)
"""A line of a log in which a part of gradus warns; libraries warn of much."""
MOST_KEPT = 1_000
"""Records from which a verdict is made: the others are only counted."""


@dataclass(frozen=True)
class PhaseSeconds:
    """Wall time of each phase of a launch."""

    start_up: float
    steps: float
    stop: float

    @property
    def total(self) -> float:
        return self.start_up + self.steps + self.stop

    def __add__(self, other: PhaseSeconds) -> PhaseSeconds:
        return PhaseSeconds(
            self.start_up + other.start_up, self.steps + other.steps, self.stop + other.stop
        )


@dataclass
class Phases:
    """When each phase of an attempt began, in monotonic seconds, and the sums of those before."""

    started: float = field(default_factory=time.monotonic)
    ready: float | None = None
    stopping: float | None = None
    before: PhaseSeconds = field(default_factory=lambda: PhaseSeconds(0.0, 0.0, 0.0))

    @property
    def is_working(self) -> bool:
        return self.ready is not None and self.stopping is None

    def seconds(self) -> PhaseSeconds:
        now = time.monotonic()
        stopping = self.stopping or now
        ready = self.ready or stopping
        return self.before + PhaseSeconds(ready - self.started, stopping - ready, now - stopping)

    def begin_again(self) -> None:
        self.before, self.started = self.seconds(), time.monotonic()
        self.ready = self.stopping = None


@dataclass
class Totals:
    """Owns what the records of a run add up to, in room that does not grow with their number: sums,
    evenly spread records, and the last ones."""

    num_steps: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Kind → episodes."""
    fates: Counter[str] = field(default_factory=Counter)
    """Tokens that the policy sampled, by what became of them: trained, or why not."""
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    """Version and average of the first and of the last evaluation."""
    _seconds: dict[str, array[float]] = field(default_factory=dict)
    """Part of a step → of each step; eight bytes each."""
    _kept: list[Record] = field(default_factory=list)
    _every: int = 1
    _last: deque[Record] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))

    @classmethod
    def of(cls, records: Iterable[Record]) -> Totals:
        totals = cls()
        for record in records:
            totals.add(record)
        return totals

    @property
    def num_done(self) -> int:
        """Steps that the newest record follows."""
        return self._last[-1].step + 1 if self._last else 0

    @property
    def records(self) -> list[Record]:
        """Of steps: all of them, or evenly spread ones and the last ones."""
        newest = self._kept[-1].step if self._kept else -1
        return [*self._kept, *(record for record in self._last if record.step > newest)]

    def add(self, record: Record) -> None:
        """The next record of the file."""
        if record.is_evaluation:
            if (average := evaluated_average(record.metrics)) is not None:
                self.evaluated = [*self.evaluated[:1], (record.step, average)]
            return
        self._add_counts(record.metrics)
        if self.num_steps % self._every == 0:
            self._kept.append(record)
        if len(self._kept) > MOST_KEPT:
            self._kept, self._every = self._kept[::2], 2 * self._every
        self._last.append(record)
        self.num_steps += 1

    def _add_counts(self, metrics: Mapping[str, float]) -> None:
        for part, keys in STEP_PARTS.items():
            if (value := _sum_of(metrics, keys)) is not None:
                self._seconds.setdefault(part, array("d")).append(value)
        total = metrics.get("episode/tokens/sampled/sum", 0.0)
        self.fates[_TRAINED] += round(total * metrics.get("episode/tokens/trained/share", 0.0))
        for name, value in metrics.items():
            if match := _FAILURES.fullmatch(name):
                self.failures[match[1]] += round(value)
            elif match := _UNTRAINED.fullmatch(name):
                of_source = metrics.get(f"episode/{match[1]}/tokens/sampled/sum", 0.0)
                self.fates[match[2]] += round(value * of_source)

    def median_seconds(self) -> dict[str, float]:
        """Where the time of a step goes: the median over all steps, by part."""
        known = (part for part in STEP_PARTS if part in self._seconds)
        return {part: statistics.median(self._seconds[part]) for part in known}


@dataclass(frozen=True)
class Summary:
    """The result of one launch."""

    kind: str
    """`rl`, `sft`, `bench` or `replay`."""
    run_dir: str
    term: int
    outcome: str
    """`done`, `solved`, `stalled`, `failed` or `interrupted`."""
    cause: str | None
    """Why it ended before its last step. None when it did not."""
    max_steps: int
    seconds: PhaseSeconds
    totals: Totals
    best: BestVersion | None = None
    """The best evaluated version; None where nothing was evaluated."""
    restarts: tuple[str, ...] = ()
    """What failed and was followed by a restart, the oldest first."""

    @property
    def headline(self) -> tuple[str, str]:
        """Name and metric of the number that shows whether the run learned."""
        if self.kind in ("sft", "replay"):
            return "loss", "loss/total/mean"
        if self.kind == "bench":
            return "tokens/s", "throughput/trained_tokens_per_second"
        return "reward", "episode/reward/mean"

    def first_and_last(self) -> tuple[float, float] | None:
        key = self.headline[1]
        return first_and_last([r.metrics[key] for r in self.totals.records if key in r.metrics])

    def agents_first_and_last(self) -> tuple[str, str] | None:
        """The same of each agent that trains, where several do and their mean says nothing."""
        told = [r.metrics for r in self.totals.records if agents_rewards(r.metrics)]
        if self.headline[0] != "reward" or not told:
            return None
        last = told[-LAST_STEPS:]
        names = dict.fromkeys(name for metrics in last for name in metrics if "/agent/" in name)
        means = {name: mean([m[name] for m in last if name in m]) for name in names}
        return agents_rewards(told[0]), agents_rewards(means)

    def verdict(self) -> LearningVerdict | None:
        """What the run learned; None where nothing can be said of it."""
        return verdict_on(self.kind, self.outcome, self.totals.records)

    def as_json(self) -> dict[str, Any]:
        name = self.headline[0]
        ends = self.first_and_last()
        verdict = self.verdict()
        return {
            "kind": self.kind,
            "run_dir": self.run_dir,
            "term": self.term,
            "outcome": self.outcome,
            "cause": self.cause,
            "steps": self.totals.num_steps,
            "max_steps": self.max_steps,
            f"{name}_first": ends[0] if ends else None,
            f"{name}_last": ends[1] if ends else None,
            "best": self.best and msgspec.structs.asdict(self.best),
            "verdict": verdict and verdict.as_json(),
            "failures": dict(self.totals.failures),
            "sampled_tokens": dict(+self.totals.fates),
            "restarts": list(self.restarts),
            "seconds": {
                "start_up": round(self.seconds.start_up, 3),
                "steps": round(self.seconds.steps, 3),
                "stop": round(self.seconds.stop, 3),
                "total": round(self.seconds.total, 3),
            },
            "median_seconds_per_step": {
                part.replace(" ", "_"): round(value, 4)
                for part, value in self.totals.median_seconds().items()
            },
        }

    def _tokens(self) -> list[str]:
        fates = +self.totals.fates
        if not (total := fates.total()):
            return []
        trained = fates.pop(_TRAINED, 0)
        told = f"{total:,} sampled, {trained:,} of them trained ({trained / total:.1%})"
        why = ", ".join(f"{number:,} {reason}" for reason, number in fates.most_common())
        return [_line("tokens", f"{told}{why and f'; not: {why}'}")]

    def _warnings(self) -> list[str]:
        """How often gradus warned, by log."""
        logs = Path(self.run_dir, "logs")
        told = []
        for path in sorted(logs.rglob("*.log")):
            with path.open("rb") as lines:
                if number := sum(map(bool, map(_WARNING.search, lines))):
                    told.append(f"{number} in {path.relative_to(logs.parent)}")
        return [_line("warnings", ", ".join(told))] if told else []

    def _commands(self) -> list[str]:
        """What to do with the model of a supervised run, by the configs that lie here."""
        if self.kind != "sft" or self.outcome not in ("done", "stalled"):
            return []
        root = Path(self.run_dir)
        is_below = root.is_relative_to(Path.cwd())
        shown = root.relative_to(Path.cwd()) if is_below else root
        model = f"--model.name {shlex.quote(str(shown / 'model'))}"
        commands = {
            "eval": f"gradus eval @ eval.toml --name {shlex.quote(root.name)}-eval {model}",
            "rl": f"gradus rl @ rl.toml {model}",
        }
        found = [line for name, line in commands.items() if Path(f"{name}.toml").is_file()]
        return [*found, f"gradus chat {shlex.quote(str(shown))}"]

    def lines(self) -> list[str]:
        seconds = self.seconds
        steps = self.totals.num_steps
        of_all = "" if planned_steps(self.max_steps) is None else f" of {self.max_steps}"
        lines = [_line(self.outcome, f"{steps}{of_all} steps in {seconds.total:.1f} s")]
        ends = self.first_and_last()
        shown = self.agents_first_and_last()
        if ends is not None:
            shown = (f"{ends[0]:.3f}", f"{ends[1]:.3f}")
        if shown is not None:
            first, last = shown
            count = f"mean of the last {min(LAST_STEPS, steps)} steps"
            told = f"{first} at the first step, {last} at the end ({count})"
            lines.append(_line(self.headline[0], told))
        verdict = self.verdict()
        if verdict is not None:
            lines.append(_line("verdict", str(verdict)))
            if verdict.advice:
                lines.append(_line("next", verdict.advice))
        lines += [_line("then", command) for command in self._commands()]
        if len(self.totals.evaluated) > 1:
            evaluated = self.totals.evaluated
            ends_of = (f"{value:.3f} at version {version}" for version, value in evaluated)
            lines.append(_line("evaluated", ", ".join(ends_of)))
        if self.best is not None:
            take = f"gradus export {shlex.quote(str(self.run_dir))} DIRECTORY --best"
            lines.append(_line("best", f"{self.best}{f': {take}' if self.best.version else ''}"))
        failures = self.totals.failures
        if failures:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in failures.most_common())
            lines.append(_line("failures", f"{failures.total()} episodes: {kinds}"))
        lines += [*self._tokens(), *self._warnings()]
        if self.restarts:
            causes = f"the causes stand above and in {self.run_dir}/summary.json"
            lines.append(_line("restarts", f"{len(self.restarts)}; {causes}"))
        lines.append(
            _line(
                "time",
                f"start-up {seconds.start_up:.1f} s, steps {seconds.steps:.1f} s, "
                f"stop {seconds.stop:.1f} s",
            )
        )
        medians = self.totals.median_seconds()
        if medians:
            parts = ", ".join(f"{part} {value:.2f} s" for part, value in medians.items())
            lines.append(_line("per step", f"{parts} (medians)"))
        lines.append(_line("results", self.run_dir))
        return lines


def _sum_of(metrics: Mapping[str, float], keys: Sequence[str]) -> float | None:
    values = [metrics[key] for key in keys if key in metrics]
    return sum(values) if values else None


def _line(title: str, text: str) -> str:
    return f"{title:<12}{text}"
