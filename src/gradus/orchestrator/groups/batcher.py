"""Groups with samples queue here until a batch is full; the last check of staleness is here.

The step of the next batch is known before it is full, so a sample's staleness is too: samples are
checked when their group arrives, and those left over again after each batch.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import msgspec
import numpy as np
from msgspec import structs

from gradus.config import RunProcessConfig
from gradus.errors import (
    EmptyBatchError,
    EnvironmentFailure,
    GradusError,
    SolvedError,
    StalledError,
)
from gradus.orchestrator.types import ERROR_PREFIX, STALE
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan, staleness

ZERO_ADVANTAGE = "zero_advantage"
REWARD_FAILED = f"{ERROR_PREFIX}RewardError"
LAST_GROUPS = 200
"""A run goes on while any of so many groups trained."""
_MISTAKEN_GROUPS = 2
"""Groups on all of which a reward function failed before any other came, after which a run ends."""
_MOSTLY = 0.75
"""Share of groups without a sample that are solved from which a run counts as solved."""
_ADVICE = {
    ZERO_ADVANTAGE: (
        "Equal rewards in every group give no gradient: use easier or harder tasks, a larger "
        "group_size, or another reward"
    ),
    STALE: (
        "Episodes end too late to train: raise orchestrator.max_staleness, lower max_lag, or "
        "shorten the episodes"
    ),
}
_LEAST_DEVIATION = 1e-6
"""Of the largest advantage; less is the rounding of float32."""
_LOOK = "The records in episodes/ say more about each sample"


@dataclass(frozen=True)
class ReadyGroup:
    """The samples of one group that passed every filter."""

    id: str
    samples: tuple[Sample, ...]
    is_frozen: bool = False
    """Not sampled by the policy: never stale, and stamped with the version that trains it."""

    def at(self, step: int) -> ReadyGroup:
        """The group as step `step` trains it."""
        if not self.is_frozen:
            return self
        span = VersionSpan(oldest=step, newest=step)
        return replace(self, samples=tuple(structs.replace(s, versions=span) for s in self.samples))


@dataclass(frozen=True)
class SampleBatch:
    """What step `step` trains."""

    step: int
    groups: tuple[ReadyGroup, ...]

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def group_ids(self) -> list[str]:
        return [group.id for group in self.groups]


@dataclass(frozen=True)
class StaleDrop:
    """What became too old while it waited."""

    samples: list[Sample] = field(default_factory=list)
    group_ids: list[str] = field(default_factory=list)
    """Groups of which nothing is left."""


class Filling(msgspec.Struct):
    """The batch that fills: its step, and the groups without a sample since the last one with."""

    step: int = 0
    empty_groups: int = 0
    failed_groups: int = 0
    """Of those, the last ones in a row of which nothing but errors came."""
    solved_groups: int = 0
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    told_groups: int = 0
    """The most in a row, in any batch, that a person was told of."""


class Batcher:
    """Owns the queue of ready groups and the number of the next step.

    >>> batcher = Batcher(groups_per_batch=1, max_staleness=8, max_empty_attempts=3)
    >>> batcher.step
    0
    """

    def __init__(
        self,
        *,
        groups_per_batch: int,
        max_staleness: int,
        max_empty_attempts: int,
        normalizes: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`normalizes` divides the advantages of each batch by their standard deviation; `tell`
        gets a line about groups in a row that train nothing."""
        self.state = Filling()
        self._groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self._normalizes = normalizes
        self._max_failed_groups = max_empty_attempts * groups_per_batch
        self._max_empty_groups = max(LAST_GROUPS, self._max_failed_groups)
        self._tell = tell
        self._ready: deque[ReadyGroup] = deque()
        self._full = asyncio.Event()
        self.ended: GradusError | None = None
        """Why no group comes any more; batches that are full already still go out."""

    @property
    def ready(self) -> tuple[ReadyGroup, ...]:
        """Groups that wait for a batch, in their order."""
        return tuple(self._ready)

    @property
    def step(self) -> int:
        """The step that the next batch trains."""
        return self.state.step

    def restore(self, ready: Iterable[ReadyGroup]) -> None:
        """Continue after a restart with these groups waiting."""
        self._ready = deque(ready)
        self._announce()

    def add(self, group: ReadyGroup) -> StaleDrop:
        """Queue a group; samples that are too old are left out and returned.

        One of which nothing is left is for `reject`, once it is dropped.
        """
        kept, drop = self._split(group)
        if kept is not None:
            self._count_again()
            self._ready.append(kept)
            self._announce()
        return drop

    def reject(
        self,
        reasons: Mapping[str, int],
        *,
        last: str = "",
        rewards: Sequence[float] = (),
        is_solved: bool = False,
    ) -> None:
        """Count a group that gave no sample, with the reasons of its episodes and samples.

        `last` is what a plug-in said about this group and `rewards` what its episodes earned, for
        the message. The run must end after `max_empty_attempts` batches' worth of groups in a row
        of which nothing but errors came, with EnvironmentFailure; or, once none of the last
        `LAST_GROUPS` trained, with SolvedError when most of them are solved and the others flat,
        StalledError when most samples have equal rewards, else EmptyBatchError. A run that
        continues after that counts from the beginning.

        A reward function that has failed on all that was ever played, two groups at least, is a
        mistake in it, and needs no more episodes to be one.
        """
        state = self.state
        state.empty_groups += 1
        is_failed = bool(reasons) and all(it.startswith(ERROR_PREFIX) for it in reasons)
        state.failed_groups = state.failed_groups + 1 if is_failed else 0
        state.solved_groups += is_solved and set(reasons) == {ZERO_ADVANTAGE}
        state.reasons.update(reasons)
        is_first = self.step == 0 and not self._ready
        is_mistake = is_first and set(state.reasons) == {REWARD_FAILED}
        most = min(_MISTAKEN_GROUPS, self._max_failed_groups) if is_mistake else 0
        if state.failed_groups >= (most or self._max_failed_groups):
            self._end_with(self._failure(last))
        if state.empty_groups >= self._max_empty_groups:
            self._end_with(self._no_batch_error(rewards))
        if state.empty_groups >= max(self._max_failed_groups, 2 * state.told_groups):
            state.told_groups = state.empty_groups
            self._tell(
                f"{self._told_reasons()}; the run goes on with other tasks, and ends when none of "
                f"{self._max_empty_groups} trains. {self._advice()}"
            )

    def _end_with(self, error: GradusError) -> NoReturn:
        self._count_again()
        raise error

    def _count_again(self) -> None:
        self.state = Filling(self.step, told_groups=self.state.told_groups)

    def end(self, cause: GradusError) -> None:
        self.ended = self.ended or cause
        self._full.set()

    async def is_full(self) -> bool:
        """Whether a batch can be cut, once that is so or the groups ended."""
        await self._full.wait()
        return len(self._ready) >= self._groups_per_batch

    async def next_batch(self) -> SampleBatch | None:
        """The batch of `step`, once it is full; then the next step begins to fill.

        None when the groups ended before.
        """
        await self._full.wait()
        if len(self._ready) < self._groups_per_batch:
            return None
        groups = [self._ready.popleft().at(self.step) for _ in range(self._groups_per_batch)]
        # By number, not by arrival, so that a synchronous run repeats itself to the bit.
        groups.sort(key=lambda group: group.id)
        batch = SampleBatch(self.step, normalized(groups) if self._normalizes else tuple(groups))
        self.state.step += 1
        self._announce()
        return batch

    def drop_stale(self) -> StaleDrop:
        """Remove what is too old for `step`; call it after each batch."""
        waiting, self._ready = self._ready, deque()
        samples: list[Sample] = []
        group_ids: list[str] = []
        for group in waiting:
            kept, drop = self._split(group)
            samples += drop.samples
            group_ids += drop.group_ids
            if kept is not None:
                self._ready.append(kept)
        self._announce()
        return StaleDrop(samples, group_ids)

    def _split(self, group: ReadyGroup) -> tuple[ReadyGroup | None, StaleDrop]:
        if group.is_frozen:
            return group, StaleDrop()
        # After a restart a version may be served whose batch is not cut again yet: a group that it
        # sampled waits behind that one.
        fresh = tuple(
            s
            for s in group.samples
            if staleness(max(self.step, s.versions.newest), s.versions) <= self.max_staleness
        )
        if len(fresh) == len(group.samples):
            return group, StaleDrop()
        kept_ids = {sample.id for sample in fresh}
        stale = [sample for sample in group.samples if sample.id not in kept_ids]
        if not fresh:
            return None, StaleDrop(stale, [group.id])
        return replace(group, samples=fresh), StaleDrop(stale)

    def _announce(self) -> None:
        if len(self._ready) >= self._groups_per_batch or self.ended is not None:
            self._full.set()
        else:
            self._full.clear()

    def _failure(self, last: str) -> EnvironmentFailure:
        look = f"One said: {last}" if last else "See episodes/ and logs/envs/"
        return EnvironmentFailure(f"every episode failed; {self._told_reasons()}. {look}")

    def _no_batch_error(self, rewards: Sequence[float]) -> EmptyBatchError:
        num_empty, solved = self.state.empty_groups, self.state.solved_groups
        if solved >= _MOSTLY * num_empty and set(self.state.reasons) == {ZERO_ADVANTAGE}:
            if solved < num_empty:
                return SolvedError(
                    f"nearly solved: of the last {num_empty} groups {solved} earned the most "
                    f"throughout, and in the other {num_empty - solved} all episodes earned the "
                    "same: nothing is left to learn from these tasks. Harder ones, or a larger "
                    "group_size for those that are not solved, would teach more"
                )
            return SolvedError(
                f"every episode of the last {num_empty} groups earned "
                f"{max(rewards):.3g}, and none of the run earned more: nothing is left to learn "
                "from these tasks"
            )
        text = self._told_reasons()
        if self._commonest != ZERO_ADVANTAGE:
            return EmptyBatchError(f"{text}. {self._advice()}")
        if len(set(rewards)) == 1:
            text += f". In the last group every episode earned {rewards[0]:.3g}"
        return StalledError(f"{text}. {self._advice()}")

    def _told_reasons(self) -> str:
        # Errors come before empties: an error explains why nothing else came.
        counted = self.state.reasons.most_common()
        counted.sort(key=lambda it: not it[0].startswith(ERROR_PREFIX))
        counts = ", ".join(f"{count} x {reason}" for reason, count in counted)
        num_empty = self.state.empty_groups
        return f"no trainable sample in {num_empty} groups in a row, by reason: {counts}"

    @property
    def _commonest(self) -> str:
        """The commonest reason that is no error; "" without one."""
        found = (reason for reason, _ in self.state.reasons.most_common())
        return next((it for it in found if not it.startswith(ERROR_PREFIX)), "")

    def _advice(self) -> str:
        return _ADVICE.get(self._commonest, _LOOK)


def normalized(groups: Sequence[ReadyGroup]) -> tuple[ReadyGroup, ...]:
    """The groups with advantages divided by their standard deviation in the batch.

    The deviation (the population's, in float64) runs over the tokens of the batch whose rl weight
    is not 0, each counted once. The mean is not subtracted: what an algorithm calls good stays
    good. Advantages that do not differ, up to rounding, stay as they are.
    """
    samples = [sample for group in groups for sample in group.samples]
    members = [
        arrays.advantages[arrays.loss_weights["rl"] != 0]
        for arrays in (sample.arrays for sample in samples)
        if "rl" in arrays.loss_weights
    ]
    values = np.concatenate([*members, np.zeros(0)]).astype(np.float64)
    deviation = float(values.std()) if values.size else 0.0
    if deviation <= _LEAST_DEVIATION * float(np.abs(values).max(initial=0.0)):
        return tuple(groups)

    def divided(sample: Sample) -> Sample:
        advantages = sample.arrays.advantages.astype(np.float64) / deviation
        return sample.with_arrays(advantages=advantages.astype(np.float32))

    return tuple(replace(group, samples=tuple(map(divided, group.samples))) for group in groups)


def build_batcher(
    config: RunProcessConfig, tell: Callable[[str], None] = lambda _: None
) -> Batcher:
    """The batcher as configured, for a run and for its replay."""
    settings = config.orchestrator
    return Batcher(
        groups_per_batch=settings.groups_per_batch,
        max_staleness=settings.max_staleness,
        max_empty_attempts=settings.max_empty_attempts,
        normalizes=settings.normalize == "batch",
        tell=tell,
    )
