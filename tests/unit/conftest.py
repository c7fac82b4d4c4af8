"""What unit tests share."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from gradus.plan import precision


@pytest.fixture(autouse=True)
def _bfloat16_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches in this process skip the trial of bfloat16, whose children import vLLM and torch for
    ten seconds. Nothing is kept of it, so that whole runs do try. Other programs are run."""
    run = precision._outcomes

    def outcomes(
        trials: Sequence[precision.Trial], deadline_seconds: float
    ) -> list[tuple[str, bool]]:
        if any(trial.argv[:2] != (sys.executable, "-P") for trial in trials):
            return run(trials, deadline_seconds)
        return [("", False)] * len(trials)

    monkeypatch.setattr(precision, "_outcomes", outcomes)
