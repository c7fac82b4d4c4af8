"""Chapter `floats`: numbers like 1.5e on their own stack."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable

from gradus_forth_lang.machine import CELL, ForthError, Machine
from gradus_forth_lang.words.vocabulary import Vocabulary

FLOATS = Vocabulary("floats")
MAX_EXACT = 2.0**62


def _computed(compute: Callable[..., float], *values: float) -> float:
    try:
        result = compute(*values)
    except ZeroDivisionError:
        raise ForthError("float division by zero", -42) from None
    except (ValueError, OverflowError):
        raise ForthError("float result out of range", -43) from None
    if isinstance(result, complex):
        raise ForthError("float result out of range", -43)
    return result


def _unary(name: str, text: str, compute: Callable[[float], float]) -> None:
    FLOATS.add(name, "F: x -- y", text, lambda m: m.push_float(_computed(compute, m.pop_float())))


def _binary(name: str, text: str, compute: Callable[[float, float], float]) -> None:
    def run(machine: Machine) -> None:
        right, left = machine.pop_float(), machine.pop_float()
        machine.push_float(_computed(compute, left, right))

    FLOATS.add(name, "F: x y -- z", text, run)


def _shuffle(name: str, effect: str, text: str) -> None:
    before, after = (side.split() for side in effect.split("--"))

    def run(machine: Machine) -> None:
        values = {item: machine.pop_float() for item in reversed(before)}
        for item in after:
            machine.push_float(values[item])

    FLOATS.add(name, f"F: {effect}", text, run)


def _test(name: str, count: int, text: str, is_true: Callable[..., bool]) -> None:
    def run(machine: Machine) -> None:
        values = [machine.pop_float() for _ in range(count)]
        machine.push_flag(is_true(*reversed(values)))

    FLOATS.add(name, f"-- flag F: {'x y' if count == 2 else 'x'} --", text, run)


for _name, _text, _two in (
    ("F+", "Add two floats.", operator.add),
    ("F-", "Subtract the top float from the second.", operator.sub),
    ("F*", "Multiply two floats.", operator.mul),
    ("F/", "Divide the second float by the top one.", operator.truediv),
    ("F**", "Raise the second float to the top one.", operator.pow),
    ("FMAX", "The larger of two floats.", max),
    ("FMIN", "The smaller of two floats.", min),
    ("FATAN2", "The angle of the point (y, x): y is second, x on top.", math.atan2),
    ("FMOD", "Rest of x / y, with the sign of x.", math.fmod),
    ("FHYPOT", "Length of the vector (x, y).", math.hypot),
):
    _binary(_name, _text, _two)
for _name, _text, _one in (
    ("FNEGATE", "Change the sign of a float.", operator.neg),
    ("FABS", "Remove the sign of a float.", abs),
    ("FSQRT", "Square root.", math.sqrt),
    ("FLOOR", "Round down to a whole float.", lambda x: float(math.floor(x))),
    ("FCEIL", "Round up to a whole float.", lambda x: float(math.ceil(x))),
    ("FROUND", "Round to the nearest whole float, half to even.", lambda x: float(round(x))),
    ("FTRUNC", "Round towards zero.", lambda x: float(math.trunc(x))),
    ("FSIN", "Sine of an angle in radians.", math.sin),
    ("FCOS", "Cosine of an angle in radians.", math.cos),
    ("FTAN", "Tangent of an angle in radians.", math.tan),
    ("FASIN", "The angle whose sine it is.", math.asin),
    ("FACOS", "The angle whose cosine it is.", math.acos),
    ("FATAN", "The angle whose tangent it is.", math.atan),
    ("FSINH", "Hyperbolic sine.", math.sinh),
    ("FCOSH", "Hyperbolic cosine.", math.cosh),
    ("FTANH", "Hyperbolic tangent.", math.tanh),
    ("FEXP", "e to the power of a float.", math.exp),
    ("FLN", "Natural logarithm.", math.log),
    ("FLOG", "Logarithm to base 10.", math.log10),
    ("FLOG2", "Logarithm to base 2.", math.log2),
    ("FALOG", "10 to the power of a float.", lambda x: 10.0**x),
    ("FSQUARED", "A float times itself.", lambda x: x * x),
    ("1/F", "1 divided by a float.", lambda x: 1.0 / x),
    ("F2*", "A float doubled.", lambda x: x * 2),
    ("F2/", "Half of a float.", lambda x: x / 2),
    ("FDEG>RAD", "Degrees to radians.", math.radians),
    ("FRAD>DEG", "Radians to degrees.", math.degrees),
):
    _unary(_name, _text, _one)
for _name, _effect, _text in (
    ("FDUP", "x -- x x", "Copy the top float."),
    ("FDROP", "x --", "Remove the top float."),
    ("FSWAP", "x y -- y x", "Exchange the two top floats."),
    ("FOVER", "x y -- x y x", "Copy the second float to the top."),
    ("FROT", "x y z -- y z x", "Move the third float to the top."),
    ("-FROT", "x y z -- z x y", "Move the top float below the next two."),
    ("FNIP", "x y -- y", "Remove the second float."),
    ("FTUCK", "x y -- y x y", "Copy the top float below the second."),
    ("F2DUP", "x y -- x y x y", "Copy the two top floats."),
):
    _shuffle(_name, _effect, _text)
_test("F=", 2, "Whether two floats are equal.", operator.eq)
_test("F<", 2, "Whether the second float is less than the top one.", operator.lt)
_test("F>", 2, "Whether the second float is more than the top one.", operator.gt)
_test("F<=", 2, "Whether the second float is at most the top one.", operator.le)
_test("F>=", 2, "Whether the second float is at least the top one.", operator.ge)
_test("F0=", 1, "Whether a float is 0.", lambda x: x == 0)
_test("F0<", 1, "Whether a float is negative.", lambda x: x < 0)
_test("F0>", 1, "Whether a float is positive.", lambda x: x > 0)

FLOATS.add("FDEPTH", "-- n", "How many floats there are.", lambda m: m.push(len(m.floats)))
FLOATS.add("FPI", "F: -- pi", "The number pi.", lambda m: m.push_float(math.pi))
FLOATS.add("S>F", "n -- F: -- x", "A number as a float.", lambda m: m.push_float(float(m.pop())))
FLOATS.add("F.", "F: x --", "Print a float and a space.", lambda m: m.emit(f"{m.pop_float():.6g} "))


@FLOATS.word("F>S", "-- n F: x --", "A float as a number, rounded towards zero.")
def _to_number(machine: Machine) -> None:
    value = machine.pop_float()
    if abs(value) > MAX_EXACT:
        raise ForthError("the float is too large for a number", -11)
    machine.push(math.trunc(value))


@FLOATS.word("F~", "-- flag F: x y r --", "Whether two floats differ by less than r.")
def _is_near(machine: Machine) -> None:
    radius, right, left = (machine.pop_float() for _ in range(3))
    machine.push_flag(abs(left - right) < radius)


@FLOATS.word("F@", "addr -- F: -- x", "Read the float at an address.")
def _fetch(machine: Machine) -> None:
    (value,) = struct.unpack("<d", machine.memory[machine.span(machine.pop(), CELL)])
    machine.push_float(value)


@FLOATS.word("F!", "addr -- F: x --", "Write the float at an address.")
def _store(machine: Machine) -> None:
    place = machine.span(machine.pop(), CELL)
    machine.memory[place] = struct.pack("<d", machine.pop_float())


@FLOATS.word("F,", "F: x --", "Append a float to the data space.")
def _append(machine: Machine) -> None:
    value = machine.pop_float()
    machine.memory[machine.span(machine.allot(CELL), CELL)] = struct.pack("<d", value)
