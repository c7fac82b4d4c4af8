"""The Markdown pages of the repository: their blocks, links, headings and commands."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from made_pages import made_pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "environments").glob("*/README.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_NEXT = re.compile(r"[&|>]\S*")
"""Where the words of a command end in a shell."""
_ELSEWHERE = re.compile(r"[a-z]+:")


def text_of(page: Path) -> str:
    """The prose of a page, without its blocks."""
    return BLOCK.sub("", page.read_text())


def whole_text_of(page: Path) -> str:
    """The same of the page that the site shows, which may be made from code when it is built."""
    inside = page.resolve().relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else ""
    made = made_pages().get(inside.removeprefix("docs/"))
    return BLOCK.sub("", made) if made else text_of(page)


def links_of(page: Path) -> list[str]:
    """Targets inside the repository, as written."""
    found = _LINK.findall(_INLINE.sub("", text_of(page)))
    return [link for link in found if not _ELSEWHERE.match(link)]


def anchors_of(page: Path) -> set[str]:
    """What a link may name behind `#`: headings as GitHub and the site spell them, and `id`s."""
    text = whole_text_of(page)
    seen: Counter[str] = Counter()
    found = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(name if not seen[name] else f"{name}-{seen[name]}")
        seen[name] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """Links whose file or heading does not exist."""
    broken = []
    for link in links_of(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        is_there = target.exists() and target.resolve().is_relative_to(ROOT.resolve())
        if not is_there or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each `gradus` command of a block, behind `&&` too, lines joined at their end."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.split(" && "):
            if part.startswith("gradus "):
                words = shlex.split(part, comments=True)
                yield list(takewhile(lambda word: not _NEXT.fullmatch(word), words))


def inline_commands(page: Path) -> Iterator[list[str]]:
    """Commands in the prose of a page."""
    for code in _INLINE.findall(text_of(page)):
        if re.match(r"`gradus [a-z-]+( |`)", code):
            yield from command_lines(code.strip("`"))
