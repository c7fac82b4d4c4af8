"""The taskset `deepwiki`: tools to list a wiki's pages, read them and ask about them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.ranges import refuse_reversed
from gradus_wiki_search.answers import TaggedAnswer
from gradus_wiki_search.questions import make_questions
from gradus_wiki_search.search import Library, bm25
from gradus_wiki_search.taskset import WikiSearchData
from gradus_wiki_search.world import SHARES, build_world

WIKIS = {f"country/{kind}": kind for kind in SHARES}
"""Name of a wiki → the kind of article that it holds."""
INSTRUCTION = (
    "Answer the question from these wikis: " + ", ".join(WIKIS) + ". List the pages of one, read "
    "them, or ask it. When you know the answer, write it once, as short as possible, as "
    "<answer>...</answer>."
)
_LONGEST = 6000
"""Characters of one answer."""
_PASSAGES = 3


class DeepWikiToolsConfig(vf.SharedToolsetConfig):
    """Which country the wikis are about."""

    world_seed: int = 0
    """Seed of the country."""


class DeepWikiTools(vf.Toolset[DeepWikiToolsConfig, vf.State]):
    """A tool server for all episodes of a worker, with the tools' names as DeepWiki has them."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        """Index each wiki."""
        world = build_world(self.config.world_seed)
        self.pages = {
            name: {title: article.text for title, article in world.items() if article.kind == kind}
            for name, kind in WIKIS.items()
        }
        self.libraries = {
            name: Library(pages, lister="read_wiki_structure") for name, pages in self.pages.items()
        }

    @vf.tool
    def read_wiki_structure(self, repoName: str) -> str:
        """The pages of a wiki."""
        if repoName not in self.pages:
            return _no_wiki(repoName)
        return f"Pages of {repoName}:\n" + "\n".join(f"- {name}" for name in self.pages[repoName])

    @vf.tool
    def read_wiki_contents(self, repoName: str, page: str = "") -> str:
        """One page of a wiki; without a page, all of them."""
        if repoName not in self.pages:
            return _no_wiki(repoName)
        if page:
            return self.libraries[repoName].read(page)
        text = "\n".join(f"# {title}\n{text}" for title, text in self.pages[repoName].items())
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\n[cut: read page by page]"

    @vf.tool
    def ask_question(self, repoName: str, question: str) -> str:
        """The passages of a wiki that a question is about."""
        if repoName not in self.pages:
            return _no_wiki(repoName)
        found = self.libraries[repoName].best(question, _PASSAGES)
        passages = (f"# {title}\n{self.pages[repoName][title]}" for title in found)
        return "\n".join(passages) or "No page has these words."


def _no_wiki(name: str) -> str:
    return f"There is no wiki {name[:50]!r}. There are: {', '.join(WIKIS)}"


class DeepWikiConfig(vf.TasksetConfig, HoldoutKeys):
    """Which questions are asked."""

    tools: DeepWikiToolsConfig = DeepWikiToolsConfig()
    """The wikis."""
    num_tasks: int = Field(400, ge=1)
    """Number of questions, at most."""
    seed: int = 0
    """Seed of the questions."""
    min_hops: int = Field(1, ge=1)
    """Fewest pages that one must read."""
    max_hops: int = Field(3, ge=1, le=6)
    """Most pages that one must read."""
    instruction: str | None = INSTRUCTION
    """System prompt, which must name the wikis and ask for the answer between tags."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_reversed("hops", self.min_hops, self.max_hops)
        return self


class DeepWikiData(WikiSearchData):
    """One question; it is the prompt."""

    wikis: tuple[str, ...]
    """The wiki of each page that leads to the answer."""


class DeepWikiTask(TaggedAnswer, vf.Task[DeepWikiData, vf.State, vf.TaskConfig]):
    """One question."""

    def gold_replies(self) -> list[object]:
        """Every page on the way, then the answer, for the check of environments."""
        reads = [
            {"tool": "read_wiki_contents", "arguments": {"repoName": wiki, "page": title}}
            for wiki, title in zip(self.data.wikis, self.data.titles, strict=True)
        ]
        return [*reads, f"<answer>{self.data.answer}</answer>"]


class DeepWikiTaskset(vf.Taskset[DeepWikiTask, DeepWikiConfig]):
    """Questions of the configured side."""

    def load(self) -> Iterable[DeepWikiTask]:
        """Yield them in the order of their seed."""
        config = self.config
        # Here, before any server starts, so that a missing package is told at once.
        bm25()
        world = build_world(config.tools.world_seed)
        hops = (config.min_hops, config.max_hops)
        questions = make_questions(world, hops=hops, seed=config.seed)
        kept = (question for question in questions if config.keeps(question.text))
        for question in islice(kept, config.num_tasks):
            data = DeepWikiData(
                prompt=question.text,
                system_prompt=config.instruction,
                answer=question.answer,
                titles=question.titles,
                wikis=tuple(f"country/{world[title].kind}" for title in question.titles),
            )
            yield DeepWikiTask(data, config.task)

    @classmethod
    def toolsets(cls, config: DeepWikiConfig) -> list[vf.Toolset]:
        return [DeepWikiTools(config.tools)]


if __name__ == "__main__":
    # verifiers starts a tool server as the module of its class.
    DeepWikiTools.run()
