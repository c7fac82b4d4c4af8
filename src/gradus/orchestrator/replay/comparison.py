"""A replay beside its run: the published weights and the learning numbers of each step (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEARNED = ("loss/", "optimizer/")
"""Metrics that follow from weights and batch alone, not from time."""


@dataclass
class Comparison:
    """Owns what both came to, step by step.

    >>> comparison = Comparison(weights={1: "ab"}, metrics={0: {"loss/total/mean": 0.5}})
    >>> comparison.published(1, "ab")
    >>> comparison.first_weights is None
    True
    """

    weights: Mapping[int, str | None]
    """Version → digest in the run; None where it was not known."""
    metrics: Mapping[int, Mapping[str, float]]
    """Step → learning metrics of the run."""
    first_weights: int | None = None
    """The first version whose weights differ."""
    first_metrics: int | None = None
    """The first step whose learning metrics differ."""
    differing_metrics: list[str] = field(default_factory=list)
    """Names of those that differ at that step."""
    num_versions: int = 0
    """Versions that were compared."""
    loss: list[tuple[float | None, float | None]] = field(default_factory=list)
    """The loss of each step, of the run and of the replay."""

    def published(self, version: int, digest: str | None) -> None:
        """The replay published a version."""
        recorded = self.weights.get(version)
        if recorded is None or digest is None:
            return
        self.num_versions += 1
        if digest != recorded and self.first_weights is None:
            self.first_weights = version

    def finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """The replay trained a step."""
        recorded, found = learned(self.metrics.get(step, {})), learned(metrics)
        self.loss.append((recorded.get("loss/total/mean"), found.get("loss/total/mean")))
        names = sorted(recorded.keys() & found.keys())
        wrong = [name for name in names if recorded[name] != found[name]]
        if wrong and self.first_metrics is None:
            self.first_metrics = step
            self.differing_metrics = wrong

    def report(self, files: Mapping[str, bool] | None) -> dict[str, Any]:
        """Everything as JSON values; `files` says of each file of the final model whether it is
        the same, None when the run has no model of that step."""
        is_same_model = files is None or (bool(files) and all(files.values()))
        is_compared = self.num_versions > 0 or bool(files)
        return {
            "is_same": is_compared
            and self.first_weights is None
            and self.first_metrics is None
            and is_same_model,
            "steps": len(self.loss),
            "versions_compared": self.num_versions,
            "first_different_version": self.first_weights,
            "first_different_step": self.first_metrics,
            "different_metrics": self.differing_metrics,
            "model_files": None if files is None else dict(files),
            "loss": [list(pair) for pair in self.loss],
        }


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a replay must repeat."""
    return {name: value for name, value in metrics.items() if name.startswith(LEARNED)}
