"""The blocks of docs/agents.md, run: the agent, its task, its config, its credit, the command."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from pages import BLOCK, ROOT
from policy_talks import TOKEN, policy_seat
from transformers import PreTrainedTokenizerFast
from verifiers.v1 import graph
from verifiers.v1.clients import train

from gradus.cli.agents import command
from gradus.environments.verifiers import replies
from gradus.errors import ExitCode
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.testing.tiny_model import build_tiny_tokenizer
from gradus_program.taskset import ProgramConfig, ProgramTaskset

pytestmark = [pytest.mark.torch, pytest.mark.slow]

BLOCKS = BLOCK.findall((ROOT / "docs" / "agents.md").read_text())


def block(language: str, number: int = 0) -> str:
    """One of the blocks of a language."""
    return str([text for kind, text in BLOCKS if kind == language][number])


async def play(taskset: dict[str, Any], says: str, folder: Path) -> vf.Trace:
    """An episode of the first task of a `program`, played by an engine that says this."""
    build_tiny_tokenizer(folder)
    tokens = PreTrainedTokenizerFast.from_pretrained(folder).encode(says, add_special_tokens=False)
    task = next(iter(ProgramTaskset(ProgramConfig.model_validate(taskset))))
    async with ScriptedEngine(reply=lambda _: Reply(tokens), data_token=TOKEN) as engine:
        agent = vf.make_agent(policy_seat(engine, folder, {"id": "gradus-program"}, sampling={}))
        async with agent:
            return await agent.run(task)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    monkeypatch.setenv("GRADUS_INFERENCE_TOKEN", TOKEN)
    monkeypatch.chdir(ROOT)
    for owner, name in ((train.TrainClient, "get_response"), (graph.PendingTurn, "commit")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    replies.sample_as_asked()


def test_the_agent_of_the_page_plays_its_task_by_its_config(tmp_path: Path) -> None:
    taskset = tomllib.loads(block("toml"))["orchestrator"]["train"]["env"][0]["taskset"]
    (file,) = taskset["files"]
    assert Path(file).read_text() == block("python")
    row = json.loads(block("json"))
    assert row in [json.loads(line) for line in Path(taskset["path"]).read_text().splitlines()]
    (tmp_path / "tasks.jsonl").write_text(block("json"))
    taskset |= {"command": [sys.executable, *taskset["command"][1:]]}
    taskset["path"] = str(tmp_path / "tasks.jsonl")
    trace = asyncio.run(play(taskset, row["prompt"][::-1], tmp_path))
    assert (trace.errors, trace.reward) == ([], 1.0)
    assert trace.info["program"]["dialects"] == {"Responses": 1}
    assert trace.info["quarantined_turns"] == []


def test_the_credit_of_the_page_is_by_branch() -> None:
    nodes = [
        build_message(None, [10]),
        build_message(0, [20, 21], sampled=2),
        build_message(1, [30]),
        build_message(2, [40], sampled=1),
        build_message(1, [50]),
        build_message(4, [60], sampled=1),
    ]
    nodes[3].message.content, nodes[5].message.content = "done", "lost"
    episode = build_episode([build_trace(nodes)])
    names: dict[str, Any] = {}
    exec(block("python", 1), names)
    names["ByBranch"]().score_group([episode], None)
    found = [node.advantages for node in episode.traces[0].nodes if node.sampled]
    assert found == [[0.5, 0.5], [0.5], [-0.5]]


def test_the_command_of_the_page_tries_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(given: Sequence[str]) -> int:
        (source,) = json.loads(given[given.index("--env") + 1])
        taskset = source["taskset"]
        taskset["command"][0] = sys.executable
        trace = asyncio.run(play(taskset, "niloiv mulp eciov", tmp_path))
        folder = Path(given[given.index("--output-dir") + 1], given[1], "episodes", "step_0")
        folder.mkdir(parents=True)
        record = {"traces": [json.loads(trace.model_dump_json())]}
        (folder / "eval.jsonl").write_text(json.dumps(record) + "\n")
        return ExitCode.DONE

    monkeypatch.setattr(command, "evaluate", evaluate)
    program, name, *words = shlex.split(block("bash"))
    assert (program, name) == ("gradus", "agent")
    assert command.run(["--output-dir", str(tmp_path), *words]) == ExitCode.DONE
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-4:] == [
        *("calls 1 by Responses; 0 streamed", "exit code 0", "reward 1"),
        "tokens 18 sampled, 18 would train",
    ]
