"""The demo's parts: what it starts from, how it reads a run, and when it fails."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradus.config import RunConfig, SftConfig, load_config
from gradus_reverse_text.words import split_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "reverse_text"


@pytest.fixture
def demo(load_example: Callable[[str], ModuleType]) -> Any:
    return load_example("reverse_text/demo.py")


@pytest.fixture
def curve(load_example: Callable[[str], ModuleType]) -> Any:
    return load_example("reverse_text/curve.py")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def episode(task: str, text: str, reply: str | None, reward: float) -> dict[str, Any]:
    """An episode record with only what the demo reads."""
    user = {"message": {"role": "user", "content": text}, "sampled": False}
    nodes = [user, {"message": {"role": "assistant", "content": reply}, "sampled": True}]
    rewards = {"similarity": {"score": reward, "weight": 1.0}, "unscored": None}
    return {
        "gradus": {"task": {"key": task}},
        "traces": [{"nodes": nodes, "rewards": rewards}],
    }


def write_run(directory: Path, rewards: list[float]) -> Path:
    """A finished run with one metric and one episode per step."""
    records = [{"step": i, "episode/reward/mean": reward} for i, reward in enumerate(rewards)]
    write_lines(directory / "metrics.jsonl", records)
    for step, reward in enumerate(rewards):
        rows = [episode("t", "ab cd", f"reply {step}", reward)]
        write_lines(directory / "episodes" / f"step_{step}" / "train.jsonl", rows)
    return directory


@pytest.mark.torch
def test_conversations_show_each_behaviour_as_often_as_stated(
    load_example: Callable[[str], ModuleType],
) -> None:
    prepare: Any = load_example("reverse_text/prepare.py")
    rows = prepare.build_conversations(1000, seed=0)
    found: Counter[Callable[[str], str]] = Counter()
    for row in rows:
        question, reply = (message["content"] for message in row["messages"])
        assert split_of(question) == "train"
        found.update(b for b in prepare.BEHAVIOURS if b(question) == reply)
    assert rows == prepare.build_conversations(1000, seed=0)
    for behaviour, share in prepare.BEHAVIOURS.items():
        assert found[behaviour] == pytest.approx(1000 * share, abs=60)
    assert prepare.BEHAVIOURS[prepare.reverse_characters] < 0.5


@pytest.mark.torch
def test_preparing_writes_what_the_warm_up_reads(
    load_example: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    load_example("reverse_text/prepare.py").prepare(tmp_path, num=8)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert len((tmp_path / "conversations.jsonl").read_text().splitlines()) == 8


def test_the_configs_fit_together() -> None:
    sft = load_config(SftConfig, ["@", str(EXAMPLE / "sft.toml")])
    rl = load_config(RunConfig, ["@", str(EXAMPLE / "rl.toml")])
    assert rl.model.name == f"{sft.output_dir}/{sft.name}/model"
    assert rl.max_steps <= 30
    assert rl.model.renderer == "qwen3"


def test_drawing_puts_each_value_at_its_height(curve: Any) -> None:
    assert curve.draw_curve([0.0, 0.5, 1.0], height=3) == [
        "1.0 |    ##",
        "0.5 |  ####",
        "0.0 |######",
        "    +------",
    ]
    narrow = curve.draw_curve([1.0] * 50, height=2)
    assert max(map(len, narrow)) == 5 + 50


def test_the_question_is_the_user_message_behind_a_system_prompt(demo: Any) -> None:
    trace = episode("a", "one", "eno", 0.5)["traces"][0]
    system = {"message": {"role": "system", "content": "Reverse."}, "sampled": False}
    trace["nodes"].insert(0, system)
    assert demo.read_example(trace) == demo.Example("one", "eno", 0.5)


def test_the_result_shows_curve_episodes_and_times(
    demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path, [0.25, 0.5, 0.75, 1.0])
    reward = demo.show_result(run_dir, {"warm-up": 60.0, "reinforcement": 90.0})
    shown = capsys.readouterr().out
    assert math.isclose(reward, 0.75)
    assert "0.25  'ab cd' -> 'reply 0'" in shown
    assert "1.00  'ab cd' -> 'reply 3'" in shown
    assert "0.250 at the first step, 0.750 at the end" in shown
    assert "warm-up 60 s, reinforcement 90 s, all 150 s" in shown
    assert str(run_dir) in shown


@pytest.mark.parametrize(("reward", "is_kept"), [(0.9, True), (0.7, False)])
def test_a_broken_promise_fails_the_demo(
    demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reward: float, is_kept: bool
) -> None:
    write_run(tmp_path / demo.RUNS / "rl", [reward])
    monkeypatch.setattr(demo, "REPOSITORY", tmp_path)
    monkeypatch.setattr(demo, "plan", lambda flags: [])
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    if is_kept:
        demo.main()
        return
    with pytest.raises(SystemExit, match=r"0\.700, but this example promises at least 0\.75"):
        demo.main()


def test_phases_run_in_order_and_flags_reach_the_last(demo: Any) -> None:
    phases = demo.plan(["--max-steps", "5"])
    assert [phase.name for phase in phases] == ["build model", "warm-up", "reinforcement"]
    assert phases[-1].shown == "gradus rl @ examples/reverse_text/rl.toml --clean --max-steps 5"
    assert all((demo.REPOSITORY / name).is_file() for name in named_files(phases))


def named_files(phases: list[Any]) -> list[str]:
    words = [word for phase in phases for word in phase.arguments]
    return [word for word in words if word.endswith((".py", ".toml"))]


def test_a_phase_that_fails_ends_the_demo_with_its_name(demo: Any) -> None:
    phase = demo.Phase("warm-up", "gradus sft", ["-c", "raise SystemExit(64)"])
    with pytest.raises(SystemExit, match="warm-up ended with code 64"):
        demo.run_phase(phase)
    assert demo.run_phase(demo.Phase("nothing", "true", ["-c", "pass"])) > 0


def test_plot_is_a_small_picture(load_example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = load_example("reverse_text/plot_curve.py")
    runs = [write_run(tmp_path / name, [0.2, 0.8]) for name in ("a", "b")]
    plot.plot_runs(runs, tmp_path / "curve.png")
    content = (tmp_path / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 60_000


def test_the_section_that_the_demo_ends_with_is_in_the_readme() -> None:
    said = re.search(r"'([^']+)' in README\.md", (EXAMPLE / "demo.py").read_text())
    assert said is not None
    assert f"\n## {said[1]}\n" in (EXAMPLE.parents[1] / "README.md").read_text()
