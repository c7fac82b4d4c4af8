"""A run that meets one fault after another ends with what an undisturbed one has, bit by bit.

The faults are those of `gradus lab chaos`, in a fixed order, so that each is met; the engine is
scripted, and all else is real.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import finish, records, start

from gradus.run.lease import read_term
from gradus.run.paths import RunDirectory
from gradus_lab.chaos import soak
from gradus_lab.chaos.faults import HOURS, Injected, Victim
from gradus_lab.chaos.invariants import check_run, compare_weights
from gradus_lab.chaos.soak import Plan, Soak, line_of

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SCRIPTED = str(Path(__file__).parent / "scripted_run.py")
TOML = """
output_dir = "{root}"
max_steps = 1000
seed = 3
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 96
[checkpoint]
interval_steps = 2
[launch]
hang_seconds = 20.0
restarts = 100
[orchestrator]
groups_per_batch = 3
max_lag = 0
max_staleness = 0
[orchestrator.train.sampling]
max_completion_tokens = 16
[[orchestrator.train.env]]
id = "gradus-reverse-text"
name = "words"
group_size = 4
num_workers = 2
[trainer]
num_processes = 2
deterministic = true
[trainer.optimizer]
lr = 1e-3
"""
FAULTS = (
    *("kill inference", "cut env_words@2", "kill trainer/2", "kill orchestrator"),
    *("clock +1h", "mute inference", "kill launcher", "stop trainer/2"),
)
"""`trainer/2` is one of two ranks, `env_words@2` the second process of a source."""
SAID = (
    r"inference was killed by SIGKILL .* of inference alone",
    r"orchestrator was killed by SIGKILL .* of orchestrator alone, where",
    r"trainer .* of trainer alone, from checkpoint \d+, \w+ steps? (is|are) done again",
    r"trainer .* is stopped by a signal for 20 s; .* the stacks of its threads stand in its log",
)
MAX_COMPARED = 20
"""Versions of the undisturbed run."""


class Ordered(Soak):
    """The faults of a list, one after the other, each as soon as there is whom it hits."""

    left = FAULTS

    def _choose(self, found: Sequence[Victim]) -> Injected | None:
        kind, _, name = self.left[0].partition(" ")
        (victim,) = [it for it in found if it.name == name] or [None]
        if name in HOURS:
            victim = Victim(name, found[0].pid)
        if victim is None or (kind == "cut" and not victim.is_linked):
            return None
        self.left = self.left[1:]
        if not self.left:
            self._until = 0.0
        return Injected(kind, victim)


@pytest.mark.shows("F01", "F02", "F04", "F05", "F09", "F33", "F72", "F73", "I1", "I2", "I5", "I7")
def test_a_run_under_faults_serves_what_an_undisturbed_one_does(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "PAUSE_SECONDS", 2.0)
    root = tmp_path / "it's a résumé"
    root.mkdir()
    config = root / "rl.toml"
    config.write_text(TOML.format(root=root, model=tiny_model))
    words = ["@", str(config), "--name"]
    hurt, calm = (RunDirectory(root / name) for name in ("hurt", "calm"))
    program = (sys.executable, SCRIPTED, "rl")
    plan = Plan([*words, "hurt"], hurt, 30.0, 1, rest_seconds=0.1, program=program)
    rounds = Ordered(plan, root / "hurt.chaos.jsonl", print).run()
    printed = (root / "hurt.chaos.log").read_text()
    assert [it.fault for it in rounds] == [*FAULTS, "end"], printed
    assert [line_of(it) for it in rounds if it.broken or it.seconds is None] == [], printed
    assert [line for line in SAID if not re.search(line, printed)] == [], printed
    assert read_term(hurt) == 2, "all started again after the launcher was killed, and only then"
    steps = min(MAX_COMPARED, len(records(hurt.metrics)))
    finish(start("rl", *words, "calm", "--max-steps", str(steps), program=(SCRIPTED,)))
    assert compare_weights(hurt, calm) == []
    assert check_run(calm) == []
