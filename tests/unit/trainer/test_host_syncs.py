"""Forward and backward never wait for the device: what would is refused, on a CPU.

A GPU would stop at each of these calls until everything queued before it is computed. That none is
left on the path of flash attention was read, not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from builders import build_micro_batch, build_sample
from configs import build_loss_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradus.config.schema.learning import LossConfig
from gradus.trainer.distributed import World
from gradus.trainer.losses import build_loss
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.step import GradientStep, count_locally
from gradus.wire.micro_batch import MicroBatch

pytestmark = pytest.mark.torch

READING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
}
"""Operations whose result, or its shape, the host must know."""


class NoHostSyncs(TorchDispatchMode):
    """Refuses operations that would make the host wait for a GPU."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        indices = args[1] if func.name().startswith("aten::index.") else ()
        by_mask = any(it is not None and it.dtype == torch.bool for it in indices)
        if func.name().partition(".")[0] in READING or by_mask:
            raise AssertionError(f"{func.name()} waits for the device")
        return func(*args, **(kwargs or {}))


def two_micro_batches() -> list[MicroBatch]:
    """Samples of every component, with reference logprobs."""
    samples = [build_sample(9 + number, seed=number) for number in range(4)]
    for sample, name in zip(samples, ("rl", "ce", "ref_kl", "ce_batch"), strict=True):
        weights = sample.arrays.loss_weights
        weights[name] = weights.pop("rl")
        sample.arrays.reference_logprobs[:] = -1.0
    return [build_micro_batch(samples[:2]), build_micro_batch(samples[2:])]


def gradients_without_syncs(step: GradientStep) -> dict[str, Tensor]:
    micro_batches = two_micro_batches()
    members = count_locally(micro_batches)
    with NoHostSyncs():
        return step.accumulate(micro_batches, members)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "loss",
    [
        build_loss_config(),
        build_loss_config("gspo", importance_sampling="truncated", entropy_coefficient=0.1),
        build_loss_config(reference_kl_coefficient=0.1),
    ],
    ids=["dppo", "gspo", "reference"],
)
def test_no_number_is_read_before_the_last_backward(
    build_policy: Callable[[torch.dtype], PolicyModel],
    world: World,
    loss: LossConfig,
    dtype: torch.dtype,
) -> None:
    policy = build_policy(dtype)
    step = GradientStep(policy, build_loss(loss), world, aggregation="sequence_mean")
    shares = gradients_without_syncs(step)
    assert shares["total"].dtype == torch.float64
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_a_number_that_is_read_is_noticed() -> None:
    values = torch.arange(3.0)
    for read in (
        lambda: values.sum().item(),
        lambda: bool(values.any()),
        lambda: values[values > 1],
        lambda: values.nonzero(),
    ):
        with NoHostSyncs(), pytest.raises(AssertionError, match="waits for the device"):
            read()
