"""Grader and matcher: other models that compare free answers, for the diagnosis alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import combinations
from typing import Any

import msgspec
import verifiers.v1 as vf
from verifiers.v1.configs.client import ClientTimeoutConfig

from gradus_debate.settings import DebateEnvConfig, Rules, VerdictConfig
from gradus_kit.multiagent.channels import fence
from gradus_kit.multiagent.pack import VerdictPrompt
from gradus_kit.multiagent.prompts import Case
from gradus_kit.multiagent.scores import EpisodeScores, Truth

FAILURES = "verdict_failures"
"""Key of a trace's info: which comparisons failed, and why."""
MAX_REASON_CHARACTERS = 300


class VerdictJudge(vf.Judge[bool]):
    """Asks for one of a pack's two words; ValueError for everything else."""

    def __init__(self, name: str, config: VerdictConfig, prompt: VerdictPrompt) -> None:
        wait = config.deadline_seconds
        super().__init__(
            vf.JudgeConfig(
                name=name,
                base_url=config.base_url,
                api_key_var=config.api_key_var,
                model=config.model,
                timeout=ClientTimeoutConfig(connect=wait, read=wait, write=wait, pool=wait),
            )
        )
        self._prompt = prompt

    def build_messages(self, **fields: Any) -> vf.Messages:
        """The pack's texts with the two answers."""
        user = vf.UserMessage(content=self._prompt.user.render(fields))
        if self._prompt.system is None:
            return [user]
        return [vf.SystemMessage(content=self._prompt.system.render(fields)), user]

    def parse(self, response: vf.JudgeResponse[bool]) -> bool:
        """Tell whether the reply is the positive word."""
        return self._prompt.read(response.text)


async def compare_answers(
    rules: Rules,
    config: DebateEnvConfig,
    scores: EpisodeScores,
    case: Case,
    truth: Truth,
    home: vf.Trace,
) -> EpisodeScores:
    """The scores with what grader and matcher say; a failed comparison is noted."""
    asked: dict[tuple[str, str], Awaitable[bool | None]] = {}
    free = [m for m in rules.scorer.contestants if rules.scorer.is_compared_by_models(m)]
    answers = {m: scores.members[m].final_answer for m in free}
    given = {member: answer for member, answer in answers.items() if answer is not None}
    if config.grader is not None and rules.pack.grader is not None and truth.answer is not None:
        grader = VerdictJudge("grader", config.grader, rules.pack.grader)
        for member, answer in given.items():
            given_by = fence(answer, member=member).text
            fields = {"task_prompt": case.task_prompt, "answer": given_by, "other": truth.answer}
            asked["grader", member] = _ask(grader, config.grader, home, fields)
    if config.matcher is not None and rules.pack.matcher is not None and len(given) == len(free):
        matcher = VerdictJudge("matcher", config.matcher, rules.pack.matcher)
        for one, other in combinations(given, 2):
            first, second = (fence(given[member], member=member).text for member in (one, other))
            fields = {"task_prompt": case.task_prompt, "answer": first, "other": second}
            asked["matcher", f"{one}/{other}"] = _ask(matcher, config.matcher, home, fields)
    if not asked:
        return scores
    said = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
    members = {
        member: msgspec.structs.replace(
            own, final_correct=said.get(("grader", member), own.final_correct)
        )
        for member, own in scores.members.items()
    }
    matches = [verdict for (kind, _), verdict in said.items() if kind == "matcher"]
    agreement = all(matches) if matches and None not in matches else scores.agreement
    graded = msgspec.structs.replace(scores, members=members)
    failed = sum(verdict is None for verdict in said.values())
    home.record_metric("episode/verdicts_failed", float(failed))
    return rules.scorer.with_outcome(graded, truth, agreement=agreement)


async def _ask(
    judge: VerdictJudge, config: VerdictConfig, home: vf.Trace, fields: dict[str, str]
) -> bool | None:
    """The verdict; None when none came, which the trace then says."""
    try:
        async with asyncio.timeout(config.deadline_seconds):
            return (await judge.evaluate(trace=home, **fields)).parsed
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]
        home.info.setdefault(FAILURES, []).append({"judge": judge.reward_name, "reason": reason})
        return None
