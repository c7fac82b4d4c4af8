"""Every shipped config passes `gradus check`, and the demo reads what a run writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gradus.config import RunConfig, SftConfig, load_config
from gradus.plan.machine import check

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RL_CONFIGS = sorted(EXAMPLES.glob("*/rl*.toml"))
SFT_CONFIGS = sorted(EXAMPLES.glob("*/sft*.toml"))


def load_example(name: str) -> ModuleType:
    path = EXAMPLES / "reverse_text" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def curve() -> Iterator[ModuleType]:
    yield load_example("curve")
    del sys.modules["curve"]


@pytest.fixture
def demo(curve: ModuleType) -> Iterator[ModuleType]:
    """The demo's module; it imports its neighbour `curve`."""
    assert curve
    yield load_example("demo")
    del sys.modules["demo"]


def make_stand_ins(root: Path, *paths: str) -> None:
    """What the examples' own `prepare.py` makes, as far as a check looks at it."""
    for path in paths:
        target = root / path
        if target.suffix == ".jsonl":
            target.parent.mkdir(parents=True, exist_ok=True)
            message = {"role": "user", "content": "a"}
            reply = {"role": "assistant", "content": "b"}
            target.write_text(json.dumps({"messages": [message, reply]}) + "\n")
            continue
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text("{}")
        (target / "tokenizer_config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"x")


def test_there_are_examples() -> None:
    assert RL_CONFIGS
    assert SFT_CONFIGS


@pytest.mark.parametrize("path", RL_CONFIGS, ids=lambda path: path.parent.name)
def test_every_shipped_rl_config_passes_the_check(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(RunConfig, ["@", str(path)])
    make_stand_ins(tmp_path, config.model.name)
    assert load_config(RunConfig, ["@", str(path)], check=check) == config


@pytest.mark.parametrize("path", SFT_CONFIGS, ids=lambda path: path.parent.name)
def test_every_shipped_sft_config_passes_the_check(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(SftConfig, ["@", str(path)])
    paths = [config.data.path, *([] if config.validation is None else [config.validation.path])]
    make_stand_ins(tmp_path, config.model.name, *paths)
    assert load_config(SftConfig, ["@", str(path)], check=check) == config


def test_the_curve_of_a_run_is_read_in_step_order(curve: ModuleType, tmp_path: Path) -> None:
    rows = [{"step": step, curve.REWARD: step / 10} for step in (2, 0, 1, 3)]
    rows.append({"step": 4, "loss/total/mean": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = curve.read_curve(path)
    assert (read.steps, read.first) == ((0, 1, 2, 3), 0.0)
    assert read.last == pytest.approx(0.2)


def test_a_run_without_a_step_is_refused(curve: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="did the run make a step"):
        curve.read_curve(tmp_path / "metrics.jsonl")


def test_a_higher_value_draws_a_taller_bar(curve: ModuleType) -> None:
    lines = curve.draw_curve([0.0, 0.5, 1.0], height=11, width=60)
    heights = [sum(line[5 + 2 * column] == "#" for line in lines[:-1]) for column in range(3)]
    assert heights == [1, 6, 11]


def test_the_demo_shows_one_episode_of_each_of_three_tasks(
    demo: ModuleType, tmp_path: Path
) -> None:
    def record(key: str, reply: str, score: float) -> dict[str, object]:
        nodes = [
            {"sampled": False, "message": {"role": "user", "content": key}},
            {"sampled": True, "message": {"role": "assistant", "content": reply}},
        ]
        trace = {"nodes": nodes, "rewards": {"similarity": {"score": score, "weight": 1.0}}}
        return {"gradus": {"task": {"key": key}}, "traces": [trace]}

    rows = [record("ab", "ba", 1.0), record("ab", "ab", 0.5), record("cd", "", 0.0)]
    rows += [{"gradus": {"task": {"key": "failed"}}}, record("ef", "fe", 1.0), record("gh", "", 0)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [(e.text, e.reply, e.reward) for e in demo.read_examples(path)]
    assert shown == [("ab", "ba", 1.0), ("cd", "", 0.0), ("ef", "fe", 1.0)]
