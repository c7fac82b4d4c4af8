"""docs/learn/tools.md and two-agents.md: files load, configs pass the fast check."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import verifiers.v1 as vf
from pages import BLOCK, ROOT

from gradus.config import RunConfig, load_config
from gradus.plan.machine import check

FILE = re.compile(r"# file: ([\w.]+)\n")
BASE = {"max_steps": 1, "model": {"name": "some/model"}}


@pytest.mark.parametrize("page", ["tools", "two-agents"])
def test_the_files_of_a_tutorial_load_and_its_configs_are_accepted(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "learn" / f"{page}.md").read_text()
    blocks = BLOCK.findall(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for kind, body in blocks:
        if kind == "python" and (name := FILE.match(body)) is not None:
            Path(name[1]).write_text(body)
    configs = [body for kind, body in blocks if kind == "toml"]
    assert configs
    for config in configs:
        Path("rl.toml").write_text(config)
        loaded = load_config(RunConfig, ["@", "rl.toml"], base=BASE, check=check)
        (source,) = loaded.orchestrator.train.env
        assert f"gradus env check {source.id}" in text
        module = importlib.import_module(source.id.replace("-", "_"))
        kind = next(getattr(module, it) for it in module.__all__ if it.endswith("Taskset"))
        tasks = list(kind(vf.taskset_config_type(source.id)(id=source.id)))
        assert len(tasks) > 50
        del sys.modules[module.__name__]


def test_the_game_of_the_tutorial_pays_for_nearness_and_for_nothing_hostile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "learn" / "two-agents.md").read_text()
    (body,) = (body for kind, body in BLOCK.findall(text) if kind == "python")
    (tmp_path / "warm_cold.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    nearness = importlib.import_module("warm_cold").nearness
    del sys.modules["warm_cold"]
    assert [nearness(said, 40) for said in ("40", " 65 ", "99", "forty", "", "²")] == [
        *(1.0, 0.5, 0.0, 0.0, 0.0, 0.0)
    ]
