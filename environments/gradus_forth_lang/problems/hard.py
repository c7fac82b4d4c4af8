"""Tier 5: recursion, tables, and searches."""

from __future__ import annotations

from random import Random

from gradus_forth_lang.problems.problem import NUM_CASES, Problem, Template, build_cases


def _recurrence(draw: Random) -> Problem:
    a, b, m = draw.randint(1, 5), draw.randint(1, 5), draw.randint(100, 999)

    def solve(n: int) -> int:
        x, y = 0, 1
        for _ in range(n):
            x, y = y, (a * y + b * x) % m
        return x

    inputs = [(n,) for n in (0, 1, 2, *(draw.randint(3, 40) for _ in range(NUM_CASES - 3)))]
    return Problem(
        effect="( n -- f )",
        text=f"f(0) = 0, f(1) = 1, f(n) = ({a} * f(n-1) + {b} * f(n-2)) mod {m}. Leave f(n).",
        reference=f"0 1 rot 0 ?do tuck {a} * swap {b} * + {m} mod loop drop",
        cases=build_cases(inputs, solve),
    )


def _coins(draw: Random) -> Problem:
    coins = sorted(draw.sample(range(2, 12), 3))
    most = 60

    def solve(n: int) -> int:
        ways = [1] + [0] * n
        for coin in coins:
            for total in range(coin, n + 1):
                ways[total] += ways[total - coin]
        return ways[n]

    inputs = [(0,), *((draw.randint(1, most),) for _ in range(NUM_CASES - 1))]
    passes = " ".join(f"dup {coin} pass" for coin in coins)
    return Problem(
        effect="( n -- ways )",
        text=f"In how many ways coins of {coins[0]}, {coins[1]} and {coins[2]} make up n, the "
        f"order aside; n is at most {most}.",
        reference=f"ways {most + 1} 0 cells-fill 1 ways ! {passes} ways swap nth@",
        cases=build_cases(inputs, solve),
        helpers=f"create ways {most + 1} cells allot : pass ( n coin -- ) 2dup < if 2drop exit "
        "then swap 1+ over ?do ways i 2 pick - nth@ ways i nth +! loop drop ;",
    )


def _steps_to_one(draw: Random) -> Problem:
    add = draw.choice((1, 3, 5))

    def solve(n: int) -> int:
        steps = 0
        while n > 1 and steps < 200:
            n = n // 2 if n % 2 == 0 else n + add
            steps += 1
        return steps

    inputs = [(draw.randint(1, 300),) for _ in range(NUM_CASES)]
    return Problem(
        effect="( n -- steps )",
        text=f"Halve n where it is even, add {add} where it is odd, until it is at most 1 or 200 "
        "steps were made; leave the number of steps.",
        reference=f"0 begin over 1 > over 200 < and while swap dup 1 and if {add} + else 2/ then "
        "swap 1+ repeat nip",
        cases=build_cases(inputs, solve),
    )


def _largest_factor(draw: Random) -> Problem:
    k = draw.randint(2, 9)

    def solve(n: int) -> int:
        largest, factor = 1, 2
        while n > 1:
            while n % factor == 0:
                n //= factor
                largest = factor
            factor += 1
        return largest * k

    inputs = [(n,) for n in (2, 3, *(draw.randint(4, 900) for _ in range(NUM_CASES - 2)))]
    return Problem(
        effect="( n -- x )",
        text=f"Leave the largest prime that divides n, times {k}; n is at least 2.",
        reference=f"1 swap begin dup 1 > while dup smallest-factor rot over max >r / r> swap "
        f"repeat drop {k} *",
        cases=build_cases(inputs, solve),
    )


def _grid_paths(draw: Random) -> Problem:
    m = draw.randint(100, 999)

    def solve(a: int, b: int) -> int:
        row = [1] * (b + 1)
        for _ in range(a):
            for i in range(1, b + 1):
                row[i] += row[i - 1] + (row[i - 2] if i > 1 else 0)
        return row[b] % m

    inputs = [(draw.randint(0, 5), draw.randint(0, 5)) for _ in range(NUM_CASES)]
    return Problem(
        effect="( a b -- paths )",
        text="A row of b + 1 ones. a times: go through it from the second place on, and add to "
        "each number the one before it and, from the third place on, also the one before that "
        f"(both as they are then). Leave the last number modulo {m}.",
        reference="row over 1+ 1 cells-fill swap 0 ?do dup 1+ 1 ?do i step loop loop "
        f"row swap nth@ {m} mod",
        cases=build_cases(inputs, solve),
        helpers="create row 64 cells allot : step ( i -- ) row over 1- nth@ over 1 > if row 2 pick "
        "2 - nth@ + then row rot nth +! ;",
    )


TEMPLATES = (
    Template(5, "recurrence", _recurrence),
    Template(5, "coins", _coins),
    Template(5, "steps-to-one", _steps_to_one),
    Template(5, "largest-factor", _largest_factor),
    Template(5, "row-sums", _grid_paths),
)
