"""`gradus lab check-loss` prints a table and fails with the plain reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.cli.main import INTERRUPTED, main
from gradus.errors import ExitCode

pytestmark = pytest.mark.torch

WRONG = """
import signal
import torch
from gradus.trainer.losses import LossOutput

class ByLength:
    def __call__(self, inputs):
        loss = torch.where(inputs.mask, -inputs.advantages * inputs.policy_logprobs, 0.0)
        return LossOutput(loss / inputs.mask.sum().clamp(min=1))

class Neighbours:
    def __init__(self, *, places):
        self.places = places

    def __call__(self, inputs):
        loss = torch.where(inputs.mask, -inputs.advantages * inputs.policy_logprobs, 0.0)
        return LossOutput(torch.where(inputs.mask, loss + loss.roll(self.places), 0.0))

class Interrupted:
    def __call__(self, inputs):
        signal.raise_signal(signal.SIGINT)
"""


@pytest.fixture
def wrong_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_losses_of_a_user.py").write_text(WRONG)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend("")


def test_a_registered_loss_passes_with_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "check-loss", "dapo", "--clip-high", "0.5"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert shown.startswith("loss dapo: 18 samples, ")
    assert shown.count("  same\n") == 9
    assert "3 ranks" in shown


@pytest.mark.usefixtures("wrong_losses")
def test_ctrl_c_while_the_loss_runs_is_an_interruption() -> None:
    assert main(["lab", "check-loss", "wrong_losses_of_a_user:Interrupted"]) == INTERRUPTED


@pytest.mark.usefixtures("wrong_losses")
def test_a_loss_that_divides_by_the_micro_batch_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "check-loss", "wrong_losses_of_a_user:ByLength"]) == ExitCode.CONFIG
    shown = capsys.readouterr()
    assert shown.out.count("DIFFERENT") == 6
    assert "ByLength is not invariant. In all samples in one row: the loss scales" in shown.err


@pytest.mark.usefixtures("wrong_losses")
def test_a_loss_that_looks_at_neighbours_fails(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lab", "check-loss", "wrong_losses_of_a_user:Neighbours", "--options.places", "3"]
    assert main(words) == ExitCode.CONFIG
    assert "computes across samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a loss"),
        (["--threshold", "1"], "name a loss"),
        (["dpo"], "loss 'dpo' is not known"),
        (["my.Loss"], "or your own as 'package.module:Class'"),
        (["dppo", "--options.threshold", "1"], "options: unknown key; "),
        (["dppo", "--threshold", "7"], "threshold: 7.0: "),
        (["ipo", "--clip-low", "0.1"], "unknown key"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "check-loss", *words]) == ExitCode.CONFIG
    assert message in capsys.readouterr().err
