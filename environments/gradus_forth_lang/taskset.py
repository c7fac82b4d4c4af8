"""The taskset `forth-lang`: define a word of a Forth that has its own documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from gradus_forth_lang.problems.build import NUM_TIERS, SOLUTION, Numbered, build_problems
from gradus_forth_lang.problems.problem import Case
from gradus_forth_lang.tools import Exam, ForthState, ForthTools, ForthToolsConfig
from gradus_kit.tasksets.holdout import HoldoutKeys

INSTRUCTION = (
    "You program in a Forth with cells of 64 bits. Many of its words you will not know: look them "
    "up with lookup_docs, and try code with run_code. Hand in a program that defines the word with "
    "submit_code. It is tested on cases that you do not see; you may hand in {max_submissions} "
    "times, and the last one counts."
)


class ForthTaskConfig(vf.TaskConfig):
    """Settings of submissions and what they are worth."""

    max_submissions: int = Field(3, ge=1, le=20)
    """How often `submit_code` may be called; the last submission counts."""
    shows_failure: bool = True
    """True if `submit_code` names the first case that failed."""
    partial_reward: float = Field(0.2, ge=0.0, lt=1.0)
    """Reward of a submission that passes some cases, times their share."""


class ForthLangConfig(vf.TasksetConfig, HoldoutKeys):
    """Which problems."""

    tiers: list[int] = Field(default_factory=lambda: list(range(NUM_TIERS)), min_length=1)
    """0 expressions, 1 orders on the stack, 2 branches, 3 loops, 4 strings and memory,
    5 recursion and searches."""
    per_tier: int = Field(60, ge=1, le=2_000)
    """Problems of each tier before the hold-out; a tier may have fewer different ones."""
    seed: int = 0
    """Other numbers, other problems."""
    style: Literal["full", "brief"] = "full"
    """`brief` asks with a formula alone, for small models; only tiers 0 and 1 have some."""
    num_examples: int = Field(3, ge=0, le=8)
    """Cases that the prompt shows."""
    tools: ForthToolsConfig = ForthToolsConfig()
    """The tool server."""
    task: ForthTaskConfig = ForthTaskConfig()
    """Submissions and their reward."""


class ForthData(vf.TaskData):
    """One problem."""

    tier: int
    """0 to 5."""
    word: str
    """The word to define."""
    cases: list[Case]
    """What a submission is tested on."""
    answer: str
    """A right submission."""


class ForthTask(vf.Task[ForthData, ForthState, ForthTaskConfig]):
    """One problem; only what was handed in counts."""

    def gold_replies(self) -> list[object]:
        """Hand a right program in, and stop."""
        code = {"code": self.data.answer}
        return [{"tool": "submit_code", "arguments": code}, "Done."]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:  # noqa: ARG002
        """Give the tools what a submission is tested on."""
        trace.state.exam = Exam(
            word=self.data.word,
            cases=self.data.cases,
            max_submissions=self.config.max_submissions,
            shows_failure=self.config.shows_failure,
        )

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:  # noqa: ARG002
        trace.info["submissions"] = trace.state.submissions

    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        """1 when the last submission passes every case, else a part of `partial_reward`."""
        if not trace.state.submissions:
            return 0.0
        last = trace.state.submissions[-1]
        share = float(last["passed"]) / max(int(last["of"]), 1)
        return 1.0 if share == 1.0 else self.config.partial_reward * share

    @vf.metric
    async def submissions(self, trace: vf.Trace) -> float:
        """How often the model handed in."""
        return float(len(trace.state.submissions))

    @vf.metric
    async def tier(self, trace: vf.Trace) -> float:  # noqa: ARG002
        """The tier of the problem."""
        return float(self.data.tier)


class ForthLangTaskset(vf.Taskset[ForthTask, ForthLangConfig]):
    """Problems of the tiers in turn, one side of the hold-out."""

    def load(self) -> Iterable[ForthTask]:
        """Yield the problems; ValueError for tiers that there are not."""
        config = self.config
        if unknown := [tier for tier in config.tiers if not 0 <= tier < NUM_TIERS]:
            raise ValueError(f"tiers = {unknown}: there are tiers 0 to {NUM_TIERS - 1}")
        for one in build_problems(config.tiers, config.per_tier, seed=config.seed):
            is_asked = config.style == "full" or one.problem.formula
            if is_asked and config.keeps(f"{one.problem.effect} {one.problem.text}"):
                yield ForthTask(self._data(one), config.task)

    def _data(self, one: Numbered) -> ForthData:
        is_brief = self.config.style == "brief"
        instruction = INSTRUCTION.format(max_submissions=self.config.task.max_submissions)
        return ForthData(
            name=one.name,
            prompt=one.problem.formula if is_brief else self._prompt(one),
            system_prompt=None if is_brief else instruction,
            tier=one.tier,
            word=SOLUTION,
            cases=list(one.problem.cases),
            answer=one.problem.solution(SOLUTION),
        )

    def _prompt(self, one: Numbered) -> str:
        shown = [f"  {case.text}" for case in one.problem.cases[: self.config.num_examples]]
        examples = "\n".join(["Examples, stack before -> stack after:", *shown]) if shown else ""
        text = f"Define {SOLUTION} {one.problem.effect}. {one.problem.text}\n{examples}"
        return text.strip()

    @classmethod
    def toolsets(cls, config: ForthLangConfig) -> list[vf.Toolset]:
        return [ForthTools(config.tools)]
