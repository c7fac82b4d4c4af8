"""How many episodes run at once: as many as the engine can take, with a cap on starts per minute.

`EngineWatch` polls the engine, `InFlightController` finds the limit from its load, and `Scheduler`
starts planned episodes below it. Additive growth is too slow for an engine that starts empty, so
the limit grows by a factor, once per turnover: only after as many episodes ended as were allowed,
all of them under the grown limit.

    KV cache < 0.6 full, nothing queues, limit used to 0.9     limit * 1.25, once per turnover
    KV cache > 0.8 full                                        in flight * 0.7 / usage (soft trim)
    KV cache > 0.9 full                                        in flight * 0.5 / usage (hard trim)
    a request was preempted                                    limit * 0.8
    queue > half of running, at six polls in a row             limit * 0.9
    the same within six polls after such a cut                 limit * 0.5

A trim aims at the number of episodes that would fill the cache to 0.7, or 0.5; it only lowers the
limit. Nothing that runs is given up: a preempted request is computed again, an abandoned episode
would be lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from gradus.config import RunProcessConfig
from gradus.errors import DeadlineError, GradusError, ProcessError
from gradus.log import get_logger
from gradus.orchestrator.play.inference_client import EngineFailed, NoServer, PolicyClient
from gradus.wire.inference import EngineStatus

GROW_BELOW_USAGE = 0.6
GROW_FROM_SHARE = 0.9
GROWTH = 1.25
SOFT_TRIM_USAGE = 0.8
SOFT_TRIM_TARGET = 0.7
HARD_TRIM_USAGE = 0.9
HARD_TRIM_TARGET = 0.5
PREEMPTION_CUT = 0.8
QUEUE_SHARE = 0.5
QUEUE_POLLS = 6
QUEUE_CUT = 0.9
SECOND_QUEUE_CUT = 0.5
INTERVAL_SECONDS = 2.0
"""Between two polls: short compared with a step, long compared with a status request."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Load:
    """What one poll of the engine and of the scheduler shows."""

    in_flight: int
    """Episodes that run."""
    num_ended: int
    """Episodes that ended since the start of the run."""
    running: int
    """Requests that the engine computes."""
    waiting: int
    """Requests that queue in the engine."""
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""
    preemptions: int
    """Since the start of the engine."""
    num_servers: int = 1
    """That serve the live version."""


class LimitState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a restart keeps of the limit; everything else is measured again within one turnover."""

    limit: int
    num_servers: int | None
    """That the limit is for; None before the first poll."""


class InFlightController:
    """Owns the limit between `least` and `most`; it never moves when both are equal.

    >>> controller = InFlightController(least=1, most=100, initial=40)
    >>> controller.observe(Load(40, 40, running=40, waiting=0, kv_usage=0.3, preemptions=0))
    50
    """

    def __init__(
        self, *, least: int, most: int, initial: int, num_servers: int | None = None
    ) -> None:
        """`initial` is for so many servers; None means for those of the first poll."""
        assert 1 <= least <= most, f"limits {least}..{most}"
        self._least = least
        self._most = most
        self.limit = min(max(initial, least), most)
        self._turnover_at: int | None = self.limit
        """Of the episodes that ended; None until the first poll after a restart."""
        self._preemptions: int | None = None
        self._queued_polls = 0
        self._polls_since_queue_cut: int | None = None
        self._num_servers = num_servers

    def observe(self, load: Load) -> int:
        """The limit after one poll; it follows the number of servers at once."""
        if self._turnover_at is None:
            self._turnover_at = load.num_ended + self.limit
        before, self._num_servers = self._num_servers, load.num_servers
        if before is not None and load.num_servers != before:
            self._set(self.limit * load.num_servers / before, load)
            return self.limit
        wanted = min(
            float(self.limit),
            self._after_usage(load),
            self._after_preemptions(load),
            self._after_queue(load),
        )
        if wanted < self.limit:
            self._set(wanted, load)
        elif self._may_grow(load):
            self._set(max(self.limit * GROWTH, self.limit + 1), load)
        return self.limit

    @property
    def state(self) -> LimitState:
        return LimitState(self.limit, self._num_servers)

    @state.setter
    def state(self, state: LimitState) -> None:
        self.limit = min(max(state.limit, self._least), self._most)
        self._num_servers = state.num_servers
        self._turnover_at = None

    def _set(self, wanted: float, load: Load) -> None:
        self.limit = min(max(int(wanted), self._least), self._most)
        self._turnover_at = load.num_ended + self.limit

    def _may_grow(self, load: Load) -> bool:
        return (
            load.kv_usage < GROW_BELOW_USAGE
            and load.waiting == 0
            and load.in_flight >= GROW_FROM_SHARE * self.limit
            and self._turnover_at is not None
            and load.num_ended >= self._turnover_at
            and self.limit < self._most
        )

    def _after_usage(self, load: Load) -> float:
        if load.kv_usage > HARD_TRIM_USAGE:
            return load.in_flight * HARD_TRIM_TARGET / load.kv_usage
        if load.kv_usage > SOFT_TRIM_USAGE:
            return load.in_flight * SOFT_TRIM_TARGET / load.kv_usage
        return float(self.limit)

    def _after_preemptions(self, load: Load) -> float:
        before, self._preemptions = self._preemptions, load.preemptions
        if before is not None and load.preemptions > before:
            return self.limit * PREEMPTION_CUT
        return float(self.limit)

    def _after_queue(self, load: Load) -> float:
        """A long queue lowers the limit a little; if it is long again soon after, by half."""
        if self._polls_since_queue_cut is not None:
            self._polls_since_queue_cut += 1
        if load.waiting <= QUEUE_SHARE * load.running:
            self._queued_polls = 0
            return float(self.limit)
        self._queued_polls += 1
        if self._queued_polls < QUEUE_POLLS:
            return float(self.limit)
        since, self._polls_since_queue_cut = self._polls_since_queue_cut, 0
        self._queued_polls = 0
        is_again = since is not None and since <= QUEUE_POLLS
        return self.limit * (SECOND_QUEUE_CUT if is_again else QUEUE_CUT)


def build_controller(config: RunProcessConfig, kv_capacity_tokens: int) -> InFlightController:
    """The in-flight limit as configured; without a known KV capacity it starts at the most."""
    settings = config.orchestrator
    # As many episodes of full length as the KV caches hold; 0 means unknown.
    initial = kv_capacity_tokens // config.model.max_length_tokens
    return InFlightController(
        least=settings.min_in_flight_episodes,
        most=settings.max_in_flight_episodes,
        initial=initial or settings.max_in_flight_episodes,
        num_servers=None if config.inference.addresses is None else 1,
    )


@dataclass
class EngineRecord:
    """The polls since the last record."""

    polls: list[Load] = field(default_factory=list)
    first: EngineStatus | None = None
    """The last poll of the previous record: counters are reported as differences."""
    last: EngineStatus | None = None
    num_failed: int = 0
    """Polls without an answer."""
    num_replaced: int = 0
    """Servers that took the place of another."""
    incarnations: dict[str, str] = field(default_factory=dict)
    """The last one seen of each server, by its name; "" for a server that is asked alone."""
    num_up: list[int] = field(default_factory=list)
    """Replicas that served the live version, at each poll; empty for one server."""

    def add(self, status: EngineStatus, load: Load) -> None:
        """Keep one poll."""
        self.first = self.first or status
        for name, it in ({"": status} if status.parts is None else status.parts).items():
            before = self.incarnations.setdefault(name, it.incarnation)
            self.num_replaced += it.incarnation != before
            self.incarnations[name] = it.incarnation
        self.last = status
        self.polls.append(load)
        if status.parts is not None:
            self.num_up.append(len(status.parts))

    def take(self) -> dict[str, float]:
        """Means and extremes over the polls, differences of counters; then start again."""
        found: dict[str, float] = {
            "policy/status_failed/sum": float(self.num_failed),
            "policy/servers_replaced/sum": float(self.num_replaced),
        }
        if self.polls and self.first is not None and self.last is not None:
            found |= _gauges(self.polls) | _differences(self.first, self.last)
        if self.num_up:
            found["policy/replicas_up/min"] = float(min(self.num_up))
        self.polls, self.first, self.num_up = [], self.last, []
        self.num_failed = self.num_replaced = 0
        return found


def _gauges(polls: list[Load]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("in_flight", "running", "waiting", "kv_usage"):
        values = [float(getattr(load, name)) for load in polls]
        found[f"policy/{name}/mean"] = sum(values) / len(values)
        found[f"policy/{name}/max"] = max(values)
    return found


def _differences(first: EngineStatus, last: EngineStatus) -> dict[str, float]:
    """A counter that fell belongs to a restarted engine, which counts from 0."""

    def grown(name: str) -> float:
        before, now = getattr(first, name), getattr(last, name)
        return float(now - before if now >= before else now)

    found = {
        "policy/preemptions/sum": grown("preemptions"),
        "policy/prompt_tokens/sum": grown("prompt_tokens"),
        "policy/generated_tokens/sum": grown("generated_tokens"),
        "policy/asked_again/sum": grown("asked_again"),
    }
    if queries := grown("prefix_queries"):
        found["policy/prefix_hit/share"] = grown("prefix_hits") / queries
    return found


class EngineWatch:
    """Owns the in-flight limit and the engine's record."""

    def __init__(
        self,
        policy: PolicyClient,
        controller: InFlightController,
        *,
        count: Callable[[], tuple[int, int]],
        on_limit: Callable[[int], None],
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        """`count` returns the episodes in flight and those that ended so far; `on_limit` gets every
        new limit; `on_tokens` is called when the engine has generated since the last poll."""
        self._policy = policy
        self._controller = controller
        self._count = count
        self._on_limit = on_limit
        self._on_tokens = on_tokens
        self._record = EngineRecord()
        self._given = controller.limit
        self._lag = 0.0
        """Seconds by which this event loop was late at most since the last `take`."""
        self.is_silent = False
        """Whether the engine did not answer the last poll."""

    @property
    def status(self) -> EngineStatus | None:
        return self._record.last

    async def run(self) -> None:
        """Poll until cancelled.

        consumes: the engine's status      waits for: an interval
        produces: the in-flight limit      unblocked by: time
        """
        now = asyncio.get_running_loop().time
        while True:
            await self.poll()
            due = now() + INTERVAL_SECONDS
            await asyncio.sleep(INTERVAL_SECONDS)
            self._lag = max(self._lag, now() - due)

    async def poll(self) -> None:
        """Ask once. An engine that does not answer costs only the poll: episodes and new versions
        have their own deadlines and errors. A new one is told what to serve, before it answers."""
        try:
            status = await self._policy.status()
        except GradusError as error:
            if isinstance(error, NoServer):
                self._limit_to(0)
                self._on_tokens()  # it waits for somebody, and does not stand still
            self.is_silent = True
            self._record.num_failed += 1
            if self._record.num_failed == 1:
                log.warning("the engine's load is unknown: %s", error)
            return
        if status.is_stale:
            try:
                status = await self._policy.serve_again()
            except (DeadlineError, ProcessError, EngineFailed) as error:
                log.warning(
                    "a new inference server ended before it was told its version: %s", error
                )
                return
        self.is_silent = False
        before = self._record.last
        in_flight, num_ended = self._count()
        load = Load(
            in_flight=in_flight,
            num_ended=num_ended,
            running=status.running,
            waiting=status.waiting,
            kv_usage=status.kv_usage,
            preemptions=status.preemptions,
            num_servers=1 if status.parts is None else len(status.parts),
        )
        self._record.add(status, load)
        if before is None or status.generated_tokens != before.generated_tokens:
            self._on_tokens()
        limit = self._controller.limit
        if not status.is_paused and self._controller.observe(load) != limit:
            log.debug("in-flight limit %d -> %d at %s", limit, self._controller.limit, load)
        self._limit_to(self._controller.limit)

    def _limit_to(self, limit: int) -> None:
        if limit != self._given:
            self._given = limit
            self._on_limit(limit)

    def take(self) -> dict[str, float]:
        """Metrics of the polls since the last call, for the record of a step."""
        lag, self._lag = self._lag, 0.0
        limit = float(self._controller.limit)
        return self._record.take() | {
            "policy/in_flight_limit": limit,
            "time/event_loop_lag_seconds/max": lag,
        }


class AdmissionRate:
    """Owns the budget of starts: at most `per_minute` in a minute, spread evenly.

    Only starts of training episodes are counted here: an evaluation never waits for it.

    >>> rate = AdmissionRate(per_minute=60)
    >>> rate.wait_seconds(now=0.0), rate.take(now=0.0), rate.wait_seconds(now=0.25)
    (0.0, None, 0.75)
    """

    def __init__(self, *, per_minute: int | None) -> None:
        self._interval = 0.0 if per_minute is None else 60.0 / per_minute
        self._next_start = 0.0

    def wait_seconds(self, *, now: float) -> float:
        """How long until the next episode may start."""
        return max(0.0, self._next_start - now)

    def take(self, *, now: float) -> None:
        self._next_start = max(now, self._next_start) + self._interval


@dataclass(frozen=True)
class PlannedEpisode:
    """An episode that waits for its start."""

    id: str
    group_id: str


class Scheduler:
    """Owns the queue of planned episodes and the count of those in flight.

    >>> scheduler = Scheduler(max_in_flight=1)
    >>> scheduler.plan("g0", ["g0.0", "g0.1"])
    >>> scheduler.next_episode().id, scheduler.next_episode()
    ('g0.0', None)
    """

    def __init__(self, *, max_in_flight: int, rate: AdmissionRate | None = None) -> None:
        self.max_in_flight = max_in_flight
        """May change at any time; running episodes continue."""
        self._rate = rate or AdmissionRate(per_minute=None)
        self._planned: deque[PlannedEpisode] = deque()
        self._changed = asyncio.Event()
        self.in_flight = 0

    @property
    def wants_group(self) -> bool:
        """Whether a new group's first episode could start at once.

        A group opens as late as possible, so that it starts on the newest version.
        """
        return not self._planned and self.in_flight < self.max_in_flight

    @property
    def num_planned(self) -> int:
        """Episodes of open groups that wait for their start."""
        return len(self._planned)

    def plan(self, group_id: str, episode_ids: Sequence[str]) -> None:
        """Queue the episodes of a new group behind those of older groups."""
        self._planned.extend(PlannedEpisode(episode_id, group_id) for episode_id in episode_ids)

    def wait_seconds(self, *, now: float) -> float:
        return self._rate.wait_seconds(now=now)

    def next_episode(self, *, now: float = 0.0) -> PlannedEpisode | None:
        """The episode that starts now, counted as in flight; None when none may."""
        if not self._planned or self.in_flight >= self.max_in_flight:
            return None
        if self._rate.wait_seconds(now=now) > 0:
            return None
        self._rate.take(now=now)
        self.in_flight += 1
        return self._planned.popleft()

    def ended(self) -> None:
        assert self.in_flight > 0, "an episode ended that was not in flight"
        self.in_flight -= 1
        self.note_change()

    def set_limit(self, limit: int) -> None:
        self.max_in_flight = limit
        self.note_change()

    def note_change(self) -> None:
        self._changed.set()

    async def changed(self, *, at_most_seconds: float) -> None:
        """Wait for the next change; 0 seconds mean without a limit."""
        self._changed.clear()
        if at_most_seconds:
            asyncio.get_running_loop().call_later(at_most_seconds, self._changed.set)
        await self._changed.wait()

    def forget(self, group_id: str) -> None:
        """Take the planned episodes of an abandoned group out of the queue."""
        self._planned = deque(e for e in self._planned if e.group_id != group_id)
