"""Tiers 0 to 2: expressions, orders on the stack, branches."""

from __future__ import annotations

from random import Random

from gradus_forth_lang.problems.problem import NUM_CASES, Problem, Template, build_cases


def _numbers(draw: Random, count: int = 1, low: int = -50, high: int = 50) -> list[tuple[int, ...]]:
    return [tuple(draw.randint(low, high) for _ in range(count)) for _ in range(NUM_CASES)]


def _linear(draw: Random) -> Problem:
    a, b = draw.randint(2, 12), draw.randint(1, 30)
    return Problem(
        effect="( n -- m )",
        text=f"Multiply n by {a} and add {b}.",
        reference=f"{a} * {b} +",
        cases=build_cases(_numbers(draw), lambda n: n * a + b),
        formula=f"n*{a}+{b}",
    )


def _two_weights(draw: Random) -> Problem:
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    return Problem(
        effect="( a b -- c )",
        text=f"Leave {a} times a plus {b} times b.",
        reference=f"{b} * swap {a} * +",
        cases=build_cases(_numbers(draw, 2), lambda x, y: a * x + b * y),
        formula=f"a*{a}+b*{b}",
    )


def _rest(draw: Random) -> Problem:
    a, m = draw.randint(1, 30), draw.randint(3, 17)
    return Problem(
        effect="( n -- r )",
        text=f"Add {a} to n and leave the rest of the division by {m}, never negative.",
        reference=f"{a} + {m} mod",
        cases=build_cases(_numbers(draw), lambda n: (n + a) % m),
        formula=f"(n+{a})%{m}",
    )


def _square_less(draw: Random) -> Problem:
    a, b = draw.randint(1, 9), draw.randint(1, 40)
    return Problem(
        effect="( n -- m )",
        text=f"Add {a} to n, square the sum and subtract {b}.",
        reference=f"{a} + dup * {b} -",
        cases=build_cases(_numbers(draw), lambda n: (n + a) ** 2 - b),
        formula=f"(n+{a})^2-{b}",
    )


def _order(draw: Random) -> Problem:
    names = "abc"[: draw.choice((2, 3))]
    pattern = draw.choices(names, k=draw.randint(2, 4))
    stores = "".join(f" v{name} !" for name in reversed(names))
    fetches = "".join(f" v{name} @" for name in pattern)

    def solve(*values: int) -> tuple[int, ...]:
        return tuple(values[names.index(name)] for name in pattern)

    effect = f"( {' '.join(names)} -- {' '.join(pattern)} )"
    return Problem(
        effect=effect,
        text="Leave the numbers in the order that the stack effect shows.",
        reference=f"{stores}{fetches}",
        cases=build_cases(_numbers(draw, len(names)), solve),
        helpers=" ".join(f"variable v{name}" for name in names),
        formula=f"{names}--{''.join(pattern)}",
    )


def _both_results(draw: Random) -> Problem:
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    return Problem(
        effect="( a b -- x y )",
        text=f"Leave x = {a} times a minus b, then y = a plus {b} times b.",
        reference=f"2dup {b} * + >r swap {a} * swap - r>",
        cases=build_cases(_numbers(draw, 2), lambda x, y: (a * x - y, x + b * y)),
    )


def _sum_and_spread(draw: Random) -> Problem:
    k = draw.randint(1, 20)
    return Problem(
        effect="( a b c -- x )",
        text=f"Leave the largest of the three minus the smallest, plus {k}.",
        reference=f"3dup max max >r min min r> swap - {k} +",
        cases=build_cases(_numbers(draw, 3), lambda *v: max(v) - min(v) + k),
    )


def _piecewise(draw: Random) -> Problem:
    edge, factor, less = draw.randint(-20, 20), draw.randint(2, 9), draw.randint(1, 30)
    return Problem(
        effect="( n -- m )",
        text=f"Where n is below {edge}, leave n times {factor}; else leave n minus {less}.",
        reference=f"dup {edge} < if {factor} * else {less} - then",
        cases=build_cases(
            [(edge,), (edge - 1,), *_numbers(draw)[2:]],
            lambda n: n * factor if n < edge else n - less,
        ),
    )


def _which_divides(draw: Random) -> Problem:
    a, b = draw.sample(range(2, 9), 2)
    codes = draw.sample(range(10, 99), 3)

    def solve(n: int) -> int:
        return codes[0] if n % a == 0 else codes[1] if n % b == 0 else codes[2]

    return Problem(
        effect="( n -- x )",
        text=f"Leave {codes[0]} where {a} divides n, else {codes[1]} where {b} divides n, "
        f"else {codes[2]}.",
        reference=f"dup {a} mod 0= if drop {codes[0]} else {b} mod 0= if {codes[1]} "
        f"else {codes[2]} then then",
        cases=build_cases([(a * b,), (a,), (b,), *_numbers(draw)[3:]], solve),
    )


def _in_range(draw: Random) -> Problem:
    low = draw.randint(-20, 10)
    high, divisor = low + draw.randint(5, 25), draw.randint(2, 5)
    # Among numbers at random often none is both: then a program that always says false would do.
    inside = high // divisor * divisor

    def solve(n: int) -> int:
        return -1 if low <= n <= high and n % divisor == 0 else 0

    return Problem(
        effect="( n -- flag )",
        text=f"Leave true (-1) where n lies in {low} to {high}, both included, and {divisor} "
        "divides it; else false (0).",
        reference=f"dup {low} {high} between swap {divisor} mod 0= and",
        cases=build_cases([(low,), (high,), (high + 1,), (inside,), *_numbers(draw)[4:]], solve),
    )


def _sign_pair(draw: Random) -> Problem:
    k = draw.randint(2, 9)

    def solve(a: int, b: int) -> int:
        return a * b if (a < 0) == (b < 0) else (a + b) * k

    return Problem(
        effect="( a b -- x )",
        text=f"Where both are negative or none is, leave a times b; else their sum times {k}.",
        reference=f"2dup 0< swap 0< = if * else + {k} * then",
        cases=build_cases(_numbers(draw, 2), solve),
    )


TEMPLATES = (
    Template(0, "linear", _linear),
    Template(0, "two-weights", _two_weights),
    Template(0, "rest", _rest),
    Template(0, "square-less", _square_less),
    Template(1, "order", _order),
    Template(1, "both-results", _both_results),
    Template(1, "spread", _sum_and_spread),
    Template(2, "piecewise", _piecewise),
    Template(2, "which-divides", _which_divides),
    Template(2, "in-range", _in_range),
    Template(2, "sign-pair", _sign_pair),
)
