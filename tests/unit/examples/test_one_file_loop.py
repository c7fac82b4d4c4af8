"""The one-file loop learns, and plays ahead of what it trains; one run serves all tests."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

pytestmark = pytest.mark.torch

FILE = Path(__file__).resolve().parents[3] / "examples" / "one_file_loop.py"
LINE = re.compile(r"step +(\d+)  reward ([\d.]+)  loss \S+  sampled by versions (\d+) to (\d+)")


@dataclass(frozen=True)
class Line:
    """What the loop prints of one step."""

    step: int
    reward: float
    oldest: int
    newest: int


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    done = subprocess.run(
        [sys.executable, str(FILE)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = [LINE.fullmatch(line) for line in done.stdout.splitlines()]
    return [Line(int(m[1]), float(m[2]), int(m[3]), int(m[4])) for m in found if m]


def test_it_stays_short_enough_to_read() -> None:
    assert len(FILE.read_text().splitlines()) <= 200


def test_it_trains_every_step_and_learns(lines: list[Line]) -> None:
    assert [line.step for line in lines] == list(range(30))
    rewards = [line.reward for line in lines]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2


def test_its_batches_are_played_ahead_and_never_older_than_the_slots_allow(
    lines: list[Line],
) -> None:
    lags = [line.step - line.oldest for line in lines]
    assert max(lags) == 1
    assert all(line.newest <= line.step for line in lines)
