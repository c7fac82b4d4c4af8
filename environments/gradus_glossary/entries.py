"""A glossary of made-up words for tools of old trades, and questions about them.

The same seed gives the same glossary on every machine. Nothing in it is real.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

MIN_WORDS, MAX_WORDS = 12, 2000
_SYLLABLES = (
    *("bra", "chi", "dro", "fel", "gu", "hes", "jo", "kri", "lum", "mar", "nok", "ost", "pli"),
    *("qua", "rin", "sto", "tru", "urd", "ves", "wim", "yar", "zel"),
)
_MATERIALS = (
    *("amber", "ash wood", "bone", "brass", "clay", "copper", "flint", "glass", "horn", "iron"),
    *("ivory", "jade", "leather", "lead", "oak", "pewter", "silver", "slate", "straw", "tin"),
)
_TRADES = (
    *("baker", "bookbinder", "brewer", "carter", "cooper", "dyer", "falconer", "ferryman"),
    *("fletcher", "glazier", "locksmith", "miller", "potter", "saddler", "tanner", "thatcher"),
    *("tinker", "wainwright", "weaver", "wheelwright"),
)
_PURPOSES = (
    *("bend hoops", "carry embers", "clean hides", "comb wool", "cut reeds", "draw wire"),
    *("grind dyes", "hang bells", "hold seals", "level sand", "mark sacks", "measure grain"),
    *("pierce cork", "press petals", "roll dough", "scrape moss", "sort seeds", "split canes"),
    *("stretch cloth", "tie sheaves"),
)
_PARTS = ("cap", "foot", "handle", "hinge", "lid", "ring")
Question = tuple[str, str, tuple[str, ...]]
"""A question, its answer, and the words to look up for it; the first is what it asks about."""


@dataclass(frozen=True)
class Entry:
    """One word."""

    word: str
    material: str
    trade: str
    purpose: str
    part: str
    """A part of it, which has a name in the glossary."""
    part_word: str

    @property
    def definition(self) -> str:
        """What the glossary says."""
        return (
            f"a tool of {self.material} with which a {self.trade} may {self.purpose}. Its "
            f"{self.part} is called a {self.part_word}."
        )


Glossary = dict[str, Entry]


@cache
def build_glossary(seed: int = 0, num_words: int = 120) -> Glossary:
    """The words of a seed, in alphabetical order; no word explains another in a circle of one.

    >>> len(build_glossary())
    120
    """
    draw = random.Random(f"glossary {seed} {num_words}")
    words: set[str] = set()
    while len(words) < num_words:
        words.add("".join(draw.choices(_SYLLABLES, k=draw.choice((2, 3)))))
    glossary = {}
    for word in sorted(words):
        chosen = [draw.choice(kind) for kind in (_MATERIALS, _TRADES, _PURPOSES, _PARTS)]
        glossary[word] = Entry(word, *chosen, draw.choice(sorted(words - {word})))
    return glossary


def make_questions(glossary: Glossary, *, steps: tuple[int, int], seed: int) -> Iterator[Question]:
    """Every question over so many words, each once, in the order of a seed."""
    found: list[Question] = []
    for entry in glossary.values():
        subject, here, words = f"the {entry.word}", entry, [entry.word]
        for step in range(1, steps[1] + 1):
            if step >= steps[0]:
                asked = tuple(words)
                found += [
                    (f"Of what is {subject} made?", here.material, asked),
                    (f"Whose tool is {subject}?", here.trade, asked),
                    (f"What can one do with {subject}?", here.purpose, asked),
                ]
            subject = f"the {here.part} of {subject}"
            here = glossary[here.part_word]
            words.append(here.word)
    random.Random(f"glossary questions {seed}").shuffle(found)
    yield from found
