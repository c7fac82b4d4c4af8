"""All checks of one environment, in order; each result is yielded as soon as it is known.

First a separate process loads the environment; then the environment process of a run plays it,
with a scripted model that replies what each check needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.v1.configs.client import EvalClientConfig

from gradus.config import SamplingConfig
from gradus.conformance.attacking import Attacks
from gradus.conformance.findings import Checked, broken, note, ok, shortened, skipped
from gradus.conformance.lifecycle import check_lifecycle
from gradus.conformance.probes import PLAIN
from gradus.conformance.reading import ModelEndpoint, Reading, Subject
from gradus.conformance.stage import EPISODE_SECONDS, Played, Stage, record_bytes
from gradus.conformance.tasks import TaskChecks
from gradus.conformance.transcript import conversation, last_reply
from gradus.errors import EnvironmentFailure
from gradus.orchestrator.play.environment import EpisodeSettings
from gradus.orchestrator.types import Task

_THROUGHPUT_SECONDS = 3.0
_IN_FLIGHT = 16
_MAX_EPISODES = 200


async def check_environment(
    subject: Subject, reading: Reading, folder: Path
) -> AsyncIterator[Checked]:
    """Every result about one environment; the caller makes `folder` and removes it."""
    seen = await asyncio.to_thread(reading.result)
    if "refused" in seen:
        yield broken("loads", seen["refused"], "Nothing else can be checked before that")
        return
    for line in describe_reading(seen):
        yield line
    stage = Stage(subject, folder, seen)
    try:
        async with stage:
            async for line in _Play(stage, seen).run():
                yield line
    except EnvironmentFailure as error:
        yield broken("starts", str(error), "A run would end the same way")


def describe_reading(seen: Mapping[str, Any]) -> list[Checked]:
    number = "endless" if seen["num_tasks"] is None else f"{seen['num_tasks']:,}"
    lines = [ok("loads", f"in {seen['seconds']:.1f} s")]
    if seen["missing_modules"]:
        lines.append(
            note(
                "installed",
                f"some functions import {', '.join(seen['missing_modules'])}, not installed here",
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
    lines.append(ok("tasks", f"{number}; {shown}", {"num_tasks": seen["num_tasks"]}))
    if problems := [problem for problem in seen.get("headers", ()) if problem]:
        advice = "Give each task a table of headers, or null, in the field of headers_from"
        lines.append(broken("headers", f"headers_from does not fit a task: {problems[0]}", advice))
    changed = _difference([task["task_data"] for task in seen["tasks"]], seen["again"])
    if changed:
        lines.append(
            broken(
                "same tasks",
                f"loaded twice in one process, {changed}",
                "Draw from a random.Random(seed) of your own, made again in `load`",
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
    """Owns the checks of one running environment."""

    def __init__(self, stage: Stage, seen: Mapping[str, Any]) -> None:
        self._stage = stage
        self._seen = seen
        self._checks = TaskChecks(stage)

    async def run(self) -> AsyncIterator[Checked]:
        checks, gold = self._checks, self._seen["gold"]
        number = len(self._seen["tasks"])
        tasks = [await self._stage.task(index) for index in range(number)]
        yield self._same_tasks(tasks)
        async for line in checks.lines(tasks[0], gold[0], tasks[1:]):
            yield line
        async for line in checks.other_gold(tasks[1:], gold[1:]):
            yield line
        if self._stage.subject.attacks:
            attacks = Attacks(self._stage, tasks, gold, checks.tools)
            async for line in attacks.lines():
                yield line
            checks.played += attacks.played
        yield await checks.at_once(tasks)
        yield checks.tokens()
        yield self._shown(await checks.play(tasks[0], checks.best))
        if self._stage.subject.endpoint is not None:
            yield await self._with_endpoint(tasks[0])
        async for line in self._throughput(tasks):
            yield line
        known, number = checks.known, len(checks.played)
        async for line in check_lifecycle(self._stage, tasks[0], known, number):
            yield line

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

    def _shown(self, played: Played) -> Checked:
        if played.episode is None or played.failure is not None:
            return skipped("an episode", "it fails, see above")
        return ok(
            "an episode",
            f"of {played.probe.name}\n" + "\n".join(conversation(played.episode)),
            {"last_reply": last_reply(played.episode), "rewards": played.rewards},
        )

    # ------------------------------------------------------------------ numbers

    async def _throughput(self, tasks: Sequence[Task]) -> AsyncIterator[Checked]:
        stage = self._stage
        if all(played.failure for played in self._checks.played):
            yield skipped("speed", "every episode fails")
            return
        stage.say(PLAIN)
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
        self._checks.played += ended
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
                {"episodes_per_second": len(ended) / seconds, "cpu_ms": cpu},
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
        endpoint = self._stage.subject.endpoint
        assert endpoint is not None
        played = await self._stage.play(task, PLAIN, settings=_asking(endpoint))
        if played.failure is not None or played.episode is None:
            return self._checks.failed(played) or skipped("your model", "no episode came back")
        tokens = sum(
            call.usage.total_tokens
            for trace in played.episode.traces
            for call in trace.calls
            if call.usage is not None
        )
        head = f"{endpoint.model}, {played.seconds:.1f} s, {tokens:,} tokens"
        return ok("your model", "\n".join([head, *conversation(played.episode)]))


def _asking(endpoint: ModelEndpoint) -> EpisodeSettings:
    return EpisodeSettings(
        EvalClientConfig(base_url=endpoint.base_url, api_key_var=endpoint.api_key_var),
        SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=1024),
        EPISODE_SECONDS,
        model=endpoint.model,
        has_cache_salt=False,
    )
