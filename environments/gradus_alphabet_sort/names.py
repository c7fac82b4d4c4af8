"""Names of people who do not exist, put together from first and last names."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FIRST = (
    "Ada Agnes Albert Alice Amos Anton Arthur Aya Basil Beatrice Ben Berta Boris Camille Carl "
    "Cecilia Cora Daisuke Dalia David Dora Edgar Edith Elias Emma Enzo Esther Farid Felix Fiona "
    "Frida Gaspard Gloria Greta Gustav Hana Harold Hector Helen Hugo Ida Igor Ines Iris Ivan "
    "Jamila Jasper Joan Jonas Judith Kai Karim Kirsten Lara Leon Linus Lucia Mabel Magnus Marta "
    "Mateo Mina Moses Nadia Nelson Nina Noah Olga Omar Oscar Paula Percy Petra Quentin Rafael "
    "Ramona Rita Rosa Rufus Salma Selma Simon Sofia Stella Tamar Theo Tilda Tobias Ulla Umberto "
    "Vera Victor Viola Wanda Walter Xavier Yara Yusuf Zelda Zora"
)
_LAST = (
    "Abbot Ackers Alder Ambrose Arkwell Ashdown Bakker Barlow Beck Bellamy Birch Blythe Bolt "
    "Brandt Calder Carver Castell Cho Clement Cobb Corsi Crane Dahl Darrow Denholm Dimas Doyle "
    "Drake Eberly Eklund Ellery Esposito Fairley Falk Fenn Forsyth Foss Galvin Garber Gessner Gow "
    "Graves Hale Harker Hemming Hoyle Hurst Ibsen Ingram Iwata Jansen Jarrow Joyner Kapoor Keller "
    "Kestrel Kinney Kovac Lamb Larkin Lindt Lorimer Lowry Maddox Marsh Mertens Moreau Munk Nagy "
    "Nestor Nolan Norberg Oakley Okoro Orton Osei Paxton Pell Pereira Pickett Quade Quill Radley "
    "Ravel Reyes Rowan Sadler Santos Selwyn Stroud Takeda Tanner Thorne Tully Ulrich Underhill "
    "Vance Varga Vogel Wade Weller Wilder Yamada Yates Yost Zander Zeller"
)
_SHORT = "al bo cy di ed fi gi hu ig jo ki lu mo ny oz pi qi ro si ty ur vi wu xi yo za"
FIRST_NAMES = tuple(_FIRST.split())
LAST_NAMES = tuple(_LAST.split())
SHORT_NAMES = tuple(_SHORT.split())
"""Names of two letters, one for each first letter."""


@dataclass(frozen=True)
class Name:
    """A person's name; the list shows `text`."""

    first: str
    last: str
    text: str


def draw_people(draw: random.Random) -> Iterator[Name]:
    """All different people that the lists give for one draw; no part of a name comes twice."""
    firsts = draw.sample(FIRST_NAMES, len(FIRST_NAMES))
    lasts = draw.sample(LAST_NAMES, len(FIRST_NAMES))
    for first, last in zip(firsts, lasts, strict=True):
        yield Name(first, last, f"{first} {last}")


def draw_short(draw: random.Random) -> Iterator[Name]:
    for name in draw.sample(SHORT_NAMES, len(SHORT_NAMES)):
        yield Name(name, name, name)


def read_people(texts: Sequence[str]) -> Iterator[Name]:
    """Names as a data set has them, like `AdaQuill`; leaves out those that would tie."""
    seen: set[str] = set()
    for text in texts:
        joined = "".join(text.split())
        cut = next((at for at in range(1, len(joined)) if joined[at].isupper()), len(joined))
        first, last = joined[:cut], joined[cut:]
        if first and last and not {f"first {first}", f"last {last}"} & seen:
            seen |= {f"first {first}", f"last {last}"}
            yield Name(first, last, joined)
