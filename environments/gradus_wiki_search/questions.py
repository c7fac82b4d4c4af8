"""Questions that follow facts from one article to the next."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from gradus_wiki_search.world import World

_OF = {
    "climber": "the first climber of {}",
    "neighbour": "the mountain that a ridge joins to {}",
    "source": "the mountain on which {} rises",
    "mouth": "the town near which {} reaches the great lake",
    "river": "the river of {}",
    "mountain": "the mountain above {}",
    "mayor": "the mayor of {}",
    "twin": "the twin town of {}",
    "birthplace": "the birthplace of {}",
    "teacher": "the teacher of {}",
    "maker": "the maker of {}",
    "keeper": "the town that keeps {}",
    "founder": "the founder of {}",
    "seat": "the seat of {}",
}
"""Relation → how the article that it leads to is called."""
_ASK = {
    ("mountain", "height"): "How many metres high is {}?",
    ("river", "length"): "How many kilometres long is {}?",
    ("town", "founded"): "In which year was {} founded?",
    ("person", "born"): "In which year was {} born?",
    ("person", "profession"): "What is the profession of {}?",
    ("work", "made"): "In which year was {} finished?",
    ("company", "founded"): "In which year was {} founded?",
    ("company", "product"): "What does {} make?",
}
_DRAWS = 400
"""Chains that are drawn for each question of a kind, at most."""


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the articles that one must read to know it."""

    text: str
    answer: str
    titles: tuple[str, ...]
    """From the one that the question names to the one that has the answer."""


def make_questions(world: World, *, hops: tuple[int, int], seed: int) -> Iterator[Question]:
    """Different questions about a world, over `hops` articles each, until hardly any are left.

    >>> from gradus_wiki_search.world import build_world
    >>> len(next(make_questions(build_world(), hops=(2, 2), seed=0)).titles)
    2
    """
    draw = random.Random(f"wiki questions {seed}")
    titles = list(world)
    seen: set[str] = set()
    failed = 0
    while failed < _DRAWS:
        chain = _chain(world, draw.choice(titles), draw.randint(*hops), draw)
        question = _question(world, chain, draw)
        if question is None or question.text in seen:
            failed += 1
            continue
        failed = 0
        seen.add(question.text)
        yield question


def _chain(world: World, start: str, length: int, draw: random.Random) -> list[tuple[str, str]]:
    """(relation, title) pairs; the first has no relation."""
    chain = [("", start)]
    while len(chain) < length:
        relation, title = draw.choice(list(world[chain[-1][1]].relations.items()))
        chain.append((relation, title))
    return chain


def _question(world: World, chain: list[tuple[str, str]], draw: random.Random) -> Question | None:
    titles = tuple(title for _, title in chain)
    if len(set(titles)) < len(titles):
        return None
    subject = f"the {titles[0]}" if world[titles[0]].kind == "river" else titles[0]
    for relation, _ in chain[1:]:
        subject = _OF[relation].format(subject)
    last = world[titles[-1]]
    asked = [name for kind, name in _ASK if kind == last.kind]
    name = draw.choice(asked)
    return Question(_ASK[last.kind, name].format(subject), last.values[name], titles)
