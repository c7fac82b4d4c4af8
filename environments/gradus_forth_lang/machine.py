"""A Forth with limits: every program ends, whatever it does.

Cells are signed integers of 64 bits. The machine interprets the source word by word; a colon
definition becomes a list of Python callables that one flat loop runs, so that deep recursion of a
program is no recursion of Python. Steps, memory, stacks, output and source are bounded, and what
a word does in bulk is charged as steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from gradus_forth_lang.literals import read_number

CELL = 8
"""Bytes of a cell."""
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
MAX_NESTING = 20
"""How deep CATCH and EVALUATE may lie inside one another; each is a call of Python."""
BYTES_PER_STEP = 16

Op: TypeAlias = Callable[["Machine"], None]


class ForthError(Exception):
    """A program failed; `code` is the number that CATCH would see."""

    def __init__(self, text: str, code: int = -2048) -> None:
        super().__init__(text)
        self.code = code


class LimitReached(ForthError):
    """A limit of the machine; CATCH does not stop it."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    steps: int = 100_000
    """Words that run, bulk work included."""
    memory: int = 65_536
    """Bytes of data space."""
    stack: int = 1_024
    """Cells of each stack."""
    calls: int = 512
    """Definitions inside one another."""
    output: int = 8_192
    """Characters that are printed."""
    source: int = 32_768
    """Characters of the program."""


@dataclass
class Word:
    """One word of the dictionary."""

    name: str
    effect: str
    """Stack effect, like `( a b -- sum )`."""
    text: str
    """A sentence on what it does."""
    run: Op | None = None
    """Its action, for what Python does."""
    code: list[Op] | None = None
    """Its body, for a colon definition or what follows DOES>."""
    start: int = 0
    """Where in the body it begins; not 0 after DOES>."""
    body: int | None = None
    """Its data, for what CREATE made."""
    is_immediate: bool = False
    """True if it runs while a definition is compiled."""
    is_compile_only: bool = False
    """True if it means nothing outside a definition."""
    group: str = "yours"
    """The chapter of the documentation."""


@dataclass
class _Frame:
    """Where to go on after a definition, and what it must leave as it found it."""

    code: list[Op]
    position: int
    num_returns: int
    num_loops: int


@dataclass
class Loop:
    """A counted loop that runs."""

    index: int
    limit: int


@dataclass
class _Source:
    """The text that is read and how far."""

    text: str = ""
    position: int = 0


@dataclass
class Definition:
    """A definition that is being compiled."""

    word: Word
    code: list[Op] = field(default_factory=list)
    control: list[tuple[str, list[int]]] = field(default_factory=list)
    """Open IFs, loops and cases, with places to jump to or to fill in."""


def signed(value: int) -> int:
    """The cell that holds `value`, modulo 2**64.

    >>> signed(2**63), signed(-1)
    (-9223372036854775808, -1)
    """
    value &= _MASK
    return value - (1 << 64) if value & _SIGN else value


def unsigned(value: int) -> int:
    """The cell read without a sign."""
    return value & _MASK


class Machine:
    """Owns stacks, memory, dictionary and output of one program.

    >>> machine = build_machine()  # doctest: +SKIP
    >>> machine.run(": squared dup * ; 7 squared .")  # doctest: +SKIP
    >>> machine.text  # doctest: +SKIP
    '49 '
    """

    def __init__(self, words: list[Word], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.stack: list[int] = []
        self.returns: list[int] = []
        self.loops: list[Loop] = []
        self.floats: list[float] = []
        self.memory = bytearray(self.limits.memory)
        self.here = CELL
        """Address 0 is never handed out."""
        self.words = list(words)
        self.names = {word.name: index for index, word in enumerate(self.words)}
        self.definition: Definition | None = None
        self.latest: Word | None = None
        self.source = _Source()
        self.base = 10
        self.held: list[str] = []
        """Digits of a pictured number, last one first."""
        self.steps = 0
        self._frames: list[_Frame] = []
        self._code: list[Op] = []
        self.position = 0
        """Of the next operation in the definition that runs."""
        self._nesting = 0
        self._output: list[str] = []
        self._num_output = 0

    # -- stacks

    def push(self, value: int) -> None:
        """Put a number on the stack, modulo 2**64."""
        if len(self.stack) >= self.limits.stack:
            raise ForthError("stack overflow", -3)
        self.stack.append(signed(value))

    def pop(self) -> int:
        """Take the top number."""
        if not self.stack:
            raise ForthError("stack underflow", -4)
        return self.stack.pop()

    def pop_many(self, count: int) -> list[int]:
        """Take `count` numbers; the last of the list was on top."""
        if count > len(self.stack):
            raise ForthError("stack underflow", -4)
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def push_many(self, values: list[int]) -> None:
        for value in values:
            self.push(value)

    def push_flag(self, value: bool) -> None:
        """Put -1 for true and 0 for false."""
        self.push(-1 if value else 0)

    def push_float(self, value: float) -> None:
        """Put a number on the stack of floats; no infinity and no NaN gets there."""
        if value != value or value in (float("inf"), float("-inf")):
            raise ForthError("float result out of range", -43)
        if len(self.floats) >= self.limits.stack:
            raise ForthError("float stack overflow", -44)
        self.floats.append(value)

    def pop_float(self) -> float:
        """Take the top float."""
        if not self.floats:
            raise ForthError("float stack underflow", -45)
        return self.floats.pop()

    def push_return(self, value: int) -> None:
        """Put a number on the return stack."""
        if len(self.returns) >= self.limits.stack:
            raise ForthError("return stack overflow", -5)
        self.returns.append(value)

    def pop_returns(self, count: int) -> list[int]:
        """Take numbers that this definition put on the return stack."""
        floor = self._frames[-1].num_returns if self._frames else 0
        if len(self.returns) - count < floor:
            raise ForthError("return stack underflow", -6)
        taken = self.returns[len(self.returns) - count :]
        del self.returns[len(self.returns) - count :]
        return taken

    # -- memory

    def span(self, address: int, count: int) -> slice:
        """The bytes from `address`; ForthError where they are not all ours."""
        if count < 0 or address < 0 or address + count > len(self.memory):
            raise ForthError(f"invalid memory address {address}", -9)
        self.charge(count // BYTES_PER_STEP)
        return slice(address, address + count)

    def fetch(self, address: int) -> int:
        return int.from_bytes(self.memory[self.span(address, CELL)], "little", signed=True)

    def store(self, address: int, value: int) -> None:
        self.memory[self.span(address, CELL)] = signed(value).to_bytes(CELL, "little", signed=True)

    def allot(self, count: int) -> int:
        """Reserve bytes of the data space, or give back, and return where they begin."""
        start, end = self.here, self.here + count
        if not CELL <= end <= len(self.memory):
            raise ForthError("the data space is full", -8)
        self.here = end
        return start

    def text_at(self, address: int, count: int) -> str:
        return self.memory[self.span(address, count)].decode("latin-1")

    def keep_text(self, text: str) -> tuple[int, int]:
        """Write a string to the data space; its address and length."""
        data = text.encode("latin-1", "replace")
        address = self.allot(len(data))
        self.memory[self.span(address, len(data))] = data
        return address, len(data)

    # -- output and limits

    def emit(self, text: str) -> None:
        """Print."""
        self._num_output += len(text)
        if self._num_output > self.limits.output:
            raise LimitReached(f"more than {self.limits.output} characters printed")
        self._output.append(text)

    @property
    def text(self) -> str:
        """What was printed."""
        return "".join(self._output)

    def charge(self, steps: int) -> None:
        """Count work; LimitReached when it was too much."""
        self.steps += steps
        if self.steps > self.limits.steps:
            raise LimitReached(f"more than {self.limits.steps} steps")

    # -- the inner interpreter

    def execute(self, word: Word) -> None:
        """Run one word to its end."""
        depth = len(self._frames)
        self.enter(word)
        while len(self._frames) > depth:
            if self.position >= len(self._code):
                self.leave()
                continue
            operation = self._code[self.position]
            self.position += 1
            self.charge(1)
            operation(self)

    def enter(self, word: Word) -> None:
        """Begin a word: a definition is entered, anything else runs at once."""
        if word.body is not None:
            self.push(word.body)
        if word.code is not None:
            self.call(word.code, word.start)
        elif word.run is not None:
            self.charge(1)
            word.run(self)

    def call(self, code: list[Op], start: int = 0) -> None:
        """Enter a body."""
        if len(self._frames) >= self.limits.calls:
            raise ForthError("too many definitions inside one another (endless recursion?)", -5)
        frame = _Frame(self._code, self.position, len(self.returns), len(self.loops))
        self._frames.append(frame)
        self._code, self.position = code, start

    def leave(self) -> None:
        """Return from the definition that runs."""
        frame = self._frames.pop()
        if (len(self.returns), len(self.loops)) != (frame.num_returns, frame.num_loops):
            raise ForthError(
                "the definition leaves something on the return stack or in a loop", -25
            )
        self._code, self.position = frame.code, frame.position

    @property
    def running(self) -> list[Op]:
        return self._code

    def guarded(self, word: Word) -> int:
        """Run a word as CATCH does: 0, or the code of its error with all depths as before."""
        depths = (len(self.stack), len(self.returns), len(self.loops), len(self.floats))
        place = (self._code, self.position, len(self._frames), self.source)
        try:
            with _Nested(self):
                self.execute(word)
        except LimitReached:
            raise
        except ForthError as error:
            del self.returns[depths[1] :], self.loops[depths[2] :], self.floats[depths[3] :]
            self.stack = (self.stack + [0] * depths[0])[: depths[0]]
            self._code, self.position, frames, self.source = place
            del self._frames[frames:]
            return error.code
        return 0

    # -- the outer interpreter

    def run(self, text: str) -> None:
        """Interpret a program. ForthError when it fails; what it did until then stays."""
        if len(text) > self.limits.source:
            raise LimitReached(f"the program has more than {self.limits.source} characters")
        self.evaluate(text)
        if self.definition is not None:
            raise ForthError(f"the definition of {self.definition.word.name} has no ;", -22)

    def evaluate(self, text: str) -> None:
        """Interpret a text inside the program."""
        before, self.source = self.source, _Source(text)
        self.charge(len(text) // BYTES_PER_STEP)
        with _Nested(self):
            while name := self.parse_name():
                self.interpret(name)
        self.source = before

    def interpret(self, name: str) -> None:
        """Run or compile one word or number."""
        index = self.names.get(name.upper())
        if index is None:
            self._number(name)
            return
        word = self.words[index]
        if self.definition is not None and not word.is_immediate:
            self.compile(word)
        elif word.is_compile_only and self.definition is None:
            raise ForthError(f"{word.name} works only inside a definition", -14)
        else:
            self.execute(word)

    def _number(self, name: str) -> None:
        found = read_number(name, self.base)
        if found is None:
            raise ForthError(f"{name[:64]} ? (not a word, and not a number)", -13)
        for value in found:
            if isinstance(value, float):
                self.literal_float(value)
            else:
                self.literal(value)

    def literal(self, value: int) -> None:
        """Compile a number, or push it outside a definition."""
        if self.definition is None:
            self.push(value)
        else:
            self.definition.code.append(lambda machine: machine.push(value))

    def literal_float(self, value: float) -> None:
        """Compile a float, or push it outside a definition."""
        if self.definition is None:
            self.push_float(value)
        else:
            self.definition.code.append(lambda machine: machine.push_float(value))

    def compile(self, word: Word) -> None:
        """Append a word to the definition."""
        is_plain = word.code is None and word.body is None and word.run is not None
        operation = word.run if is_plain else (lambda machine: machine.enter(word))
        assert operation is not None
        self.compiling.code.append(operation)
        if len(self.compiling.code) > self.limits.source:
            raise LimitReached("a definition is too long")

    @property
    def compiling(self) -> Definition:
        """The open definition; ForthError outside one."""
        if self.definition is None:
            raise ForthError("works only inside a definition", -14)
        return self.definition

    def add(self, word: Word) -> None:
        """Make a word known; a later one hides an earlier one of its name."""
        if len(self.words) >= len(self.memory) // CELL:
            raise LimitReached("too many definitions")
        self.names[word.name] = len(self.words)
        self.words.append(word)

    def word_of(self, token: int) -> Word:
        """The word of an execution token."""
        if not 0 <= token < len(self.words):
            raise ForthError(f"{token} is no execution token", -9)
        return self.words[token]

    def find(self, name: str) -> int:
        """The execution token of a name; ForthError for an unknown one."""
        index = self.names.get(name.upper())
        if index is None:
            raise ForthError(f"{name[:64] or 'a name'} ? (not a word)", -13)
        return index

    # -- reading the source

    def parse_name(self) -> str:
        """The next text between blanks; empty at the end."""
        source = self.source
        text, position = source.text, source.position
        while position < len(text) and text[position].isspace():
            position += 1
        start = position
        while position < len(text) and not text[position].isspace():
            position += 1
        source.position = min(position + 1, len(text))
        return text[start:position]

    def parse(self, end: str) -> str:
        """The text up to a character, which is skipped."""
        source = self.source
        found = source.text.find(end, source.position)
        stop = len(source.text) if found < 0 else found
        taken = source.text[source.position : stop]
        source.position = min(stop + 1, len(source.text))
        return taken

    def new_name(self) -> str:
        """The name of a word to define."""
        name = self.parse_name().upper()
        if not name or len(name) > 64:
            raise ForthError("a name of 1 to 64 characters must follow", -16)
        return name


class _Nested:
    """Counts calls of Python inside one another."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __enter__(self) -> None:
        self._machine._nesting += 1
        if self._machine._nesting > MAX_NESTING:
            self._machine._nesting -= 1
            raise LimitReached(f"more than {MAX_NESTING} CATCH and EVALUATE inside one another")

    def __exit__(self, *_: object) -> None:
        self._machine._nesting -= 1
