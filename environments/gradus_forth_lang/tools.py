"""The three tools: look a word up, run a program, hand one in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import verifiers.v1 as vf
from pydantic import BaseModel, Field

from gradus_forth_lang.dictionary import lookup, run_program
from gradus_forth_lang.machine import Limits
from gradus_forth_lang.problems.problem import Case, grade

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

ToolName: TypeAlias = Literal["lookup_docs", "run_code", "submit_code"]
MAX_SHOWN = 2_000
"""Characters of one answer."""
MAX_KEPT = 8_000
"""Characters of a submission that the record keeps."""


class Exam(BaseModel):
    """The tests of a submission, which the model never sees."""

    word: str = ""
    """The word to define."""
    cases: list[Case] = Field(default_factory=list)
    """Inputs and what they must leave."""
    max_submissions: int = 0
    """How many may be handed in."""
    shows_failure: bool = True
    """True if the answer names the first case that failed."""


class ForthState(vf.State):
    """The state of one episode, which the tools and the reward share."""

    exam: Exam = Exam()
    """Set before the first turn."""
    submissions: list[dict[str, Any]] = Field(default_factory=list)
    """Each with `code`, `passed` and `of`, in order."""


class ForthToolsConfig(vf.SharedToolsetConfig):
    """Limits of one program."""

    max_steps: int = Field(50_000, ge=100, le=1_000_000)
    """Words that `run_code` runs before it stops."""
    offers: list[ToolName] = Field(default=["lookup_docs", "run_code", "submit_code"], min_length=1)
    """Which tools the model is offered; without `submit_code` nothing can be solved."""


class ForthTools(vf.Toolset[ForthToolsConfig, ForthState]):
    """One server for all episodes of a worker; each call is on a new machine."""

    TOOL_PREFIX = None

    def register(self, mcp: MCPServer) -> None:
        """Offer the configured tools."""
        super().register(mcp)
        for name in {"lookup_docs", "run_code", "submit_code"} - set(self.config.offers):
            mcp.remove_tool(name)

    @vf.tool
    def lookup_docs(self, query: str) -> str:
        """What a word does; a chapter such as `strings`, or a description, works too."""
        return lookup(query)[:MAX_SHOWN]

    @vf.tool
    def run_code(self, code: str) -> str:
        """Run a program on an empty stack; answers with the stack, the output and the error."""
        machine, error = run_program(code, Limits(steps=self.config.max_steps))
        lines = [f"stack: {' '.join(map(str, machine.stack[-32:]))}"]
        if machine.text:
            lines.append(f"output: {machine.text.strip()}")
        if error is not None:
            lines.append(f"error: {error}")
        return "\n".join(lines)[:MAX_SHOWN]

    @vf.tool
    def submit_code(self, code: str) -> str:
        """Hand in the program that defines the word; it is tested on cases that you do not see."""
        exam, submissions = self.state.exam, self.state.submissions
        if len(submissions) >= exam.max_submissions:
            return "no submission is left"
        result = grade(code, exam.word, exam.cases)
        kept = code.encode("utf-8", "replace").decode()[:MAX_KEPT]
        submissions.append({"code": kept, "passed": result.num_passed, "of": result.num_cases})
        text = f"passed {result.num_passed} of {result.num_cases}"
        if result.reason and exam.shows_failure:
            text += f"; {result.reason}"
        return text[:MAX_SHOWN]


if __name__ == "__main__":
    # verifiers starts a tool server as the module of its class.
    ForthTools.run()
