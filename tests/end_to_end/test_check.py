"""`gradus check` as a user runs it: nothing is written or left running."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradus.cli.check.child import PARTS
from gradus.cli.check.parts import parts_of
from gradus.config import RunConfig, SftConfig
from gradus.errors import ConfigError
from gradus.plan.processes import Machine
from gradus.processes.table import carries_mark, living_processes

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]


def look(folder: Path, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(values))
    return subprocess.run(
        [sys.executable, "-P", "-m", "gradus.cli.main", "check", "@", "config.json"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_values(model: Path, **source: Any) -> dict[str, Any]:
    env = {"id": "gradus-word-lookup", "group_size": 4, **source}
    sampling = {"max_completion_tokens": 64}
    return {
        "max_steps": 2,
        "model": {"name": str(model), "max_length_tokens": 1024},
        "orchestrator": {"train": {"env": [env], "sampling": sampling}},
    }


def test_files_with_the_names_of_libraries_shadow_none(tmp_path: Path, tiny_model: Path) -> None:
    for name in ("random", "queue", "types", "tokenizers", "datasets", "openai", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py was imported')")
    ended = look(tmp_path, run_values(tiny_model))
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_config_that_works_is_loaded_part_by_part(tmp_path: Path, tiny_model: Path) -> None:
    ended = look(tmp_path, run_values(tiny_model))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("ok ")]
    parts = ["dtype", "model", "environment gradus-word-lookup", "plug-ins", "trainer", "engine"]
    assert len(lines) == len(parts)
    assert all(line[10:].startswith(part) for line, part in zip(lines, parts, strict=True))
    assert "renderer qwen3 (by its chat template)" in ended.stdout
    assert "with tools, first prompts" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    left = [p for p in living_processes() if carries_mark(p.pid, "PWD", str(tmp_path))]
    assert left == []


def seen(config: RunConfig | SftConfig, name: str) -> str:
    """What the child of a part says of it, asked without its process, which starts for seconds."""
    (part,) = [part for part in parts_of(config, Machine.current()) if part.name == name]
    return PARTS[part.probe](part.request)


def test_prompts_that_fit_only_without_their_tools_are_refused(tiny_model: Path) -> None:
    values = run_values(tiny_model)
    values["model"]["max_length_tokens"] = 256
    config = RunConfig.model_validate(values)
    with pytest.raises(ConfigError, match="their tools included, which leaves none to sample"):
        seen(config, "environment gradus-word-lookup")


def test_what_a_process_of_the_run_would_refuse_is_refused(tiny_model: Path) -> None:
    values = run_values(tiny_model, taskset={"max_word": 3})
    values["model"]["renderer"] = "nonsense"
    config = RunConfig.model_validate(values)
    with pytest.raises(ConfigError, match=r"model\.renderer = 'nonsense' is not usable"):
        seen(config, "model")
    with pytest.raises(ConfigError, match="max_word"):
        seen(config, "environment gradus-word-lookup")


def supervised_values(folder: Path, model: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model": {"name": str(model), "max_length_tokens": 64},
        "data": {"path": "rows.jsonl"},
        "max_steps": 2,
    }


def test_a_config_that_cannot_start_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": "a b", "reply": "b a"}] * 3
    ended = look(tmp_path, supervised_values(tmp_path, tiny_model, rows))
    assert ended.returncode == 65
    assert re.search("^fails +data ", ended.stdout, re.MULTILINE)
    assert "rows.jsonl:1: has the keys" in " ".join(ended.stdout.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "rows.jsonl"]


def test_supervised_data_is_read_and_made_into_samples(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a b", "completion": "b a"}] * 3
    config = SftConfig.model_validate(supervised_values(tmp_path, tiny_model, rows))
    assert seen(config, "data").startswith("3 conversations, all up to")
