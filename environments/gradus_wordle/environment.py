"""The environment `wordle`: a scripted game master, and the words that it hides."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import islice
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_wordle.rules import Play, Style, answer_to, opening
from gradus_wordle.words import english_words, own_words


class WordleConfig(vf.TasksetConfig, HoldoutKeys):
    """Which words are hidden, and how long one may guess."""

    words: Literal["own", "english-words"] = "own"
    """`own`: our lists of common words of three and of five letters. `english-words`: those of this
    package, many of them rare."""
    length: int = Field(5, ge=2, le=12)
    """Letters of each word."""
    num_words: int | None = Field(None, ge=1)
    """Hide only the first words of the list. None means all."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of games. None means one for each word."""
    seed: int = 0
    """Seed of the order of the words."""
    max_turns: int = Field(6, ge=1, le=20)
    """Guesses of a game."""
    style: Style = "tags"
    """`tags` explains the game and reads the guess between tags. `plain`, for very small models,
    explains nothing, and the reply is nothing but the word."""


class WordleData(vf.TaskData):
    """One hidden word; the game master opens, so there is no prompt."""

    answer: str
    """The word."""
    max_turns: int
    """Guesses of the game."""
    style: Style
    """Form of the messages."""

    def play(self, replies: list[str]) -> Play:
        return Play.of(replies, self.answer, max_turns=self.max_turns, style=self.style)


class WordleTask(vf.Task[WordleData, vf.State, vf.TaskConfig]):
    """One game."""

    def gold_replies(self) -> list[str]:
        """Reply as somebody who knows the word."""
        word = self.data.answer
        return [word if self.data.style == "plain" else f"<guess>{word}</guess>"]

    @vf.reward
    async def game(self, trace: vf.Trace) -> dict[str, float]:
        """For finding the word, finding it soon, coming close, and guesses that can be read."""
        return self.data.play(_replies(trace)).parts

    @vf.metric
    async def is_solved(self, trace: vf.Trace) -> float:
        """1 when the word was found."""
        return float(self.data.play(_replies(trace)).is_solved)

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """Guesses made."""
        return float(len(self.data.play(_replies(trace)).guesses))

    @vf.metric
    async def unreadable(self, trace: vf.Trace) -> float:
        """Share of the replies without a guess that can be read."""
        return 1.0 - self.data.play(_replies(trace)).readable


def _replies(trace: vf.Trace) -> list[str]:
    return [str(message.content or "") for message in trace.assistant_messages]


class WordleEnv(vf.SingleAgentEnv):
    """Marks every guess until the word is found or no guess is left."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play one game."""
        data: WordleData = task.data
        message = opening(len(data.answer), data.max_turns, data.style)
        replies: list[str] = []
        async with agents.agent.interaction(task) as talk:
            while True:
                segment = await talk.turn(message)
                if segment.terminated:
                    return
                replies.append(segment.last_reply)
                play = data.play(replies)
                if play.is_over:
                    return
                left = data.max_turns - len(replies)
                message = answer_to(play.guesses[-1], data.answer, left, data.style)


class WordleTaskset(vf.Taskset[WordleTask, WordleConfig]):
    """The words of the configured side in a drawn order."""

    def load(self) -> Iterable[WordleTask]:
        """Yield one game for each word."""
        config = self.config
        found = own_words if config.words == "own" else english_words
        words = [word for word in found(config.length)[: config.num_words] if config.keeps(word)]
        random.Random(f"wordle {config.seed}").shuffle(words)
        for word in islice(words, config.num_tasks):
            data = WordleData(
                name=word, answer=word, max_turns=config.max_turns, style=config.style
            )
            yield WordleTask(data, config.task)
