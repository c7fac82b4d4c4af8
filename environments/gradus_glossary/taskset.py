"""The taskset `glossary`: tools `glossary_look_up` and `glossary_find`, and one answer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from itertools import islice
from typing import Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gradus_glossary.entries import MAX_WORDS, MIN_WORDS, build_glossary, make_questions
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.ranges import refuse_reversed
from gradus_wiki_search.answers import TaggedAnswer

INSTRUCTION = (
    "Answer the question with the glossary: look words up, or find those whose entry has some "
    "words. When you know the answer, write it once, in the words of the glossary, as "
    "<answer>...</answer>."
)
RESULTS = 5
"""Words that one search shows."""


class GlossaryToolsConfig(vf.SharedToolsetConfig):
    """Which glossary the tools read."""

    seed: int = 0
    """Seed of the words."""
    num_words: int = Field(120, ge=MIN_WORDS, le=MAX_WORDS)
    """Number of words."""


class GlossaryTools(vf.Toolset[GlossaryToolsConfig, vf.State]):
    """A tool server for all episodes of a worker: its tools read, and remember nothing."""

    TOOL_PREFIX = "glossary"

    async def setup(self) -> None:
        """Make the glossary."""
        self.glossary = build_glossary(self.config.seed, self.config.num_words)

    @vf.tool
    def look_up(self, word: str) -> str:
        """What a word means."""
        entry = self.glossary.get(word.strip().lower())
        if entry is not None:
            return f"{entry.word}: {entry.definition}"
        near = ", ".join(difflib.get_close_matches(word[:50].lower(), self.glossary, n=3))
        return f"The glossary has no {word[:50]!r}. Words like it: {near or 'none'}"

    @vf.tool
    def find(self, text: str) -> str:
        """The words whose entries have all of these words."""
        wanted = _words(text[:200])
        entries = self.glossary.items()
        found = [w for w, e in entries if wanted and wanted <= _words(f"{w} {e.definition}")]
        more = f" and {len(found) - RESULTS} more" if len(found) > RESULTS else ""
        return ", ".join(found[:RESULTS]) + more or "No entry has all of these words."


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


class GlossaryConfig(vf.TasksetConfig, HoldoutKeys):
    """Which questions are asked."""

    tools: GlossaryToolsConfig = GlossaryToolsConfig()
    """The glossary."""
    num_tasks: int = Field(400, ge=1)
    """Number of questions, at most."""
    seed: int = 0
    """Seed of their order."""
    min_steps: int = Field(1, ge=1)
    """Fewest words that one must look up."""
    max_steps: int = Field(2, ge=1, le=4)
    """Most words that one must look up."""
    instruction: str | None = INSTRUCTION
    """System prompt, which must ask for the answer between tags."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_reversed("steps", self.min_steps, self.max_steps)
        return self


class GlossaryData(vf.TaskData):
    """One question; it is the prompt."""

    answer: str
    """In the words of the glossary."""
    words: tuple[str, ...]
    """What must be looked up; a question is held out when one of them is."""


class GlossaryTask(TaggedAnswer, vf.Task[GlossaryData, vf.State, vf.TaskConfig]):
    """One question."""

    def gold_replies(self) -> list[object]:
        """Every word, then the answer, for the check of environments."""
        looks = [
            {"tool": "glossary_look_up", "arguments": {"word": word}} for word in self.data.words
        ]
        return [*looks, f"<answer>{self.data.answer}</answer>"]


class GlossaryTaskset(vf.Taskset[GlossaryTask, GlossaryConfig]):
    """Questions of the configured side."""

    def load(self) -> Iterable[GlossaryTask]:
        """Yield them in the order of their seed."""
        config = self.config
        glossary = build_glossary(config.tools.seed, config.tools.num_words)
        steps = (config.min_steps, config.max_steps)
        questions = make_questions(glossary, steps=steps, seed=config.seed)
        kept = (question for question in questions if config.keeps(*question[2]))
        for text, answer, words in islice(kept, config.num_tasks):
            data = GlossaryData(
                prompt=text, system_prompt=config.instruction, answer=answer, words=words
            )
            yield GlossaryTask(data, config.task)

    @classmethod
    def toolsets(cls, config: GlossaryConfig) -> list[vf.Toolset]:
        return [GlossaryTools(config.tools)]


if __name__ == "__main__":
    # verifiers starts a tool server as the module of its class.
    GlossaryTools.run()
