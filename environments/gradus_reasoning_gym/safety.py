"""Which answers may reach a scorer that computes them as Python or hands them to sympy.

Nine scorers of reasoning-gym do. So an answer must be a plain literal for some of them and plain
arithmetic for the others, with small numbers and small powers. Arithmetic may take for ever all the
same, and is computed in a helper process (`computed`).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

LITERAL = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
"""Their scorers evaluate the answer as Python when it is not in the form of the gold one."""
ARITHMETIC = {
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
}
"""Their scorers parse the answer with sympy, which evaluates it."""
FUNCTIONS = {
    *("Abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "sec"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
}
NOT_A_NUMBER_WINS = {"complex_arithmetic"}
"""Their scorers take what is not a number for the gold one: no comparison with it holds."""
_LARGEST_NUMBER = 10**9
_LARGEST_POWER = 40
_MOST_NODES = 500
_HUGE_EXPONENT = re.compile(r"[eE][+-]?\d{4}")
"""A fraction of `1e999999999` takes hours to make."""
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd)


def may_score(generator: str, answer: str) -> bool:
    """Tell whether a scorer may see the answer; it may see nearly anything that it only compares.

    >>> may_score("countdown", "(3 + 4) * 5"), may_score("countdown", "__import__('os')")
    (True, False)
    """
    if _HUGE_EXPONENT.search(answer):
        return False
    if generator in NOT_A_NUMBER_WINS and "nan" in answer.lower():
        return False
    if generator not in LITERAL | ARITHMETIC:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Python cannot evaluate it either. sympy rewrites some forms first, so it sees none.
        return generator in LITERAL
    nodes = list(ast.walk(tree))
    if len(nodes) > _MOST_NODES:
        return False
    is_allowed = _is_literal if generator in LITERAL else _is_arithmetic
    return all(is_allowed(node) for node in nodes)


def fits(generator: str, answer: str, gold: str | None) -> bool:
    """Whether an answer has what its scorer forgets to ask: of four generators one reply would pay
    on nearly every task.

    >>> fits("puzzle24", "8*3*1*1", "8*(5*1 - 2)"), fits("chain_sum", "4", "5")
    (False, True)
    """
    if generator not in _ASKS or gold is None:
        return True
    if _HUGE_EXPONENT.search(answer):
        return False
    try:
        return _ASKS[generator](answer, gold)
    except (ValueError, ZeroDivisionError, RecursionError):
        return False


def _has_numbers(answer: str, gold: str) -> bool:
    return sorted(re.findall(r"\d+", answer)) == sorted(re.findall(r"\d+", gold))


def _is_near(answer: str, gold: str) -> bool:
    given, right = (float(Fraction(text.replace(",", "").strip())) for text in (answer, gold))
    return math.isclose(given, right, rel_tol=1e-3)


_ASKS: Mapping[str, Callable[[str, str], bool]] = {
    "puzzle24": _has_numbers,  # asks for 24 alone
    "coin_flip": _is_near,  # pays for each digit that a short answer has
    "game_of_life": lambda answer, gold: bool(json.loads(answer) == json.loads(gold)),  # by cell
    "game_of_life_halting": lambda answer, gold: answer.strip().lower() == gold.lower(),  # any text
}


def _is_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd)
    kinds = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Load, ast.USub, ast.UAdd)
    # A word alone is a name to Python; evaluating it raises or gives a builtin, never a board.
    return isinstance(node, (*kinds, ast.Name))


def _is_arithmetic(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=int() | float() as value):
            return abs(value) <= _LARGEST_NUMBER
        case ast.Name(id=name):
            return name in FUNCTIONS or (len(name) <= 2 and name.isalpha())
        case ast.Call(func=ast.Name(id=name), keywords=[], args=[_]):
            return name in FUNCTIONS
        case ast.BinOp(op=ast.Pow(), right=power):
            return _is_small(power)
    return isinstance(node, (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Load, *_OPERATORS))


def _is_small(power: ast.expr) -> bool:
    """A power that is a small number, a fraction of two, or one letter."""
    match power:
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_small(operand)
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            return _is_small(left) and _is_small(right)
        case ast.Constant(value=int() | float() as value):
            return abs(value) <= _LARGEST_POWER
        case ast.Name(id=name):
            return len(name) == 1
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return _is_small(left) and _is_small(right)
    return False
