"""The files for SkyPilot and dstack: their tools read them, and their commands start the run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradus.run.lease import MARKER_NAME

FILES = Path(__file__).parents[3] / "examples" / "cluster"
GRADUS = '#!/bin/sh\nprintf "%s\\n" "$*"\n'


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FILES / name).read_text())
    return found


def run(name: str, rank: int, folder: Path) -> str:
    """What a node's command starts, with a folder in the place of the shared one."""
    file = read(name)
    command = file["run"] if "run" in file else file["commands"][0]
    (folder / "gradus").write_text(GRADUS)
    (folder / "gradus").chmod(0o700)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SKYPILOT_NODE_RANK": f"{rank}",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "DSTACK_NODE_RANK": f"{rank}",
        "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    }
    done = subprocess.run(
        ["bash", "-c", command.replace("/runs", str(folder))],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.replace(str(folder), "/runs").strip()


@pytest.mark.parametrize("name", ["skypilot.yaml", "task.dstack.yml"])
def test_the_first_node_launches_or_continues_the_run_and_the_others_join_it(
    name: str, tmp_path: Path
) -> None:
    begins = "rl @ run.toml --name mine --output-dir /runs --launch.nodes.host 10.0.0.1"
    assert run(name, 0, tmp_path) == begins
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MARKER_NAME).touch()
    assert run(name, 0, tmp_path) == f"{begins} --resume"
    assert run(name, 1, tmp_path) == "node /runs/mine --number 1 --stay"


def test_skypilot_reads_its_file() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config(read("skypilot.yaml") | {"secrets": {"HF_TOKEN": "x"}})
    assert (task.num_nodes, task.name) == (2, "gradus")
    wrong = read("skypilot.yaml") | {"num_node": 2}
    with pytest.raises(Exception, match="num_node"):
        sky.Task.from_yaml_config(wrong)


def test_dstack_reads_its_file() -> None:
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    task = configurations.parse_apply_configuration(read("task.dstack.yml"))
    assert (task.type, task.nodes) == ("task", 2)
    with pytest.raises(Exception, match="node_s"):
        configurations.parse_apply_configuration(read("task.dstack.yml") | {"node_s": 2})
