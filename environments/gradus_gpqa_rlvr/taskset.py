"""The taskset `gpqa-rlvr`: one reply to one question, rewarded by its letter."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from gradus_gpqa.tasks import INSTRUCTION, GpqaConfig, load_items
from gradus_gpqa_rlvr.reward import chosen_letter, rate_choice
from gradus_kit.multiagent.answers import is_exact


class GpqaRlvrData(vf.TaskData):
    """Question and options are the prompt."""

    answer: str
    """Letter of the right option."""
    letters: str
    """Letters of all options."""
    kind: str
    """Generator or domain."""
    level: int | None
    """1 to 3; None where the data set does not say."""


class GpqaRlvrTask(vf.Task[GpqaRlvrData, vf.State, vf.TaskConfig]):
    """One question: reward 1 for the right letter."""

    @vf.reward
    async def right_letter(self, trace: vf.Trace) -> float:
        """1 when the reply settles on the right letter."""
        return rate_choice(trace.last_reply, self.data.answer, self.data.letters)

    @vf.metric
    async def exact_letter(self, trace: vf.Trace) -> float:
        """1 when the reply is a letter and nothing else."""
        return float(is_exact(trace.last_reply, self.data.letters))

    @vf.metric
    async def extraction_failed(self, trace: vf.Trace) -> float:
        """1 when the reply settles on no letter."""
        return float(chosen_letter(trace.last_reply, self.data.letters) is None)

    def gold_replies(self) -> list[str]:
        return [self.data.answer]


class GpqaRlvrTaskset(vf.Taskset[GpqaRlvrTask, GpqaConfig]):
    """One task per item."""

    def load(self) -> Iterable[GpqaRlvrTask]:
        """Yield the items in order."""
        for item in load_items(self.config):
            data = GpqaRlvrData(
                name=item.key,
                prompt=f"{item.text}\n\n{INSTRUCTION}",
                answer=item.answer,
                letters=item.letters,
                kind=item.kind,
                level=item.level,
            )
            yield GpqaRlvrTask(data, self.config.task)
