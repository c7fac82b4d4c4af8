"""The taskset `code-golf`: the problems of `code`, where short right programs earn the most."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import Field

from gradus_code.problems import Problem
from gradus_code.taskset import (
    CodeData,
    CodeKeys,
    ProgramConfig,
    fenced,
    judge_here,
    problem_data,
    run_reply,
)

INSTRUCTION = (
    "Reply with the shortest complete program that is right, in one block that begins with "
    "```python. Every character counts."
)


class GolfRewardConfig(ProgramConfig):
    """How a program is run, and what its length is worth."""

    length_weight: float = Field(0.5, ge=0.0, le=1.0)
    """Part of the reward that a right program earns by its length; it has the rest anyway."""
    par_factor: float = Field(0.5, gt=0.0, le=1.0)
    """Length that earns all of it, as a part of what the known solution adds to the question's
    code, without comments."""
    par_bytes: int = Field(100, ge=1)
    """That length for a problem without a known solution."""


class CodeGolfConfig(CodeKeys):
    """Which problems, and what their programs are worth."""

    instruction: str | None = INSTRUCTION
    """System prompt. None means that the model sees only the problem."""
    task: GolfRewardConfig = GolfRewardConfig()
    """How a program is run, and what its length is worth."""


def golf_bytes(program: str) -> int:
    """Length in bytes, so that rare characters that hide several do not count as one."""
    return len(program.strip().encode("utf-8", "surrogatepass"))


def written_part(problem: Problem) -> str:
    """What a reply must write of the known solution: it continues the question's own code, and has
    neither comments nor docstrings. Empty without a solution."""
    num_given = problem.preamble.count("\n")
    tree = ast.parse(problem.solution)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [it for it in body if not _is_text(it)]  # type: ignore[attr-defined]
    begun = [node for node in tree.body if node.lineno <= num_given]
    rest = [it for node in begun for it in getattr(node, "body", []) if it.lineno > num_given]
    new = [node for node in tree.body if node.lineno > num_given]
    indent = " " * (rest[0].col_offset if rest else 0)
    parts = (textwrap.indent(_unparsed(rest), indent), _unparsed(new))
    return "\n".join(filter(None, parts))


def _is_text(statement: ast.stmt) -> bool:
    """Tell whether a statement is a text and nothing else, such as a docstring."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _unparsed(statements: list[ast.stmt]) -> str:
    return ast.unparse(ast.Module(statements, []))


def par_of(problem: Problem, config: GolfRewardConfig) -> float:
    """The length that earns everything."""
    if not problem.solution:
        return float(config.par_bytes)
    return max(1.0, config.par_factor * golf_bytes(written_part(problem)))


def length_reward(length: int, par: float) -> float:
    """1 up to par, then par / length.

    >>> length_reward(200, 100.0)
    0.5
    """
    return 1.0 if length <= par else par / length


class CodeGolfTask(vf.Task[CodeData, vf.State, GolfRewardConfig]):
    """One problem."""

    def gold_replies(self) -> list[str]:
        """Return what the known solution adds to the question; none for problems of the hub."""
        return fenced(written_part(Problem(**self.data.problem)))

    @vf.reward
    async def golf(self, trace: vf.Trace) -> float:
        """Nothing for a wrong program; else between 1 - `length_weight` and 1."""
        verdict = await run_reply(self.data, self.config, trace)
        length = golf_bytes(verdict.program)
        trace.record_metric("tests_passed", verdict.share)
        trace.record_metric("right", float(verdict.is_right))
        trace.record_metric("program_bytes", float(length))
        if not verdict.is_right:
            return 0.0
        weight = self.config.length_weight
        par = par_of(Problem(**self.data.problem), self.config)
        return 1.0 - weight + weight * length_reward(length, par)


class CodeGolfTaskset(vf.Taskset[CodeGolfTask, CodeGolfConfig]):
    """The problems in the order of their source."""

    def load(self) -> Iterable[CodeGolfTask]:
        """Yield the problems; refuses a machine that cannot protect itself as required."""
        judge_here()
        for problem in self.config.problems():
            yield CodeGolfTask(problem_data(problem, self.config), self.config.task)
