"""Episodes through the real environment process, verifiers' client and a scripted engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from commands import wait_until_async
from renderers import Qwen3RendererConfig
from running import RunningEnvironment
from transformers import PreTrainedTokenizerFast
from verifiers.v1.serve import EnvClient
from verifiers.v1.types import content_text

from gradus.config import EnvironmentProcessConfig, algorithms
from gradus.orchestrator.algorithms.base import CreditContext
from gradus.orchestrator.algorithms.echo import Echo
from gradus.orchestrator.algorithms.rae import RoleAdvantageEstimation
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.play.agents import mark_trainable
from gradus.orchestrator.play.episode_check import find_failure
from gradus.processes.table import descendants, living_processes
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply, Status
from gradus.wire.versions import VersionSpan
from gradus_word_lookup.entries import TOOL, build_entries

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

TOKEN = "the-data-token"
ORIGIN = SampleOrigin("e", "g0", "g0.0", VersionSpan(0, 0), 1.0, max_length_tokens=2000)


def start(
    run_dir: Path,
    verifiers: dict[str, Any],
    *,
    seats: Sequence[str] = ("agent",),
    **seat: Any,
) -> RunningEnvironment:
    secrets = run_dir / "secrets"
    secrets.mkdir()
    (secrets / "inference_token").write_text(TOKEN)
    agent = {"harness": {"id": "gradus-chat"}, "runtime": {"type": "subprocess"}, **seat}
    config = EnvironmentProcessConfig(
        run_dir=str(run_dir),
        term=1,
        name="e",
        verifiers={**verifiers, **dict.fromkeys(seats, agent)},
    )
    return RunningEnvironment(config)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEnvironment]:
    config = {"taskset": {"id": "gradus-test-echo"}, "timeout": {"episode": 30.0}}
    limits = {"max_turns": 2, "timeout": {"scoring": 0.5}}
    with start(tmp_path_factory.mktemp("echo"), config, **limits) as environment:
        yield environment


@asynccontextmanager
async def playing(
    environment: RunningEnvironment, model: Path, engine: ScriptedEngine
) -> AsyncIterator[Any]:
    """A function that plays one episode of a task's data."""
    client = EnvClient(environment.wait_ready()["run_address"])
    endpoint = vf.TrainClientConfig(
        base_url=engine.base_url,
        api_key_var="GRADUS_INFERENCE_TOKEN",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=str(model),
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=200, cache_salt="v0")

    async def play(task_data: dict[str, Any]) -> vf.WireEpisode:
        return await client.run(endpoint, "policy", sampling, task_data)

    try:
        yield play
    finally:
        await client.close()


async def task_of(environment: RunningEnvironment, index: int, **changed: Any) -> dict[str, Any]:
    task: dict[str, Any] = await environment.ask("task", index=index)
    return {**task["task_data"], **changed}


def script(tokenizer: PreTrainedTokenizerFast, *texts: str) -> Any:
    """Replies with these texts, one after the other, whatever the prompt."""
    replies = iter(texts)
    return lambda prompt: Reply(tokenizer.encode(next(replies), add_special_tokens=False))


def assert_tokens_are_the_engine_s(trace: vf.WireTrace, engine: ScriptedEngine) -> None:
    """Invariant 1: joined node tokens of a branch = the tokens the engine saw and produced."""
    (branch,) = trace.branches
    last = engine.calls[-1]
    assert last.reply is not None
    assert branch.token_ids == [*last.prompt_token_ids, *last.reply.token_ids]
    sampled = [
        token for call in engine.calls if call.reply is not None for token in call.reply.token_ids
    ]
    mask = branch.sampled_mask
    assert [
        t for t, is_sampled in zip(branch.token_ids, mask, strict=True) if is_sampled
    ] == sampled


async def test_a_text_episode(
    echo: RunningEnvironment, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with (
        ScriptedEngine(reply=script(tokenizer, "repeat 3"), data_token=TOKEN) as engine,
        playing(echo, model, engine) as play,
    ):
        episode = await play(await task_of(echo, 3))
    (trace,) = episode.traces
    assert (episode.ok, trace.reward, trace.last_reply) == (True, 1.0, "repeat 3")
    assert trace.stop_condition == "agent_completed"
    assert trace.task.data.model_extra["answer"] == "repeat 3"
    assert_tokens_are_the_engine_s(trace, engine)
    assert engine.calls[0].cache_salt == "v0"
    assert engine.calls[0].session_id == trace.id


@pytest.mark.shows("F37")
async def test_an_episode_whose_reward_is_not_a_number_arrives_as_that(
    echo: RunningEnvironment, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with (
        ScriptedEngine(reply=script(tokenizer, "x"), data_token=TOKEN) as engine,
        playing(echo, model, engine) as play,
    ):
        episode = await play(await task_of(echo, 0, behaviour="nan_reward"))
    reward = episode.traces[0].reward
    assert reward != reward


@pytest.mark.shows("F51")
@pytest.mark.parametrize("behaviour", ["raises", "raises_in_setup", "exits"])
async def test_an_error_of_the_environment_is_recorded_with_its_type(
    echo: RunningEnvironment, model: Path, tokenizer: PreTrainedTokenizerFast, behaviour: str
) -> None:
    async with (
        ScriptedEngine(reply=script(tokenizer, "x"), data_token=TOKEN) as engine,
        playing(echo, model, engine) as play,
    ):
        episode = await play(await task_of(echo, 0, behaviour=behaviour))
    (error,) = episode.traces[0].errors
    assert not episode.ok
    assert error.type == "TaskError"
    assert "this task always fails" in error.message


@pytest.mark.shows("F52")
async def test_a_scorer_that_hangs_is_given_up_after_its_deadline(
    echo: RunningEnvironment, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with (
        ScriptedEngine(reply=script(tokenizer, "x"), data_token=TOKEN) as engine,
        playing(echo, model, engine) as play,
    ):
        episode = await play(await task_of(echo, 0, behaviour="hangs"))
    (trace,) = episode.traces
    assert (trace.stop_condition, trace.is_timeout) == ("scoring_timeout", True)
    assert trace.rewards == {"echoed": None}


@pytest.mark.shows("F08")
async def test_a_plain_function_that_never_ends_stops_nothing_and_ends_at_its_deadline(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = {"taskset": {"id": "gradus-test-echo"}}
    with start(tmp_path, config, max_turns=2, timeout={"scoring": 20.0}) as environment:
        async with (
            ScriptedEngine(reply=script(tokenizer, *["x"] * 40), data_token=TOKEN) as engine,
            playing(environment, model, engine) as play,
        ):
            waiting = [await task_of(environment, 0, behaviour="waits") for _ in range(34)]
            blocked = [asyncio.ensure_future(play(task)) for task in waiting]
            await engine.wait_until(lambda e: len(e.calls) >= len(waiting) and not e.running)
            ended = await asyncio.gather(*blocked)
            assert {it.traces[0].stop_condition for it in ended} == {"scoring_timeout"}
            # More than there are places, and the threads of all still wait.
            (trace,) = (await play(await task_of(environment, 1))).traces
            assert trace.rewards["echoed"].score == 0.0
    assert "patience" in environment.log


@pytest.mark.shows("F62")
async def test_an_error_of_the_engine_is_recorded_as_the_cause(
    echo: RunningEnvironment, model: Path
) -> None:
    async with ScriptedEngine(data_token=TOKEN) as engine:
        engine.inject(Status(422))
        async with playing(echo, model, engine) as play:
            episode = await play(await task_of(echo, 0))
    (error,) = episode.traces[0].errors
    assert (error.type, error.status_code) == ("ProviderError", 422)


@pytest.mark.shows("F61")
async def test_a_passing_error_of_the_engine_costs_one_more_call(
    echo: RunningEnvironment, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with ScriptedEngine(reply=script(tokenizer, "repeat 0"), data_token=TOKEN) as engine:
        engine.inject(Status(503))
        async with playing(echo, model, engine) as play:
            episode = await play(await task_of(echo, 0))
    assert (episode.ok, episode.traces[0].reward) == (True, 1.0)
    assert [call.status for call in engine.calls] == [503, 200]


async def test_a_conversation_with_a_simulated_user(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with start(tmp_path, {"taskset": {"id": "gradus-test-talk"}}) as environment:
        replies = script(tokenizer, "say 0", "what", "say 2")
        async with (
            ScriptedEngine(reply=replies, data_token=TOKEN) as engine,
            playing(environment, model, engine) as play,
        ):
            episode = await play(await task_of(environment, 0))
    (trace,) = episode.traces
    assert trace.errors == []
    assert (trace.num_turns, trace.stop_condition) == (3, "user_closed")
    assert trace.reward == pytest.approx(2 / 3)
    assert_tokens_are_the_engine_s(trace, engine)


async def test_a_game_of_two_seats_gives_each_player_a_trace_and_zero_sum_rewards(
    tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = {"taskset": {"id": "gradus-kuhn-poker"}}
    with start(tmp_path, config, seats=("first", "second")) as environment:
        assert (await environment.ask("info"))["agents"] == {
            "first": True,
            "second": True,
        }
        async with (
            ScriptedEngine(reply=script(tokenizer, "p", "b", "b"), data_token=TOKEN) as engine,
            playing(environment, model, engine) as play,
        ):
            episode = await play(await task_of(environment, 4))
    assert (episode.ok, episode.errors) == (True, [])
    assert mark_trainable(episode, ["judge"]) is None
    assert find_failure(episode) is None
    traces = {trace.agent.name: trace for trace in episode.traces}
    assert {name: (trace.reward, trace.num_turns) for name, trace in traces.items()} == {
        "first": (1.0, 2),
        "second": (-1.0, 1),
    }
    RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5)).score_group(
        [episode], CreditContext("kuhn", "KJ")
    )
    samples = build_samples(episode, ORIGIN)
    assert sorted(float(s.arrays.advantages[s.arrays.loss_mask].mean()) for s in samples) == [
        -0.5,
        0.5,
    ]


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEnvironment]:
    config = {"taskset": {"id": "gradus-word-lookup"}}
    with start(tmp_path_factory.mktemp("lookup"), config) as environment:
        yield environment


async def test_outputs_of_a_real_tool_become_observations_of_echo(
    lookup: RunningEnvironment, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    answer = build_entries()["c"]
    call = '<tool_call>\n{"name": "dict_get", "arguments": {"k": "c"}}\n</tool_call>'
    async with (
        ScriptedEngine(reply=script(tokenizer, call, answer), data_token=TOKEN) as engine,
        playing(lookup, model, engine) as play,
    ):
        episode = await play(await task_of(lookup, 2))
    assert find_failure(episode) is None
    (trace,) = episode.traces
    assert (trace.reward, trace.metrics["tool_calls"], trace.num_turns) == (1.0, 1.0, 2)
    assert [content_text(message.content) for message in trace.tool_messages] == [answer]
    assert_tokens_are_the_engine_s(trace, engine)
    opening = trace.nodes[0]
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "c"}], tools=[TOOL], return_dict=False
    )
    assert opening.token_ids == shown
    algorithm, context = (
        Echo(algorithms.EchoAlgorithmConfig(tool_names=["dict_get"])),
        CreditContext("lookup", "c"),
    )
    await algorithm.score_episode(episode, context)
    algorithm.score_group([episode], context)
    (sample,) = build_samples(episode, ORIGIN)
    observed = sample.arrays.token_ids[sample.arrays.loss_weights["ce"] > 0].tolist()
    assert tokenizer.decode(observed) == answer


@pytest.mark.shows("F06")
async def test_a_killed_tool_server_that_episodes_share_is_started_again(
    lookup: RunningEnvironment, model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    answer = build_entries()["c"]
    call = '<tool_call>\n{"name": "dict_get", "arguments": {"k": "c"}}\n</tool_call>'
    replies = script(tokenizer, f"{call}\n{call}", answer)
    async with (
        ScriptedEngine(reply=replies, data_token=TOKEN) as engine,
        playing(lookup, model, engine) as play,
    ):
        task = await task_of(lookup, 2)
        (server,) = tool_servers(lookup)
        os.kill(server, signal.SIGKILL)
        reaped = Path(f"/proc/{server}")
        await wait_until_async(lambda: not reaped.exists())
        episode = await play(task)
        assert (find_failure(episode), len(tool_servers(lookup))) == (None, 1)
    tools = [n.message for n in episode.traces[0].nodes if n.message.role == "tool"]
    assert [content_text(message.content) for message in tools] == [answer, answer]


def tool_servers(environment: RunningEnvironment) -> list[int]:
    """The pids of the word lookup's tool servers."""
    return [
        process.pid
        for process in descendants(environment.process.pid, living_processes())
        if b"gradus_word_lookup.taskset" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    ]


UV_STAND_IN = f"""#!/bin/sh
case "$*" in
  *--help*) echo "--script" ;;
  "python find"*) echo "{sys.executable}" ;;
esac
"""
"""What verifiers asks of `uv`: this interpreter, which has the packages of the program."""


async def test_the_program_of_bash_plays_with_the_tokens_that_the_engine_saw(
    tmp_path: Path,
    model: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "uv").write_text(UV_STAND_IN)
    (folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    call = (
        '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((6 * 7))"}}\n</tool_call>'
    )
    config = {"taskset": {"id": "gradus-test-echo"}}
    with start(tmp_path, config, harness={"id": "bash"}, max_turns=4) as environment:
        async with (
            ScriptedEngine(
                reply=script(tokenizer, call, "done"), data_token=TOKEN, max_length_tokens=8000
            ) as engine,
            playing(environment, model, engine) as play,
        ):
            episode = await play(await task_of(environment, 0))
    assert find_failure(episode) is None
    trace = episode.traces[0]
    assert [content_text(m.content) for m in trace.tool_messages] == ["42\n"]
    assert_tokens_are_the_engine_s(trace, engine)
