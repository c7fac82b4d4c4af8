"""Drawings of circles and squares, decided by a seed."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIZES = ((70, 98), (98, 70), (84, 84))
"""Width and height in pixels."""
QUESTION = "how many circles?"
_CELL = 28
_COLOURS = ("red", "blue", "green", "black")


@dataclass(frozen=True)
class Drawing:
    """An image and what is in it.

    >>> drawing = next(drawings(seed=0, max_circles=3, max_squares=0))
    >>> 1 <= drawing.num_circles <= 3, drawing.url[:22]
    (True, 'data:image/png;base64,')
    """

    num_circles: int
    content: bytes
    """Of a PNG file."""

    @property
    def url(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.content).decode()


def drawings(*, seed: int, max_circles: int, max_squares: int) -> Iterator[Drawing]:
    """Drawings without end, each of 1 to `max_circles` circles and at most `max_squares` squares
    on white, which nowhere touch."""
    draw = random.Random(f"shapes {seed}")
    while True:
        width, height = draw.choice(SIZES)
        num_circles = draw.randint(1, max_circles)
        num_squares = draw.randint(0, max_squares)
        cells = [
            (x, y)
            for x in range(0, width - _CELL + 1, _CELL)
            for y in range(0, height - _CELL + 1, _CELL)
        ]
        image = Image.new("RGB", (width, height), "white")
        pencil = ImageDraw.Draw(image)
        places = draw.sample(cells, num_circles + num_squares)
        for number, (left, top) in enumerate(places):
            side = draw.randint(14, _CELL - 4)
            x, y = left + draw.randint(1, _CELL - side - 2), top + draw.randint(1, _CELL - side - 2)
            shape = pencil.ellipse if number < num_circles else pencil.rectangle
            shape((x, y, x + side, y + side), fill=draw.choice(_COLOURS))
        written = io.BytesIO()
        image.save(written, "PNG")
        yield Drawing(num_circles, written.getvalue())
