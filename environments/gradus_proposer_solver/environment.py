"""The environment `proposer-solver`: a proposer, solvers, and a checker of what is proposed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from gradus_kit.multiagent.channels import fence
from gradus_proposer_solver.rules import (
    Proposal,
    last_number,
    learnability,
    read_claim,
    read_expression,
    requests,
)

PROPOSER, SOLVER, CHECKER = "proposer", "solver", "checker"
Style = Literal["words", "expression"]
ASK_FOR_WORDS = (
    "Invent one short problem about {topic} whose answer is a whole number. Use the numbers {a} "
    "and {b}. About half of good pupils should fail it, and everything needed must be in its text. "
    "End with two lines:\nProblem: the text\nAnswer: the number"
)
ASK_FOR_EXPRESSION = (
    "Write one expression of whole numbers with + - * and brackets that about half of good pupils "
    "get wrong. Use the numbers {a} and {b}. Reply with the expression alone."
)
SOLVE = "{problem}\n\nEnd your reply with the number that is the answer."


class ProposerSolverConfig(vf.TasksetConfig):
    """What is proposed, and how often."""

    num_tasks: int = Field(60, ge=1, le=100_000)
    """Number of requests, each with a topic and two numbers."""
    seed: int = 0
    """Seed of the numbers."""
    style: Style = "words"
    """`words`: a text with a claimed answer, which the checker must confirm. `expression`: sums,
    differences and products, whose value is computed, so that no judge is needed."""
    request: str | None = None
    """What the proposer is asked, with {topic}, {a} and {b}. None means a text for the style."""
    question: str = Field(SOLVE, pattern=r"\{problem\}")
    """What solvers and checker are asked, with {problem}."""


class ProposeData(vf.TaskData):
    """The request is the prompt."""

    style: Style
    """What is proposed."""
    question: str
    """What solvers and checker are asked."""


class ProposeTask(vf.Task[ProposeData, vf.State, vf.TaskConfig]):
    """One request; the environment rewards the proposer by what the problem does to solvers."""

    def gold_replies(self) -> dict[str, list[str]]:
        """A readable problem and its answer. Who all solve it leave its proposer with nothing."""
        proposed = "Problem: What is 12 + 30?\nAnswer: 42"
        if self.data.style == "expression":
            proposed = "12 + 30"
        return {PROPOSER: [proposed], SOLVER: ["42"], CHECKER: ["42"]}


class SolveData(vf.TaskData):
    """A proposed problem is the prompt."""

    answer: int
    """The number that counts as right."""


class SolveTask(vf.Task[SolveData, vf.State, vf.TaskConfig]):
    """One proposed problem: reward 1 for its number."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 when the last number of the reply is the answer."""
        return float(last_number(trace.last_reply) == self.data.answer)


class ProposerSolverTaskset(vf.Taskset[ProposeTask, ProposerSolverConfig]):
    """One task per request."""

    def load(self) -> Iterable[ProposeTask]:
        """Yield the requests in order."""
        config = self.config
        default = ASK_FOR_WORDS if config.style == "words" else ASK_FOR_EXPRESSION
        for index, (topic, (a, b)) in enumerate(requests(config.num_tasks, seed=config.seed)):
            asked = config.request or default
            for name, value in (("topic", topic), ("a", a), ("b", b)):
                asked = asked.replace(f"{{{name}}}", str(value))
            data = ProposeData(
                name=f"request {index}", prompt=asked, style=config.style, question=config.question
            )
            yield ProposeTask(data, config.task)


class ProposerSolverEnvConfig(vf.EnvConfig):
    """The three roles, and how many solvers try a problem."""

    proposer: vf.AgentConfig = vf.AgentConfig()
    """Invents the problem."""
    solver: vf.AgentConfig = vf.AgentConfig()
    """Tries it, several times and each time anew."""
    checker: vf.AgentConfig = vf.AgentConfig()
    """Solves a problem in words first; solvers play only where its answer is the claimed one."""
    max_concurrent_agents: int | None = Field(None, ge=1)
    """Agents of one episode that play at the same time. None means all solvers."""
    num_solvers: int = Field(4, ge=2, le=64)
    """Solvers per problem; one alone says nothing of how hard it is."""


class ProposerSolverEnv(vf.Env[ProposerSolverEnvConfig]):
    """A proposal, its check, and independent attempts to solve it."""

    @property
    def unplayed_roles(self) -> tuple[str, ...]:
        """Roles that have no part in any episode."""
        return () if self.taskset.config.style == "words" else (CHECKER,)

    async def run(self, task: ProposeTask, agents: vf.Agents) -> None:
        """Ask for a problem, have it checked, and let the solvers try it.

        A reply that holds no problem, and one that the checker does not confirm, end the episode
        there: its proposer gets nothing.
        """
        proposed = await agents.proposer.run(task)
        proposal = _read(task, proposed)
        if proposal is None:
            return
        text = proposal.problem
        if task.data.style == "words":
            # An expression holds nothing but numbers and signs.
            text = fence(text, member=PROPOSER).text
        asked = task.data.question.replace("{problem}", text)
        problem = SolveTask(SolveData(prompt=asked, answer=proposal.answer), task.config)
        if task.data.style == "words":
            checked = await agents.checker.run(problem)
            if not checked.ok or last_number(checked.last_reply) != proposal.answer:
                return
        attempts = (agents.solver.run(problem) for _ in range(self.config.num_solvers))
        await asyncio.gather(*attempts)

    async def finalize(self, task: ProposeTask, episode: vf.Episode) -> None:
        """Reward the proposer by its solvers; an episode with a failed trace rewards none."""
        if not all(trace.ok for trace in episode.traces):
            return
        solved = [_is_correct(t) for t in episode.traces if t.agent.name == SOLVER]
        for trace in episode.traces:
            if trace.agent.name == PROPOSER:
                trace.record_reward("learnability", learnability(solved))
                trace.record_metric("readable", float(_read(task, trace) is not None))
                trace.record_metric("confirmed", float(bool(solved)))
                trace.record_metric("solve_rate", sum(solved) / max(1, len(solved)))


def _read(task: ProposeTask, trace: vf.Trace) -> Proposal | None:
    if not trace.ok:
        return None
    reader = read_claim if task.data.style == "words" else read_expression
    return reader(trace.last_reply)


def _is_correct(trace: vf.Trace) -> bool:
    reward = trace.rewards.get("correct")
    return reward is not None and reward.score > 0
