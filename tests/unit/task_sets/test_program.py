"""Foreign agents play whole rollouts: tokens, rewards, and what fails an episode."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from policy_talks import TOKEN, path_of, policy_seat
from renderers import parsing
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients import train
from verifiers.v1.interception import server
from verifiers.v1.utils.loaders import harness_class, taskset_class

from gradus.environments.verifiers import replies
from gradus.environments.verifiers.engine_client import EngineClient
from gradus.errors import ConfigError
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import GenerateCall, Reply, Status
from gradus.wire.episode import CONTEXT_FULL
from gradus_program.harness import ProgramHarness, _last_said
from gradus_program.taskset import ProgramConfig, ProgramTask, ProgramTaskset
from gradus_reverse_text.taskset import ReverseTextConfig, ReverseTextTaskset

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[3] / "examples" / "program"
CALL = 'First:<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
REWARDS = """
def said(output):
    return float("hello" in output)

def looked(row, output, errors, exit_code, files, reply, trace):
    assert reply == "hello" and trace.num_turns == 1
    text = float(files.get("a.txt") == row["answer"])
    return {"exit": exit_code, "files": len(files), "text": text}

def none(output):
    return None
"""
ASK = (
    'curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" '
    """-d '{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.1}'"""
)


@pytest.fixture(autouse=True)
def rewards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    monkeypatch.setenv("GRADUS_INFERENCE_TOKEN", TOKEN)
    monkeypatch.setenv("HF_TOKEN", "hub-token")
    monkeypatch.setenv("SEARCH_KEY", "search-key")
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture
def says(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[int]], Reply]:
    def reply(prompt: list[int]) -> Reply:
        text = tokenizer.decode(prompt)
        wants_tool = "<tools>" in text and "<tool_response>" not in text
        words = CALL if wants_tool else "hello"
        return Reply(tokenizer.encode(words, add_special_tokens=False))

    return reply


def task_of(rewards: Path, *command: str, reward: str = "said", **keys: Any) -> ProgramTask:
    config = ProgramConfig.model_validate(
        {
            "id": "gradus-program",
            "command": list(command),
            "tasks": [{"prompt": "a task", "answer": "b"}],
            "reward": f"{rewards}:{reward}",
            **keys,
        }
    )
    return next(iter(ProgramTaskset(config)))


async def play(
    task: vf.Task,
    model: Path,
    engine: ScriptedEngine,
    *,
    seconds: float | None = None,
    max_turns: int | None = None,
    **harness: Any,
) -> vf.Trace:
    seat = policy_seat(
        engine,
        model,
        {"id": "gradus-program", **harness},
        sampling={"max_tokens": 100},
        timeout={"rollout": seconds},
        max_turns=max_turns,
    )
    agent = vf.make_agent(seat)
    async with agent:
        return await agent.run(task)


def assert_tokens_are_those_of(calls: list[GenerateCall], trace: vf.Trace) -> None:
    seen = [[*call.prompt_token_ids, *call.reply.token_ids] for call in calls if call.reply]
    paths = [path_of(trace, node) for node in trace.nodes if node.sampled]
    assert sorted(paths) == sorted(seen)
    trained = sum(sum(node.mask) for node in trace.nodes)
    assert trained == sum(len(call.reply.token_ids) for call in calls if call.reply)


def test_verifiers_finds_task_set_and_harness_by_one_id() -> None:
    assert taskset_class("gradus-program") is ProgramTaskset
    assert harness_class("gradus-program") is ProgramHarness


@pytest.mark.slow
async def test_the_openai_package_trains_with_a_tool_a_stream_and_four_calls_at_once(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    agent = [EXAMPLES / "agent_openai.py"]
    task = task_of(rewards, sys.executable, "agent_openai.py", files=agent)
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        trace = await play(task, model, engine)
    assert trace.errors == []
    assert (len(engine.calls), trace.num_branches, trace.reward) == (6, 5, 1.0)
    assert len(trace.tool_messages) == 1
    assert_tokens_are_those_of(engine.calls, trace)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "dialect"), [("responses", "Responses"), ("messages", "Messages")]
)
async def test_the_packages_of_other_dialects_train_with_a_tool_and_a_stream(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply], agent: str, dialect: str
) -> None:
    file = EXAMPLES / f"agent_{agent}.py"
    task = task_of(rewards, sys.executable, file.name, files=[file])
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        trace = await play(task, model, engine)
    assert trace.errors == []
    info = trace.info["program"]
    assert (info["dialects"], info["num_streams"] > 0) == ({dialect: 2}, True)
    assert (info["num_refused"], info["lost_reasoning"]) == (0, 0)
    assert (len(engine.calls), trace.num_branches, trace.reward) == (2, 1, 1.0)
    assert_tokens_are_those_of(engine.calls, trace)


TWO_TOOL_TURNS = """
import json, os, urllib.request

messages, ids = [{"role": "user", "content": "hi"}], []
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
while len(ids) < 2:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, "tools": tools}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    ids += [call["id"] for call in reply["tool_calls"]]
    messages += [reply, {"role": "tool", "tool_call_id": ids[-1], "content": "3"}]
print(*ids)
"""


async def test_the_tool_calls_of_two_turns_have_different_ids(
    model: Path,
    rewards: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "build_async_openai", EngineClient)
    monkeypatch.setattr(train, "response_from_generate", train.response_from_generate)
    monkeypatch.setattr(parsing, "json", parsing.json)
    replies.read_every_tool_call()
    call = Reply(tokenizer.encode(CALL, add_special_tokens=False))
    task = task_of(rewards, sys.executable, "-c", TWO_TOOL_TURNS)
    async with ScriptedEngine(reply=lambda _: call, data_token=TOKEN) as engine:
        trace = await play(task, model, engine)
    first, second = trace.info["program"]["stdout"].split()
    assert first != second
    assert (trace.num_turns, trace.num_branches) == (2, 1)


async def test_curl_in_a_loop_trains_each_of_its_three_conversations(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    task = task_of(rewards, "./agent_curl.sh", files=[EXAMPLES / "agent_curl.sh"])
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        trace = await play(task, model, engine)
    assert trace.errors == []
    assert trace.info["program"]["stdout"] == "hello\n" * 3
    assert (trace.num_branches, trace.reward) == (3, 1.0)
    assert_tokens_are_those_of(engine.calls, trace)


async def test_the_reward_hears_files_and_exit_code_and_the_info_keeps_the_tails(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    script = f"{ASK}; printf b > a.txt; yes | head -c 9000 >&2; exit 4"
    task = task_of(rewards, "sh", "-c", script, reward="looked", outputs=["a.txt", "absent"])
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        trace = await play(task, model, engine)
    assert trace.errors == []
    assert {name: reward.score for name, reward in trace.rewards.items()} == {
        "exit": 4.0,
        "files": 1.0,
        "text": 1.0,
    }
    info = trace.info["program"]
    assert (info["exit_code"], len(info["stderr"]), info["stderr_bytes"]) == (4, 4000, 9000)
    assert trace.metrics == {
        "program_failed": 1.0,
        "dropped_parameters": 1.0,
        "refused_calls": 0.0,
        "unread_calls": 0.0,
        "lost_reasoning": 0.0,
    }


async def test_a_program_plays_another_task_set_for_the_reward_of_that_one(
    model: Path, says: Callable[[list[int]], Reply]
) -> None:
    config = ReverseTextConfig(id="gradus-reverse-text", num_tasks=1)
    task = next(iter(ReverseTextTaskset(config)))
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        trace = await play(task, model, engine, command=["sh", "-c", f"{ASK}; cat"])
    assert trace.errors == []
    assert trace.info["program"]["stdout"].endswith(task.data.prompt)
    assert 0.0 < trace.reward < 1.0


async def test_no_secret_of_the_worker_is_in_the_program_s_environment(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    task = task_of(rewards, "sh", "-c", f"{ASK}; env; cat /proc/self/environ >&2")
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        trace = await play(task, model, engine)
    text = json.dumps(trace.info)
    assert "OPENAI_BASE_URL=http://127.0.0.1" in text
    assert [s for s in (TOKEN, "hub-token", "search-key", "GRADUS") if s in text] == []


async def test_a_deadline_fails_the_episode_and_says_what_the_program_said(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    task = task_of(rewards, "sh", "-c", f"{ASK}; sleep 60")
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        trace = await play(task, model, engine, seconds=3.0)
    assert (trace.is_timeout, trace.reward) == (True, 0.0)
    assert "hello" in trace.info["program"]["stdout"]
    assert trace.info["program"]["exit_code"] is None


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo no endpoint >&2; exit 2", "exit code 2 and made no model call. It must ask"),
        (f"{ASK.replace('chat/completions', 'embeddings')}", "Embeddings are not served"),
    ],
)
async def test_a_program_without_a_model_call_fails_by_name(
    model: Path, rewards: Path, script: str, text: str
) -> None:
    async with ScriptedEngine(data_token=TOKEN) as engine:
        trace = await play(task_of(rewards, "sh", "-c", script), model, engine)
    assert [error.type for error in trace.errors] == ["NoModelCall"]
    assert text in trace.errors[0].message


async def test_a_program_that_an_engine_fails_is_no_outcome(model: Path, rewards: Path) -> None:
    async with ScriptedEngine(data_token=TOKEN) as engine:
        engine.inject(Status(503), times=9)
        task = task_of(rewards, "sh", "-c", f"{ASK} --fail")
        trace = await play(task, model, engine)
    assert [error.type for error in trace.errors] == ["ProviderError"]


async def test_a_program_that_lives_with_an_engine_s_failure_is_rated(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        engine.inject(Status(503), times=9)
        task = task_of(rewards, "sh", "-c", f"until {ASK} --fail; do :; done")
        trace = await play(task, model, engine)
    assert (trace.errors, trace.reward) == ([], 1.0)


@pytest.mark.parametrize("max_turns", [None, 1])
async def test_an_engine_s_fault_that_a_program_hides_fails_the_episode(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply], max_turns: int | None
) -> None:
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        engine.inject(Status(500))
        other = ASK.replace('"hi"', '"another"')
        task = task_of(rewards, "sh", "-c", f"{ASK}; {other}; {other}; echo hello")
        trace = await play(task, model, engine, max_turns=max_turns)
    assert [error.type for error in trace.errors] == ["ProviderError"]
    assert trace.num_turns >= 1
    assert trace.info["program"]["exit_code"] == 0


async def test_a_call_that_a_program_leaves_ends_in_the_engine_and_trains_nothing(
    model: Path,
    rewards: Path,
    says: Callable[[list[int]], Reply],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "build_async_openai", EngineClient)
    monkeypatch.setattr(server, "web", server.web)
    replies.cancel_left_calls()
    wait = "until [ -e {} ]; do sleep 0.05; done"
    left = f"{ASK} & {wait.format('left')}; kill $!; {wait.format('again')}; {ASK}"
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        engine.hold()
        playing = asyncio.create_task(play(task_of(rewards, "sh", "-c", left), model, engine))
        await engine.wait_until(lambda it: it.running == 1, timeout_seconds=60)
        (folder,) = (rewards.parent / "verifiers" / "runtimes" / "subprocess").iterdir()
        (folder / "left").touch()
        await engine.wait_until(lambda it: it.running == 0)
        engine.release()
        (folder / "again").touch()
        trace = await playing
    assert (trace.errors, trace.num_turns, trace.reward) == ([], 1, 1.0)
    assert [call.error is None for call in trace.calls] == [False, True]
    assert trace.metrics["unread_calls"] == 1.0
    assert_tokens_are_those_of(engine.calls, trace)


async def test_a_request_beyond_the_context_is_rated_and_not_played_again(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    huge = 'yes | head -c 9000000 | curl -s -d @- -H "Authorization: Bearer $OPENAI_API_KEY" '
    refused = f"{huge} $OPENAI_BASE_URL/chat/completions"
    async with ScriptedEngine(reply=says, data_token=TOKEN, max_length_tokens=4096) as engine:
        task = task_of(rewards, "sh", "-c", f"{ASK}; {refused} >&2; exit 1")
        trace = await play(task, model, engine)
    assert (trace.errors, trace.num_turns, trace.reward) == ([], 1, 1.0)
    assert "maximum context length of 4096 tokens" in trace.info["program"]["stderr"]


async def test_a_program_whose_first_prompt_is_too_long_is_rated_and_not_played_again(
    model: Path, rewards: Path
) -> None:
    async with ScriptedEngine(data_token=TOKEN, max_length_tokens=8) as engine:
        trace = await play(task_of(rewards, "sh", "-c", f"{ASK} --fail"), model, engine)
    assert (trace.errors, trace.stop_condition) == ([], CONTEXT_FULL)
    assert trace.info["program"]["exit_code"] != 0


async def test_a_program_that_leaves_a_call_open_is_not_waited_for(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        task = task_of(rewards, "sh", "-c", f"{ASK}; {ASK} & sleep 0.2")
        trace = await play(task, model, engine)
    assert trace.errors == []


async def test_a_reward_that_is_no_number_fails_by_its_name(
    model: Path, rewards: Path, says: Callable[[list[int]], Reply]
) -> None:
    async with ScriptedEngine(reply=says, data_token=TOKEN) as engine:
        trace = await play(task_of(rewards, "sh", "-c", ASK, reward="none"), model, engine)
    assert "rewards.py:none' returned None" in trace.errors[0].message


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"reward": ""}, "`reward` is missing"),
        ({"reward": "absent.py:f"}, "there is no file"),
        ({"command": []}, "`command` is missing"),
        ({"tasks": []}, "either `path`"),
        ({"path": "absent.jsonl", "tasks": []}, "absent.jsonl"),
        ({"column": "question"}, "tasks\\[0\\] has no 'question'"),
        ({"tasks": [{"prompt": "x", "command": "sh"}]}, "must be a list of texts"),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(
    rewards: Path, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        task_of(rewards, "sh", **keys) if "reward" not in keys else _load(keys)


def _load(keys: dict[str, Any]) -> list[ProgramTask]:
    config = {"id": "gradus-program", "command": ["sh"], "tasks": [{"prompt": "x"}], **keys}
    return list(ProgramTaskset(ProgramConfig.model_validate(config)))


def test_tasks_come_from_a_file_with_a_command_of_their_own(rewards: Path, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"question": {"n": 1}}, {"question": "two", "command": ["cat"]}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    config = {"path": file, "column": "question", "tasks": [], "reward": f"{rewards}:said"}
    tasks = _load(config)
    assert [task.data.prompt for task in tasks] == ['{"n": 1}', "two"]
    assert [task.data.program.command for task in tasks] == [["sh"], ["cat"]]


def test_the_key_of_a_task_does_not_depend_on_what_runs(rewards: Path) -> None:
    keys = {task_of(rewards, command).key for command in ("sh", "cat")}
    assert len(keys) == 1


def test_a_long_last_line_of_a_program_is_told_with_its_beginning() -> None:
    said = _last_said(
        "Traceback\nValueError: Unknown model 'policy'. Known: " + "x, " * 900 + "last"
    )
    assert said.startswith("ValueError: Unknown model 'policy'.")
    assert (said.endswith("x, last"), len(said)) == (True, 455)
    assert _last_said("first\nsecond") == "first\nsecond"
