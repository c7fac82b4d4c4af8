"""The taskset `wikispeedia`: tools `click_link` and `go_back`, and a page to arrive at."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.ranges import refuse_reversed
from gradus_wikispeedia.graph import Graph, distances, page_text, snap_graph, world_graph
from gradus_wikispeedia.walk import link_on, refused, shown, worth

INSTRUCTION = (
    "Walk from the page that you see to the target page. Call click_link with a link of the page "
    "you are on, or go_back to return to the one before. Take as few steps as you can."
)
_DRAWS = 200
"""Targets that are drawn for each walk, at most."""


class PagesConfig(vf.SharedToolsetConfig):
    """The pages that one walks on."""

    source: Literal["world", "snap"] = "world"
    """`world`: three hundred pages about a made-up country. `snap`: SNAP's graph, in `path`."""
    world_seed: int = 0
    """Seed of the country."""
    path: Path | None = None
    """Folder with `links.tsv`, and `plaintext_articles` for texts; only for `snap`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.source == "snap") != (self.path is not None):
            raise ValueError("source = 'snap' and path, the folder of its files, go together")
        # The server of the tools runs in a folder other than that of the command.
        self.path = self.path and self.path.expanduser().absolute()
        return self

    @property
    def graph(self) -> Graph:
        """The pages, loaded once in a process."""
        return world_graph(self.world_seed) if self.path is None else snap_graph(self.path)


class WalkState(vf.State):
    """Where a player is; it travels with every call, so that one server serves all episodes."""

    target: str = ""
    """The page to arrive at."""
    path: list[str] = Field(default_factory=list)
    """Pages from the start to the one that is shown; going back takes the last away."""
    moves: int = 0
    """Clicks and steps back."""
    refused: int = 0
    """Links asked for that were not there."""


class WalkTools(vf.Toolset[PagesConfig, WalkState]):
    """The tools of all walks of a worker."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.graph = self.config.graph

    @vf.tool
    def click_link(self, title: str) -> str:
        """Follow a link of the page you are on."""
        page = self.graph[self.state.path[-1]]
        link = link_on(page, title)
        if link is None:
            self.state.refused += 1
            return refused(page, title)
        self.state.path.append(link)
        return self._moved()

    @vf.tool
    def go_back(self) -> str:
        """Return to the page before."""
        if len(self.state.path) < 2:
            self.state.refused += 1
            return "This is the page that you started on; there is none before it."
        self.state.path.pop()
        return self._moved()

    def _moved(self) -> str:
        self.state.moves += 1
        page = self.graph[self.state.path[-1]]
        if page.title == self.state.target:
            return f"You have arrived at {page.title}."
        return shown(page, page_text(page, self.config.path), self.state.target)


class WikispeediaConfig(vf.TasksetConfig, HoldoutKeys):
    """Which walks are asked for."""

    pages: PagesConfig = PagesConfig()
    """The pages."""
    num_tasks: int = Field(400, ge=1)
    """Number of walks."""
    seed: int = 0
    """Seed of the walks."""
    min_clicks: int = Field(2, ge=1)
    """Fewest clicks that the shortest way may take."""
    max_clicks: int = Field(4, ge=1, le=20)
    """Most clicks that the shortest way may take."""
    instruction: str | None = INSTRUCTION
    """System prompt."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_reversed("clicks", self.min_clicks, self.max_clicks)
        return self


class WikispeediaData(vf.TaskData):
    """One walk; the prompt shows its first page."""

    start: str
    """Title of the first page."""
    target: str
    """Title of the page to arrive at."""
    shortest: int
    """Clicks of the shortest way."""
    pages: PagesConfig
    """The pages, for the reward."""


class WikispeediaTask(vf.Task[WikispeediaData, WalkState, vf.TaskConfig]):
    """One walk."""

    def gold_replies(self) -> list[object]:
        """The clicks of a shortest way, for the check of environments."""
        graph, here, clicks = self.data.pages.graph, self.data.start, list[object]()
        left = distances(graph, self.data.target)
        while here != self.data.target:
            here = next(link for link in graph[here].links if left.get(link) == left[here] - 1)
            clicks.append({"tool": "click_link", "arguments": {"title": here}})
        return clicks

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:  # noqa: ARG002
        trace.state.target = self.data.target
        trace.state.path = [self.data.start]

    @vf.stop
    async def arrived(self, trace: vf.Trace) -> bool:
        """End the episode on the target page."""
        return bool(trace.state.path) and trace.state.path[-1] == self.data.target

    @vf.reward
    async def walked(self, trace: vf.Trace) -> float:
        """1 for the shortest way, at least 0.5 for arriving, up to 0.2 for coming closer."""
        left = self._clicks_left(trace)
        return worth(trace.state.moves, shortest=self.data.shortest, left=left)

    @vf.metric
    async def has_arrived(self, trace: vf.Trace) -> float:
        """1 when the walk ended on the target page."""
        return float(await self.arrived(trace))

    @vf.metric
    async def moves(self, trace: vf.Trace) -> float:
        """Clicks and steps back."""
        return float(trace.state.moves)

    @vf.metric
    async def refused(self, trace: vf.Trace) -> float:
        """Links asked for that were not there."""
        return float(trace.state.refused)

    def _clicks_left(self, trace: vf.Trace) -> int | None:
        here = trace.state.path[-1] if trace.state.path else self.data.start
        return distances(self.data.pages.graph, self.data.target).get(here)


class WikispeediaTaskset(vf.Taskset[WikispeediaTask, WikispeediaConfig]):
    """Walks of the configured side."""

    def load(self) -> Iterable[WikispeediaTask]:
        """Draw walks, none twice, until there are enough or hardly any are left."""
        config = self.config
        kept = (walk for walk in self._walks() if config.keeps(f"{walk[0]}\0{walk[1]}"))
        for start, target, shortest in islice(kept, config.num_tasks):
            page = config.pages.graph[start]
            data = WikispeediaData(
                prompt=shown(page, page_text(page, config.pages.path), target),
                system_prompt=config.instruction,
                start=start,
                target=target,
                shortest=shortest,
                pages=config.pages,
            )
            yield WikispeediaTask(data, config.task)

    def _walks(self) -> Iterator[tuple[str, str, int]]:
        config = self.config
        graph = config.pages.graph
        titles = sorted(graph)
        draw = random.Random(f"wikispeedia {config.seed}")
        seen: set[tuple[str, str]] = set()
        failed = 0
        while failed < _DRAWS:
            target = draw.choice(titles)
            near = distances(graph, target)
            starts = sorted(
                title
                for title, clicks in near.items()
                if config.min_clicks <= clicks <= config.max_clicks and (title, target) not in seen
            )
            failed = 0 if starts else failed + 1
            for start in draw.sample(starts, min(2, len(starts))):
                seen.add((start, target))
                yield start, target, near[start]

    @classmethod
    def toolsets(cls, config: WikispeediaConfig) -> list[vf.Toolset]:
        return [WalkTools(config.pages)]


if __name__ == "__main__":
    # verifiers starts a tool server as the module of its class.
    WalkTools.run()
