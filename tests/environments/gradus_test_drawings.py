"""The drawings of `shapes`, for a model that was trained on nothing."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from gradus_shapes.environment import ShapesConfig, ShapesData, ShapesEnv, ShapesTaskset

__all__ = ["DrawingsEnv", "DrawingsTaskset"]


class DrawingsTask(vf.Task[ShapesData, vf.State, vf.TaskConfig]):
    """Worth something now and then, without a right answer."""

    @vf.reward
    async def evenly(self, trace: vf.Trace) -> float:
        """Share of the replies whose number of small letters is even."""
        said = [str(message.content or "") for message in trace.assistant_messages]
        return sum(sum(map(str.islower, reply)) % 2 == 0 for reply in said) / len(said)


class DrawingsEnv(ShapesEnv):
    """Shows drawing after drawing."""


class DrawingsTaskset(vf.Taskset[DrawingsTask, ShapesConfig]):
    """The same conversations."""

    def load(self) -> Iterable[DrawingsTask]:
        """Yield them in their order."""
        for task in ShapesTaskset(self.config).load():
            yield DrawingsTask(task.data, self.config.task)
