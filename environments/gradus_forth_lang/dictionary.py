"""All words with their documentation, and a machine that knows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from gradus_forth_lang.machine import ForthError, Limits, Machine, Word
from gradus_forth_lang.words.control import CONTROL, DEFINING
from gradus_forth_lang.words.floats import FLOATS
from gradus_forth_lang.words.memory import MEMORY
from gradus_forth_lang.words.numbers import ARITHMETIC, BITS, COMPARISON, DOUBLE
from gradus_forth_lang.words.stack import STACK
from gradus_forth_lang.words.text import OUTPUT, STRINGS

VOCABULARIES = (
    *(STACK, ARITHMETIC, COMPARISON, BITS, CONTROL, DEFINING),
    *(MEMORY, OUTPUT, STRINGS, DOUBLE, FLOATS),
)
_HEADER = re.compile(r"^: (?P<name>\S+) (?P<effect>\( .*? \)) \\ (?P<text>.+)$")
_CHAPTER = re.compile(r"^\\ chapter: (\w+)$")
MAX_QUERY = 100


@cache
def all_words() -> tuple[Word, ...]:
    """Every word; those of the prelude are compiled once."""
    machine = Machine([word for book in VOCABULARIES for word in book.words], Limits(steps=10**6))
    text = (Path(__file__).parent / "prelude.fs").read_text()
    machine.run(text)
    chapter = ""
    for line in text.splitlines():
        if found := _CHAPTER.match(line):
            chapter = found[1]
        elif found := _HEADER.match(line):
            word = machine.words[machine.names[found["name"]]]
            word.effect, word.text, word.group = found["effect"], found["text"], chapter
    return tuple(machine.words)


def build_machine(limits: Limits | None = None) -> Machine:
    """A machine that knows every word.

    >>> machine = build_machine()
    >>> machine.run(": double-sum + 2* ; 3 4 double-sum .")
    >>> machine.text
    '14 '
    """
    return Machine(list(all_words()), limits)


def lookup(query: str) -> str:
    """What the documentation says of a word or a chapter; near names where it has none.

    >>> lookup("swap")
    'SWAP ( a b -- b a )  Exchange the two top numbers.  [stack]'
    """
    name = query.strip()[:MAX_QUERY]
    words = {word.name: word for word in all_words()}
    if word := words.get(name.upper()):
        return describe(word)
    chapters = {word.group for word in words.values()}
    if name.lower() in chapters:
        members = [word.name for word in words.values() if word.group == name.lower()]
        return f"Words of the chapter {name.lower()}: {' '.join(members)}"
    found = [describe(word) for word in _mentioning(name, list(words.values()))]
    if found:
        return "\n".join(found)
    near = get_close_matches(name.upper(), words, n=5, cutoff=0.5)
    hint = f"Near names: {' '.join(near)}. " if near else ""
    return f"There is no word {name!r}. {hint}Chapters: {' '.join(sorted(chapters))}"


def _mentioning(name: str, words: Sequence[Word], limit: int = 8) -> list[Word]:
    """Words whose description has every word of the query."""
    wanted = name.lower().split()
    return [w for w in words if wanted and all(part in w.text.lower() for part in wanted)][:limit]


def describe(word: Word) -> str:
    """One line of documentation."""
    return f"{word.name} {word.effect}  {word.text}  [{word.group}]"


def run_program(code: str, limits: Limits | None = None) -> tuple[Machine, str | None]:
    """Run a program on a new machine; the machine, and why it failed or None."""
    machine = build_machine(limits)
    try:
        machine.run(code)
    except ForthError as error:
        return machine, str(error)
    return machine, None
