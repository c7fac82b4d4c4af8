"""How chapters of words are written down."""

from __future__ import annotations

from collections.abc import Callable

from gradus_forth_lang.machine import Machine, Op, Word


class Vocabulary:
    """One chapter of words.

    >>> chapter = Vocabulary("stack")
    >>> chapter.shuffle("SWAP", "a b -- b a", "Exchange the two top numbers.")
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self.words: list[Word] = []

    def add(self, name: str, effect: str, text: str, run: Op) -> None:
        """A word with any action."""
        self.words.append(Word(name, f"( {effect} )", text, run, group=self.group))

    def word(
        self, name: str, effect: str, text: str, *, immediate: bool = False, inside: bool = False
    ) -> Callable[[Op], Op]:
        """A word whose action is the decorated function.

        `immediate` words run while a definition is compiled, words that are `inside` mean nothing
        outside one.
        """

        def keep(run: Op) -> Op:
            word = Word(name, f"( {effect} )", text, run, group=self.group)
            word.is_immediate, word.is_compile_only = immediate, inside
            self.words.append(word)
            return run

        return keep

    def shuffle(self, name: str, effect: str, text: str) -> None:
        """A word that only reorders, copies or drops: its effect says how."""
        before, after = (side.split() for side in effect.split("--"))
        order = [before.index(item) for item in after]

        def run(machine: Machine) -> None:
            taken = machine.pop_many(len(before))
            machine.push_many([taken[place] for place in order])

        self.add(name, effect, text, run)

    def unary(self, name: str, effect: str, text: str, compute: Callable[[int], int]) -> None:
        """A word that replaces the top number."""
        self.add(name, effect, text, lambda machine: machine.push(compute(machine.pop())))

    def binary(self, name: str, effect: str, text: str, compute: Callable[[int, int], int]) -> None:
        """A word that replaces the two top numbers by one."""

        def run(machine: Machine) -> None:
            left, right = machine.pop_many(2)
            machine.push(compute(left, right))

        self.add(name, effect, text, run)

    def test(self, name: str, effect: str, text: str, is_true: Callable[..., bool]) -> None:
        """A word that replaces as many numbers as its effect names by a flag."""
        count = len(effect.split("--")[0].split())

        def run(machine: Machine) -> None:
            machine.push_flag(is_true(*machine.pop_many(count)))

        self.add(name, effect, text, run)
