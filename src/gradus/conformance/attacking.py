"""Plays the library of attacks: whether one of them earns more than chance."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradus.conformance.attacks import ALWAYS, Attack, AttackKind, joined, library, parts_of
from gradus.conformance.findings import Checked, broken, note, ok, shortened
from gradus.conformance.probes import PLAIN, Probe, gold_from_hook
from gradus.conformance.stage import Played, Stage
from gradus.orchestrator.types import Task

_SLOW_SECONDS = 3.0
"""Where an episode takes longer, as in a container, only commands and few others are tried."""
_NUM_SLOW_TASKS = 2
_NUM_FIRST = 2
"""Tasks on which a cheat must gain something before it is played on all."""
_TOLERANCE = 1e-9
_NUM_DISTINCT = 3
"""Right answers that differ, from which on none can be right everywhere."""
_LUCKY_TASKS = 1.5
"""On how many tasks more than chance says a policy may be right without being a cheat."""


@dataclass
class _Seat:
    """Who attacks, while all others say what is right."""

    role: str
    plain: float
    """Its mean reward for a plain reply."""
    gold: float | None
    """Its mean reward for the right one."""
    chance: float
    """What the best guess earns."""
    shape: str
    """A right reply with `{}` in the answer's place."""
    joined: list[Attack]
    """Replies with the right answers of several tasks; none where episodes are slow."""
    highest: tuple[float, str]
    """What an attack earned at most, and which."""
    holes: list[str] = field(default_factory=list)


class Attacks:
    """Owns the attack on one environment: its seats, and what each attack brought."""

    def __init__(
        self,
        stage: Stage,
        tasks: Sequence[Task],
        gold: Sequence[Mapping[str, Any]],
        tools: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._stage = stage
        self._tasks = list(tasks)
        self._gold = [gold_from_hook(given) for given in gold]
        self._tools = tools
        self._seats: list[_Seat] = []
        self._right: list[str] = []
        self.played: list[Played] = []

    async def lines(self) -> AsyncIterator[Checked]:
        chosen = library(has_container=self._stage.has_container)
        if await self._begin():
            chosen = [a for a in chosen if a.kind is AttackKind.COMMAND or a.name in ALWAYS]
        guesses = [attack for attack in chosen if attack.is_guess]
        for seat in self._seats:
            for attack in guesses:
                seat.chance = max(seat.chance, await self._best(seat, attack, len(self._tasks)))
            if line := self._pays_everywhere(seat):
                yield line
            for attack in [*(a for a in chosen if not a.is_guess), *seat.joined]:
                earned = await self._earned(seat, attack)
                seat.highest = max(seat.highest, (earned, attack.name), key=lambda one: one[0])
                if line := self._hole(seat, attack.name, earned):
                    yield line
        if failed := [played for played in self.played if played.failure]:
            yield self._failure(failed)
        num_joined = max((len(seat.joined) for seat in self._seats), default=0)
        yield self._summary(len(chosen) + num_joined)

    # ------------------------------------------------------------------ what is known before

    async def _begin(self) -> bool:
        """Find what each seat earns without an attack; whether episodes are slow."""
        await self._rewards(PLAIN, self._tasks[:1])  # The first episode loads the tokenizer.
        plain = await self._rewards(PLAIN, self._tasks)
        is_slow = min(played.seconds for played in self.played) > _SLOW_SECONDS
        if is_slow:
            del self._tasks[_NUM_SLOW_TASKS:], self._gold[_NUM_SLOW_TASKS:]
        trained = [role for role, is_trained in self._stage.agents.items() if is_trained]
        for role in trained:
            before = _mean(plain, role) or 0.0
            gold = await self._gold_mean(role)
            self._right = [text for probe in self._gold if (text := _answer(probe, role))]
            right = [parts_of(text) for probe in self._gold if (text := _answer(probe, role))]
            shape = right[0][0] if right else "{}"
            joint = [] if is_slow else joined([answer for _, answer in right])
            self._seats.append(_Seat(role, before, gold, before, shape, joint, (before, "none")))
        if len(self._stage.agents) == 1:
            for seat in self._seats:
                seat.chance = max(seat.chance, await self._others_gold(seat))
        return is_slow

    async def _gold_mean(self, role: str) -> float | None:
        found = []
        for task, probe in zip(self._tasks, self._gold, strict=True):
            if probe is not None:
                found += await self._rewards(probe, [task])
        return _mean(found, role)

    async def _others_gold(self, seat: _Seat) -> float:
        """The most that one task's right reply earns on the others."""
        best = seat.plain
        for place, probe in enumerate(self._gold):
            others = [task for number, task in enumerate(self._tasks) if number != place]
            if probe is not None and others:
                best = max(best, _mean(await self._rewards(probe, others), seat.role) or 0.0)
        return best

    # ------------------------------------------------------------------ play

    async def _earned(self, seat: _Seat, attack: Attack) -> float:
        """A cheat's best mean; on a few tasks alone where it gains nothing there."""
        few = await self._best(seat, attack, _NUM_FIRST)
        if few <= min(seat.chance, seat.plain) + _TOLERANCE or len(self._tasks) <= _NUM_FIRST:
            return few
        return await self._best(seat, attack, len(self._tasks))

    async def _best(self, seat: _Seat, attack: Attack, num_tasks: int) -> float:
        """The highest mean of an attack's ways."""
        means = [seat.plain] if attack.is_guess else []
        tasks, known = self._tasks[:num_tasks], self._gold[:num_tasks]
        for probe in attack.probes(seat.shape, self._tools):
            if len(self._stage.agents) == 1:
                found = await self._rewards(probe, tasks)
            else:
                found = []
                for task, gold in zip(tasks, known, strict=True):
                    found += await self._rewards(self._seated(seat, probe, gold), [task])
            means.append(_mean(found, seat.role) or 0.0)
        return max(means, default=seat.plain)

    def _seated(self, seat: _Seat, probe: Probe, gold: Probe | None) -> Probe:
        """The seat says the attack, and the others what is right."""
        others = gold or PLAIN
        return replace(others, name=probe.name, by_role={**others.by_role, seat.role: probe.turns})

    async def _rewards(self, probe: Probe, tasks: Iterable[Task]) -> list[dict[str, float]]:
        """Rewards by agent of each task, all played at once."""
        self._stage.say(probe)
        played = await asyncio.gather(*(self._stage.play_beside(task) for task in tasks))
        self.played += played
        return [one.rewards for one in played if one.failure is None]

    # ------------------------------------------------------------------ lines

    def _hole(self, seat: _Seat, name: str, earned: float) -> Checked | None:
        is_alone = len(self._stage.agents) == 1
        limit = seat.chance if is_alone else max(seat.chance, seat.gold or seat.chance)
        reach = abs((seat.gold if seat.gold is not None else 1.0) - seat.plain)
        # Where no guess is ever right, neither is a cheat by luck.
        lucky = _LUCKY_TASKS if limit > seat.plain + _TOLERANCE else _LUCKY_TASKS / 3
        if earned <= limit + lucky / len(self._tasks) * reach + _TOLERANCE:
            return None
        if seat.gold is None and earned < 1.0 - _TOLERANCE:
            return None
        seat.holes.append(name)
        return broken(
            f"attack: {name}",
            f"it earns {seat.role} {earned:.2f} on average; chance {seat.chance:.2f}",
            "A model will find it: read the reply more strictly, or keep what it edits away from "
            "what decides",
        )

    def _pays_everywhere(self, seat: _Seat) -> Checked | None:
        """One reply that earns on every task what the right one earns, though these differ: that is
        no chance."""
        if seat.gold is None or len(self._stage.agents) > 1 or len({*self._right}) < _NUM_DISTINCT:
            return None
        if seat.chance < seat.gold - _TOLERANCE or seat.gold <= seat.plain + _TOLERANCE:
            return None
        return broken(
            "attack: one reply for all tasks",
            f"it earns {seat.role} {seat.chance:.2f} on average, as much as the right ones",
            "A model will find it: let the reward ask for what the task asks",
        )

    def _failure(self, failed: Sequence[Played]) -> Checked:
        first = failed[0]
        assert first.failure is not None
        names = ", ".join(dict.fromkeys(played.probe.name for played in failed))
        return broken(
            "attacks fail",
            f"{len(failed)} episodes ({shortened(names, 100)}): {first.failure.kind}: "
            f"{shortened(first.failure.message, 200)}",
            "No reply of a model may fail an episode; catch it and give a low reward",
        )

    def _summary(self, number: int) -> Checked:
        tops = [
            f"{'' if len(self._seats) == 1 else f'{seat.role} '}{seat.highest[0]:.2g} "
            f"({seat.highest[1]}), chance {seat.chance:.2g}"
            for seat in self._seats
        ]
        text = f"{number} on {len(self._tasks)} tasks; the highest: {'; '.join(tops)}"
        values = {
            "attacks": number,
            "highest": {seat.role: seat.highest[0] for seat in self._seats},
            "chance": {seat.role: seat.chance for seat in self._seats},
        }
        guessed = [
            seat
            for seat in self._seats
            if seat.gold is not None and seat.chance > (seat.plain + seat.gold) / 2 + _TOLERANCE
        ]
        if guessed and len(self._stage.agents) == 1:
            advice = (
                "A guess earns more than half of what can be had: a group learns little from it"
            )
            return replace(note("attacks", text, advice), values=values)
        return ok("attacks", text, values)


def _mean(rewards: Sequence[Mapping[str, float]], role: str) -> float | None:
    return statistics.fmean(r.get(role, 0.0) for r in rewards) if rewards else None


def _answer(gold: Probe | None, role: str) -> str:
    """The last right reply of a seat that calls no tool; "" without one."""
    turns = [] if gold is None else list(gold.by_role.get(role) or gold.turns)
    texts = [turn for turn in turns if isinstance(turn, str) and "<tool_call>" not in turn]
    return texts[-1] if texts else ""
