"""Chapters `output` and `strings`: printing, digits, and text in memory."""

from __future__ import annotations

from collections.abc import Callable

from gradus_forth_lang.literals import read_number
from gradus_forth_lang.machine import ForthError, Machine, unsigned
from gradus_forth_lang.words.numbers import pop_double, push_double
from gradus_forth_lang.words.vocabulary import Vocabulary

OUTPUT = Vocabulary("output")
STRINGS = Vocabulary("strings")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_WIDTH = 1_024
"""Most characters that one word pads to."""


def in_base(value: int, base: int) -> str:
    """A number in a base between 2 and 36.

    >>> in_base(-255, 16)
    '-FF'
    """
    if value == 0:
        return "0"
    digits, rest = [], abs(value)
    while rest:
        rest, digit = divmod(rest, base)
        digits.append(_DIGITS[digit])
    return ("-" if value < 0 else "") + "".join(reversed(digits))


def _padded(machine: Machine, text: str, width: int) -> None:
    machine.emit(text.rjust(min(width, MAX_WIDTH)))


def _spaces(machine: Machine) -> None:
    machine.emit(" " * min(max(machine.pop(), 0), MAX_WIDTH))


OUTPUT.add(
    ".", "n --", "Print a number and a space.", lambda m: m.emit(f"{in_base(m.pop(), m.base)} ")
)
OUTPUT.add(
    "U.",
    "u --",
    "Print without a sign.",
    lambda m: m.emit(f"{in_base(unsigned(m.pop()), m.base)} "),
)
OUTPUT.add(
    "D.",
    "d --",
    "Print a number of two cells.",
    lambda m: m.emit(f"{in_base(pop_double(m), m.base)} "),
)
OUTPUT.add("EMIT", "char --", "Print a character.", lambda m: m.emit(chr(m.pop() & 255)))
OUTPUT.add("CR", "--", "Begin a new line.", lambda m: m.emit("\n"))
OUTPUT.add("SPACE", "--", "Print a space.", lambda m: m.emit(" "))
OUTPUT.add("SPACES", "n --", "Print n spaces, at most 1024.", _spaces)
OUTPUT.add("BL", "-- char", "The character space.", lambda m: m.push(32))


@OUTPUT.word(".R", "n width --", "Print a number at the right of a column.")
def _print_right(machine: Machine) -> None:
    value, width = machine.pop_many(2)
    _padded(machine, in_base(value, machine.base), width)


@OUTPUT.word("U.R", "u width --", "Like .R, without a sign.")
def _print_unsigned_right(machine: Machine) -> None:
    value, width = machine.pop_many(2)
    _padded(machine, in_base(unsigned(value), machine.base), width)


@OUTPUT.word("D.R", "d width --", "Like .R, a number of two cells.")
def _print_double_right(machine: Machine) -> None:
    width = machine.pop()
    _padded(machine, in_base(pop_double(machine), machine.base), width)


@OUTPUT.word(".S", "--", "Print the stack, which stays: <count> and the numbers, top last.")
def _print_stack(machine: Machine) -> None:
    machine.charge(len(machine.stack))
    shown = [in_base(value, machine.base) for value in machine.stack]
    machine.emit(" ".join([f"<{len(shown)}>", *shown]) + " ")


@OUTPUT.word("TYPE", "addr n --", "Print a string.")
def _type(machine: Machine) -> None:
    address, count = machine.pop_many(2)
    machine.emit(machine.text_at(address, count))


@OUTPUT.word("STARS", "n --", "Print n stars, at most 1024.")
def _stars(machine: Machine) -> None:
    machine.emit("*" * min(max(machine.pop(), 0), MAX_WIDTH))


@OUTPUT.word(".HEX", "u --", "Print in base 16 and a space.")
def _print_hex(machine: Machine) -> None:
    machine.emit(f"{unsigned(machine.pop()):X} ")


@OUTPUT.word(".BIN", "u --", "Print in base 2 and a space.")
def _print_binary(machine: Machine) -> None:
    machine.emit(f"{unsigned(machine.pop()):b} ")


for _name, _base in (("DECIMAL", 10), ("HEX", 16), ("OCTAL", 8), ("BINARY", 2)):

    def _set_base(machine: Machine, base: int = _base) -> None:
        machine.base = base

    OUTPUT.add(_name, "--", f"Read and print numbers in base {_base}.", _set_base)

OUTPUT.add("BASE@", "-- n", "The base of numbers.", lambda m: m.push(m.base))


@OUTPUT.word("BASE!", "n --", "Set the base of numbers, 2 to 36.")
def _choose_base(machine: Machine) -> None:
    base = machine.pop()
    if not 2 <= base <= len(_DIGITS):
        raise ForthError("the base must be 2 to 36", -24)
    machine.base = base


@OUTPUT.word("<#", "--", "Begin a number that is built digit by digit, last digit first.")
def _begin_digits(machine: Machine) -> None:
    machine.held = []


@OUTPUT.word("#", "d -- d", "Add the next digit.")
def _digit(machine: Machine) -> None:
    rest, digit = divmod(pop_double(machine) % (1 << 128), machine.base)
    _hold(machine, _DIGITS[digit])
    push_double(machine, rest)


@OUTPUT.word("#S", "d -- 0 0", "Add all remaining digits, at least one.")
def _all_digits(machine: Machine) -> None:
    for digit in reversed(in_base(pop_double(machine) % (1 << 128), machine.base)):
        _hold(machine, digit)
    push_double(machine, 0)


@OUTPUT.word("HOLD", "char --", "Add a character before the digits.")
def _hold_character(machine: Machine) -> None:
    _hold(machine, chr(machine.pop() & 255))


@OUTPUT.word("SIGN", "n --", "Add a minus where n is negative.")
def _sign(machine: Machine) -> None:
    if machine.pop() < 0:
        _hold(machine, "-")


@OUTPUT.word("#>", "d -- addr n", "End the number; it is a string now.")
def _end_digits(machine: Machine) -> None:
    machine.pop_many(2)
    machine.push_many([*machine.keep_text("".join(reversed(machine.held)))])


def _hold(machine: Machine, character: str) -> None:
    if len(machine.held) >= MAX_WIDTH:
        raise ForthError("the number has too many digits", -17)
    machine.held.append(character)


def pop_text(machine: Machine) -> str:
    """Take a string: its address and length."""
    address, count = machine.pop_many(2)
    return machine.text_at(address, count)


def push_text(machine: Machine, text: str) -> None:
    """Keep a string in the data space and push address and length."""
    machine.push_many([*machine.keep_text(text)])


def _changed(name: str, text: str, change: Callable[[str], str]) -> None:
    STRINGS.add(name, "addr n -- addr' n'", text, lambda m: push_text(m, change(pop_text(m))))


def _tested(name: str, text: str, is_true: Callable[[str, str], bool]) -> None:
    def run(machine: Machine) -> None:
        right, left = pop_text(machine), pop_text(machine)
        machine.push_flag(is_true(left, right))

    STRINGS.add(name, "addr n addr n -- flag", text, run)


_changed(
    "S-UPPER",
    "The string in capital letters.",
    lambda t: t.encode("latin-1").upper().decode("latin-1"),
)
_changed(
    "S-LOWER",
    "The string in small letters.",
    lambda t: t.encode("latin-1").lower().decode("latin-1"),
)
_changed("S-REVERSE", "The string from its end to its beginning.", lambda t: t[::-1])
_changed("S-COPY", "A copy of the string.", str)
_changed("-TRAILING", "The string without spaces at its end.", lambda t: t.rstrip(" "))
_changed("S-TRIM", "The string without spaces at both ends.", lambda t: t.strip(" "))
_changed("S-SORT", "The characters of the string in order.", lambda t: "".join(sorted(t)))
_tested("S=", "Whether two strings are equal.", lambda a, b: a == b)
_tested("S<", "Whether the first string comes before the second.", lambda a, b: a < b)
_tested(
    "S-STARTS?", "Whether the first string begins with the second.", lambda a, b: a.startswith(b)
)
_tested("S-ENDS?", "Whether the first string ends with the second.", lambda a, b: a.endswith(b))
_tested("S-CONTAINS?", "Whether the first string contains the second.", lambda a, b: b in a)


@STRINGS.word("S+", "addr n addr n -- addr' n'", "Join two strings to a new one.")
def _join(machine: Machine) -> None:
    right, left = pop_text(machine), pop_text(machine)
    push_text(machine, left + right)


@STRINGS.word("COMPARE", "addr n addr n -- -1|0|1", "The order of two strings.")
def _compare(machine: Machine) -> None:
    right, left = pop_text(machine), pop_text(machine)
    machine.push((left > right) - (left < right))


@STRINGS.word("SEARCH", "addr n addr n -- addr' n' flag", "Find the second string in the first.")
def _search(machine: Machine) -> None:
    wanted = pop_text(machine)
    address, count = machine.pop_many(2)
    place = machine.text_at(address, count).find(wanted)
    found = place >= 0
    place = max(place, 0)
    machine.push_many([address + place, count - place])
    machine.push_flag(found)


@STRINGS.word("/STRING", "addr n k -- addr' n'", "The string without its first k characters.")
def _cut(machine: Machine) -> None:
    address, count, removed = machine.pop_many(3)
    machine.push_many([address + removed, count - removed])


@STRINGS.word("S-LEFT", "addr n k -- addr k'", "The first k characters, or as many as there are.")
def _left(machine: Machine) -> None:
    address, count, kept = machine.pop_many(3)
    machine.push_many([address, min(count, max(kept, 0))])


@STRINGS.word("S-RIGHT", "addr n k -- addr' k'", "The last k characters, or as many as there are.")
def _right(machine: Machine) -> None:
    address, count, kept = machine.pop_many(3)
    kept = min(count, max(kept, 0))
    machine.push_many([address + count - kept, kept])


@STRINGS.word("S-AT", "addr n k -- char", "The character at place k, from 0.")
def _at(machine: Machine) -> None:
    address, count, place = machine.pop_many(3)
    if not 0 <= place < count:
        raise ForthError(f"the string has no place {place}", -24)
    machine.push(ord(machine.text_at(address + place, 1)))


@STRINGS.word("S-COUNT", "addr n char -- count", "How often a character occurs.")
def _count(machine: Machine) -> None:
    character = chr(machine.pop() & 255)
    machine.push(pop_text(machine).count(character))


@STRINGS.word("S-INDEX", "addr n char -- k", "The first place of a character, or -1.")
def _index(machine: Machine) -> None:
    character = chr(machine.pop() & 255)
    machine.push(pop_text(machine).find(character))


@STRINGS.word("COUNT", "addr -- addr+1 n", "The string whose length is the byte at an address.")
def _counted(machine: Machine) -> None:
    address = machine.pop()
    machine.push_many([address + 1, machine.memory[machine.span(address, 1)][0]])


@STRINGS.word(">NUMBER?", "addr n -- n flag", "Read a number; 0 and false where it is none.")
def _read(machine: Machine) -> None:
    found = read_number(pop_text(machine), machine.base)
    is_number = found is not None and len(found) == 1 and isinstance(found[0], int)
    machine.push(int(found[0]) if found and is_number else 0)
    machine.push_flag(is_number)


@STRINGS.word("N>S", "n -- addr n", "The number as a string.")
def _write(machine: Machine) -> None:
    push_text(machine, in_base(machine.pop(), machine.base))


for _name, _text, _test in (
    ("DIGIT?", "Whether a character is a digit.", lambda c: 48 <= c <= 57),
    (
        "LETTER?",
        "Whether a character is a letter.",
        lambda c: chr(c & 127).isalpha() and 0 <= c < 128,
    ),
    ("UPPER?", "Whether a character is a capital letter.", lambda c: 65 <= c <= 90),
    ("LOWER?", "Whether a character is a small letter.", lambda c: 97 <= c <= 122),
    ("SPACE?", "Whether a character is a blank.", lambda c: c in (9, 10, 13, 32)),
    (
        "VOWEL?",
        "Whether a character is one of aeiou.",
        lambda c: 0 < c < 128 and chr(c) in "aeiouAEIOU",
    ),
):
    STRINGS.test(_name, "char -- flag", _text, _test)

STRINGS.unary(
    ">UPPER", "char -- char", "As a capital letter.", lambda c: c - 32 if 97 <= c <= 122 else c
)
STRINGS.unary(
    ">LOWER", "char -- char", "As a small letter.", lambda c: c + 32 if 65 <= c <= 90 else c
)
STRINGS.unary(">DIGIT", "n -- char", "The character of a digit.", lambda n: ord(_DIGITS[n % 36]))
STRINGS.unary("DIGIT>", "char -- n", "What a digit is worth.", lambda c: c - 48)
