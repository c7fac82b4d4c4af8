"""Follows the engine's load: moves the in-flight limit, and tells the load with every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gradus.errors import GradusError
from gradus.log import get_logger
from gradus.orchestrator.play.concurrency import InFlightController, Load
from gradus.orchestrator.play.inference_client import PolicyClient
from gradus.wire.inference import EngineStatus

INTERVAL_SECONDS = 2.0
"""Between two polls: short against a step, long against one status request."""

log = get_logger(__name__)


@dataclass
class EngineRecord:
    """The polls since the last record."""

    polls: list[Load] = field(default_factory=list)
    first: EngineStatus | None = None
    """The last poll of the record before: counters are told as differences."""
    last: EngineStatus | None = None
    num_failed: int = 0
    """Polls without an answer."""

    def add(self, status: EngineStatus, load: Load) -> None:
        """Keep one poll."""
        self.first = self.first or status
        self.last = status
        self.polls.append(load)

    def take(self) -> dict[str, float]:
        """Means and extremes over the polls, differences of counters; then start again."""
        found: dict[str, float] = {"policy/status_failed/sum": float(self.num_failed)}
        if self.polls and self.first is not None and self.last is not None:
            found |= _gauges(self.polls) | _differences(self.first, self.last)
        self.polls, self.first, self.num_failed = [], self.last, 0
        return found


def _gauges(polls: list[Load]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("in_flight", "running", "waiting", "kv_usage"):
        values = [float(getattr(load, name)) for load in polls]
        found[f"policy/{name}/mean"] = sum(values) / len(values)
        found[f"policy/{name}/max"] = max(values)
    return found


def _differences(first: EngineStatus, last: EngineStatus) -> dict[str, float]:
    """A counter that fell belongs to an engine that was started anew; it then counts from 0."""

    def grown(name: str) -> float:
        before, now = getattr(first, name), getattr(last, name)
        return float(now - before if now >= before else now)

    found = {
        "policy/preemptions/sum": grown("preemptions"),
        "policy/prompt_tokens/sum": grown("prompt_tokens"),
        "policy/generated_tokens/sum": grown("generated_tokens"),
    }
    if queries := grown("prefix_queries"):
        found["policy/prefix_hit/share"] = grown("prefix_hits") / queries
    return found


class EngineWatch:
    """Owns the in-flight limit and the engine's record.

    >>> watch = EngineWatch(policy, controller, observe, on_limit)  # doctest: +SKIP
    >>> watch.take()["policy/in_flight_limit"]  # doctest: +SKIP
    40.0
    """

    def __init__(
        self,
        policy: PolicyClient,
        controller: InFlightController,
        *,
        count: Callable[[], tuple[int, int]],
        on_limit: Callable[[int], None],
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        """`count` tells episodes in flight and episodes that ended so far; `on_limit` gets every
        new limit; `on_tokens` is called when the engine has generated since the last poll."""
        self._policy = policy
        self._controller = controller
        self._count = count
        self._on_limit = on_limit
        self._on_tokens = on_tokens
        self._record = EngineRecord()
        self.is_silent = False
        """Whether the engine did not answer the last poll."""

    async def run(self) -> None:
        """Poll for ever.

        consumes: the engine's status      waits for: an interval
        produces: the in-flight limit      unblocked by: time
        """
        while True:
            await self.poll()
            await asyncio.sleep(INTERVAL_SECONDS)

    async def poll(self) -> None:
        """Ask once. An engine that does not answer costs the poll: who needs the engine itself,
        an episode or a new version, has deadlines and errors of its own."""
        try:
            status = await self._policy.status()
        except GradusError as error:
            self.is_silent = True
            self._record.num_failed += 1
            if self._record.num_failed == 1:
                log.warning("the engine's load is unknown: %s", error)
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
        )
        self._record.add(status, load)
        if before is None or status.generated_tokens != before.generated_tokens:
            self._on_tokens()
        limit = self._controller.limit
        if not status.is_paused and self._controller.observe(load) != limit:
            log.debug("in-flight limit %d -> %d at %s", limit, self._controller.limit, load)
            self._on_limit(self._controller.limit)

    def take(self) -> dict[str, float]:
        """What the polls since the last call say, for the record of a step."""
        return self._record.take() | {"policy/in_flight_limit": float(self._controller.limit)}
