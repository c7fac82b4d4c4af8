"""Tiers 3 and 4: loops, strings, memory and output."""

from __future__ import annotations

from random import Random

from gradus_forth_lang.problems.problem import NUM_CASES, Problem, Template, build_cases

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _counts(draw: Random, high: int = 30) -> list[tuple[int, ...]]:
    return [(0,), (1,), *((draw.randint(2, high),) for _ in range(NUM_CASES - 2))]


def _texts(draw: Random) -> list[str]:
    return [
        "".join(draw.choices(_LETTERS[:6] + " ", k=draw.randint(1, 9))) for _ in range(NUM_CASES)
    ]


def _cells(draw: Random) -> list[list[int]]:
    return [[draw.randint(-20, 20) for _ in range(draw.randint(1, 7))] for _ in range(NUM_CASES)]


def _sum_multiples(draw: Random) -> Problem:
    a, b = draw.sample(range(2, 9), 2)
    return Problem(
        effect="( n -- sum )",
        text=f"Add all numbers from 1 to n that {a} or {b} divides.",
        reference=f"0 swap 1+ 1 ?do i {a} mod 0= i {b} mod 0= or if i + then loop",
        cases=build_cases(
            _counts(draw), lambda n: sum(i for i in range(1, n + 1) if i % a == 0 or i % b == 0)
        ),
    )


def _weighted_powers(draw: Random) -> Problem:
    k, c = draw.randint(1, 3), draw.randint(2, 7)
    return Problem(
        effect="( n -- sum )",
        text=f"Leave the sum of {c} * i^{k} for i = 1 to n.",
        reference=f"0 swap 1+ 1 ?do i {k} ** {c} * + loop",
        cases=build_cases(_counts(draw), lambda n: sum(c * i**k for i in range(1, n + 1))),
    )


def _count_digit(draw: Random) -> Problem:
    digit = draw.randint(0, 9)
    inputs = [(draw.randint(0, 9_999_999),) for _ in range(NUM_CASES - 1)]
    return Problem(
        effect="( n -- count )",
        text=f"How often the digit {digit} occurs in n, which is not negative.",
        reference=f"0 swap begin 10 /mod >r {digit} = if 1+ then r> dup 0= until drop",
        cases=build_cases([(digit,), *inputs], lambda n: str(n).count(str(digit))),
    )


def _repeat_step(draw: Random) -> Problem:
    a, b, m = draw.randint(2, 9), draw.randint(1, 9), draw.randint(50, 997)

    def solve(x: int, n: int) -> int:
        for _ in range(n):
            x = (a * x + b) % m
        return x

    inputs = [(draw.randint(0, 40), draw.randint(0, 12)) for _ in range(NUM_CASES)]
    return Problem(
        effect="( x n -- y )",
        text=f"Replace x by ({a} * x + {b}) mod {m}, n times.",
        reference=f"0 ?do {a} * {b} + {m} mod loop",
        cases=build_cases(inputs, solve),
    )


def _digits_in_base(draw: Random) -> Problem:
    base = draw.randint(2, 9)

    def solve(n: int) -> int:
        total = 0
        while n:
            n, digit = divmod(n, base)
            total += digit
        return total

    inputs = [(0,), *((draw.randint(1, 5000),) for _ in range(NUM_CASES - 1))]
    return Problem(
        effect="( n -- sum )",
        text=f"The sum of the digits of n written in base {base}; n is not negative.",
        reference=f"0 swap begin dup while {base} /mod >r + r> repeat drop",
        cases=build_cases(inputs, solve),
    )


def _count_char(draw: Random) -> Problem:
    first, second = draw.sample(_LETTERS[:6], 2)
    return Problem(
        effect="( addr n -- count )",
        text=f"How often the letters {first} and {second} occur in a string, together.",
        reference=f"2dup '{first}' s-count -rot '{second}' s-count +",
        cases=build_cases(
            [(text,) for text in _texts(draw)], lambda t: t.count(first) + t.count(second)
        ),
    )


def _print_shifted(draw: Random) -> Problem:
    k = draw.randint(1, 9)

    def solve(text: str) -> str:
        moved = (_LETTERS[(_LETTERS.index(c) + k) % 26] if c in _LETTERS else c for c in text)
        return "".join(moved)

    return Problem(
        effect="( addr n -- )",
        text=f"Print a string of small letters, each moved {k} places on in the alphabet (after z "
        "comes a); spaces stay.",
        reference=f"0 ?do dup i + c@ dup lower? if 97 - {k} + 26 mod 97 + then emit loop drop",
        cases=build_cases([(text.replace(" ", "z"),) for text in _texts(draw)], solve),
    )


def _without_char(draw: Random) -> Problem:
    gone = draw.choice(_LETTERS[:6])
    return Problem(
        effect="( addr n -- )",
        text=f"Print a string backwards without any {gone}.",
        reference=f"s-reverse 0 ?do dup i + c@ dup '{gone}' = if drop else emit then loop drop",
        cases=build_cases(
            [(text.replace(" ", "z"),) for text in _texts(draw)],
            lambda t: t[::-1].replace(gone, ""),
        ),
    )


def _alternating(draw: Random) -> Problem:
    a, b = draw.randint(2, 6), draw.randint(2, 6)
    return Problem(
        effect="( addr n -- sum )",
        text=f"addr holds n cells. Add {a} times each cell at places 0, 2, 4, ... and subtract {b} "
        "times each other one.",
        reference=f"0 -rot 0 ?do dup i nth@ i 1 and if {b} * negate else {a} * then rot + swap "
        "loop drop",
        cases=build_cases(
            [(cells,) for cells in _cells(draw)],
            lambda v: sum(a * x if i % 2 == 0 else -b * x for i, x in enumerate(v)),
        ),
    )


def _above(draw: Random) -> Problem:
    edge = draw.randint(-10, 10)
    return Problem(
        effect="( addr n -- count sum )",
        text=f"addr holds n cells. Leave how many are above {edge}, and the sum of those.",
        reference=f"0 0 2swap 0 ?do dup i nth@ dup {edge} > if swap >r rot 1+ -rot + r> else drop "
        "then loop drop",
        cases=build_cases(
            [(cells,) for cells in _cells(draw)],
            lambda v: (sum(x > edge for x in v), sum(x for x in v if x > edge)),
        ),
    )


def _print_steps(draw: Random) -> Problem:
    step, mark = draw.randint(2, 5), draw.randint(2, 4)

    def solve(n: int) -> str:
        return " ".join("*" if i % mark == 0 else str(i * step) for i in range(n))

    return Problem(
        effect="( n -- )",
        text=f"Print i * {step} for i = 0 to n - 1, with spaces between; where {mark} divides i, "
        "print * instead.",
        reference=f"""0 ?do i {mark} mod 0= if ." * " else i {step} * . then loop""",
        cases=build_cases(_counts(draw, 12), solve),
    )


TEMPLATES = (
    Template(3, "multiples", _sum_multiples),
    Template(3, "powers", _weighted_powers),
    Template(3, "count-digit", _count_digit),
    Template(3, "repeat-step", _repeat_step),
    Template(3, "base-digits", _digits_in_base),
    Template(4, "count-letters", _count_char),
    Template(4, "shift-letters", _print_shifted),
    Template(4, "backwards", _without_char),
    Template(4, "alternating", _alternating),
    Template(4, "above", _above),
    Template(4, "print-steps", _print_steps),
)
