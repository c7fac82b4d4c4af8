"""The words of the orchestrator: task, episode, group, and how each may end.

    TaskPointer ──► Task ──► Group ──► PlayedEpisode, one per start ──► Sample ──► SampleBatch
    (drawn)         (loaded) (opened)  (ended)                          (credited)  (trained)

A task is drawn, and its environment loads it. A group takes a slot for it and starts its episodes.
Each ends exactly once. When the last has ended the group is scored, and becomes samples or reasons
why there are none. Next page: `orchestrator.py`, the loops that move them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec
from verifiers.v1.episode import WireEpisode

from gradus.orchestrator.traces import (
    agent_values,
    episode_values,
    forget_credit,
    is_truncated,
    named_values,
    num_prompt_tokens,
    num_sampled_tokens,
    tool_results,
    trainable_traces,
)
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

ABANDONED = "abandoned"
"""Reason of samples whose group was given up while it ran."""
RUN_ENDED = "run_ended"
STALE = "stale"
"""Reason of samples that became too old."""
ERROR_PREFIX = "error:"
"""Reasons with this prefix are errors of episodes, e.g. "error:ProviderError"."""


@dataclass(frozen=True)
class TaskPointer:
    """Where to find one task of the stream."""

    source: str
    pass_number: int
    """How often this task was drawn before."""
    index: int
    attempt: int = 0
    """How often this draw came back to its source before it could be trained."""
    group_size: int | None = None
    """Episodes that its curriculum wants of it. None means the source's."""


class Task(msgspec.Struct, frozen=True):
    """One task, in the form in which its environment gives it and plays it."""

    task_data: dict[str, Any]
    key: str | int
    """The task's identity in records."""


@dataclass(frozen=True)
class Failure:
    """Why an episode trains nothing."""

    kind: str
    """Counted by this: the type of the error, e.g. "ProviderError" or "invalid_reward"."""
    message: str
    status_code: int | None = None
    """HTTP status, when a model's provider gave one."""


class EpisodeFailed(Exception):
    """An episode failed: an outcome to count, not an error of the run."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.message}")
        self.failure = failure


class EpisodeOutcome(StrEnum):
    """How a started episode ended; exactly one of these, once."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class EpisodeNumbers:
    """What is counted of the trainable traces of a finished episode."""

    rewards: tuple[float, ...]
    """One per trace."""
    length_tokens: int
    """Sampled tokens."""
    num_turns: int
    """Model turns."""
    is_truncated: bool
    """Whether a limit cut a trace short."""
    agents: tuple[str, ...]
    """Who played each trace."""
    prompt_tokens: tuple[int, ...] = ()
    """What each trace began with, where that is known."""
    stops: tuple[str, ...] = ()
    """What ended each trace, where that is known."""
    tool_failures: tuple[bool, ...] = ()
    """One for each tool call."""
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By name, one per trace that has it: parts of the reward, metrics of the environment, and
    seconds of each stage."""
    of_agents: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    """By agent and name: rewards, their parts and metrics of all its traces that ended well, also
    of those that do not train. Empty when only one agent played."""


@dataclass(frozen=True)
class PlayedEpisode:
    """How one started episode ended: with an episode, a failure, or neither (cancelled)."""

    id: str
    group_id: str
    versions: VersionSpan
    episode: WireEpisode | None = None
    failure: Failure | None = None
    seconds: float = 0.0
    """From its start to its end, retries included."""

    @property
    def number(self) -> int:
        """Which episode of its group this is, in the order of their starts, from 0."""
        return int(self.id.rpartition(".")[2])

    @property
    def outcome(self) -> EpisodeOutcome:
        """Exactly one of the three."""
        if self.failure is not None:
            return EpisodeOutcome.FAILED
        return EpisodeOutcome.CANCELLED if self.episode is None else EpisodeOutcome.FINISHED

    @cached_property
    def numbers(self) -> EpisodeNumbers | None:
        """None unless it finished. Cached, because verifiers walks every branch for it."""
        if self.episode is None or self.failure is not None:
            return None
        traces = trainable_traces([self.episode])
        return EpisodeNumbers(
            rewards=tuple(trace.reward for trace in traces),
            length_tokens=sum(map(num_sampled_tokens, traces)),
            num_turns=sum(trace.num_turns for trace in traces),
            is_truncated=any(is_truncated(trace) for trace in traces),
            agents=tuple(trace.agent.name for trace in traces),
            prompt_tokens=tuple(it for it in map(num_prompt_tokens, traces) if it is not None),
            stops=tuple(it.stop_condition for it in traces if it.stop_condition),
            tool_failures=tuple(failed for trace in traces for failed in tool_results(trace)),
            values={**named_values(traces), **episode_values(self.episode)},
            of_agents=agent_values(self.episode),
        )


class Verdict(StrEnum):
    """What a filter says about a sample."""

    KEEP = "keep"
    FLAG = "flag"
    DROP = "drop"


@dataclass
class Group:
    """One task and its episodes, from the first start to the last record."""

    id: str
    pointer: TaskPointer
    task: Task
    played: list[PlayedEpisode] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """Samples that may train."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Reason per id of a sample, or of an episode that gave none."""
    verdicts: dict[str, dict[str, Verdict]] = field(default_factory=dict)
    """Per id of a sample, what each filter said of it."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What the algorithm recorded about this group."""
    failure: Failure | None = None
    """Why the whole group could not be scored."""
    failures: dict[str, Failure] = field(default_factory=dict)
    """Per id of a finished episode, why a plug-in made it train nothing."""

    @property
    def source(self) -> str:
        return self.pointer.source

    @property
    def finished(self) -> list[tuple[PlayedEpisode, WireEpisode]]:
        """The episodes that count for credit."""
        return [(p, p.episode) for p in self.played if p.episode is not None and p.failure is None]

    @property
    def finished_episodes(self) -> list[WireEpisode]:
        return [episode for _, episode in self.finished]

    @property
    def reasons(self) -> Counter[str]:
        """How often each reason kept something of this group from training."""
        return Counter(self.dropped.values())

    def sort(self) -> None:
        """In the order of their starts: which episode ended first must not change the credit."""
        self.played.sort(key=lambda played: played.number)

    def drop_episode(self, played: PlayedEpisode, failure: Failure) -> None:
        """A finished episode trains nothing because a plug-in could not deal with it."""
        self.samples[:] = [s for s in self.samples if s.episode_id != played.id]
        self.dropped[played.id] = f"{ERROR_PREFIX}{failure.kind}"
        self.failures[played.id] = failure

    def fail(self, failure: Failure) -> None:
        """The whole group trains nothing because a plug-in could not deal with it."""
        self.failure = self.failure or failure
        for played, episode in self.finished:
            forget_credit(episode)
            self.drop_episode(played, failure)

    def give_up(self, reason: str) -> None:
        """The group trains nothing, for one reason that holds for all its episodes."""
        self.samples.clear()
        for played in self.played:
            failure = played.failure
            self.dropped[played.id] = f"{ERROR_PREFIX}{failure.kind}" if failure else reason


class GroupPhase(StrEnum):
    """Where a group stands."""

    OPEN = "open"
    SCORING = "scoring"
    """Every episode ended, and the algorithm has not answered."""
    COMPLETE = "complete"
    SHIPPED = "shipped"
    GONE = "gone"


class GroupOutcome(StrEnum):
    """Whether a group trained, and if not, whether it was too slow."""

    TRAINED = "trained"
    TOO_SLOW = "too_slow"
    """Abandoned, or stale before its batch."""
    OTHER = "other"
