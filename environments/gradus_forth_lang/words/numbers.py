"""Chapters `arithmetic`, `comparison`, `bits` and `double`: whole numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from gradus_forth_lang.machine import ForthError, Machine, signed, unsigned
from gradus_forth_lang.words.vocabulary import Vocabulary

ARITHMETIC = Vocabulary("arithmetic")
COMPARISON = Vocabulary("comparison")
BITS = Vocabulary("bits")
DOUBLE = Vocabulary("double")

TRUE = -1
_CELL_BITS = 64


def _divided(left: int, right: int) -> tuple[int, int]:
    """Quotient and remainder, rounded down."""
    if right == 0:
        raise ForthError("division by zero", -10)
    return left // right, left % right


def _truncated(left: int, right: int) -> tuple[int, int]:
    """Quotient and remainder, rounded towards zero."""
    quotient, rest = _divided(abs(left), abs(right))
    return (quotient if (left < 0) == (right < 0) else -quotient), (rest if left >= 0 else -rest)


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise ForthError("a negative exponent", -24)
    return pow(base, exponent, 1 << _CELL_BITS)


def _root(value: int) -> int:
    if value < 0:
        raise ForthError("the root of a negative number", -24)
    return math.isqrt(value)


for _name, _effect, _text, _two in (
    ("+", "a b -- a+b", "Add.", operator.add),
    ("-", "a b -- a-b", "Subtract the top number from the second.", operator.sub),
    ("*", "a b -- a*b", "Multiply.", operator.mul),
    ("/", "a b -- a/b", "Divide, rounded down; b must not be 0.", lambda a, b: _divided(a, b)[0]),
    ("MOD", "a b -- rest", "Rest of a / b, with the sign of b.", lambda a, b: _divided(a, b)[1]),
    ("MAX", "a b -- larger", "The larger of two numbers.", max),
    ("MIN", "a b -- smaller", "The smaller of two numbers.", min),
    ("GCD", "a b -- divisor", "Greatest common divisor, never negative.", math.gcd),
    ("LCM", "a b -- multiple", "Least common multiple, never negative.", math.lcm),
    ("**", "a n -- a^n", "Power; n must not be negative.", _power),
):
    ARITHMETIC.binary(_name, _effect, _text, _two)

for _name, _effect, _text, _one in (
    ("1+", "n -- n+1", "Add 1.", lambda n: n + 1),
    ("1-", "n -- n-1", "Subtract 1.", lambda n: n - 1),
    ("2+", "n -- n+2", "Add 2.", lambda n: n + 2),
    ("2-", "n -- n-2", "Subtract 2.", lambda n: n - 2),
    ("2*", "n -- 2n", "Double.", lambda n: n * 2),
    ("2/", "n -- half", "Halve, rounded down.", lambda n: n >> 1),
    ("NEGATE", "n -- -n", "Change the sign.", operator.neg),
    ("ABS", "n -- size", "Remove the sign.", abs),
    ("SGN", "n -- -1|0|1", "The sign.", lambda n: (n > 0) - (n < 0)),
    ("ISQRT", "n -- root", "Square root, rounded down; n must not be negative.", _root),
):
    ARITHMETIC.unary(_name, _effect, _text, _one)


def _push_both(divide: Callable[[int, int], tuple[int, int]]) -> Callable[[Machine], None]:
    def run(machine: Machine) -> None:
        quotient, rest = divide(*machine.pop_many(2))
        machine.push_many([rest, quotient])

    return run


ARITHMETIC.add("/MOD", "a b -- rest quotient", "Divide, rounded down.", _push_both(_divided))
ARITHMETIC.add("TRUNC/MOD", "a b -- rest quotient", "Divide, rounded to 0.", _push_both(_truncated))


@ARITHMETIC.word("*/", "a b c -- a*b/c", "Multiply, then divide; nothing overflows between.")
def _scale(machine: Machine) -> None:
    a, b, c = machine.pop_many(3)
    machine.push(_divided(a * b, c)[0])


@ARITHMETIC.word("*/MOD", "a b c -- rest quotient", "Like */, and the rest.")
def _scale_with_rest(machine: Machine) -> None:
    a, b, c = machine.pop_many(3)
    quotient, rest = _divided(a * b, c)
    machine.push_many([rest, quotient])


for _name, _text, _two_test in (
    ("=", "Whether two numbers are equal.", operator.eq),
    ("<>", "Whether two numbers differ.", operator.ne),
    ("<", "Whether a is less than b.", operator.lt),
    (">", "Whether a is more than b.", operator.gt),
    ("<=", "Whether a is at most b.", operator.le),
    (">=", "Whether a is at least b.", operator.ge),
    ("U<", "Whether a is less than b, without signs.", lambda a, b: unsigned(a) < unsigned(b)),
    ("U>", "Whether a is more than b, without signs.", lambda a, b: unsigned(a) > unsigned(b)),
    ("U<=", "Whether a is at most b, without signs.", lambda a, b: unsigned(a) <= unsigned(b)),
    ("U>=", "Whether a is at least b, without signs.", lambda a, b: unsigned(a) >= unsigned(b)),
    ("DIVIDES?", "Whether a divides b.", lambda a, b: b == 0 if a == 0 else b % a == 0),
):
    COMPARISON.test(_name, "a b -- flag", _text, _two_test)

for _name, _text, _one_test in (
    ("0=", "Whether it is 0; also turns a flag round.", lambda n: n == 0),
    ("0<>", "Whether it is not 0.", lambda n: n != 0),
    ("0<", "Whether it is negative.", lambda n: n < 0),
    ("0>", "Whether it is positive.", lambda n: n > 0),
    ("0<=", "Whether it is not positive.", lambda n: n <= 0),
    ("0>=", "Whether it is not negative.", lambda n: n >= 0),
    ("EVEN?", "Whether it is even.", lambda n: n % 2 == 0),
    ("ODD?", "Whether it is odd.", lambda n: n % 2 == 1),
    ("NOT", "Whether it is 0, like 0=.", lambda n: n == 0),
):
    COMPARISON.test(_name, "n -- flag", _text, _one_test)

COMPARISON.test(
    "WITHIN",
    "n low high -- flag",
    "Whether low <= n < high, also round the end of the numbers.",
    lambda n, low, high: unsigned(n - low) < unsigned(high - low),
)
COMPARISON.test(
    "BETWEEN",
    "n low high -- flag",
    "Whether low <= n <= high.",
    lambda n, low, high: low <= n <= high,
)
COMPARISON.add("TRUE", "-- flag", "The flag for true, -1.", lambda machine: machine.push(TRUE))
COMPARISON.add("FALSE", "-- flag", "The flag for false, 0.", lambda machine: machine.push(0))
COMPARISON.binary("CMP", "a b -- -1|0|1", "The sign of a - b.", lambda a, b: (a > b) - (a < b))


def _left(value: int, count: int) -> int:
    return value << count if 0 <= count < _CELL_BITS else 0


def _right(value: int, count: int) -> int:
    return unsigned(value) >> count if 0 <= count < _CELL_BITS else 0


def _rotated(value: int, count: int) -> int:
    count %= _CELL_BITS
    return unsigned(value) << count | unsigned(value) >> (_CELL_BITS - count)


for _name, _effect, _text, _two in (
    ("AND", "a b -- both", "The bits that both have; and of two flags.", operator.and_),
    ("OR", "a b -- any", "The bits that one has; or of two flags.", operator.or_),
    ("XOR", "a b -- one", "The bits that exactly one has.", operator.xor),
    ("LSHIFT", "n count -- n'", "Move the bits to the left.", _left),
    ("RSHIFT", "n count -- n'", "Move the bits to the right; zeros come in.", _right),
    ("ARSHIFT", "n count -- n'", "Move to the right; the sign stays.", lambda n, c: n >> (c % 64)),
    ("ROTATE", "n count -- n'", "Move to the left, and in again on the right.", _rotated),
    (
        "BIT?",
        "n place -- flag",
        "Whether a bit is set; 0 is the lowest.",
        lambda n, p: -(n >> (p % 64) & 1),
    ),
    ("SET-BIT", "n place -- n'", "Set a bit.", lambda n, p: n | 1 << (p % 64)),
    ("CLEAR-BIT", "n place -- n'", "Clear a bit.", lambda n, p: n & ~(1 << (p % 64))),
    ("FLIP-BIT", "n place -- n'", "Turn a bit round.", lambda n, p: n ^ 1 << (p % 64)),
):
    BITS.binary(_name, _effect, _text, _two)

BITS.unary("INVERT", "n -- n'", "Turn every bit round.", operator.invert)
BITS.unary("POPCOUNT", "n -- count", "How many bits are set.", lambda n: unsigned(n).bit_count())
BITS.unary(
    "BIT-LENGTH", "n -- count", "Bits up to the highest.", lambda n: unsigned(n).bit_length()
)


def pop_double(machine: Machine) -> int:
    """Take a number of two cells; the high one is on top."""
    low, high = machine.pop_many(2)
    return unsigned(low) | high << _CELL_BITS


def push_double(machine: Machine, value: int) -> None:
    """Put a number of two cells."""
    machine.push_many([signed(value), signed(value >> _CELL_BITS)])


def _double_unary(name: str, text: str, compute: Callable[[int], int]) -> None:
    DOUBLE.add(name, "d -- d", text, lambda m: push_double(m, compute(pop_double(m))))


def _double_binary(name: str, text: str, compute: Callable[[int, int], int]) -> None:
    def run(machine: Machine) -> None:
        right, left = pop_double(machine), pop_double(machine)
        push_double(machine, compute(left, right))

    DOUBLE.add(name, "d d -- d", text, run)


def _double_test(name: str, text: str, is_true: Callable[[int, int], bool]) -> None:
    def run(machine: Machine) -> None:
        right, left = pop_double(machine), pop_double(machine)
        machine.push_flag(is_true(left, right))

    DOUBLE.add(name, "d d -- flag", text, run)


_double_binary("D+", "Add two numbers of two cells.", operator.add)
_double_binary("D-", "Subtract two numbers of two cells.", operator.sub)
_double_binary("DMAX", "The larger of two numbers of two cells.", max)
_double_binary("DMIN", "The smaller of two numbers of two cells.", min)
_double_unary("DNEGATE", "Change the sign of a number of two cells.", operator.neg)
_double_unary("DABS", "Remove the sign of a number of two cells.", abs)
_double_unary("D2*", "Double a number of two cells.", lambda n: n * 2)
_double_unary("D2/", "Halve a number of two cells, rounded down.", lambda n: n >> 1)
_double_test("D=", "Whether two numbers of two cells are equal.", operator.eq)
_double_test("D<", "Whether the first number of two cells is less.", operator.lt)
_double_test("DU<", "Like D<, without signs.", lambda a, b: a % (1 << 128) < b % (1 << 128))


@DOUBLE.word("D0=", "d -- flag", "Whether a number of two cells is 0.")
def _is_zero(machine: Machine) -> None:
    machine.push_flag(pop_double(machine) == 0)


@DOUBLE.word("D0<", "d -- flag", "Whether a number of two cells is negative.")
def _is_negative(machine: Machine) -> None:
    machine.push_flag(pop_double(machine) < 0)


@DOUBLE.word("S>D", "n -- d", "Make a number of two cells.")
def _to_double(machine: Machine) -> None:
    push_double(machine, machine.pop())


@DOUBLE.word("D>S", "d -- n", "The low cell of a number of two cells.")
def _from_double(machine: Machine) -> None:
    machine.push(pop_double(machine))


@DOUBLE.word("M+", "d n -- d", "Add a number to one of two cells.")
def _add_mixed(machine: Machine) -> None:
    right = machine.pop()
    push_double(machine, pop_double(machine) + right)


@DOUBLE.word("M*", "a b -- d", "Multiply; the product has two cells.")
def _multiply_mixed(machine: Machine) -> None:
    a, b = machine.pop_many(2)
    push_double(machine, a * b)


@DOUBLE.word("UM*", "a b -- d", "Multiply without signs; the product has two cells.")
def _multiply_unsigned(machine: Machine) -> None:
    a, b = machine.pop_many(2)
    push_double(machine, unsigned(a) * unsigned(b))


@DOUBLE.word("M*/", "d a b -- d", "Multiply by a, divide by b, rounded down.")
def _scale_double(machine: Machine) -> None:
    a, b = machine.pop_many(2)
    push_double(machine, _divided(pop_double(machine) * a, b)[0])


def _double_division(
    name: str, text: str, divide: Callable[[int, int], tuple[int, int]], *, is_signed: bool
) -> None:
    def run(machine: Machine) -> None:
        right, left = machine.pop(), pop_double(machine)
        if not is_signed:
            right, left = unsigned(right), left % (1 << 128)
        quotient, rest = divide(left, right)
        machine.push_many([rest, quotient])

    DOUBLE.add(name, "d n -- rest quotient", text, run)


_double_division("FM/MOD", "Divide two cells by one, rounded down.", _divided, is_signed=True)
_double_division("SM/REM", "Divide two cells by one, rounded to 0.", _truncated, is_signed=True)
_double_division("UM/MOD", "Divide two cells by one, no signs.", _divided, is_signed=False)
