"""What the comparison of whole steps counts, and that both sides are asked the same."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import wait_until

from gradus.config import RunConfig

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench() -> Iterator[Any]:
    yield load("whole_step")
    del sys.modules["whole_step"]


def write_steps(path: Path, *, num_steps: int, seconds: float) -> None:
    lines = [
        json.dumps(
            {
                "step": step,
                "time": step * seconds,
                "time/step_seconds": 1.0,
                "time/publish_seconds": 0,
            }
        )
        for step in range(num_steps)
    ]
    path.write_text("\n".join(lines) + "\n")


def test_every_case_is_a_config_that_a_user_could_write(bench: Any, tmp_path: Path) -> None:
    for case in bench.CASES.values():
        for dtype in ("default", "float32", "bfloat16"):
            settings = bench.gradus_config(case, tmp_path, tmp_path, dtype, 5)
            config = RunConfig.model_validate(settings)
            (source,) = config.orchestrator.train.env
            episodes = config.orchestrator.groups_per_batch * source.group_size
            assert episodes == case.episodes == config.inference.max_num_seqs


def test_the_first_and_the_last_steps_do_not_count(bench: Any, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    write_steps(metrics, num_steps=8, seconds=2.0)
    running = bench.RunningGradus(0, metrics)
    for step in range(8):
        # Steps 0 and 1 warm up and the last two have nothing beside them: each uses 100 times more.
        used = 3.0 * step if 1 <= step <= 5 else 300.0 * (step + 1)
        running.at_step[step] = {
            "all": used,
            "trainer": used,
            "machine": used + 2.0 * step,
            "ended": 2.0 * step,
        }
    found = bench.summarise_gradus(running, 8, 2)
    assert found["seconds"] == [2.0] * 4
    assert found["core_seconds"] == {"all": 3.0, "trainer": 3.0}
    assert found["others"] == 1.0


def test_the_fastest_side_of_trl_is_what_gradus_is_compared_with(bench: Any) -> None:
    side = {"core_seconds": {}}
    found = bench.report(
        bench.CASES["chat"],
        {
            "gradus default": [side | {"seconds": [1.0, 3.0, 3.0]}],
            "trl float32, 256 rows": [side | {"seconds": [6.0, 6.0]}],
            "trl bfloat16, 256 rows": [side | {"seconds": [9.0]}],
        },
    )
    assert found["step_of_trl"] == {"gradus default": 0.5}


@pytest.mark.slow
def test_core_seconds_are_those_of_the_role_and_of_all_below_it(bench: Any, tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    start = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    launcher = (
        "import subprocess, sys\n"
        f"c = [sys.executable, '-c', {start!r}, 'gradus.cli.main', 'trainer']\n"
        "subprocess.run(c)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == b"1\n"
        running = bench.RunningGradus(process.pid, tmp_path / "none")
        wait_until(lambda: running.used().get("trainer", 0.0) >= 0.25)
        used = running.used()
        assert used["all"] == pytest.approx(used["trainer"] + used["launcher"])
        assert used["machine"] > used["all"]
    finally:
        process.stdin.write(b"\n")
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_a_demonstration_asks_the_tool_four_times_and_then_replies() -> None:
    rows = load("whole_step_tools").demonstrations(2, seed=0)
    for row in rows:
        replies = [m for m in row["messages"] if m["role"] == "assistant"]
        asked = [m["tool_calls"][0]["function"]["arguments"]["k"] for m in replies[:-1]]
        answers = [m["content"] for m in row["messages"] if m["role"] == "tool"]
        assert asked == ["4", "3", "2", "1"]
        assert answers == ["3", "2", "1", "0"]
        assert replies[-1]["content"] == "0"
    assert rows[0]["tools"] != rows[1]["tools"]
