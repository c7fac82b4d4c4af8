"""`gradus rl` trains debaters while a worker dies inside a barrier, the judge's endpoint goes away
and comes back, and an opponent fails."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from commands import finish, processes_of, records, start, wait_until_async

from gradus.files import read_json
from gradus.run.paths import RunDirectory
from gradus.testing.engine import ScriptedEngine

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SCRIPTED = (str(Path(__file__).parent / "scripted_run.py"),)
START_SECONDS = 200.0
"""Deadline of each wait; a busy machine takes a minute to start what plays."""
SYSTEM = "Speak, in a "
"""Begins every conversation; the name of the source follows."""
PACK = """
version: 2
schedule:
  - {members: [debater_a, debater_b, judge], phase: open}
  - {members: [judge], phase: final}
system: Speak, in a {name}.
question: "{{ task_prompt }}"
user:
  debater_a: {open: "?"}
  debater_b: {open: "?"}
  judge: {open: "?", final: who}
fields:
  debater_a: {open: {answer: {scoring: choice}}}
  debater_b: {open: {answer: {scoring: choice}}}
  judge: {final: {decision: {scoring: {mode: enum, values: [debater_a, debater_b, tie]}}}}
"""
TOML = """
name = "debate"
output_dir = "{root}"
max_steps = 2
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 128
[orchestrator]
groups_per_batch = 2
max_lag = 0
[orchestrator.train]
algo = {{ type = "rae" }}
[orchestrator.train.sampling]
max_completion_tokens = 16
{sources}
[trainer]
num_processes = 1
"""


SOURCE = """
[[orchestrator.train.env]]
id = "debate"
name = "{name}"
group_size = 2
settings = {{ pack = "{root}/{name}.yaml" }}
taskset = {{ kinds = ["digits"], num_tasks = 8{learner} }}
errors = {{ backoff_seconds = 0.1, retries = 8 }}
[orchestrator.train.env.agents]
judge = {{ model = "policy", base_url = "{judge}/v1", api_key_var = "JUDGE_KEY" }}
"""
OPPONENT = """
opponent = {{ model = "policy", base_url = "{opponent}/v1", api_key_var = "JUDGE_KEY" }}
"""
NUM_FAULTS = 3
"""Answers of 500 at least; a client asks three times before an episode fails."""


class Judge(ScriptedEngine):
    """A judge behind an endpoint; it keeps its first callers waiting for ever."""

    def __init__(self) -> None:
        super().__init__(data_token="judge-key")
        self.waiting: Counter[str] = Counter()
        """Callers by source."""
        self.is_stuck = True
        self.chat_reply = lambda _: next(self._decisions)
        self._decisions = itertools.cycle(f"<decision>debater_{x}</decision>" for x in "aab")

    async def _chat(self, request: web.BaseRequest) -> web.Response:
        # The launcher asks a word of it too, before anything is played.
        text = (await request.read()).decode()
        if self.is_stuck and SYSTEM in text:
            self.waiting["duel" if f"{SYSTEM}duel" in text else "debate"] += 1
            await asyncio.Event().wait()
        return await super()._chat(request)


class Opponent(ScriptedEngine):
    """A debater behind an endpoint that answers 500 while it is out of order."""

    def __init__(self) -> None:
        super().__init__(data_token="judge-key")
        self.is_out_of_order = False
        self.num_faults = 0
        self.chat_reply = lambda _: "<answer>A</answer>"

    async def _chat(self, request: web.BaseRequest) -> web.Response:
        if self.is_out_of_order and SYSTEM in (await request.read()).decode():
            self.num_faults += 1
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        return await super()._chat(request)


@pytest.mark.shows("F06", "F62")
async def test_debates_go_on_after_a_worker_the_judge_and_an_opponent_failed(
    tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = RunDirectory(tmp_path / "debate")
    async with Judge() as judge, Opponent() as opponent:
        config = write_config(tmp_path, tiny_model, judge, opponent)
        run = start("rl", "@", str(config), program=SCRIPTED, variables={"JUDGE_KEY": "judge-key"})
        try:
            await kill_environment_inside_a_barrier(run, run_dir, judge)
            await take_judge_away(run, run_dir, judge)
            await break_opponent_and_bring_judge_back(run, run_dir, opponent, judge)
            printed = await asyncio.to_thread(finish, run)
        finally:
            run.terminate()
            run.wait(30)
    assert processes_of(run_dir.root) == []
    rows = records(run_dir.metrics)
    assert [row["step"] for row in rows] == [0, 1], printed
    check_ends(run_dir, rows)
    played = [
        record
        for file in sorted(run_dir.episodes.glob("step_*/train.jsonl"))
        for record in records(file)
    ]
    assert {record["gradus"]["outcome"] for record in played} == {"finished"}, printed
    for record in played:
        check_rewards(record)
    assert any("rae_baseline/debater_a" in key for row in rows for key in row)


def write_config(root: Path, model: Path, judge: Judge, opponent: Opponent) -> Path:
    own = SOURCE.format(name="debate", root=root, learner="", judge=judge.base_url)
    learner = ', learner_seat = "round_robin"'
    duel = SOURCE.format(name="duel", root=root, learner=learner, judge=judge.base_url)
    duel += OPPONENT.format(opponent=opponent.base_url)
    for name in ("debate", "duel"):
        (root / f"{name}.yaml").write_text(PACK.replace("{name}", name))
    config = root / "rl.toml"
    config.write_text(TOML.format(root=root, model=model, sources=own + duel))
    return config


async def kill_environment_inside_a_barrier(
    run: subprocess.Popen[str], run_dir: RunDirectory, judge: Judge
) -> None:
    """While both sources wait for the judge, in the slot of three."""
    await wait_until_async(
        lambda: len(judge.waiting) == 2 or run.poll() is not None,
        timeout_seconds=START_SECONDS,
        what="a judge that is asked by both sources",
    )
    assert run.poll() is None, finish(run)
    registry = read_json(run_dir.processes)["processes"]
    (environment,) = [entry["pid"] for entry in registry if entry["name"] == "env_debate"]
    os.kill(environment, signal.SIGKILL)


async def take_judge_away(run: subprocess.Popen[str], run_dir: RunDirectory, judge: Judge) -> None:
    """Drop whoever asks it, until an episode was retried for that."""
    judge.is_stuck = False
    await judge.close()
    await wait_for_provider_errors(run, run_dir, 1)


async def break_opponent_and_bring_judge_back(
    run: subprocess.Popen[str], run_dir: RunDirectory, opponent: Opponent, judge: Judge
) -> None:
    """Until an episode was retried for the opponent, which then works again."""
    num_failed = retries(run_dir)["ProviderError"]
    opponent.is_out_of_order = True
    await judge.start(port=port_of(judge))
    await wait_until_async(
        lambda: opponent.num_faults >= NUM_FAULTS or run.poll() is not None,
        timeout_seconds=START_SECONDS,
        what="an opponent that answers 500 three times",
    )
    await wait_for_provider_errors(run, run_dir, num_failed + 1)
    opponent.is_out_of_order = False


async def wait_for_provider_errors(
    run: subprocess.Popen[str], run_dir: RunDirectory, number: int
) -> None:
    await wait_until_async(
        lambda: retries(run_dir)["ProviderError"] >= number or run.poll() is not None,
        timeout_seconds=START_SECONDS,
        what=f"{number} episodes that are played again",
    )
    assert run.poll() is None, finish(run)


def port_of(engine: ScriptedEngine) -> int:
    return int(engine.base_url.rpartition(":")[2])


def retries(run_dir: RunDirectory) -> Counter[str]:
    """How often each error made an episode be played again."""
    lines = records(run_dir.journal)
    return Counter(line["error"] for line in lines if line["event"] == "episode_retried")


def check_ends(run_dir: RunDirectory, rows: list[dict[str, Any]]) -> None:
    """Each episode ends once under its name, those too that were played again."""
    lines = [line for line in records(run_dir.journal) if "episode" in line]
    ended = Counter(line["episode"] for line in lines if line["event"] == "episode_ended")
    started = {line["episode"] for line in lines if line["event"] == "episode_started"}
    assert ended == dict.fromkeys(started, 1)
    assert len(started) == 8
    causes = retries(run_dir)
    assert causes.keys() == {"EnvironmentLost", "ProviderError"}
    counted = Counter[str]()
    for row in rows:
        for key, value in row.items():
            if "/retried/" in key and key.startswith(("episode/debate/", "episode/duel/")):
                counted[key.split("/")[3]] += int(value)
    assert counted == causes
    outcomes = {line["outcome"] for line in lines if line["event"] == "episode_ended"}
    assert outcomes == {"finished"}


def check_rewards(record: dict[str, Any]) -> None:
    """The members' rewards sum to nothing, and who trains has credit of the same sign."""
    seats = {trace["info"]["seat"]: trace for trace in record["traces"]}
    rewards = {seat: trace["rewards"]["debate"]["score"] for seat, trace in seats.items()}
    assert sorted(rewards.values()) == [-1.0, 0.0, 1.0]
    assert rewards["judge"] == 0.0
    trained = {seat for seat, trace in seats.items() if trace["agent"]["trainable"]}
    is_duel = record["gradus"]["source"] == "duel"
    assert len(trained - {"judge"}) == len(trained) == (1 if is_duel else 2)
    order = (trace["info"]["seat"] for trace in record["traces"])
    credit = dict(zip(order, record["gradus"]["advantages"], strict=True))
    assert credit["judge"] is None
    assert all(credit[seat] * rewards[seat] > 0 for seat in trained)
