"""Hostile deeds of a loss: refused under the name of its class, or without any effect."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample

from gradus.config import learning
from gradus.errors import ConfigError
from gradus.trainer.losses import Dppo, LossInputs, LossOutput
from gradus.trainer.step import GradientStep

pytestmark = pytest.mark.torch

Deed = Callable[[LossInputs, LossOutput], Any]


class Hostile:
    """Dppo, and then a deed."""

    def __init__(self, deed: Deed) -> None:
        self._deed = deed

    def __call__(self, inputs: LossInputs) -> Any:
        return self._deed(inputs, Dppo(learning.DppoConfig())(inputs))


def raising(error: BaseException) -> Deed:
    def deed(*_: Any) -> None:
        raise error

    return deed


def leave(*_: Any) -> None:
    sys.exit(0)


def with_values(value: float) -> Deed:
    return lambda _, output: LossOutput(torch.full_like(output.per_token, value))


def with_metric(name: Any, value: Any = None) -> Deed:
    return lambda inputs, output: replace(
        output, metrics={name: inputs.advantages if value is None else value}
    )


REFUSED: dict[str, tuple[Deed, str]] = {
    "raises": (raising(KeyError("beta")), "KeyError: 'beta' (test_hostile_losses.py:"),
    "exits": (leave, "SystemExit: 0"),
    "makes up a cancellation": (raising(asyncio.CancelledError()), "CancelledError"),
    "makes up a Ctrl-C": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "gives nothing": (lambda *_: None, "returns a NoneType"),
    "gives a tensor": (lambda _, output: output.per_token, "returns a Tensor"),
    "averages": (lambda _, o: LossOutput(o.per_token.mean()), "per_token has shape ()"),
    "shortens": (lambda _, o: LossOutput(o.per_token[1:]), "per_token has shape"),
    "gives a number": (lambda *_: LossOutput(0.0), "per_token has shape float"),  # type: ignore[arg-type]
    "gives complex numbers": (lambda _, o: LossOutput(o.per_token * 1j), "give real numbers"),
    "gives no numbers": (with_values(float("nan")), "gives numbers that are not finite to"),
    "gives infinity": (with_values(float("inf")), "gives numbers that are not finite to"),
    "takes the name of the loss": (with_metric("total/mean"), "is called 'total/mean'"),
    "takes the name of a component": (with_metric("rl/mean"), "is called 'rl/mean'"),
    "takes the name of the entropy": (with_metric("entropy/mean"), "is called 'entropy/mean'"),
    "takes a peak": (with_metric("ratio/max"), "is called 'ratio/max'"),
    "names a metric by a number": (with_metric(3), "is called 3"),
    "measures a plain number": (with_metric("mine/mean", 0.5), "mine/mean has shape float"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_deed_is_refused_under_the_name_of_the_class(name: str, bench: Any, world: Any) -> None:
    deed, said = REFUSED[name]
    step = GradientStep(bench.policy, Hostile(deed), world)
    with pytest.raises(ConfigError) as refused:
        step.run([build_micro_batch([build_sample(9)])])
    assert f"loss {__name__}:Hostile" in str(refused.value)
    assert said in str(refused.value)


def spoil(inputs: LossInputs, _: LossOutput) -> LossOutput:
    """Zeros into everything that the loss was given; it computes from copies."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    given = {name: values for name, values in given.items() if values is not None}
    kept = LossInputs(**{name: values.clone() for name, values in given.items()})
    for values in given.values():
        values.data.zero_()
    return Dppo(learning.DppoConfig())(kept)


def test_what_a_loss_writes_into_its_inputs_changes_no_number_of_the_run(
    bench: Any, world: Any
) -> None:
    batches = [build_micro_batch([build_sample(9, advantage=1.0)])]
    plain = GradientStep(bench.policy, Dppo(learning.DppoConfig()), world).run(batches)
    gradients = bench.take_gradients()
    assert any(gradient.any() for gradient in gradients.values())
    spoiled = GradientStep(bench.policy, Hostile(spoil), world).run(batches)
    assert spoiled.metrics["loss/entropy/mean"] == plain.metrics["loss/entropy/mean"]
    assert spoiled.metrics["loss/mismatch_kl/mean"] == plain.metrics["loss/mismatch_kl/mean"]
    assert spoiled.members == plain.members
    for name, gradient in bench.take_gradients().items():
        assert np.array_equal(gradient, gradients[name]), name


@pytest.mark.parametrize(("suffix", "expected"), [("max", 3.0), ("sum", 26.0), ("mean", 26 / 14)])
def test_a_metric_over_several_micro_batches_is_what_its_name_says(
    suffix: str, expected: float, bench: Any, world: Any
) -> None:
    name = f"mine/{suffix}"
    step = GradientStep(bench.policy, Hostile(with_metric(name)), world)
    samples = [build_sample(9, prompt_length=2, advantage=a) for a in (3.0, 5 / 7)]
    batches = [build_micro_batch([sample]) for sample in samples]
    found = step.run(batches).metrics[f"loss/{name}"]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_the_peak_of_a_metric_without_fractions_is_its_own(
    dtype: torch.dtype, bench: Any, world: Any
) -> None:
    def deed(inputs: LossInputs, output: LossOutput) -> LossOutput:
        return LossOutput(
            output.per_token, {"mine/max": torch.zeros_like(inputs.mask, dtype=dtype)}
        )

    step = GradientStep(bench.policy, Hostile(deed), world)
    found = step.run([build_micro_batch([build_sample(9)])])
    assert found.metrics["loss/mine/max"] == 0.0
