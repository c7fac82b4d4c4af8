"""Plug-ins that end their process with exit code 0: a real run says so at once and by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import finish, processes_of, start

from gradus.errors import ExitCode

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SCRIPTED = (str(Path(__file__).parent / "scripted_run.py"),)
PLUGINS = """
import os
from gradus.orchestrator.algorithms.group_relative import GroupRelative

class Gone:
    def __call__(self, inputs):
        os._exit(0)

class GoneWhenSaved(GroupRelative):
    def state(self):
        os._exit(0)
"""
TOML = """
name = "left"
output_dir = "{root}"
max_steps = 3
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 96
[checkpoint]
interval_steps = 1
[orchestrator]
groups_per_batch = 2
[orchestrator.train.sampling]
max_completion_tokens = 16
[[orchestrator.train.env]]
id = "gradus-reverse-text"
group_size = 2
algo = {{ type = "{algorithm}" }}
[trainer.loss]
type = "{loss}"
"""


@pytest.mark.parametrize(
    ("algorithm", "loss", "role"),
    [("grpo", "leaving:Gone", "trainer"), ("leaving:GoneWhenSaved", "dppo", "orchestrator")],
)
def test_a_role_that_leaves_before_its_steps_are_done_fails_the_run(
    tmp_path: Path, tiny_model: Path, algorithm: str, loss: str, role: str
) -> None:
    (tmp_path / "leaving.py").write_text(PLUGINS)
    file, root = tmp_path / "rl.toml", tmp_path / "runs"
    file.write_text(TOML.format(root=root, model=tiny_model, algorithm=algorithm, loss=loss))
    variables = {"PYTHONPATH": str(tmp_path)}
    run = start("rl", "@", str(file), program=SCRIPTED, variables=variables)
    printed = finish(run, exit_code=None)
    assert run.returncode == ExitCode.INTERNAL
    assert f"gradus rl: {role} ended with exit code 0 before its work was done" in printed
    assert processes_of(root / "left") == []
