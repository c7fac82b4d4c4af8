"""The checks in their order, each told as soon as it is known.

First the environment is loaded by a process of its own; then the environment process of a run
plays it, with a model that says what each check needs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.v1.configs.client import EvalClientConfig

from gradus.config import SamplingConfig
from gradus.conformance import probes
from gradus.conformance.findings import Checked, broken, note, ok, shortened, skipped
from gradus.conformance.lifecycle import check_lifecycle
from gradus.conformance.probes import HOSTILE, Probe
from gradus.conformance.reading import ModelEndpoint, Reading, Subject
from gradus.conformance.stage import EPISODE_SECONDS, Played, Stage, record_bytes
from gradus.conformance.transcript import conversation, path_problem
from gradus.errors import EnvironmentFailure
from gradus.orchestrator.play.environment import EpisodeSettings
from gradus.orchestrator.types import Task

_PLAIN = Probe("a plain reply", ["I do not know."])
_NUM_COMPARED = 3
"""Tasks of which both processes must say the same."""
_THROUGHPUT_SECONDS = 3.0
_IN_FLIGHT = 16
_MAX_EPISODES = 200


async def check_environment(
    subject: Subject, reading: Reading, folder: Path
) -> AsyncIterator[Checked]:
    """Every line about one environment, as it comes; the caller made `folder` and removes it."""
    seen = await asyncio.to_thread(reading.result)
    if "refused" in seen:
        yield broken("loads", seen["refused"], "Nothing else can be checked before that")
        return
    for line in describe(seen):
        yield line
    stage = Stage(subject, folder)
    try:
        async with stage:
            async for line in _Play(stage, seen).run():
                yield line
    except EnvironmentFailure as error:
        yield broken("starts", str(error), "A run would end the same way")


def describe(seen: Mapping[str, Any]) -> list[Checked]:
    """What the reader's report says."""
    number = "endless" if seen["num_tasks"] is None else f"{seen['num_tasks']:,}"
    lines = [ok("loads", f"in {seen['seconds']:.1f} s")]
    if seen["missing_modules"]:
        lines.append(
            note(
                "installed",
                f"functions of it import {', '.join(seen['missing_modules'])}, not installed here",
                "Install them if your settings reach that code",
            )
        )
    roles = [
        f"{name} ({'trains' if is_trained else 'never trains'})"
        for name, is_trained in seen["agents"].items()
    ]
    lines.append(ok("roles", ", ".join(roles)))
    first = seen["tasks"][0]["task_data"]
    prompt = first.get("prompt")
    if isinstance(prompt, list):
        prompt = prompt[-1].get("content") if prompt else None
    shown = f"the first begins {shortened(prompt, 100)!r}" if prompt else "the environment opens"
    lines.append(ok("tasks", f"{number}; {shown}"))
    changed = _difference([task["task_data"] for task in seen["tasks"]], seen["again"])
    if changed:
        lines.append(
            broken(
                "same tasks",
                f"loaded twice in one process, {changed}",
                "Draw from a random.Random(seed) of your own, made anew in `load`",
            )
        )
    return lines


def _difference(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> str:
    """How two readings of the same tasks differ; empty when they do not."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        for key in one.keys() | other.keys():
            if one.get(key) != other.get(key):
                return (
                    f"task {number} has another {key!r}: {shortened(one.get(key), 60)!r}, then "
                    f"{shortened(other.get(key), 60)!r}"
                )
    return "" if len(first) == len(second) else f"{len(first)} tasks became {len(second)}"


class _Play:
    """Owns what the checks of one running environment learn of it."""

    def __init__(self, stage: Stage, seen: Mapping[str, Any]) -> None:
        self._stage = stage
        self._seen = seen
        self._gold: float | None = None
        self._best = _PLAIN
        self._played: list[Played] = []
        self._reported: set[str] = set()

    async def run(self) -> AsyncIterator[Checked]:
        """All lines that need an episode."""
        number = len(self._seen["tasks"])
        tasks = [await self._stage.task(index) for index in range(number)]
        yield self._same_tasks(tasks)
        first = await self._play(tasks[0], _PLAIN)
        known = self._stage.below()
        if line := self._failed(first):
            yield line
        async for line in self._tools(tasks[0], first):
            yield line
        async for line in self._rewards(tasks[0]):
            yield line
        yield await self._same_prompt(tasks[0])
        yield self._tokens()
        best = await self._play(tasks[0], self._best)
        yield self._shown(best)
        if self._stage.subject.endpoint is not None:
            yield await self._with_endpoint(tasks[0])
        async for line in self._throughput(tasks):
            yield line
        async for line in check_lifecycle(self._stage, tasks[0], known, len(self._played)):
            yield line

    async def _play(self, task: Task, probe: Probe) -> Played:
        played = await self._stage.play(task, probe)
        self._played.append(played)
        return played

    def _same_tasks(self, tasks: Sequence[Task]) -> Checked:
        first = [task["task_data"] for task in self._seen["tasks"]]
        changed = _difference(first, [task.task_data for task in tasks])
        if changed:
            return broken(
                "same tasks",
                f"in another process, {changed}",
                "Do not depend on hash() of text, on sets, on the clock, or on unseeded numbers: "
                "a resumed run would train on other tasks",
            )
        return ok("same tasks", f"{len(first)} tasks are the same in two processes")

    # ------------------------------------------------------------------ failures

    def _failed(self, played: Played) -> Checked | None:
        """A line when the episode failed, once per reason."""
        failure = played.failure
        if failure is None:
            return None
        text = f"{failure.kind}: {shortened(failure.message, 300)}"
        if text in self._reported:
            return skipped(played.probe.name, "the episode fails as before")
        self._reported.add(text)
        return broken(played.probe.name, f"the episode fails: {text}", self._advice(played))

    @staticmethod
    def _advice(played: Played) -> str:
        conditions = [
            trace.stop_condition for trace in (played.episode and played.episode.traces) or []
        ]
        kind = "" if played.failure is None else played.failure.kind
        if "scoring_timeout" in conditions:
            return "Scoring did not end: bound everything that it waits for"
        if kind == "episode_timeout":
            return (
                "The episode never ended: code that computes must not block the event loop, and "
                "`run` must stop when a turn is `terminated`"
            )
        if kind == "invalid_reward":
            return "Return a finite number for every reply, also for one without any text"
        if "exit" in (played.failure.message if played.failure else ""):
            return "Never call exit() in an environment"
        return "No reply of a model may fail an episode; catch it and give a low reward"

    # ------------------------------------------------------------------ tools

    async def _tools(self, task: Task, first: Played) -> AsyncIterator[Checked]:
        traces = [] if first.episode is None else first.episode.traces
        offered = {tool.name: tool for trace in traces for tool in trace.tools}
        if not offered:
            yield ok("tools", "none")
            return
        yield ok("tools", ", ".join(offered))
        for name, tool in list(offered.items())[:8]:
            arguments = probes.made_up_arguments(tool.parameters)
            turns = [probes.tool_call(name, arguments), "I do not know."]
            played = await self._play(task, Probe(f"tool {shortened(name, 12)}", turns))
            if line := self._failed(played):
                yield line
        wrong = probes.tool_call("no_such_tool", {"x": [1]}) + '<tool_call>{"name": </tool_call>'
        played = await self._play(task, Probe("broken tool call", [wrong, "I do not know."]))
        yield self._failed(played) or ok("broken tool call", "is answered, and the episode goes on")

    # ------------------------------------------------------------------ rewards

    async def _rewards(self, task: Task) -> AsyncIterator[Checked]:
        gold = await self._find_gold(task)
        hostile = [await self._play(task, probe) for probe in HOSTILE]
        if gold is not None and gold.failure is not None:
            yield self._failed(gold) or skipped("gold reply", "its episode fails")
            gold = None
        is_alone = len(self._seen["agents"]) == 1
        values = [v for played in hostile if not played.failure for v in _of(played)]
        lowest = min(values, default=math.nan)
        reward = max(_of(gold), default=None) if gold is not None else None
        if gold is not None and reward is not None:
            self._gold, self._best = reward, gold.probe
        if is_alone:
            name = "" if gold is None else gold.probe.name
            yield probes.judge_gold(name, reward, lowest)
        else:
            yield skipped("gold reply", "several agents: what one wins another may lose")
        for played in hostile:
            yield self._judged(played, reward if is_alone else None, lowest)

    def _judged(self, played: Played, gold: float | None, lowest: float) -> Checked:
        name = played.probe.name
        if line := self._failed(played):
            return line
        if line := probes.check_range(name, played.rewards):
            return line
        if len(self._seen["agents"]) == 1:
            return probes.judge_hostile(name, max(_of(played), default=0.0), gold, lowest)
        shown = ", ".join(f"{who} {value:g}" for who, value in played.rewards.items())
        return ok(name, f"rewards: {shown}")

    async def _find_gold(self, task: Task) -> Played | None:
        """The episode of the best reply that is known."""
        hook = self._seen["gold"][0]
        if "error" in hook:
            self._reported.add(hook["error"])
        if "replies" in hook:
            return await self._play(task, probes.gold_from_hook(hook["replies"]))
        found: list[Played] = []
        for probe in probes.guessed_gold(task.task_data)[:12]:
            played = await self._play(task, probe)
            if played.failure is None and _of(played):
                found.append(played)
            if found and max(_of(found[-1])) >= 1.0:
                break
        return max(found, key=lambda played: max(_of(played)), default=None)

    # ------------------------------------------------------------------ prompts and tokens

    async def _same_prompt(self, task: Task) -> Checked:
        both = [await self._play(task, self._best) for _ in range(2)]
        prompts = [[call.prompt_token_ids for call in played.calls] for played in both]
        if any(played.failure for played in both):
            return skipped("same prompt", "its episodes fail")
        if prompts[0] == prompts[1]:
            return ok("same prompt", f"{len(prompts[0])} turns, token by token, under one seed")
        number = next(
            (n for n, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b),
            min(map(len, prompts)),
        )
        texts = [
            shortened(self._stage.tokenizer.decode(p[number]) if number < len(p) else "", 120)
            for p in prompts
        ]
        return broken(
            "same prompt",
            f"turn {number} of the same task differs under one seed: {texts[0]!r}, then "
            f"{texts[1]!r}",
            "Draw from a random.Random of the task's key: episodes of a group are compared, and a "
            "replay must repeat them",
        )

    def _tokens(self) -> Checked:
        num_calls = 0
        for played in self._played:
            if played.episode is None or played.failure is not None:
                continue
            num_calls += len(played.calls)
            problem = path_problem(played.episode.traces, played.calls)
            if problem:
                return broken("tokens", problem, "A harness that edits messages cannot train")
        if not num_calls:
            return skipped("tokens", "no episode ended well")
        return ok("tokens", f"{num_calls} model calls, each a path of its trace")

    def _shown(self, played: Played) -> Checked:
        if played.episode is None or played.failure is not None:
            return skipped("an episode", "it fails, see above")
        return ok(
            "an episode", f"of {played.probe.name}\n" + "\n".join(conversation(played.episode))
        )

    # ------------------------------------------------------------------ numbers

    async def _throughput(self, tasks: Sequence[Task]) -> AsyncIterator[Checked]:
        stage = self._stage
        if all(played.failure for played in self._played):
            yield skipped("speed", "every episode fails")
            return
        stage.say(_PLAIN)
        ended: list[Played] = []
        before, started = stage.cpu_seconds(), time.perf_counter()
        first_call = len(stage.engine.calls)

        async def player(number: int) -> None:
            while time.perf_counter() - started < _THROUGHPUT_SECONDS:
                if len(ended) >= _MAX_EPISODES:
                    return
                ended.append(await stage.play_beside(tasks[number % len(tasks)]))
                number += _IN_FLIGHT

        await asyncio.gather(*(player(number) for number in range(_IN_FLIGHT)))
        seconds = time.perf_counter() - started
        cpu = 1000 * (stage.cpu_seconds() - before) / len(ended)
        calls = stage.engine.calls[first_call:]
        self._played += ended
        episodes = [played.episode for played in ended if played.episode is not None]
        if failed := [played.failure for played in ended if played.failure]:
            yield broken(
                "speed",
                f"{len(failed)} of {len(ended)} episodes fail when {_IN_FLIGHT} play at once: "
                f"{failed[0].kind}: {shortened(failed[0].message, 200)}",
                "One object plays many episodes at once: keep state in the trace or in `run`",
            )
        else:
            yield ok(
                "speed",
                f"{len(ended) / seconds:.1f} episodes/s, {_IN_FLIGHT} at once in one worker with a "
                f"plain reply; {cpu:.0f} ms of CPU each",
            )
        if episodes:
            sizes = sorted(record_bytes(episode) for episode in episodes[:20])
            prompts = sum(len(call.prompt_token_ids) for call in calls) / len(ended)
            yield ok(
                "cost",
                f"{len(calls) / len(ended):.1f} model calls and {prompts:.0f} bytes of prompts per "
                f"episode; its record has {sizes[len(sizes) // 2] / 1024:.0f} KiB",
            )

    async def _with_endpoint(self, task: Task) -> Checked:
        """One episode of the model that the user named."""
        endpoint = self._stage.subject.endpoint
        assert endpoint is not None
        played = await self._stage.play(task, _PLAIN, settings=_asking(endpoint))
        if played.failure is not None or played.episode is None:
            return self._failed(played) or skipped("your model", "no episode came back")
        tokens = sum(
            call.usage.total_tokens
            for trace in played.episode.traces
            for call in trace.calls
            if call.usage is not None
        )
        head = f"{endpoint.model}, {played.seconds:.1f} s, {tokens:,} tokens"
        return ok("your model", "\n".join([head, *conversation(played.episode)]))


def _of(played: Played) -> list[float]:
    """Rewards of the agents that train."""
    return list(played.trained_rewards.values())


def _asking(endpoint: ModelEndpoint) -> EpisodeSettings:
    """How an episode reaches the user's model."""
    return EpisodeSettings(
        EvalClientConfig(base_url=endpoint.base_url, api_key_var=endpoint.api_key_var),
        SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=1024),
        EPISODE_SECONDS,
        model=endpoint.model,
        has_cache_salt=False,
    )
