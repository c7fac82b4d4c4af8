"""Chapter `stack`: the data stack and the return stack."""

from __future__ import annotations

from gradus_forth_lang.machine import ForthError, Machine
from gradus_forth_lang.words.vocabulary import Vocabulary

STACK = Vocabulary("stack")

for _name, _effect, _text in (
    ("DUP", "x -- x x", "Copy the top number."),
    ("DROP", "x --", "Remove the top number."),
    ("SWAP", "a b -- b a", "Exchange the two top numbers."),
    ("OVER", "a b -- a b a", "Copy the second number to the top."),
    ("ROT", "a b c -- b c a", "Move the third number to the top."),
    ("-ROT", "a b c -- c a b", "Move the top number below the next two."),
    ("NIP", "a b -- b", "Remove the second number."),
    ("TUCK", "a b -- b a b", "Copy the top number below the second."),
    ("2DUP", "a b -- a b a b", "Copy the top pair."),
    ("2DROP", "a b --", "Remove the top pair."),
    ("2SWAP", "a b c d -- c d a b", "Exchange the two top pairs."),
    ("2OVER", "a b c d -- a b c d a b", "Copy the second pair to the top."),
    ("2ROT", "a b c d e f -- c d e f a b", "Move the third pair to the top."),
    ("2NIP", "a b c d -- c d", "Remove the second pair."),
    ("2TUCK", "a b c d -- c d a b c d", "Copy the top pair below the second."),
    ("3DUP", "a b c -- a b c a b c", "Copy the three top numbers."),
    ("3DROP", "a b c --", "Remove the three top numbers."),
    ("4DROP", "a b c d --", "Remove the four top numbers."),
    ("4DUP", "a b c d -- a b c d a b c d", "Copy the four top numbers."),
    ("FLIP3", "a b c -- c b a", "Reverse the three top numbers."),
    ("FLIP4", "a b c d -- d c b a", "Reverse the four top numbers."),
    ("THIRD", "a b c -- a b c a", "Copy the third number to the top."),
    ("FOURTH", "a b c d -- a b c d a", "Copy the fourth number to the top."),
    ("UNDER", "a b -- a a b", "Copy the second number where it is."),
):
    STACK.shuffle(_name, _effect, _text)


@STACK.word("?DUP", "x -- x x | 0", "Copy the top number unless it is 0.")
def _dup_nonzero(machine: Machine) -> None:
    value = machine.pop()
    machine.push_many([value, value] if value else [value])


@STACK.word("DEPTH", "-- n", "How many numbers were on the stack.")
def _depth(machine: Machine) -> None:
    machine.push(len(machine.stack))


@STACK.word("CLEAR", "... --", "Remove every number from the stack.")
def _clear(machine: Machine) -> None:
    machine.stack.clear()


@STACK.word("PICK", "xn ... x0 n -- xn ... x0 xn", "Copy the n-th number below; 0 is the top.")
def _pick(machine: Machine) -> None:
    place = machine.pop()
    if not 0 <= place < len(machine.stack):
        raise ForthError("stack underflow", -4)
    machine.push(machine.stack[-1 - place])


@STACK.word("ROLL", "xn ... x0 n -- ... x0 xn", "Move the n-th number to the top; 1 is SWAP.")
def _roll(machine: Machine) -> None:
    place = machine.pop()
    if not 0 <= place < len(machine.stack):
        raise ForthError("stack underflow", -4)
    machine.push(machine.stack.pop(-1 - place))


@STACK.word(">R", "x --", "Move the top number to the return stack.", inside=True)
def _to_return(machine: Machine) -> None:
    machine.push_return(machine.pop())


@STACK.word("R>", "-- x", "Move a number back from the return stack.", inside=True)
def _from_return(machine: Machine) -> None:
    machine.push_many(machine.pop_returns(1))


@STACK.word("R@", "-- x", "Copy the top of the return stack.", inside=True)
def _copy_return(machine: Machine) -> None:
    taken = machine.pop_returns(1)
    machine.push_return(taken[0])
    machine.push(taken[0])


@STACK.word("RDROP", "--", "Remove the top of the return stack.", inside=True)
def _drop_return(machine: Machine) -> None:
    machine.pop_returns(1)


@STACK.word("2>R", "a b --", "Move a pair to the return stack.", inside=True)
def _pair_to_return(machine: Machine) -> None:
    for value in machine.pop_many(2):
        machine.push_return(value)


@STACK.word("2R>", "-- a b", "Move a pair back from the return stack.", inside=True)
def _pair_from_return(machine: Machine) -> None:
    machine.push_many(machine.pop_returns(2))


@STACK.word("2R@", "-- a b", "Copy the top pair of the return stack.", inside=True)
def _copy_return_pair(machine: Machine) -> None:
    taken = machine.pop_returns(2)
    for value in taken:
        machine.push_return(value)
    machine.push_many(taken)


@STACK.word("N>R", "xn ... x1 n --", "Move n numbers and n to the return stack.", inside=True)
def _many_to_return(machine: Machine) -> None:
    count = machine.pop()
    for value in (*machine.pop_many(max(count, 0)), count):
        machine.push_return(value)


@STACK.word("NR>", "-- xn ... x1 n", "Move back what N>R moved.", inside=True)
def _many_from_return(machine: Machine) -> None:
    count = machine.pop_returns(1)[0]
    machine.push_many([*machine.pop_returns(max(count, 0)), count])
