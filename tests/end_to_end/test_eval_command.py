"""`gradus eval`, killed in the middle and resumed: every episode exactly once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import finish, kill, processes_of, start, wait_until
from evaluated import read_gradus_fields
from running import RunningInference

from gradus.files import read_json
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Status
from gradus.wire.inference import SERVED_MODEL_NAME

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

NUM_TASKS, GROUP_SIZE = 15, 4
TOML = """
name = "e"
output_dir = "{root}"
base_url = "{base_url}/v1"
api_key_var = "GRADUS_TEST_KEY"
max_in_flight_episodes = 4
[model]
name = "policy"
[sampling]
max_completion_tokens = 12
[[env]]
id = "gradus-reverse-text"
num_tasks = {num_tasks}
group_size = {group_size}
"""

KEY = {"GRADUS_TEST_KEY": "data-token"}

Evaluate = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, because sockets lie below it."""
    return tmp_path_factory.mktemp("e")


@pytest.fixture
def evaluate(root: Path, inference_server: RunningInference) -> Evaluate:
    """Starts `gradus eval` of the served model under the name "e"."""

    def run(*words: str) -> subprocess.Popen[str]:
        config = root / "eval.toml"
        config.write_text(
            TOML.format(
                root=root,
                base_url=inference_server.base_url,
                num_tasks=NUM_TASKS,
                group_size=GROUP_SIZE,
            )
        )
        key = {"GRADUS_TEST_KEY": inference_server.data_token}
        return start("eval", "@", str(config), *words, variables=key)

    return run


def wait_for_episodes(path: Path, number: int, process: subprocess.Popen[str]) -> list[bytes]:
    """The whole lines of the results once there are at least `number`."""
    wait_until(
        lambda: process.poll() is not None or (path.exists() and len(lines_of(path)) >= number),
        timeout_seconds=120,
        what=f"{number} episodes",
    )
    assert process.poll() is None, process.communicate()
    return lines_of(path)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def test_an_evaluation_whose_process_is_killed_has_every_episode_once(
    root: Path, evaluate: Evaluate
) -> None:
    """The next test kills the launcher."""
    run_dir = root / "e"
    results = run_dir / "episodes" / "step_0" / "eval.jsonl"
    first = evaluate()
    kept = wait_for_episodes(results, 20, first)
    kill(run_dir, "evaluator")
    printed = finish(first)
    assert "evaluator was killed by SIGKILL" in printed
    assert "restart 1 of 5 in 1 s with the episodes that are missing or failed" in printed
    assert processes_of(run_dir) == []
    assert set(kept) <= set(lines_of(results)), "what was played is not played again"
    names = [fields["episode"] for fields in read_gradus_fields(results)]
    assert sorted(names) == sorted(
        f"gradus-reverse-text/{task}/{replica}"
        for task in range(NUM_TASKS)
        for replica in range(GROUP_SIZE)
    )
    (row,) = read_json(run_dir / "results.json")["environments"]
    assert row["num_episodes"] == NUM_TASKS * GROUP_SIZE


def command(tmp_path: Path, base_url: str, *words: str) -> list[str]:
    env = {"id": "gradus-reverse-text", "num_tasks": 6, "group_size": 2}
    return [
        *("eval", "--base-url", base_url),
        *("--model", SERVED_MODEL_NAME, "--api-key-var", "GRADUS_TEST_KEY", "--name", "mine"),
        *("--output-dir", str(tmp_path), "--env", json.dumps([env])),
        *("--max-in-flight-episodes", "2", *words),
    ]


@pytest.mark.shows("F04")
async def test_killed_with_its_launcher_and_resumed_every_episode_is_there_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp_path = tmp_path_factory.mktemp("r")
    episodes = tmp_path / "mine" / "episodes" / "step_0" / "eval.jsonl"
    async with ScriptedEngine() as engine:
        engine.inject(Status(429), path="/v1/chat/completions")
        asked = 0
        reached = asyncio.Event()
        launchers: list[subprocess.Popen[str]] = []

        def reply(messages: list[dict[str, object]]) -> str:
            nonlocal asked
            asked += 1
            if asked == 7:
                os.kill(launchers[0].pid, signal.SIGKILL)
                reached.set()
            return str(messages[-1]["content"])[::-1]

        engine.chat_reply = reply
        words = command(tmp_path, f"{engine.base_url}/v1")
        launchers.append(start(*words, variables=KEY))
        async with asyncio.timeout(90):
            await reached.wait()
        await asyncio.to_thread(launchers[0].communicate)
        assert not (tmp_path / "mine" / "results.json").exists()
        resumed = start(*words, "--resume", variables=KEY)
        output = await asyncio.to_thread(finish, resumed)
    lines = [json.loads(line)["gradus"] for line in episodes.read_text().splitlines()]
    assert sorted(line["episode"] for line in lines) == sorted(
        f"gradus-reverse-text/{task}/{replica}" for task in range(6) for replica in range(2)
    )
    results = json.loads((tmp_path / "mine" / "results.json").read_text())
    assert results["overall"]["num_episodes"] == 12
    assert "pass@2" in output or "avg" in output
