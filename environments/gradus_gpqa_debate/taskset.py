"""The task set `gpqa-debate`: the items of gpqa as questions of a debate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import verifiers.v1 as vf
from pydantic import model_validator

from gradus_debate import DebateData, DebateTask
from gradus_gpqa.tasks import GpqaConfig, load_items
from gradus_kit.multiagent.seats import check_learner_seat, draw_learner_seat

SEATS = ("debater_a", "debater_b")


class GpqaDebateConfig(GpqaConfig):
    """The keys of the items, and who learns."""

    learner_seat: str | None = None
    """The seat that trains: `bernoulli`, `round_robin`, `hash`, or the name of a debater. None
    means both."""

    @model_validator(mode="after")
    def _seat_exists(self) -> Self:
        check_learner_seat(self.learner_seat, SEATS)
        return self


class GpqaDebateTaskset(vf.Taskset[DebateTask, GpqaDebateConfig]):
    """One debate per item."""

    def load(self) -> Iterable[DebateTask]:
        """Yield the items in order, each with the seat that learns in it."""
        config = self.config
        for index, item in enumerate(load_items(config)):
            learner = draw_learner_seat(
                config.learner_seat,
                SEATS,
                seed=config.seed,
                task_key=item.key,
                task_index=index,
            )
            data = DebateData(
                name=item.key,
                question=item.question,
                options=list(item.options),
                answer=item.answer,
                learner_seat=learner,
            )
            yield DebateTask(data, config.task)
