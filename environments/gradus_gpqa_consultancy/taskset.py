"""The task set `gpqa-consultancy`: the items of gpqa, each with an answer to argue for."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from gradus_debate import DebateData, DebateEnv, DebateEnvConfig, DebateTask
from gradus_gpqa.tasks import GpqaConfig, load_items
from gradus_gpqa_consultancy.assignment import assign_letters

CONSULTANT = "consultant"


class GpqaConsultancyTaskset(vf.Taskset[DebateTask, GpqaConfig]):
    """One consultation per item."""

    def load(self) -> Iterable[DebateTask]:
        """Yield the items in order, each with the consultant's letter."""
        items = load_items(self.config)
        letters = assign_letters(items, seed=self.config.seed)
        for item, letter in zip(items, letters, strict=True):
            data = DebateData(
                name=item.key,
                question=item.question,
                options=list(item.options),
                answer=item.answer,
                assigned_answers={CONSULTANT: letter},
            )
            yield DebateTask(data, self.config.task)


class GpqaConsultancyEnvConfig(DebateEnvConfig):
    """A debate whose pack is that of the consultancy."""

    pack: str = "consultancy"
    """The texts: a pack that comes with `gradus_debate`, or the path of a YAML file."""


class GpqaConsultancyEnv(DebateEnv, vf.Env[GpqaConsultancyEnvConfig]):
    """One consultant argues, the judge picks an answer."""
