"""In the second box: the checks of a problem, which meet the answers but never the model's program.

`python checking.py calls NAME` prints the arguments of every call that `check(candidate)` of
`checks.py` makes, one tuple a line. `python checking.py judge NAME` answers each call with the line
of `answers.txt` that belongs to it in `calls.txt`, and prints how many assertions held, and how
many there are. `python checking.py trivial NAME` prints the same of the best program that solves
nothing: one that raises, says the same of `answers.txt` to every call, or gives an argument back.
NAME is the candidate's, since some checks also call it by its name.
"""

from __future__ import annotations

import ast
import random
import runpy
import sys
from collections.abc import Callable
from typing import Any

NOTE = "_note_check"
MAX_CONSTANTS = 100
"""Different answers that are tried as the answer to every call."""


class Notes(ast.NodeTransformer):
    """Each assertion becomes a call that notes whether it holds, and continues."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """`assert x` -> `_note_check(lambda: x)`."""
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        later = ast.Lambda(args=nothing, body=node.test)
        return ast.Expr(ast.Call(func=ast.Name(NOTE, ast.Load()), args=[later], keywords=[]))


class Assertions:
    """How many held, of how many."""

    def __init__(self) -> None:
        self.held = 0
        self.total = 0

    def note(self, check: Callable[[], Any]) -> None:
        """Count one."""
        self.total += 1
        try:
            self.held += bool(check())
        except Exception:
            return


def run_checks(candidate: Callable[..., Any]) -> Assertions:
    """Every assertion of `check`, noted; a statement between them that fails counts as one more."""
    with open("checks.py", encoding="utf-8") as file:
        tree = ast.fix_missing_locations(Notes().visit(ast.parse(file.read())))
    with open("noted.py", "w", encoding="utf-8") as file:
        file.write(ast.unparse(tree))
    found = Assertions()
    # Checks that draw their inputs draw the same ones both times.
    random.seed(0)
    check = runpy.run_path("noted.py", init_globals={NOTE: found.note})["check"]
    check.__globals__[sys.argv[2]] = candidate
    try:
        check(candidate)
    except Exception:
        found.total += 1
    return found


def print_calls() -> None:
    """What the candidate is called with."""

    def candidate(*arguments: Any) -> None:
        print(repr(arguments))  # noqa: T201

    run_checks(candidate)


def read_lines(name: str) -> list[str]:
    """The lines of a file."""
    with open(name, encoding="utf-8") as file:
        return file.read().split("\n")


def value_of(line: str) -> Any:
    """Read a line of answers; ValueError for a call that came to none."""
    if not line or line.startswith("!"):
        raise ValueError("no answer")
    return ast.literal_eval(line)


def judged() -> Assertions:
    """Give each call the answer that the first box gave to it."""
    answers = dict(zip(read_lines("calls.txt"), read_lines("answers.txt"), strict=False))
    return run_checks(lambda *arguments: value_of(answers.get(repr(arguments), "")))


def echo_of(place: int) -> Callable[..., Any]:
    """A program that gives the argument at a place back."""
    return lambda *arguments: arguments[place]


def trivial() -> Assertions:
    """The most that a program gains which solves nothing, of all that a right one meets."""
    constants = ["", *dict.fromkeys(read_lines("answers.txt"))][:MAX_CONSTANTS]
    calls = [ast.literal_eval(line) for line in read_lines("calls.txt") if line]
    programs: list[Callable[..., Any]] = [
        *(lambda *_, line=line: value_of(line) for line in constants),
        *(echo_of(place) for place in range(min(map(len, calls), default=0))),
    ]
    best = judged()
    best.held = max(run_checks(program).held for program in programs)
    return best


def main() -> None:
    """Obey the order."""
    if sys.argv[1] == "calls":
        print_calls()
        return
    found = judged() if sys.argv[1] == "judge" else trivial()
    print(found.held, found.total)  # noqa: T201


if __name__ == "__main__":
    main()
