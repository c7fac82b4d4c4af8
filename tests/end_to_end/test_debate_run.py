"""`gradus rl` trains debaters, and a worker dies while three members speak at once."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest
from aiohttp import web

from gradus.files import read_json
from gradus.processes.table import descendants, living_processes
from gradus.run.paths import RunDirectory
from gradus.testing.commands import finish, processes_of, records, start, wait_until_async
from gradus.testing.engine import ScriptedEngine

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SCRIPTED = (str(Path(__file__).parent / "scripted_run.py"),)
SYSTEM = "Speak."
PACK = """
version: 2
schedule:
  - {members: [debater_a, debater_b, judge], phase: open}
  - {members: [judge], phase: final}
system: Speak.
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
[[orchestrator.train.env]]
id = "debate"
group_size = 2
pool = {{ type = "static", num_workers = 1 }}
settings = {{ pack = "{root}/pack.yaml" }}
taskset = {{ kinds = ["digits"], num_tasks = 8 }}
errors = {{ backoff_seconds = 0.1 }}
agents.judge = {{ model = "policy", base_url = "{judge}/v1", api_key_var = "JUDGE_KEY" }}
[trainer]
num_processes = 1
"""


class Judge(ScriptedEngine):
    """A judge behind an endpoint; it keeps its first callers waiting for ever."""

    def __init__(self) -> None:
        super().__init__(data_token="judge-key")
        self.waiting = 0
        self.is_stuck = True
        self.chat_reply = lambda _: next(self._decisions)
        self._decisions = itertools.cycle(f"<decision>debater_{x}</decision>" for x in "aab")

    async def _chat(self, request: web.Request) -> web.Response:
        # The launcher asks a word of it too, before anything is played.
        if self.is_stuck and SYSTEM in await request.text():
            self.waiting += 1
            await asyncio.Event().wait()
        return await super()._chat(request)


async def test_a_debate_is_trained_and_goes_on_after_a_worker_died_inside_a_barrier(
    tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = RunDirectory(tmp_path / "debate")
    (tmp_path / "pack.yaml").write_text(PACK)
    async with Judge() as judge:
        config = tmp_path / "rl.toml"
        text = TOML.format(root=tmp_path, model=tiny_model, judge=judge.base_url)
        config.write_text(text)
        run = start("rl", "@", str(config), program=SCRIPTED, variables={"JUDGE_KEY": "judge-key"})
        await wait_until_async(
            lambda: judge.waiting or run.poll() is not None,
            timeout_seconds=90,
            what="a judge that is asked in the slot of three",
        )
        assert run.poll() is None, finish(run)
        registry = read_json(run_dir.processes)["processes"]
        (environment,) = [entry["pid"] for entry in registry if "debate" in entry["name"]]
        # A pool of one worker is one process.
        (worker,) = descendants(environment, living_processes())
        judge.is_stuck = False
        try:
            os.kill(worker.pid, signal.SIGKILL)
            printed = await asyncio.to_thread(finish, run)
        finally:
            run.terminate()
            run.wait(30)
    assert processes_of(run_dir.root) == []
    rows = records(run_dir.metrics)
    assert [row["step"] for row in rows] == [0, 1], printed
    lost = sum(row.get("episode/debate/retried/EnvironmentLost/sum", 0) for row in rows)
    assert lost >= judge.waiting > 0, printed
    played = [
        record
        for file in sorted(run_dir.episodes.glob("step_*/train.jsonl"))
        for record in records(file)
    ]
    assert {record["gradus"]["outcome"] for record in played} == {"finished"}, printed
    ids = [record["gradus"]["episode"] for record in played]
    assert len(ids) == len(set(ids)) >= 8
    for record in played:
        seats = {trace["info"]["seat"]: trace for trace in record["traces"]}
        rewards = {seat: trace["rewards"]["debate"]["score"] for seat, trace in seats.items()}
        assert sorted(rewards.values()) == [-1.0, 0.0, 1.0]
        assert rewards["judge"] == 0.0
        assert {seat: trace["agent"]["trainable"] for seat, trace in seats.items()} == {
            **{"debater_a": True, "debater_b": True},
            **{"judge": False},
        }
        credit = dict(
            zip(
                (t["info"]["seat"] for t in record["traces"]),
                record["gradus"]["advantages"],
                strict=True,
            )
        )
        assert credit["judge"] is None
        assert credit["debater_a"] * rewards["debater_a"] > 0
    assert any("rae_baseline/debater_a" in key for row in rows for key in row)
