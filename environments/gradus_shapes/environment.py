"""The environment `shapes`: a user who shows drawings, one each turn, and the tasks it plays."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import verifiers.v1 as vf
from pydantic import Field

from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_shapes.drawing import QUESTION, Drawing, drawings

MOST_SHAPES = 6
"""So many cells has the smallest drawing."""


class ShapesConfig(vf.TasksetConfig, HoldoutKeys):
    """What is drawn, and how often the user asks."""

    num_tasks: int = Field(1000, ge=1)
    """Number of conversations."""
    seed: int = 0
    """Seed of the drawings."""
    turns: int = Field(1, ge=1, le=8)
    """Drawings of a conversation, one each turn."""
    max_circles: int = Field(4, ge=1, le=MOST_SHAPES)
    """Most circles of a drawing; each number from 1 on is as likely."""
    max_squares: int = Field(0, ge=0, le=MOST_SHAPES - 1)
    """Most squares, which are not counted; with the circles at most six."""

    def model_post_init(self, _: object) -> None:
        """Refuse more shapes than the smallest drawing holds."""
        if self.max_circles + self.max_squares > MOST_SHAPES:
            raise ValueError(
                f"max_circles + max_squares = {self.max_circles + self.max_squares}: a drawing "
                f"holds at most {MOST_SHAPES} shapes"
            )


class ShapesData(vf.TaskData):
    """One conversation; its prompt is the first drawing."""

    later_turns: tuple[vf.UserMessage, ...]
    """What the user shows and asks then."""
    counts: tuple[int, ...]
    """The right answers."""


class ShapesTask(vf.Task[ShapesData, vf.State, vf.TaskConfig]):
    """One conversation, worth the share of its drawings that were counted right."""

    def gold_replies(self) -> list[str]:
        """The right answer of each turn."""
        return [str(count) for count in self.data.counts]

    @vf.reward
    async def counted(self, trace: vf.Trace) -> float:
        """Share of the replies that are the number and nothing else."""
        said = [str(message.content or "").strip() for message in trace.assistant_messages]
        right = [reply == str(n) for reply, n in zip(said, self.data.counts, strict=False)]
        return sum(right) / len(self.data.counts)

    @vf.metric
    async def numbers(self, trace: vf.Trace) -> float:
        """Share of the replies that are a number at all."""
        said = [str(message.content or "").strip() for message in trace.assistant_messages]
        return sum(reply.isdecimal() for reply in said) / len(self.data.counts)


class ShapesEnv(vf.SingleAgentEnv):
    """Shows drawing after drawing, until there are no more or the model stops."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play one conversation."""
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            for message in task.data.later_turns:
                if reply.terminated:
                    break
                reply = await talk.turn([message])


class ShapesTaskset(vf.Taskset[ShapesTask, ShapesConfig]):
    """Conversations of the configured side."""

    def load(self) -> Iterable[ShapesTask]:
        """Yield them in the order in which they are drawn."""
        config = self.config
        drawn = drawings(
            seed=config.seed, max_circles=config.max_circles, max_squares=config.max_squares
        )
        shown = iter(lambda: list(islice(drawn, config.turns)), [])
        # By each drawing: none that is trained on is held out, in whatever conversation.
        kept = (them for them in shown if config.keeps(*(drawing.url for drawing in them)))
        for number, them in enumerate(islice(kept, config.num_tasks)):
            data = ShapesData(
                name=f"drawing {number}",
                prompt=[asked(them[0])],
                later_turns=tuple(map(asked, them[1:])),
                counts=tuple(drawing.num_circles for drawing in them),
            )
            yield ShapesTask(data, config.task)


def asked(drawing: Drawing) -> vf.UserMessage:
    """A drawing and the question about it."""
    image = {"type": "image_url", "image_url": {"url": drawing.url}}
    return vf.UserMessage.model_validate({"content": [image, {"type": "text", "text": QUESTION}]})
