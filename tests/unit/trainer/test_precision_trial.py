"""The trainer's part of the trial of bfloat16, which runs for real on every processor."""

from __future__ import annotations

import pytest
import torch

from gradus.trainer.entry import precision

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_a_step_in_bfloat16_agrees_with_float32_here_and_a_wrong_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert precision.fault() == ""
    right = precision.gradients_of_a_step
    found: list[torch.Tensor] = []

    def wrong(*given: object) -> torch.Tensor:
        found.append(right(*given))  # type: ignore[arg-type]
        return found[-1] if len(found) == 1 else found[-1] * 1.1

    monkeypatch.setattr(precision, "gradients_of_a_step", wrong)
    assert "computed other gradients than in float32" in precision.fault()
