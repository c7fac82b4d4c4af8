"""The taskset `required-format`: answer in one lowercase word, without any decoration."""

from __future__ import annotations

import string
from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import Field

from gradus_required_format.questions import build_questions

INSTRUCTION = "Answer with one lowercase word."


class RequiredFormatConfig(vf.TasksetConfig):
    """Which questions, and how the format is asked for."""

    seed: int = 0
    """Seed of the order of the questions."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of questions. None means all."""
    instruction: str | None = INSTRUCTION
    """System prompt. None means that the model sees only the question."""


class RequiredFormatData(vf.TaskData):
    """The question is the prompt."""

    answer: str
    """The right answer as one lowercase word."""


def rate_brevity(reply: str) -> float:
    """1 for one word, 1/n for n words, 0 for none."""
    num_words = len(reply.split())
    return 1.0 / num_words if num_words else 0.0


def rate_lowercase(reply: str) -> float:
    """Share of the words without an uppercase letter, of those with letters; 0 without any."""
    words = [word for word in reply.split() if any(map(str.isalpha, word))]
    return sum(word == word.lower() for word in words) / len(words) if words else 0.0


def is_bare(reply: str) -> bool:
    """True for a reply of one line that neither begins nor ends with punctuation."""
    text = reply.strip()
    return bool(text) and "\n" not in text and text.strip(string.punctuation) == text


def is_cut_off(trace: vf.Trace) -> bool:
    """Tell whether the limit of tokens ended the reply; half a sentence has no full stop either."""
    return bool(trace.calls) and trace.calls[-1].finish_reason == "length"


def has_answer(reply: str, answer: str) -> bool:
    """True when the answer is one of the words of the reply, in any case, with marks around it.

    Words end at spaces alone, as where they are counted: `oslo-rome-lima` is one, and no answer.
    """
    return any(word.strip(string.punctuation) == answer for word in reply.lower().split())


class RequiredFormatTask(vf.Task[RequiredFormatData, vf.State, vf.TaskConfig]):
    """One question; the format weighs three quarters, the answer one quarter."""

    @vf.reward(weight=0.25)
    async def brevity(self, trace: vf.Trace) -> float:
        """1 / number of words."""
        return rate_brevity(trace.last_reply)

    @vf.reward(weight=0.25)
    async def lowercase(self, trace: vf.Trace) -> float:
        """Share of lowercase words."""
        return rate_lowercase(trace.last_reply)

    @vf.reward(weight=0.25)
    async def bare(self, trace: vf.Trace) -> float:
        """1 for one line without punctuation around it, unless the limit of tokens ended it."""
        return float(is_bare(trace.last_reply) and not is_cut_off(trace))

    @vf.reward(weight=0.25)
    async def answer(self, trace: vf.Trace) -> float:
        """1 when the right answer is among the words."""
        return float(has_answer(trace.last_reply, self.data.answer))

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        """1 when the reply is the right answer in the required format, and nothing else."""
        return float(trace.last_reply.strip() == self.data.answer)


class RequiredFormatTaskset(vf.Taskset[RequiredFormatTask, RequiredFormatConfig]):
    """Every question once."""

    def load(self) -> Iterable[RequiredFormatTask]:
        """Yield the questions in the order of the seed."""
        questions = build_questions(seed=self.config.seed)[: self.config.num_tasks]
        for question in questions:
            data = RequiredFormatData(
                prompt=question.text,
                system_prompt=self.config.instruction,
                answer=question.answer,
            )
            yield RequiredFormatTask(data, self.config.task)
