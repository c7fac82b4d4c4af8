"""Whether a run may end before its last step: its goal is reached, or its reward stalls (pure).

a run with evaluations    the average of all their environments, `eval/avg@k`, each environment
                          counting the same
any other run             the training reward; where several sources or several agents train,
                          each of theirs (`verdict.py`)

solved     an evaluation has the target, or the last ten steps have it on average
stalled    no evaluation was better than the best for `patience_steps`; or no reward of the last
           `patience_steps` is clearly above that of as many before (`statistics.py`)

A reward that is not in every step counts by its own last numbers, however old they are.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from statistics import fmean

from gradus.errors import GoodEnd, SolvedError, StalledError
from gradus.monitor.statistics import MIN_STEPS, Difference, over_steps
from gradus.monitor.verdict import deciding_rewards
from gradus.run.records import EVALUATION

AVERAGE = re.compile(r"eval/avg(@\d+)?")
"""The reward of an evaluation over all its environments; there is one at most."""
MAX_FAILED_SHARE = 0.05
"""Of an environment's episodes: with more, those that are left may be the easy ones, and the
evaluation is neither compared nor ends a run."""
_FAILED = re.compile(r"eval/([^/]+/)?error/share")
_REWARD = "/reward/mean"
_DECIDES = (_REWARD, "/trained/share")
_ROUNDING = 1e-9


def evaluated_average(metrics: Mapping[str, float]) -> float | None:
    """What an evaluated version earned over all environments; None where its record has none.

    >>> evaluated_average({"eval/avg@4": 0.5, "eval/words/avg@4": 0.5})
    0.5
    """
    found = next((it for name, it in metrics.items() if AVERAGE.fullmatch(name)), math.nan)
    return found if math.isfinite(found) else None


class Goal:
    """Owns what the records so far say about an end. The same records give the same end.

    >>> goal = Goal(target=0.9, patience_steps=None, is_evaluated=True)
    >>> goal.note({"eval/version": 20.0, "eval/avg@4": 0.91}, 20)
    >>> print(goal.end)
    the evaluation of version 20 earned 0.91, and target_reward is 0.9
    """

    def __init__(
        self,
        *,
        target: float | None,
        patience_steps: int | None,
        is_evaluated: bool,
        num_sources: int = 0,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` hears of an evaluation that has no average to look at, once. Nothing is solved
        before `num_sources` have a reward."""
        self.end: GoodEnd | None = None
        """Why the run may end; None while it may not."""
        self.num_steps = 0
        """Steps whose records came."""
        self._target = target
        self._patience = patience_steps
        self._is_evaluated = is_evaluated
        self._num_sources = num_sources
        self._tell = tell
        self._has_told = False
        self._best: tuple[float, int] | None = None
        """Average and version of the best evaluation, the first of equal ones."""
        self._known: dict[str, float] = {}
        """What any step had of the metrics that decide, with a number that is not 0 if there was
        one: as if one step held them all."""
        kept = max(MIN_STEPS, 2 * (patience_steps or 0))
        self._numbers: dict[str, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=kept))
        """Metric → its last numbers, each with its step."""

    @property
    def follows_steps(self) -> bool:
        """Whether the record of a step can end the run."""
        return not (self._is_off or self._is_evaluated)

    @property
    def _is_off(self) -> bool:
        return self._target is None and self._patience is None

    def note(self, metrics: Mapping[str, float], step: int) -> None:
        """A record of a step, or of an evaluated version, is complete."""
        if self._is_off or self.end is not None or (EVALUATION in metrics) != self._is_evaluated:
            return
        if self._is_evaluated:
            self._note_evaluation(metrics, step)
            return
        self.num_steps = step + 1
        for name, it in metrics.items():
            if name.endswith(_DECIDES) and math.isfinite(it):
                self._known[name] = it or self._known.get(name, it)
                self._numbers[name].append((step, it))
        self.end = self._solved() or self._stalled()

    def _note_evaluation(self, metrics: Mapping[str, float], version: int) -> None:
        average = evaluated_average(metrics)
        if average is None:
            if not self._has_told:
                self._has_told = True
                self._tell(
                    f"the evaluation of version {version} has no average over its environments, so "
                    "target_reward and patience_steps cannot look at it: every episode of one "
                    "failed, or several agents are measured"
                )
            return
        failed = (it for name, it in metrics.items() if _FAILED.fullmatch(name))
        if max(failed, default=0.0) > MAX_FAILED_SHARE:  # The evaluator's log says so.
            return
        if self._target is not None and average >= self._target - _ROUNDING:
            self.end = SolvedError(
                f"the evaluation of version {version} earned {average:.3g}, and target_reward is "
                f"{self._target:g}"
            )
        elif self._best is None or average > self._best[0]:
            self._best = (average, version)
        elif self._patience is not None and version - self._best[1] >= self._patience:
            best, since = self._best
            self.end = StalledError(
                f"no evaluation was better than that of version {since} ({best:.3g}) for "
                f"{version - since} steps, and patience_steps is {self._patience}"
            )

    def _solved(self) -> SolvedError | None:
        target, names = self._target, deciding_rewards([self._known])
        rewards = (it for it in self._known if it.endswith(_REWARD) and it.count("/") > 2)
        sources = {name.split("/")[1] for name in rewards}
        if target is None or not names or len(sources) < self._num_sources > 1:
            return None
        means = []
        for metric in names:
            values = self._values(metric, MIN_STEPS)
            if len(values) < MIN_STEPS or fmean(values) < target - _ROUNDING:
                return None
            means.append(fmean(values))
        told = ", ".join(f"{n} {it:.3g}" for n, it in zip(names.values(), means, strict=True))
        return SolvedError(
            f"{told} on average over the last {MIN_STEPS} steps, and target_reward is {target:g}"
        )

    def _stalled(self) -> StalledError | None:
        size = self._patience
        if size is None or self.num_steps < 2 * size:
            return None
        changes: dict[str, Difference] = {}
        for metric, name in deciding_rewards([self._known]).items():
            values = self._values(metric, 2 * size)
            half = len(values) // 2
            if half < MIN_STEPS:
                return None
            changes[name] = over_steps(values[:half], values[-half:])
        if not changes or any(it.is_clear and it.value > 0 for it in changes.values()):
            return None
        told = ", ".join(
            f"{name} {it.value:+.3f} ({it.low:+.3f} to {it.high:+.3f})"
            for name, it in changes.items()
        )
        return StalledError(
            f"no clear rise in {size} steps: {told} against the {size} steps before, and "
            f"patience_steps is {size}"
        )

    def _values(self, metric: str, num_steps: int) -> list[float]:
        """Of the last steps; the last numbers where that is too few to compare."""
        numbers = self._numbers[metric]
        recent = sum(step >= self.num_steps - num_steps for step, _ in numbers)
        return [it for _, it in numbers][-max(recent, min(num_steps, 2 * MIN_STEPS)) :]
