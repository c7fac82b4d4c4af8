"""The taskset `code`: reply with a Python program that passes the problem's tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from gradus_code.judging import Judge, Verdict
from gradus_code.problems import (
    HUB_DATASET,
    Problem,
    hub_problems,
    human_eval_problems,
)
from gradus_kit.sandbox import Limits, Sandbox
from gradus_kit.tasksets.holdout import HoldoutKeys

INSTRUCTION = "Reply with the complete program in one block that begins with ```python."
_WALL_FACTOR = 3.0
"""Seconds by the clock for each of processor time."""


class ProgramConfig(vf.TaskConfig):
    """How a program is run."""

    seconds: float = Field(10.0, gt=0, le=600)
    """Processor time for all tests of one program; by the clock it has three times as much, since
    on a busy machine it waits for its core."""
    memory_mib: int = Field(512, ge=64)
    """Address space of each of its processes."""

    @property
    def limits(self) -> Limits:
        """For the sandbox."""
        return Limits(
            seconds=_WALL_FACTOR * self.seconds,
            cpu_seconds=max(1, round(self.seconds)),
            memory_bytes=self.memory_mib << 20,
        )


class CodeRewardConfig(ProgramConfig):
    """How a program is run, and what it is worth."""

    partial: bool = False
    """Pay the share of passed tests beyond what a program passes that always says the same, or
    gives an argument back; otherwise 1 for all and 0 for less."""


class CodeKeys(vf.TasksetConfig, HoldoutKeys):
    """Which problems; shared with other tasksets over the same problems."""

    source: Literal["human_eval", "hub"] = "human_eval"
    """`human_eval`: 164 problems of an installed package. `hub`: LiveCodeBench."""
    dataset: str = HUB_DATASET
    """Data set on the Hugging Face hub, or a local folder in one of its formats."""
    dataset_split: str = "test"
    """Split of that data set."""
    max_tests: int = Field(20, ge=1)
    """Most tests of a problem of `hub`."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of problems. None means all."""
    instruction: str | None = INSTRUCTION
    """System prompt. None means that the model sees only the problem."""
    holdout_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the problems that is held out, by the hash of each name."""

    def problems(self) -> Iterator[Problem]:
        """The problems of the configured source and side."""
        found = (
            human_eval_problems()
            if self.source == "human_eval"
            else hub_problems(self.dataset, split=self.dataset_split, max_tests=self.max_tests)
        )
        kept = (problem for problem in found if self.keeps(problem.name))
        return itertools.islice(kept, self.num_tasks)


class CodeConfig(CodeKeys):
    """Which problems, and how their programs are run."""

    task: CodeRewardConfig = CodeRewardConfig()
    """How a program is run, and what it is worth."""


class CodeData(vf.TaskData):
    """One problem; its question is the prompt."""

    problem: dict[str, Any]
    """The fields of `Problem`."""


@cache
def judge_here() -> Judge:
    """One judge for a process; ConfigError where bubblewrap does not work."""
    return Judge(Sandbox())


async def run_reply(data: CodeData, config: ProgramConfig, trace: vf.Trace) -> Verdict:
    """Run the program of a trace's last reply; the trace's info says how that went."""
    judge = judge_here()
    verdict = await judge.judge(Problem(**data.problem), trace.last_reply, config.limits)
    trace.info["program"] = {
        **verdict.info,
        "passed": verdict.passed,
        "total": verdict.total,
        "characters": len(verdict.program),
    }
    return verdict


class CodeTask(vf.Task[CodeData, vf.State, CodeRewardConfig]):
    """One problem."""

    def gold_replies(self) -> list[str]:
        """The known solution; none for problems of the hub."""
        return fenced(self.data.problem["solution"])

    @vf.reward
    async def passed(self, trace: vf.Trace) -> float:
        """1 when every test passes; with `partial`, the share that is not had for nothing."""
        verdict = await run_reply(self.data, self.config, trace)
        trace.record_metric("tests_passed", verdict.share)
        trace.record_metric("has_program", float(bool(verdict.program)))
        if not self.config.partial or verdict.passed in (0, verdict.total):
            return float(verdict.is_right)
        judge = judge_here()
        problem = Problem(**self.data.problem)
        return verdict.beyond(await judge.floor(problem, self.config.limits))


class CodeTaskset(vf.Taskset[CodeTask, CodeConfig]):
    """The problems in the order of their source."""

    def load(self) -> Iterable[CodeTask]:
        """Yield the problems; refuses a machine that cannot box their programs."""
        judge_here()
        for problem in self.config.problems():
            yield CodeTask(problem_data(problem, self.config), self.config.task)


def fenced(program: str) -> list[str]:
    """A reply with this program, or no reply where there is no program."""
    return [f"```python\n{program}\n```"] if program else []


def problem_data(problem: Problem, config: CodeKeys) -> CodeData:
    """The task of a problem."""
    return CodeData(
        name=problem.name,
        prompt=problem.question,
        system_prompt=config.instruction,
        problem=asdict(problem),
    )
