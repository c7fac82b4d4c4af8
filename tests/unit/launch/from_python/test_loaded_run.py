"""`import gradus`: reading a run, and what `gradus.train` refuses."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoints import commit, new_run
from configs import build_run_values

import gradus
from gradus.errors import ConfigError, GradusError, RunDirectoryError
from gradus.files import write_json
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory

PAGE = Path(__file__).parents[4] / "docs" / "python.md"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    """A run of twelve steps, whose last lines are still being written."""
    run = new_run(tmp_path)
    lines = [json.dumps({"step": 0, "time": 1.5, "loss/total/mean": 0.5})]
    lines += [json.dumps({"step": 1, "time": 2.5, "loss/total/mean": None, "non_finite": ["x"]})]
    run.metrics.write_text("\n".join([*lines, '{"step": 2, "lo']))
    for step in (10, 2):
        path = run.episodes / f"step_{step}" / "train.jsonl"
        path.parent.mkdir(parents=True)
        fields = {"step": step, "outcome": "trained", "error": None}
        record = {"id": str(step), "gradus": fields}
        path.write_text(json.dumps(record) + "\n")
    return run


def python(program: str, folder: Path = Path()) -> str:
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_gradus_loads_nothing_else() -> None:
    heavy = "{'torch', 'verifiers', 'pydantic', 'msgspec', 'transformers', 'pandas'}"
    assert python(f"import gradus, sys; print({heavy} & sys.modules.keys() or 'none')") == "none"


def test_what_gradus_offers_is_listed_and_typed() -> None:
    assert {"load_run", "train", "LoadedRun", "RunCheckpoint", "__version__"} <= set(dir(gradus))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = gradus.trian  # type: ignore[attr-defined]


def test_metrics_are_numbers_and_the_line_being_written_is_left_out(run_dir: RunDirectory) -> None:
    first, second = gradus.load_run(run_dir.root).metrics()
    assert first == {"step": 0, "time": 1.5, "loss/total/mean": 0.5}
    assert (second["step"], math.isnan(second["loss/total/mean"])) == (1, True)


def test_episodes_come_in_the_order_of_their_steps(run_dir: RunDirectory) -> None:
    run = gradus.load_run(str(run_dir.root))
    assert [record["id"] for record in run.episodes()] == ["2", "10"]
    assert list(run.episodes(purpose="eval")) == []


def test_the_episodes_of_an_evaluation_are_those_that_it_played(tmp_path: Path) -> None:
    write_json(tmp_path / ".gradus-run", {"run_id": "a", "kind": "eval", "format": 3})
    path = tmp_path / "episodes" / "step_0" / "eval.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"id": "7"}\n')
    run = gradus.load_run(tmp_path)
    assert [record["id"] for record in run.episodes()] == ["7"]
    assert list(run.episodes(purpose="train")) == []


def test_frames_have_a_column_for_each_key(run_dir: RunDirectory) -> None:
    run = gradus.load_run(run_dir.root)
    assert list(run.metrics(frame=True)["step"]) == [0, 1]
    assert list(run.episodes(frame=True)["gradus.outcome"]) == ["trained", "trained"]


def test_checkpoints_come_with_their_folders(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    folders = [commit(checkpoints, step).folder for step in (2, 4)]
    found = gradus.load_run(run_dir.root).checkpoints()
    assert [(checkpoint.step, checkpoint.path) for checkpoint in found] == list(
        zip((2, 4), folders, strict=True)
    )


def test_the_model_is_there_when_it_is_whole(run_dir: RunDirectory) -> None:
    run = gradus.load_run(run_dir.root)
    assert run.model is None
    write_json(run_dir.model / "config.json", {})
    assert run.model == run_dir.model


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not the folder of a run"):
        gradus.load_run(tmp_path)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "a section 'orchestrator'"),
        ({"data": {}, "max_step": 3}, "max_step"),
        (build_run_values({"model": {"name": "./none"}}), "no such directory"),
        ("none.toml", "none.toml"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_starts(
    config: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GradusError, match=text):
        gradus.train(config)
    assert list(tmp_path.iterdir()) == []


def test_a_resume_needs_the_name_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set `name` in the config"):
        gradus.train(build_run_values({"output_dir": str(tmp_path)}), resume=True)


def test_training_from_another_thread_is_refused() -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            gradus.train({"orchestrator": {}})
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "from the main thread" in str(errors[0])


def test_python_m_gradus_is_the_command() -> None:
    words = [sys.executable, "-m", "gradus", "--version"]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert result.stdout == f"gradus {gradus.__version__}\n"


def test_the_page_reads_a_run_as_it_says(run_dir: RunDirectory, tmp_path: Path) -> None:
    run_dir.root.rename(tmp_path / "moved")
    (tmp_path / "runs").mkdir()
    (tmp_path / "moved").rename(tmp_path / "runs" / "demo")
    _, reading, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = python(reading, tmp_path).splitlines()
    assert lines[:4] == ["0 0.5", "1 nan", "0 episodes failed", "[]"]
