"""`gradus check-loss`: whether a loss is the same in every layout of the samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradus.cli.options import print_help, wants_help
from gradus.config import LossConfig, load_config, loss_config
from gradus.errors import ConfigError

if TYPE_CHECKING:
    from gradus.trainer.loss_check import LossReport

SUMMARY = (
    "Shows whether a loss, by name or as package.module:Class, is the same in micro batches, "
    "packed rows, with padding and over ranks, against float64 on single samples. Its options are "
    "flags: --threshold 0.1, or --options.x 1 for your own class. Ends with an error and its "
    "reason when it is not."
)


def run(words: Sequence[str]) -> int:
    """Check the loss and print one row for each layout."""
    if wants_help(words):
        print_help("check-loss NAME", SUMMARY, LossConfig)
        return 0
    if not words or words[0].startswith(("-", "@")):
        raise ConfigError("which loss? Write 'gradus check-loss dppo' or '... my_module:MyLoss'")
    config = load_config(loss_config(words[0]), ["--type", words[0], *words[1:]])
    # As in the trainer, which starts by `python -m`: a module in this folder can be named.
    if "" not in sys.path:
        sys.path.insert(0, "")

    from gradus.trainer.distributed import CPU, join_world
    from gradus.trainer.loss_check import check_loss
    from gradus.trainer.losses import build_loss

    loss = build_loss(config)
    # Float64 is the measure, and a table in the place of a model needs no GPU.
    with join_world(CPU) as world:
        report = check_loss(loss, world, aggregation=config.aggregation)
    print("\n".join(_table(config.type, report)))
    if report.reason is not None:
        raise ConfigError(f"{config.type} is not invariant. In {report.reason}")
    return 0


def _table(name: str, report: LossReport) -> list[str]:
    from gradus.trainer.loss_check import BOUND

    width = max(len(row.layout) for row in report.rows)
    lines = [
        f"loss {name}: {report.num_samples} samples, {report.num_members} tokens that train; "
        f"relative difference to float64, bound {BOUND:g}",
        f"{'':<{width}}  {'loss':>8}  {'gradient':>8}",
    ]
    for row in report.rows:
        verdict = "same" if row.reason is None else "DIFFERENT"
        lines.append(f"{row.layout:<{width}}  {row.loss:>8.1e}  {row.gradient:>8.1e}  {verdict}")
    return lines
