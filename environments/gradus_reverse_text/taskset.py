"""The taskset `reverse-text`: reply with the text, last character first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from gradus_kit.tasksets.similarity import similarity
from gradus_reverse_text.texts import HUB_DATASET, read_file, read_hub
from gradus_reverse_text.words import Split, generate_texts, split_of

DEFAULT_NUM_WORD_TASKS = 1000


class ReverseTextConfig(vf.TasksetConfig):
    """Where the texts come from, and which of them are tasks."""

    source: Literal["words", "hub", "file"] = "words"
    """`words` generates texts and needs no network, `hub` loads `dataset`, `file` reads `path`."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of tasks. None means 1000 of `words`, and all of `hub` and `file`."""
    split: Split = "train"
    """Every text is in one of both splits by its hash: about a tenth is held out."""
    seed: int = 0
    """Seed of the generated words."""
    min_words: int = Field(2, ge=1)
    """Fewest words of a generated text."""
    max_words: int = Field(4, ge=1)
    """Most words of a generated text."""
    dataset: str = HUB_DATASET
    """Data set on the Hugging Face hub, or a local folder in one of its formats."""
    dataset_split: str = "train"
    """Split of that data set."""
    path: Path | None = None
    """File of JSON lines. None unless `source` is `file`."""
    column: str = "prompt"
    """Column of the data set, or key in the file, that holds the text."""
    instruction: str | None = None
    """System prompt. None means that the model sees only the text."""


class ReverseTextData(vf.TaskData):
    """The text is the prompt; the answer is its reverse."""

    answer: str
    """The reversed text."""


class ReverseTextTask(vf.Task[ReverseTextData, vf.State, vf.TaskConfig]):
    """One text to reverse."""

    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        """Similarity of the reply and the reversed text."""
        return similarity(trace.last_reply, self.data.answer)

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        """1 when the reply is the reversed text."""
        return float(trace.last_reply.strip() == self.data.answer.strip())


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Tasks in the order of their source."""

    def load(self) -> Iterable[ReverseTextTask]:
        """Yield the tasks of the configured source and split."""
        for text in self._texts():
            data = ReverseTextData(
                prompt=text, system_prompt=self.config.instruction, answer=text[::-1]
            )
            yield ReverseTextTask(data, self.config.task)

    def _texts(self) -> Iterator[str]:
        config = self.config
        if config.source == "words":
            return iter(
                generate_texts(
                    config.num_tasks or DEFAULT_NUM_WORD_TASKS,
                    seed=config.seed,
                    min_words=config.min_words,
                    max_words=config.max_words,
                    split=config.split,
                )
            )
        stored = self._stored_texts()
        chosen = (text for text in stored if split_of(text) == config.split)
        return itertools.islice(chosen, config.num_tasks)

    def _stored_texts(self) -> Iterator[str]:
        config = self.config
        if config.source == "hub":
            return read_hub(
                config.dataset, dataset_split=config.dataset_split, column=config.column
            )
        if config.path is None:
            raise ValueError("source = 'file' needs `path`, a file of JSON lines")
        return read_file(config.path, column=config.column)
