"""Pages and the links between them: our made-up country, or the files of SNAP's Wikispeedia."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from gradus.errors import ConfigError
from gradus_wiki_search.world import build_world

SCALE = 1.5
"""Of our country: three hundred pages."""
_MOST_LINKS = 14
"""On a page of ours; a mayor of many towns is linked back to the first of them."""
_LONGEST_TEXT = 1500


@dataclass(frozen=True)
class Page:
    """A page: its text, and where it leads."""

    title: str
    text: str
    links: tuple[str, ...]


Graph = dict[str, Page]


@cache
def world_graph(seed: int = 0) -> Graph:
    """Our country as pages that link to each other in both directions.

    >>> len(world_graph())
    300
    """
    world = build_world(seed, SCALE)
    links = {title: dict.fromkeys(article.links) for title, article in world.items()}
    for title, article in world.items():
        for link in article.links:
            if len(links[link]) < _MOST_LINKS:
                links[link][title] = None
    return {
        title: Page(title, article.text, tuple(links[title])) for title, article in world.items()
    }


@cache
def snap_graph(folder: Path) -> Graph:
    """The graph in `links.tsv`, with texts from `plaintext_articles` where they are.

    ConfigError when the folder does not hold SNAP's files.
    """
    links: dict[str, dict[str, None]] = {}
    for number, line in _lines(folder / "links.tsv"):
        names = line.split("\t")
        if len(names) != 2:
            raise ConfigError(
                f"{folder / 'links.tsv'}, line {number}: {line!r:.80} is not two names with a tab "
                "between"
            )
        source, target = (_title(name) for name in names)
        links.setdefault(source, {})[target] = None
        links.setdefault(target, {})
    if not links:
        raise ConfigError(f"{folder / 'links.tsv'} holds no links")
    return {title: Page(title, "", tuple(found)) for title, found in links.items()}


def page_text(page: Page, folder: Path | None) -> str:
    """The beginning of a page; read from SNAP's folder when it is shown."""
    if folder is None:
        return page.text
    file = folder / "plaintext_articles" / f"{page.title.replace(' ', '_')}.txt"
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return " ".join(opened.read(_LONGEST_TEXT).split())
    except (OSError, ValueError):
        # The graph can be walked without texts, and not every page has one.
        return ""


def distances(graph: Graph, target: str) -> dict[str, int]:
    """Fewest clicks to a target from every page that leads to it."""
    back: dict[str, list[str]] = {}
    for title, page in graph.items():
        for link in page.links:
            back.setdefault(link, []).append(title)
    clicks, edge = {target: 0}, [target]
    while edge:
        ahead = [title for link in edge for title in back.get(link, ())]
        edge = [title for title in dict.fromkeys(ahead) if title not in clicks]
        clicks |= dict.fromkeys(edge, max(clicks.values()) + 1)
    return clicks


def _title(name: str) -> str:
    return unquote(name.strip()).replace("_", " ")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and not line.startswith("#"):
                    yield number, line.rstrip("\n")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). Unpack wikispeedia_paths-and-graph.tar.gz "
            "of SNAP and name its folder: taskset.pages.path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason})") from error
