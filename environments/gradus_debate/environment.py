"""The environment `debate`: asks the members in turn, commits what they say, and scores the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import verifiers.v1 as vf
from verifiers.v1.errors import EnvError

from gradus.errors import ConfigError
from gradus_debate.other_order import (
    AGAIN,
    ask_judge,
    compared,
    failed,
    in_other_order,
    is_asked_again,
    without_second,
)
from gradus_debate.settings import DebateEnvConfig, Rules, rules_of
from gradus_debate.taskset import DebateData, DebateTask
from gradus_debate.verdicts import compare_answers
from gradus_kit.multiagent.answers import read_choice
from gradus_kit.multiagent.channels import Said
from gradus_kit.multiagent.kernel import DialogueState, TurnSlot, Utterance, apply_action
from gradus_kit.multiagent.pack import JUDGE
from gradus_kit.multiagent.prompts import Case, Prompter
from gradus_kit.multiagent.scores import EpisodeScores, Truth

SEAT, SCORES, STOPPED, QUARANTINED = "seat", "debate", "stopped", "quarantined_turns"
FORGERIES = "forgeries"
"""Keys of a trace's info: its member, the scores of the episode, why a member spoke no more, which
of its turns could not be read, and how often what it said tried to pass for somebody else's."""
USER_CLOSED = "user_closed"


class MemberStopped(EnvError):
    """A member reached a limit before the schedule was finished."""


class UndecidedDebate(EnvError):
    """The last turn of a judge that does not train decides nothing, so no member has a reward."""


class SeatingError(EnvError):
    """A task's seats cannot be given to the roles."""


@dataclass(frozen=True)
class Reply:
    """The answer of one member in its turn."""

    said: Said
    token_count: int


@dataclass
class Table:
    """One episode while it is played: an open interaction for each member that had a turn."""

    rules: Rules
    task: DebateTask
    agents: vf.Agents
    seating: Mapping[str, str]
    prompter: Prompter
    stack: AsyncExitStack
    masks: bool = True
    """True if turns that cannot be read do not train."""
    talks: dict[str, vf.Interaction] = field(default_factory=dict)
    sampled: dict[str, list[range]] = field(default_factory=dict)
    """By member, the numbers of the model calls of each turn."""

    async def open(self, member: str) -> bool:
        """Begin a member's conversation; False when that fails, which its trace then says."""
        if member in self.talks:
            return True
        role = self.seating[member]
        agent = getattr(self.agents, role)
        learner = self.task.data.learner_seat
        is_unrewarded = member == JUDGE and self.task.data.answer is None
        if role != member or is_unrewarded or (learner is not None and member != learner):
            agent.trainable = False
        own = self.task.with_data(prompt=None, system_prompt=self.prompter.system(member))
        minted: list[vf.Trace] = []

        def seat(trace: vf.Trace) -> None:
            trace.info[SEAT] = member
            minted.append(trace)

        talk = agent.interaction(own, on_trace=seat)
        try:
            self.talks[member] = await self.stack.enter_async_context(talk)
        except Exception:
            if minted and minted[-1].errors:
                return False
            raise
        self.sampled[member] = []
        return True

    async def play(self, state: DialogueState, slot: TurnSlot) -> dict[str, Reply] | None:
        """The replies of all members of a slot; None when one of them failed."""
        texts = {member: self.prompter.delta(state, member, slot) for member in slot.members}
        for member in slot.members:
            if not await self.open(member):
                return None
        asked = {member: self._ask(member, texts[member]) for member in slot.members}
        return await all_or_none(asked)

    async def _ask(self, member: str, text: str) -> Reply | None:
        talk = self.talks[member]
        trace = talk.trace
        num_turns, num_calls = trace.num_turns, len(trace.calls)
        segment = await talk.turn(text)
        if segment.terminated or trace.errors or trace.stop_condition is not None:
            trace.info[STOPPED] = trace.stop_condition or "no_reply"
            return None
        self.sampled[member].append(range(num_turns, trace.num_turns))
        replies = [m for m in segment.messages if isinstance(m, vf.AssistantMessage)]
        thoughts = [m.reasoning_content for m in replies if m.reasoning_content]
        usages = [call.usage for call in trace.calls[num_calls:]]
        said = Said(_text(replies[-1].content), "\n".join(thoughts) or None)
        return Reply(said, sum(usage.completion_tokens for usage in usages if usage is not None))

    async def judge_again(self, before: DialogueState, slot: TurnSlot, truth: Truth) -> None:
        """Note on the judge's trace what it says to the sides in the other order; nothing that
        goes wrong here costs the episode."""
        rules, home = self.rules, self.talks[JUDGE].trace
        first = msgspec.convert(home.info[SCORES], EpisodeScores)
        swapped = in_other_order(before, rules.scorer.contestants)
        if swapped is None or first.undecided is not None:
            return
        own = self.task.with_data(prompt=None, system_prompt=self.prompter.system(JUDGE))
        text = self.prompter.delta(swapped, JUDGE, slot)
        try:
            said = await ask_judge(getattr(self.agents, self.seating[JUDGE]), own, text)
            program = self.prompter.schedule.program
            state, _ = apply_action(swapped, program, JUDGE, said, 0, rules.channels)
            home.info[AGAIN] = compared(first, rules.scorer.score(state, truth))
        except Exception as error:
            home.info[AGAIN] = failed(error)

    def conclude(self, state: DialogueState, truth: Truth) -> None:
        """Note on the traces what `finalize` and training need."""
        for member, talk in self.talks.items():
            turns = zip(state.turns_of(member), self.sampled[member], strict=True)
            if self.masks and (numbers := _unread(talk.trace, turns)):
                talk.trace.info[QUARANTINED] = numbers
            attempts = sum(map(self.prompter.attempts, state.turns_of(member)))
            talk.trace.info[FORGERIES] = attempts
        home = self.talks.get(JUDGE) or next(iter(self.talks.values()))
        scores = self.rules.scorer.score(state, truth)
        home.trace.info[SCORES] = msgspec.to_builtins(scores)


class DebateEnv(vf.Env[DebateEnvConfig]):
    """Plays a schedule of turns over one question; one object plays many episodes at once."""

    def __init__(self, config: DebateEnvConfig) -> None:
        super().__init__(config)
        self._rules = rules_of(config)

    @property
    def unplayed_roles(self) -> tuple[str, ...]:
        """Roles that have no seat in any episode."""
        return tuple(role for role in self._agent_specs if not self._rules.plays(role))

    async def setup(self, agents: vf.Agents) -> None:
        """Say who never trains: the judge, other models, and roles without a seat."""
        for role in self._agent_specs:
            is_dropped = role == JUDGE and self.config.drop_judge
            is_seated = role in self._rules.members and role not in self._rules.endpoints
            if is_dropped or not is_seated:
                getattr(agents, role).trainable = False

    async def run(self, task: DebateTask, agents: vf.Agents) -> None:
        """Ask the members of each slot and commit what all of them said.

        A member that fails ends the episode without an exception, which would hide the cause: its
        trace has the error, or `finalize` names the member.
        """
        rules, data = self._rules, task.data
        try:
            seating = rules.seat(data.model_dump())
        except ConfigError as error:
            raise SeatingError(str(error)) from error
        case = case_of(data)
        schedule = rules.schedule_of(case.task_prompt)
        prompter = Prompter(rules.pack, schedule, case)
        state = before = DialogueState()
        last: TurnSlot | None = None
        async with AsyncExitStack() as stack:
            masks = self.config.quarantine == "mask"
            table = Table(rules, task, agents, seating, prompter, stack, masks)
            while (slot := schedule.program.current_slot(state)) is not None:
                replies = await table.play(state, slot)
                if replies is None:
                    return
                before, last = state, slot
                for member in slot.members:
                    reply = replies[member]
                    state, _ = apply_action(
                        *(state, schedule.program, member),
                        *(reply.said, reply.token_count, rules.channels),
                    )
            table.conclude(state, truth_of(data))
            if last is not None and is_asked_again(data.question, self.config.ask_judge_again):
                await table.judge_again(before, last, truth_of(data))

    async def finalize(self, task: DebateTask, episode: vf.Episode) -> None:
        """Reward the members of a finished episode; an unfinished one rewards none.

        Raises MemberStopped for a member that a limit stopped, and UndecidedDebate for a judge that
        does not train. One that trains pays for its undecided verdict: it alone has a reward, 0.
        """
        episode.traces[:] = without_second(episode.traces)
        if not all(trace.ok for trace in episode.traces):
            return
        for trace in episode.traces:
            if (condition := _stop_of(trace)) is not None:
                member = trace.info.get(SEAT)
                raise MemberStopped(f"member {member!r} stopped before the end: {condition}")
        home = next((trace for trace in episode.traces if SCORES in trace.info), None)
        if home is None:
            raise MemberStopped("the schedule was not finished")
        scores = msgspec.convert(home.info[SCORES], EpisodeScores)
        if scores.undecided is not None:
            blame_judge(episode.traces, scores.undecided)
        else:
            scores = await compare_answers(
                *(self._rules, self.config, scores), case_of(task.data), truth_of(task.data), home
            )
        for trace in episode.traces:
            member = trace.info[SEAT]
            if member == JUDGE and trace.agent.trainable:
                trace.record_reward("debate", scores.judge_reward)
                trace.record_metric("episode/undecided", float(scores.undecided is not None))
            elif scores.undecided is None:
                trace.record_reward("debate", scores.rewards[member])
            own = scores.members[member]
            if self.config.quarantine == "train" and own.lost_turns:
                share = own.lost_turns / own.turns
                trace.record_reward("format", -self.config.format_penalty * share)
            forgeries = {FORGERIES: float(trace.info.get(FORGERIES, 0))}
            trace.record_metrics(scores.members[member].metrics() | forgeries)
        home.record_metrics(scores.metrics())
        if (flipped := home.info.get(AGAIN, {}).get("flipped")) is not None:
            home.record_metric("episode/judge_flipped", float(flipped))
        home.info[SCORES] = scores.categories()


def blame_judge(traces: Iterable[vf.Trace], undecided: str) -> None:
    """Let a judge that trains learn from its whole verdict, unreadable or not, and no one else.

    Played again, it would escape; so only UndecidedDebate of one that does not train is raised.
    """
    by_member = {trace.info[SEAT]: trace for trace in traces}
    judge = by_member.get(JUDGE)
    if judge is None or not judge.agent.trainable:
        raise UndecidedDebate(undecided)
    judge.info.pop(QUARANTINED, None)
    for trace in by_member.values():
        trace.agent.trainable = trace is judge


async def all_or_none(asked: Mapping[str, Coroutine[Any, Any, Reply | None]]) -> Any:
    """The replies by member; None as soon as one is None, after the others were cancelled.

    What one of them raises is raised here, as it is.
    """
    tasks = {member: asyncio.create_task(turn) for member, turn in asked.items()}
    try:
        for done in asyncio.as_completed(tasks.values()):
            if await done is None:
                return None
        return {member: task.result() for member, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def case_of(data: DebateData) -> Case:
    """A task as the members see it: the question, and its options by letter."""
    options = [f"{letter}) {text}" for letter, text in zip(data.letters, data.options, strict=True)]
    prompt = "\n".join([data.question, *(["", *options] if options else [])])
    return Case(prompt, data.assigned_answers)


def truth_of(data: DebateData) -> Truth:
    """A task as scoring sees it."""
    reader = partial(read_choice, letters=data.letters) if data.options else None
    return Truth(data.answer, data.assigned_answers, reader)


def _unread(trace: vf.Trace, turns: Iterable[tuple[Utterance, range]]) -> list[int]:
    """Numbers of the model calls that must not train: those of a turn whose channels cannot be told
    apart, and of one that never closed its reasoning, so that the conversation went on beside it.
    """
    failed = [(said, calls) for said, calls in turns if said.parse_error is not None]
    if not failed:
        return []
    nodes = [node for node in trace.nodes if node.sampled]
    kept = {id(node) for node in trace.branches[-1].nodes}
    return [
        number
        for said, calls in failed
        for number in calls
        if said.is_quarantined or id(nodes[number]) not in kept
    ]


def _stop_of(trace: vf.Trace) -> str | None:
    stopped: str | None = trace.info.get(STOPPED)
    if stopped is None and trace.stop_condition not in (None, USER_CLOSED):
        stopped = trace.stop_condition
    return stopped


def _text(content: Any) -> str:
    return content if isinstance(content, str) else ""
