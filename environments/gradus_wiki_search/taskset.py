"""The taskset `wiki-search`: tools `wiki_search` and `wiki_read`, and one answer at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator
from verifiers.v1.types import content_text

from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.hub import hub_rows
from gradus_kit.tasksets.ranges import refuse_reversed
from gradus_wiki_search.answers import TaggedAnswer
from gradus_wiki_search.questions import Question, make_questions
from gradus_wiki_search.search import Library, bm25
from gradus_wiki_search.world import build_world

Source = Literal["world", "hub"]

HUB_QUESTIONS = "willcb/wiki-trivia-questions-v4"
HUB_ARTICLES = "willcb/rare-wiki-pages"
INSTRUCTION = (
    "Answer the question with the tools: search the encyclopedia, and read its articles. When you "
    "know the answer, write it once, as short as possible, as <answer>...</answer>."
)


class WikiToolsConfig(vf.SharedToolsetConfig):
    """Which articles the tools search."""

    source: Source = "world"
    """`world`: our made-up country. `hub`: the articles of `dataset`."""
    world_seed: int = 0
    """Seed of the country."""
    dataset: str = HUB_ARTICLES
    """Data set on the hub, or a local folder, with `title` and `content` in each row."""
    dataset_split: str = "train"
    """Split of that data set."""


class WikiTools(vf.Toolset[WikiToolsConfig, vf.State]):
    """A tool server for all episodes of a worker: its tools read, and remember nothing."""

    TOOL_PREFIX = "wiki"

    async def setup(self) -> None:
        """Index the articles."""
        config = self.config
        if config.source == "world":
            world = build_world(config.world_seed)
            articles = {title: article.text for title, article in world.items()}
        else:
            columns = ["title", "content"]
            rows = hub_rows(config.dataset, split=config.dataset_split, columns=columns)
            articles = {row["title"]: row["content"] for row in rows}
        self.library = Library(articles)

    @vf.tool
    def search(self, query: str) -> str:
        """The articles that have these words, best first."""
        return self.library.search(query)

    @vf.tool
    def read(self, title: str) -> str:
        """The article with this title."""
        return self.library.read(title)


class WikiSearchConfig(vf.TasksetConfig, HoldoutKeys):
    """Which questions are asked, and about which articles."""

    tools: WikiToolsConfig = WikiToolsConfig()
    """The articles."""
    source: Source = "world"
    """`world` asks about our country, `hub` asks the questions of `dataset`, which go with the
    hub's articles."""
    num_tasks: int = Field(400, ge=1)
    """Number of questions, at most."""
    seed: int = 0
    """Seed of the questions."""
    min_hops: int = Field(1, ge=1)
    """Fewest articles that one must read."""
    max_hops: int = Field(3, ge=1, le=6)
    """Most articles that one must read."""
    dataset: str = HUB_QUESTIONS
    """Data set on the hub, or a local folder, with `question` and `answer` in each row."""
    dataset_split: str = "train"
    """Split of that data set."""
    instruction: str | None = INSTRUCTION
    """System prompt, which must ask for the answer between tags."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_reversed("hops", self.min_hops, self.max_hops)
        if self.source != self.tools.source:
            raise ValueError(
                f"source = {self.source!r} asks about other articles than tools.source = "
                f"{self.tools.source!r} has; use the same"
            )
        return self


class WikiSearchData(vf.TaskData):
    """One question; it is the prompt."""

    answer: str
    """The right answer."""
    titles: tuple[str, ...] = ()
    """The articles that lead to it, where they are known."""


class WikiSearchTask(TaggedAnswer, vf.Task[WikiSearchData, vf.State, vf.TaskConfig]):
    """One question."""

    def gold_replies(self) -> list[object]:
        """Every article on the way, then the answer, for the check of environments."""
        reads = [{"tool": "wiki_read", "arguments": {"title": name}} for name in self.data.titles]
        return [*reads, f"<answer>{self.data.answer}</answer>"]

    @vf.metric
    async def evidence(self, trace: vf.Trace) -> float:
        """Share of the articles that lead to the answer that were read."""
        read = {text.partition("\n")[0].removeprefix("# ") for text in _outputs(trace)}
        titles = self.data.titles
        return sum(title in read for title in titles) / len(titles) if titles else 0.0


def _outputs(trace: vf.Trace) -> list[str]:
    return [content_text(message.content) for message in trace.tool_messages]


class WikiSearchTaskset(vf.Taskset[WikiSearchTask, WikiSearchConfig]):
    """Questions of the configured side."""

    def load(self) -> Iterable[WikiSearchTask]:
        """Yield them in the order of their source."""
        config = self.config
        # Here, before any server starts, so that a missing package is told at once.
        bm25()
        kept = (question for question in self._questions() if config.keeps(question.text))
        for question in islice(kept, config.num_tasks):
            data = WikiSearchData(
                prompt=question.text,
                system_prompt=config.instruction,
                answer=question.answer,
                titles=question.titles,
            )
            yield WikiSearchTask(data, config.task)

    def _questions(self) -> Iterator[Question]:
        config = self.config
        if config.source == "hub":
            columns = ["question", "answer"]
            for row in hub_rows(config.dataset, split=config.dataset_split, columns=columns):
                yield Question(str(row["question"]), str(row["answer"]), ())
            return
        world = build_world(config.tools.world_seed)
        hops = (config.min_hops, config.max_hops)
        yield from make_questions(world, hops=hops, seed=config.seed)

    @classmethod
    def toolsets(cls, config: WikiSearchConfig) -> list[vf.Toolset]:
        return [WikiTools(config.tools)]


if __name__ == "__main__":
    # verifiers starts a tool server as the module of its class.
    WikiTools.run()
