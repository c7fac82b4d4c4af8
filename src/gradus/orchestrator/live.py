"""Looks at the loops once a second and leaves the numbers in `live.json`.

A look reads what the loops hold anyway and asks no other process. The file is written on a thread,
so that a slow disk delays the next look and never the loops.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from gradus.log import get_logger
from gradus.monitor.live import LIVE_SECONDS, read_live, write_live
from gradus.orchestrator.orchestrator import Orchestrator
from gradus.orchestrator.types import EpisodeOutcome, GroupPhase
from gradus.wire.inference import EngineStatus

_LOG = get_logger(__name__)
_SHOWN_PHASES = tuple(phase for phase in GroupPhase if phase is not GroupPhase.GONE)
_ENDS = tuple(EpisodeOutcome)


class LiveWriter:
    """Owns `live.json`; counts of an earlier launch continue from where the file stands."""

    def __init__(
        self,
        path: Path,
        orchestrator: Orchestrator,
        *,
        term: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._orchestrator = orchestrator
        self._term = term
        self._sleep = sleep
        self._earlier = _counted_before(path)
        self._is_lost = False

    async def run(self) -> None:
        """Look again and again until cancelled, and once more then.

        consumes: what the loops hold    waits for: a second
        produces: `live.json`            unblocked by: time
        """
        writing: asyncio.Future[None] | None = None
        try:
            while True:
                writing = asyncio.ensure_future(asyncio.to_thread(self.write, self.numbers()))
                await asyncio.shield(writing)
                await self._sleep(LIVE_SECONDS)
        finally:
            if writing is not None:  # Its thread continues, and both have one temporary file.
                await asyncio.wait([writing])
            self.write(self.numbers())

    def numbers(self) -> dict[str, float]:
        """What the file says now."""
        ended = self._orchestrator.groups.counters.ended
        pairs = {(source, outcome) for source in _sources(self._orchestrator) for outcome in _ENDS}
        counts = self._earlier.copy()
        for source, outcome in pairs | ended.keys():
            counts[f"live/episodes/{source}/{outcome}/total"] += ended[source, outcome]
        return look(self._orchestrator) | {name: float(count) for name, count in counts.items()}

    def write(self, numbers: dict[str, float]) -> None:
        """A disk that takes nothing costs the look."""
        try:
            write_live(self._path, numbers, term=self._term)
        except OSError as error:
            if not self._is_lost:
                _LOG.warning("the numbers of this moment are not written: %s", error)
            self._is_lost = True
            return
        self._is_lost = False


def look(orchestrator: Orchestrator) -> dict[str, float]:
    """Every number of this moment but the episodes that ended."""
    trainer, scheduler = orchestrator.trainer, orchestrator.scheduler
    slots, engine = orchestrator.groups.slots, orchestrator.engine
    phases = slots.phases()
    running = Counter(episode.group.source for episode in orchestrator.player.running)
    return {
        "live/version": float(trainer.policy.version),
        "live/batches/trained": float(trainer.num_finished),
        "live/batches/untrained": float(trainer.num_shipped - trainer.num_finished),
        "live/batches/unserved": float(trainer.num_finished - trainer.num_served),
        "live/slots/free": float(slots.free_slots),
        **{f"live/groups/{phase}": float(phases[phase]) for phase in _SHOWN_PHASES},
        **{f"live/running/{name}": float(running[name]) for name in _sources(orchestrator)},
        "live/in_flight/now": float(scheduler.in_flight),
        "live/in_flight/limit": float(scheduler.max_in_flight),
        "live/in_flight/planned": float(scheduler.num_planned),
        "live/records/waiting": float(orchestrator.records.num_waiting),
        "live/quiet_seconds": orchestrator.board.quiet_seconds,
        **_engine(engine.status, is_silent=engine.is_silent),
    }


def _sources(orchestrator: Orchestrator) -> list[str]:
    return list(orchestrator.groups.sources)


def _engine(status: EngineStatus | None, *, is_silent: bool) -> dict[str, float]:
    """The engine's load when it was last asked, every two seconds; its counters start with it."""
    answers = {"live/engine/answers": float(not is_silent)}
    if status is None:
        return answers
    return answers | {
        "live/engine/running": float(status.running),
        "live/engine/waiting": float(status.waiting),
        "live/engine/kv_usage": status.kv_usage,
        "live/engine/kv_capacity_tokens": float(status.kv_capacity_tokens),
        "live/engine/paused": float(status.is_paused),
        "live/engine/preemptions/total": float(status.preemptions),
        "live/engine/prompt_tokens/total": float(status.prompt_tokens),
        "live/engine/generated_tokens/total": float(status.generated_tokens),
        "live/engine/prefix_queries/total": float(status.prefix_queries),
        "live/engine/prefix_hits/total": float(status.prefix_hits),
    }


def _counted_before(path: Path) -> Counter[str]:
    """Episodes that earlier launches of the run played, also those that are played again."""
    last = read_live(path)
    found = {} if last is None else last.numbers
    return Counter(
        {
            name: int(count)
            for name, count in found.items()
            if name.startswith("live/episodes/") and name.endswith("/total")
        }
    )
