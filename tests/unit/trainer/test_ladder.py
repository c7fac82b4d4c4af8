"""The order of a step, whatever the source of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import build_micro_batch, build_sample
from configs import build_loss_config

from gradus.config import ModelConfig, TrainerConfig
from gradus.config.schema.learning import LossConfig
from gradus.errors import ConfigError
from gradus.trainer.batches import StepBatch
from gradus.trainer.distributed import World
from gradus.trainer.ladder import Ladder, StepReport
from gradus.trainer.learner import Learner
from gradus.trainer.publish import PendingVersion
from gradus.trainer.throughput import Stopwatch

pytestmark = pytest.mark.torch


def build_learner(
    model: Path,
    world: World,
    loss: LossConfig | None = None,
    *,
    max_steps: int = 2,
    is_reference_served: bool = False,
) -> Learner:
    settings = TrainerConfig(compute_dtype="float32")
    base = ModelConfig(name=str(model))
    return Learner.build(
        base,
        settings,
        loss or build_loss_config(),
        max_steps=max_steps,
        world=world,
        is_reference_served=is_reference_served,
    )


class Witness:
    """A source, a publisher, a validation and a recorder that write down when they are called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.reports: list[StepReport] = []

    def receive(self, step: int) -> StepBatch:
        self.calls.append(("receive", step))
        return StepBatch([[build_micro_batch([build_sample(9, seed=step)])]], {"batch/own": 1.0})

    def validate(self, version: int) -> dict[str, float]:
        self.calls.append(("validate", version))
        return {"validation/loss/mean": 2.0} if version == 2 else {}

    def publish(self, version: int) -> PendingVersion:
        self.calls.append(("publish", version))
        return PendingVersion(version, began=0.0)

    def record(self, report: StepReport) -> None:
        self.calls.append(("record", report.step))
        self.reports.append(report)


def test_a_step_climbs_its_rungs_in_order(tiny_model: Path, world: World) -> None:
    witness = Witness()
    Ladder(
        build_learner(tiny_model, world),
        witness,
        record=witness.record,
        validate=witness.validate,
        publish_version=witness.publish,
    ).train(0, 2)
    first = [("receive", 0), ("validate", 1), ("publish", 1), ("record", 0)]
    assert witness.calls == [*first, ("receive", 1), ("validate", 2), ("publish", 2), ("record", 1)]
    assert [report.published.version for report in witness.reports if report.published] == [1, 2]
    assert witness.reports[1].metrics["validation/loss/mean"] == 2.0
    assert all(report.metrics["batch/own"] == 1.0 for report in witness.reports)


def test_a_shared_device_is_held_until_the_new_version_was_gathered(
    tiny_model: Path, world: World
) -> None:
    witness = Witness()

    @contextmanager
    def turn(step: int) -> Iterator[None]:
        witness.calls.append(("sleep", step))
        yield
        witness.calls.append(("wake", step))

    Ladder(
        build_learner(tiny_model, world),
        witness,
        record=witness.record,
        publish_version=witness.publish,
        take_turn=turn,
    ).train(0, 1)
    rungs = ["receive", "sleep", "publish", "wake", "record"]
    assert [name for name, _ in witness.calls] == rungs


def test_a_rung_that_is_not_there_costs_no_time(tiny_model: Path, world: World) -> None:
    witness = Witness()
    Ladder(build_learner(tiny_model, world), witness, record=witness.record).train(3, 4)
    [report] = witness.reports
    assert (report.step, report.published, report.is_saved) == (3, None, False)
    times = {name for name in report.metrics if name.startswith("time/")}
    rungs = ("receive", "forward_backward", "optimize", "step")
    assert times == {f"time/{rung}_seconds" for rung in rungs}


def test_one_part_of_a_batch_may_lack_the_reference_that_another_has(
    tiny_model: Path, world: World
) -> None:
    loss = build_loss_config(reference_kl_coefficient=0.1)
    scored, plain = build_sample(9, seed=1), build_sample(9, seed=2)
    scored.arrays.reference_logprobs[:] = -1.0
    plain.arrays.reference_logprobs[:] = float("nan")
    parts = [[build_micro_batch([sample])] for sample in (scored, plain)]
    learner = build_learner(tiny_model, world, loss, is_reference_served=True)
    assert learner.reference is None
    learned, _ = learner.learn(0, parts, Stopwatch())
    assert learned.members["rl"] > 0
    for updates in (parts[1:], parts[1:] * 2):
        with pytest.raises(ConfigError, match=r"no token of the batch has reference logprobs"):
            learner.learn(1, updates, Stopwatch())
