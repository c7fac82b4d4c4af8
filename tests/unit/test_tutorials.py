"""docs/learn/tools.md and two-agents.md: files load, configs pass the fast check."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from pages import BLOCK, ROOT

from gradus.config import EvalConfig, RunConfig, SftConfig, load_config
from gradus.plan.machine import check

FILE = re.compile(r"# file: ([\w.]+)\n")
BASE = {"max_steps": 1, "model": {"name": "some/model"}}


@pytest.mark.parametrize("page", [pytest.param("tools", marks=pytest.mark.torch), "two-agents"])
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
    if page == "tools":
        make_looks()
    assert configs
    for config in configs:
        name = FILE.match(config)
        if (source := the_source(name[1] if name else "rl.toml", config)) is None:
            continue
        assert f"gradus env check {source.id}" in text
        module = importlib.import_module(source.id.replace("-", "_"))
        kind = next(getattr(module, it) for it in module.__all__ if it.endswith("Taskset"))
        tasks = list(kind(vf.taskset_config_type(source.id)(id=source.id)))
        assert len(tasks) > 50
        del sys.modules[module.__name__]


def the_source(name: str, text: str) -> Any:
    """What a config plays, which its check must accept; None where it plays nothing."""
    Path(name).write_text(text)
    words = ["@", name]
    if name == "sft.toml":
        load_config(SftConfig, words, check=check)
        return None
    if name == "eval.toml":
        return load_config(EvalConfig, words, check=check).env[0]
    return load_config(RunConfig, words, base=BASE, check=check).orchestrator.train.env[0]


def make_looks() -> None:
    """What section 3 of tools.md writes is what its light would answer; its model lies in place."""
    importlib.import_module("make_looks")
    light = importlib.import_module("traffic_light")
    for name in ("make_looks", "traffic_light"):
        del sys.modules[name]
    Path("runs/light-sft").mkdir(parents=True)
    Path("runs/light-sft/model").symlink_to(Path("tiny").resolve())
    rows = [json.loads(line) for line in Path("looks.jsonl").read_text().splitlines()]
    seen = [[it["content"] for it in row["messages"] if it["role"] == "tool"] for row in rows]
    right = sum(colours.count("green") == 1 for colours in seen)
    assert 0.35 < right / len(seen) < 0.6, "enough to learn from, and to learn"
    assert all(colours == sorted(colours, reverse=True) for colours in seen), "red, then green"
    server = MCPServer("light")
    light.Light(vf.SharedToolsetConfig()).register(server)
    (tool,) = asyncio.run(server.list_tools())
    (shown,) = rows[0]["tools"]
    assert shown["function"] == {
        "name": f"{light.Light.TOOL_PREFIX}_{tool.name}",
        "description": tool.description,
        "parameters": tool.input_schema,
    }


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
