"""Chapter `memory`: the data space."""

from __future__ import annotations

from gradus_forth_lang.machine import CELL, ForthError, Machine
from gradus_forth_lang.words.vocabulary import Vocabulary

MEMORY = Vocabulary("memory")

MEMORY.add("@", "addr -- x", "Read the cell at an address.", lambda m: m.push(m.fetch(m.pop())))
MEMORY.add("HERE", "-- addr", "The next free address.", lambda m: m.push(m.here))
MEMORY.add(
    "UNUSED", "-- n", "Free bytes of the data space.", lambda m: m.push(len(m.memory) - m.here)
)
MEMORY.unary("CELLS", "n -- bytes", "Bytes of n cells.", lambda n: n * CELL)
MEMORY.unary("CELL+", "addr -- addr'", "The address of the next cell.", lambda n: n + CELL)
MEMORY.unary("CELL-", "addr -- addr'", "The address of the cell before.", lambda n: n - CELL)
MEMORY.unary("CHARS", "n -- bytes", "Bytes of n characters.", lambda n: n)
MEMORY.unary("CHAR+", "addr -- addr'", "The address of the next character.", lambda n: n + 1)
MEMORY.unary("ALIGNED", "n -- n'", "Round up to whole cells.", lambda n: -(-n // CELL) * CELL)


@MEMORY.word("!", "x addr --", "Write the cell at an address.")
def _store(machine: Machine) -> None:
    value, address = machine.pop_many(2)
    machine.store(address, value)


@MEMORY.word("+!", "n addr --", "Add to the cell at an address.")
def _add_to(machine: Machine) -> None:
    value, address = machine.pop_many(2)
    machine.store(address, machine.fetch(address) + value)


@MEMORY.word("-!", "n addr --", "Subtract from the cell at an address.")
def _subtract_from(machine: Machine) -> None:
    value, address = machine.pop_many(2)
    machine.store(address, machine.fetch(address) - value)


@MEMORY.word("C@", "addr -- char", "Read the byte at an address.")
def _fetch_byte(machine: Machine) -> None:
    machine.push(machine.memory[machine.span(machine.pop(), 1)][0])


@MEMORY.word("C!", "char addr --", "Write the byte at an address.")
def _store_byte(machine: Machine) -> None:
    value, address = machine.pop_many(2)
    machine.memory[machine.span(address, 1)] = bytes([value & 255])


@MEMORY.word("2@", "addr -- a b", "Read two cells; b lies at the address.")
def _fetch_two(machine: Machine) -> None:
    address = machine.pop()
    machine.push_many([machine.fetch(address + CELL), machine.fetch(address)])


@MEMORY.word("2!", "a b addr --", "Write two cells; b goes to the address.")
def _store_two(machine: Machine) -> None:
    a, b, address = machine.pop_many(3)
    machine.store(address, b)
    machine.store(address + CELL, a)


@MEMORY.word("?", "addr --", "Print the cell at an address.")
def _show(machine: Machine) -> None:
    machine.emit(f"{machine.fetch(machine.pop())} ")


@MEMORY.word("ALLOT", "n --", "Reserve n bytes of the data space; negative gives back.")
def _allot(machine: Machine) -> None:
    machine.allot(machine.pop())


@MEMORY.word(",", "x --", "Append a cell to the data space.")
def _append(machine: Machine) -> None:
    value = machine.pop()
    machine.store(machine.allot(CELL), value)


@MEMORY.word("2,", "a b --", "Append two cells, b first.")
def _append_two(machine: Machine) -> None:
    a, b = machine.pop_many(2)
    for value in (b, a):
        machine.store(machine.allot(CELL), value)


@MEMORY.word("C,", "char --", "Append a byte to the data space.")
def _append_byte(machine: Machine) -> None:
    value = machine.pop()
    machine.memory[machine.span(machine.allot(1), 1)] = bytes([value & 255])


@MEMORY.word("ALIGN", "--", "Reserve bytes up to a whole cell.")
def _align(machine: Machine) -> None:
    machine.allot(-machine.here % CELL)


def _filled(machine: Machine, address: int, count: int, value: int) -> None:
    # The span first: it refuses a count for which the bytes would fill this process's memory.
    place = machine.span(address, count)
    machine.memory[place] = bytes([value & 255]) * count


@MEMORY.word("FILL", "addr n char --", "Write n bytes of one value.")
def _fill(machine: Machine) -> None:
    address, count, value = machine.pop_many(3)
    _filled(machine, address, count, value)


@MEMORY.word("ERASE", "addr n --", "Write n bytes of 0.")
def _erase(machine: Machine) -> None:
    address, count = machine.pop_many(2)
    _filled(machine, address, count, 0)


@MEMORY.word("BLANK", "addr n --", "Write n spaces.")
def _blank(machine: Machine) -> None:
    address, count = machine.pop_many(2)
    _filled(machine, address, count, ord(" "))


@MEMORY.word("MOVE", "from to n --", "Copy n bytes; the places may overlap.")
def _move(machine: Machine) -> None:
    source, target, count = machine.pop_many(3)
    data = bytes(machine.memory[machine.span(source, count)])
    machine.memory[machine.span(target, count)] = data


def _sorted(machine: Machine, *, is_descending: bool) -> None:
    address, count = machine.pop_many(2)
    machine.span(address, count * CELL)
    machine.charge(count * 2)
    values = [machine.fetch(address + place * CELL) for place in range(count)]
    for place, value in enumerate(sorted(values, reverse=is_descending)):
        machine.store(address + place * CELL, value)


MEMORY.add(
    "SORT", "addr n --", "Sort n cells, smallest first.", lambda m: _sorted(m, is_descending=False)
)
MEMORY.add(
    "SORT-DOWN",
    "addr n --",
    "Sort n cells, largest first.",
    lambda m: _sorted(m, is_descending=True),
)


@MEMORY.word("CELLS-MOVE", "from to n --", "Copy n cells; the places may overlap.")
def _move_cells(machine: Machine) -> None:
    source, target, count = machine.pop_many(3)
    if count < 0:
        raise ForthError("a negative count", -24)
    data = bytes(machine.memory[machine.span(source, count * CELL)])
    machine.memory[machine.span(target, count * CELL)] = data
