"""A made-up country as an encyclopedia: towns, rivers, mountains, people, works and companies.

The same seed and scale give the same articles on every machine. Nothing in them is real.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

_SYLLABLES = (
    *("ba", "bel", "cor", "da", "del", "dor", "el", "fal", "fen", "gar", "hal", "il", "ka", "kel"),
    *("lan", "lo", "lu", "mar", "mel", "mi", "mor", "na", "nel", "no", "or", "pel", "ra", "ren"),
    *("ri", "sa", "sel", "so", "ta", "tel", "tor", "ul", "va", "vel", "vin", "zor"),
)
_PROFESSIONS = (
    *("painter", "clockmaker", "botanist", "architect", "poet", "surveyor", "glassblower"),
    *("composer", "printer", "astronomer", "weaver", "shipwright", "physician", "sculptor"),
)
_PRODUCTS = (
    *("lamps", "cheese", "bells", "paper", "rope", "ink", "pottery", "honey", "boots", "lenses"),
    *("soap", "barrels", "kites", "salt", "violins", "bricks"),
)
_KINDS_OF_WORK = ("fresco", "ballet", "bridge", "map", "novel", "clock", "fountain", "tapestry")
_THINGS = (
    *("Lantern", "Heron", "Orchard", "Anvil", "Harbour", "Winter", "Mirror", "Compass", "Garden"),
    *("Comet", "Ladder", "Meadow", "Sparrow", "Tower", "Thimble", "Wheel", "Candle", "Anchor"),
)
_COLOURS = ("Amber", "Silver", "Crimson", "Silent", "Broken", "Golden", "Northern", "Paper", "Blue")
SHARES = {"mountain": 20, "river": 20, "town": 40, "person": 60, "work": 40, "company": 20}
"""Articles of each kind at scale 1: two hundred."""


@dataclass
class Article:
    """One page: what it says of its subject, in words and as facts."""

    title: str
    kind: str
    """`town`, `river`, `mountain`, `person`, `work` or `company`."""
    relations: dict[str, str] = field(default_factory=dict)
    """Relation → title of another article."""
    values: dict[str, str] = field(default_factory=dict)
    """Attribute → its value."""
    text: str = ""
    """Three to five sentences."""

    @property
    def links(self) -> list[str]:
        """Titles of the articles that it names, each once."""
        return list(dict.fromkeys(self.relations.values()))


World = dict[str, Article]
"""All articles by title."""


@cache
def build_world(seed: int = 0, scale: float = 1.0) -> World:
    """The country of a seed.

    >>> len(build_world())
    200
    """
    draw = random.Random(f"wiki {seed} {scale}")
    numbers = {kind: max(4, round(share * scale)) for kind, share in SHARES.items()}
    titles = _titles(draw, numbers)
    world = {title: Article(title, kind) for kind in SHARES for title in titles[kind]}
    for article in world.values():
        _state_facts(article, titles, draw)
    for article in world.values():
        article.text = _written(article)
    return world


def _titles(draw: random.Random, numbers: dict[str, int]) -> dict[str, list[str]]:
    used: set[str] = set()

    def word() -> str:
        while True:
            name = "".join(draw.choices(_SYLLABLES, k=draw.choice((2, 3)))).title()
            if name not in used:
                used.add(name)
                return name

    works = [f"The {colour} {thing}" for colour in _COLOURS for thing in _THINGS]
    draw.shuffle(works)
    return {
        "mountain": [f"Mount {word()}" for _ in range(numbers["mountain"])],
        "river": [f"{word()} River" for _ in range(numbers["river"])],
        "town": [word() for _ in range(numbers["town"])],
        "person": [f"{word()} {word()}" for _ in range(numbers["person"])],
        "work": works[: numbers["work"]],
        "company": [f"{word()} Works" for _ in range(numbers["company"])],
    }


def _state_facts(article: Article, titles: dict[str, list[str]], draw: random.Random) -> None:
    def other(kind: str) -> str:
        return draw.choice([title for title in titles[kind] if title != article.title])

    match article.kind:
        case "mountain":
            article.relations = {"climber": other("person"), "neighbour": other("mountain")}
            article.values = {"height": str(draw.randint(900, 4800))}
        case "river":
            article.relations = {"source": other("mountain"), "mouth": other("town")}
            article.values = {"length": str(draw.randint(30, 900))}
        case "town":
            article.relations = {
                "river": other("river"),
                "mountain": other("mountain"),
                "mayor": other("person"),
                "twin": other("town"),
            }
            article.values = {"founded": str(draw.randint(1100, 1750))}
        case "person":
            article.relations = {"birthplace": other("town"), "teacher": other("person")}
            article.values = {
                "born": str(draw.randint(1780, 1960)),
                "profession": draw.choice(_PROFESSIONS),
            }
        case "work":
            article.relations = {"maker": other("person"), "keeper": other("town")}
            article.values = {
                "made": str(draw.randint(1800, 1990)),
                "form": draw.choice(_KINDS_OF_WORK),
            }
        case "company":
            article.relations = {"founder": other("person"), "seat": other("town")}
            article.values = {
                "founded": str(draw.randint(1800, 1990)),
                "product": draw.choice(_PRODUCTS),
            }


_TEXTS = {
    "mountain": (
        "{title} is a mountain {height} metres high. The first to stand on its summit was "
        "{climber}. A ridge joins it to {neighbour}."
    ),
    "river": (
        "The {title} rises on {source}. It is {length} kilometres long and reaches the great lake "
        "near {mouth}."
    ),
    "town": (
        "{title} is a town on the {river}, at the foot of {mountain}. It was founded in {founded}. "
        "The mayor is {mayor}. Its twin town is {twin}."
    ),
    "person": (
        "{title} is known as a {profession}, was born in {birthplace} in {born}, and learned the "
        "trade from {teacher}."
    ),
    "work": "{title} is a {form} by {maker}, finished in {made}. It is kept in {keeper}.",
    "company": (
        "{title} makes {product}. The company was founded in {founded} by {founder} and has its "
        "seat in {seat}."
    ),
}


def _written(article: Article) -> str:
    facts = {"title": article.title, **article.relations, **article.values}
    return _TEXTS[article.kind].format(**facts)


def reachable(world: World, start: str) -> dict[str, int]:
    """Articles that links lead to from a start, with the fewest clicks to each."""
    clicks, edge = {start: 0}, [start]
    while edge:
        ahead: Sequence[str] = [link for title in edge for link in world[title].links]
        edge = [title for title in dict.fromkeys(ahead) if title not in clicks]
        distance = max(clicks.values()) + 1
        clicks |= dict.fromkeys(edge, distance)
    return clicks
