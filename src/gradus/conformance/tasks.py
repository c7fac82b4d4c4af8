"""The checks of single tasks: what each reply of a scripted model earns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from gradus.conformance import probes
from gradus.conformance.attacks import always_tried
from gradus.conformance.findings import Checked, Outcome, broken, ok, shortened, skipped
from gradus.conformance.probes import PLAIN, Probe
from gradus.conformance.stage import Played, Stage
from gradus.conformance.transcript import path_problem
from gradus.orchestrator.types import Task
from gradus.processes.table import ProcessEntry

_MAX_TOOLS = 8
_MAX_GUESSES = 12
_NUM_OTHERS = 4
_SLOW_SECONDS = 10.0
_NUM_AT_ONCE = 4
"""Tasks that are played at once, and how often each."""
_QUICK_SECONDS = 3.0
"""If even the quickest episode takes longer, tasks are not played at once."""


class TaskChecks:
    """Owns the episodes that were played one by one, and the conclusions from them."""

    def __init__(self, stage: Stage) -> None:
        self.played: list[Played] = []
        self.known: list[ProcessEntry] = []
        """Processes that were there after the first episode."""
        self.best = PLAIN
        """The reply with the highest reward."""
        self._stage = stage
        self._lowest = math.nan
        """The lowest reward of a hostile reply."""
        self.tools: dict[str, dict[str, Any]] = {}
        """Tools that the first episode offers, with the schema of their arguments."""
        self._num_agents = len(stage.agents)
        self._reported: set[str] = set()

    async def play(self, task: Task, probe: Probe) -> Played:
        played = await self._stage.play(task, probe)
        if not self.played:
            self.known = self._stage.below()
        self.played.append(played)
        return played

    async def lines(
        self, task: Task, gold: Mapping[str, Any], others: Sequence[Task] = ()
    ) -> AsyncIterator[Checked]:
        """All checks of one task; `gold` is what its hook gave.

        A reply that may be right by chance is tried again on `others`.
        """
        whole = probes.gold_from_hook(gold)
        if whole is not None and whole.by_role:
            others_say = {role for role, is_trained in self._stage.agents.items() if not is_trained}
            self._stage.fixed = dict.fromkeys(others_say & whole.by_role.keys(), whole)
        first = await self.play(task, PLAIN)
        if first.failure is not None and first.seconds > _SLOW_SECONDS:
            # The first episode of a worker loads the tokenizer, slowly on a busy machine.
            first = await self.play(task, PLAIN)
        if line := self.failed(first):
            yield line
        async for line in self._tools(task, first):
            yield line
        async for line in self.rewards(task, gold, others):
            yield line
        async for line in self._same_twice(task):
            yield line

    async def other_gold(
        self, tasks: Sequence[Task], gold: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[Checked]:
        """A line about the gold replies that the hooks of further tasks give."""
        rewards: dict[int, float] = {}
        for number, (task, given) in enumerate(zip(tasks, gold, strict=True), 1):
            probe = probes.gold_from_hook(given)
            if probe is None or probe.by_role:
                continue
            played = await self.play(task, probe)
            if line := self.failed(played):
                yield line
            rewards[number] = max(_of(played), default=0.0)
        if rewards:
            yield probes.judge_gold_elsewhere(rewards, self._lowest)

    async def at_once(self, tasks: Sequence[Task]) -> Checked:
        """Whether the best reply earns the same beside other episodes as it does alone."""
        name, some = "at once", tasks[:_NUM_AT_ONCE]
        if len(some) < 2:
            return skipped(name, "there is one task")
        if min(played.seconds for played in self.played) > _QUICK_SECONDS:
            return skipped(name, f"an episode takes longer than {_QUICK_SECONDS:g} s")
        alone = [(await self.play(task, self.best)).rewards for task in some]
        if alone != [(await self.play(task, self.best)).rewards for task in some]:
            return skipped(name, "the same reply does not always earn the same")
        self._stage.say(self.best)
        order = [*range(len(some))] * _NUM_AT_ONCE
        beside = await asyncio.gather(*(self._stage.play_beside(some[place]) for place in order))
        self.played += beside
        for place, played in zip(order, beside, strict=True):
            if played.failure is None and played.rewards != alone[place]:
                return broken(
                    name,
                    f"beside other episodes task {place} earns {_told(played.rewards)}, alone "
                    f"{_told(alone[place])}, with the same reply",
                    "Episodes share something: keep what belongs to one in its trace or in `run`, "
                    "not in the module, the class or the task set",
                )
        return ok(name, f"{len(order)} episodes of {len(some)} tasks earn what they earn alone")

    # ------------------------------------------------------------------ failures

    def failed(self, played: Played, name: str = "") -> Checked | None:
        """A line when the episode failed, once per reason."""
        name = name or played.probe.name
        failure = played.failure
        if failure is None:
            return None
        text = f"{failure.kind}: {shortened(failure.message, 300)}"
        if text in self._reported:
            return skipped(name, "the episode fails as before")
        self._reported.add(text)
        return broken(name, f"the episode fails: {text}", self._advice(played))

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
        self.tools = {tool.name: tool.parameters for trace in traces for tool in trace.tools}
        if not self.tools:
            yield ok("tools", "none")
            return
        yield ok("tools", ", ".join(self.tools))
        for name, schema in list(self.tools.items())[:_MAX_TOOLS]:
            arguments = probes.made_up_arguments(schema)
            turns = [probes.tool_call(name, arguments), "I do not know."]
            played = await self.play(task, Probe(f"tool {shortened(name, 12)}", turns))
            if line := self.failed(played):
                yield line
        wrong = probes.tool_call("no_such_tool", {"x": [1]}) + '<tool_call>{"name": </tool_call>'
        played = await self.play(task, Probe("broken tool call", [wrong, "I do not know."]))
        yield self.failed(played) or ok(
            "broken tool call", "is answered, and the episode continues"
        )

    # ------------------------------------------------------------------ rewards

    async def rewards(
        self, task: Task, given: Mapping[str, Any], others: Sequence[Task] = ()
    ) -> AsyncIterator[Checked]:
        """What right and hostile replies earn."""
        if "error" in given:
            advice = "It gives a list of texts, or of dicts with tool and arguments"
            yield broken("gold reply", f"{probes.GOLD_HOOK} fails: {given['error']}", advice)
        gold = await self._find_gold(task, given)
        tried = always_tried(self.tools, has_container=self._stage.has_container)
        hostile = [await self.play(task, probe) for probe in tried]
        is_alone = self._num_agents == 1
        values = [v for played in hostile if not played.failure for v in _of(played)]
        lowest = self._lowest = min(values, default=math.nan)
        reward = None
        if gold is not None and gold.failure is None:
            reward, self.best = max(_of(gold), default=None), gold.probe
        yield self._gold_line(gold, reward, lowest)
        for played in hostile:
            line = self._judged(played, reward if is_alone else None, lowest)
            is_lucky = line.outcome is Outcome.BROKEN and played.failure is None
            if is_lucky and await self._is_luck(played, others):
                text = f"{line.seen}, and less on other tasks: right by chance"
                line = ok(line.check, text)
            yield line

    def _gold_line(self, gold: Played | None, reward: float | None, lowest: float) -> Checked:
        if gold is not None and (line := self.failed(gold, "gold reply")):
            return line
        if gold is not None and (line := probes.check_range("gold reply", gold.rewards)):
            return line
        if self._num_agents > 1:
            if gold is None:
                return skipped("gold reply", "several agents: what one wins another may lose")
            shown = ", ".join(f"{who} {value:g}" for who, value in gold.rewards.items())
            return ok("gold reply", f"{gold.probe.name}, rewards: {shown}")
        return probes.judge_gold("" if gold is None else gold.probe.name, reward, lowest)

    async def _is_luck(self, played: Played, others: Sequence[Task]) -> bool:
        """Whether the same reply earns less on another task."""
        for task in others[:_NUM_OTHERS]:
            again = await self.play(task, played.probe)
            if again.failure is None and max(_of(again), default=0.0) < max(_of(played)):
                return True
        return False

    def _judged(self, played: Played, gold: float | None, lowest: float) -> Checked:
        name = played.probe.name
        if line := self.failed(played):
            return line
        if line := probes.check_range(name, played.rewards):
            return line
        if self._num_agents == 1:
            return probes.judge_hostile(name, max(_of(played), default=0.0), gold, lowest)
        shown = ", ".join(f"{who} {value:g}" for who, value in played.rewards.items())
        return ok(name, f"rewards: {shown}")

    async def _find_gold(self, task: Task, given: Mapping[str, Any]) -> Played | None:
        """The episode of the best known reply."""
        probe = probes.gold_from_hook(given)
        if probe is not None:
            return await self.play(task, probe)
        found: list[Played] = []
        for probe in probes.guessed_gold(task.task_data)[:_MAX_GUESSES]:
            played = await self.play(task, probe)
            if played.failure is not None:
                return played
            if _of(played):
                found.append(played)
            if found and max(_of(found[-1])) >= 1.0:
                break
        return max(found, key=lambda played: max(_of(played)), default=None)

    # ------------------------------------------------------------------ prompts and tokens

    async def _same_twice(self, task: Task) -> AsyncIterator[Checked]:
        """Whether prompts and rewards of a task are the same when the model says the same."""
        both = [await self.play(task, self.best) for _ in range(2)]
        yield self._same_prompt(both)
        rewards = [played.rewards for played in both]
        if not any(played.failure for played in both) and rewards[0] != rewards[1]:
            yield probes.noisy_reward(*rewards)

    def _same_prompt(self, both: Sequence[Played]) -> Checked:
        prompts = [[call.prompt_token_ids for call in played.calls] for played in both]
        if any(played.failure for played in both):
            return skipped("same prompt", "the episodes fail")
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

    def tokens(self) -> Checked:
        num_calls = 0
        for played in self.played:
            if played.episode is None or played.failure is not None:
                continue
            num_calls += len(played.calls)
            problem = path_problem(played.episode.traces, played.calls)
            if problem:
                return broken("tokens", problem, "A harness that edits messages cannot train")
        if not num_calls:
            return skipped("tokens", "no episode ended well")
        return ok("tokens", f"{num_calls} model calls, each a path of its trace")


def _of(played: Played) -> list[float]:
    return list(played.trained_rewards.values())


def _told(rewards: Mapping[str, float]) -> str:
    values = [
        f"{value:g}" if len(rewards) == 1 else f"{n} {value:g}" for n, value in rewards.items()
    ]
    return ", ".join(values) or "nothing"
