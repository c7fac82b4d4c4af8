"""The taskset `word-lookup`: call `dict_get` with the key, and reply with the value."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.types import content_text

from gradus_word_lookup.entries import NUM_ENTRIES, build_entries


class DictionaryConfig(vf.SharedToolsetConfig):
    """Which dictionary the tool reads."""

    seed: int = 0
    """Seed of the values."""
    num_entries: int = Field(NUM_ENTRIES, ge=1, le=26)
    """Number of keys."""


class Dictionary(vf.Toolset[DictionaryConfig, vf.State]):
    """A tool server of one tool, `dict_get`."""

    TOOL_PREFIX = "dict"

    @vf.tool
    def get(self, k: str) -> str:
        """The value of a key."""
        entries = build_entries(seed=self.config.seed, num=self.config.num_entries)
        return entries.get(k, "?")


class WordLookupConfig(vf.TasksetConfig):
    """Which keys are asked for."""

    dictionary: DictionaryConfig = DictionaryConfig()
    """The tool and its values."""
    instruction: str | None = None
    """System prompt. None means that the model sees only the key, and the tool's declaration."""


class WordLookupData(vf.TaskData):
    """The key is the prompt."""

    answer: str
    """Its value, which only the tool knows."""


class WordLookupTask(vf.Task[WordLookupData, vf.State, vf.TaskConfig]):
    """One key."""

    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        """1 when the last reply is the value, a quarter when at least the tool gave it."""
        if trace.last_reply.strip() == self.data.answer:
            return 1.0
        outputs = [content_text(message.content) for message in trace.tool_messages]
        return 0.25 if self.data.answer in outputs else 0.0

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        """Tool outputs in the conversation."""
        return float(len(trace.tool_messages))


class WordLookupTaskset(vf.Taskset[WordLookupTask, WordLookupConfig]):
    """Every key once."""

    def load(self) -> Iterable[WordLookupTask]:
        """Yield the keys in order."""
        settings = self.config.dictionary
        for key, value in build_entries(seed=settings.seed, num=settings.num_entries).items():
            yield WordLookupTask(WordLookupData(prompt=key, answer=value), self.config.task)

    @classmethod
    def toolsets(cls, config: WordLookupConfig) -> list[vf.Toolset]:
        return [Dictionary(config.dictionary)]


if __name__ == "__main__":
    # verifiers starts a tool server as the module of its class.
    Dictionary.run()
