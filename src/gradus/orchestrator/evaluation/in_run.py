"""Evaluations during a run: each measures one policy version while training episodes go on.

    loop      consumes           waits for                 produces            unblocked by
    evaluate  versions to judge  the next one, episodes    records, a free     refresh, environments
                                                           policy

The policy is pinned by waiting: `released` holds the refresh loop until the evaluation ended, so no
new weights are applied meanwhile (docs/decisions/0005). The wait needs nothing of the trainer and
no slot, and every evaluation has a deadline, so it always ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.config import EvalSourcesConfig
from gradus.orchestrator.evaluation.episodes import EvaluationSource, warn_of_graded_rewards
from gradus.orchestrator.evaluation.measurement import Measurement
from gradus.orchestrator.play.inference_client import PolicyClient
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.writer import RecordWriter


class Evaluation:
    """Owns the evaluations of a run: which version is due, and whether one is being measured.

    >>> evaluation.begin_if_due(0, is_first=True)  # doctest: +SKIP
    >>> await evaluation.released()  # doctest: +SKIP
    12.5
    """

    def __init__(
        self,
        settings: EvalSourcesConfig | None,
        sources: Sequence[EvaluationSource],
        *,
        policy: PolicyClient,
        recorder: RecordWriter,
        journal: Journal,
        episodes: Path,
    ) -> None:
        """`settings` None switches evaluation off."""
        self._settings = settings
        self._measurement = settings and Measurement(
            settings, sources, policy=policy, episodes=episodes
        )
        self._recorder = recorder
        self._journal = journal
        self._due: asyncio.Queue[int] = asyncio.Queue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last: int | None = None
        self._measured: int | None = None
        self._graded: set[str] = set()

    def begin_if_due(self, version: int, *, is_first: bool = False, is_last: bool = False) -> None:
        """`version` is served: measure it when the config says so, and not twice."""
        if self._settings is None or version == self._last:
            return
        is_due = version > 0 and version % self._settings.interval_steps == 0
        is_due |= is_first and version == 0 and self._settings.base_model_first
        is_due |= is_last and self._settings.at_end
        if is_due:
            self._last = version
            self._idle.clear()
            self._due.put_nowait(version)

    def state(self) -> dict[str, Any]:
        """What was measured to its end; a measurement that a restart cuts off begins again."""
        return {"measured": self._measured, "graded": sorted(self._graded)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._last = self._measured = state["measured"]
        self._graded = set(state["graded"])

    async def released(self) -> float | None:
        """Return when no evaluation needs the served version; the seconds that this took.

        None when evaluation is off.
        """
        if self._settings is None:
            return None
        begun = time.monotonic()
        await self._idle.wait()
        return time.monotonic() - begun

    async def run(self) -> None:
        """Measure what is due, until cancelled.

        consumes: versions to judge        waits for: the next one, its episodes
        produces: records, a free policy   unblocked by: refresh, environments
        """
        while True:
            version = await self._due.get()
            await self._measure(version)
            self._idle.set()

    async def _measure(self, version: int) -> None:
        assert self._measurement is not None
        self._journal.write(JournalEvent.EVALUATION_STARTED, version=version)
        measured = await self._measurement.measure(version)
        warn_of_graded_rewards(measured.results, self._graded)
        self._recorder.add_metrics(measured.metrics(), step=version)
        self._measured = version
        self._journal.write(
            JournalEvent.EVALUATION_ENDED, version=version, episodes=measured.num_episodes
        )
