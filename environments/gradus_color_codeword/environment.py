"""The environment `color-codeword`: a user who shows coloured squares, and the words they spell."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterable
from functools import cache
from itertools import islice

import verifiers.v1 as vf
from PIL import Image
from pydantic import Field

from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_shapes.environment import ShapesEnv

LETTERS = {
    "red": "A",
    "green": "B",
    "blue": "C",
    "yellow": "D",
    "purple": "E",
    "orange": "F",
    "black": "G",
    "white": "H",
    "cyan": "I",
}
"""The letter that each colour stands for."""
INSTRUCTION = (
    "Each square stands for a letter: "
    + ", ".join(f"{colour} {letter}" for colour, letter in LETTERS.items())
    + ". Remember the letters of all squares in their order. Reply with the word that they spell "
    "so far, and nothing else."
)
SIDE_PIXELS = 56


class ColorCodewordConfig(vf.TasksetConfig, HoldoutKeys):
    """How long the words are, and how they are shown."""

    num_tasks: int | None = Field(None, ge=1)
    """Number of words. None means that there is no end."""
    seed: int = 0
    """Seed of the words."""
    turns: int = Field(3, ge=1, le=8)
    """Turns of a conversation."""
    images_per_turn: int = Field(1, ge=1, le=8)
    """Squares that are shown each turn, an image each."""
    instruction: str | None = INSTRUCTION
    """System prompt. None leaves the letters to be learned."""


class ColorCodewordData(vf.TaskData):
    """One word; its prompt shows the first squares."""

    later_turns: tuple[vf.UserMessage, ...]
    """What the user shows then."""
    word: str
    """What all squares spell."""


class ColorCodewordTask(vf.Task[ColorCodewordData, vf.State, vf.TaskConfig]):
    """One word, which the last reply must be."""

    def gold_replies(self) -> list[str]:
        """The word so far, of each turn."""
        turns = 1 + len(self.data.later_turns)
        each = len(self.data.word) // turns
        return [self.data.word[: each * turn] for turn in range(1, turns + 1)]

    def _last_reply(self, trace: vf.Trace) -> str:
        said = [str(message.content or "").strip().upper() for message in trace.assistant_messages]
        return said[-1] if len(said) == 1 + len(self.data.later_turns) else ""

    @vf.reward
    async def spelled(self, trace: vf.Trace) -> float:
        """Share of the letters that stand in their place in the last reply, which is a word of the
        right length; 1 for the whole word."""
        reply, word = self._last_reply(trace), self.data.word
        if len(reply) != len(word):
            return 0.0
        return sum(map(str.__eq__, reply, word)) / len(word)

    @vf.metric
    async def whole(self, trace: vf.Trace) -> float:
        """1 when the last reply is the word."""
        return float(self._last_reply(trace) == self.data.word)


class ColorCodewordEnv(ShapesEnv):
    """Shows squares as that environment shows drawings, turn by turn."""


class ColorCodewordTaskset(vf.Taskset[ColorCodewordTask, ColorCodewordConfig]):
    """Words of the configured side."""

    def load(self) -> Iterable[ColorCodewordTask]:
        """Yield them in the order in which they are drawn."""
        config = self.config
        draw = random.Random(f"codewords {config.seed}")
        length = config.turns * config.images_per_turn
        drawn = iter(lambda: draw.choices(list(LETTERS), k=length), None)
        kept = (colours for colours in drawn if config.keeps(" ".join(colours)))
        for number, colours in enumerate(islice(kept, config.num_tasks)):
            shown = [
                squares(colours[place : place + config.images_per_turn])
                for place in range(0, length, config.images_per_turn)
            ]
            data = ColorCodewordData(
                name=f"word {number}",
                prompt=[shown[0]],
                system_prompt=config.instruction,
                later_turns=tuple(shown[1:]),
                word="".join(LETTERS[colour] for colour in colours),
            )
            yield ColorCodewordTask(data, config.task)


def squares(colours: list[str]) -> vf.UserMessage:
    """A message of one image for each colour."""
    images = [{"type": "image_url", "image_url": {"url": square(colour)}} for colour in colours]
    return vf.UserMessage.model_validate({"content": [*images, {"type": "text", "text": "word?"}]})


@cache
def square(colour: str) -> str:
    """The data URL of a PNG of one colour."""
    written = io.BytesIO()
    Image.new("RGB", (SIDE_PIXELS, SIDE_PIXELS), colour).save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
