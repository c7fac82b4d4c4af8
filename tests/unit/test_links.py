"""Links of every page lead to a file and a heading; the site shows every page once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import yaml


class SiteFile(yaml.SafeLoader):
    """mkdocs.yml without the Python objects that its tags name."""


SiteFile.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def files_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for part in nav.values() if isinstance(nav, dict) else nav:
        yield from files_of(part)


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert pages.broken_links(page) == []


@pytest.mark.parametrize("link", ["gone.md", "#gone", "glossary.md#gone", "/etc/hostname"])
def test_a_wrong_link_is_found(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages.ROOT / "docs" / "overview.md"
    good = page.read_text()
    monkeypatch.setattr(Path, "read_text", lambda path: f"{good}\n[wrong]({link})\n")
    assert pages.broken_links(page)[-1] == link


def test_headings_are_named_as_on_the_site(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b_c`, d\n## Same\n```\n# no heading\n```\n## Same\n<a id='x'></a>\n")
    assert pages.anchors_of(page) == {"a-b_c-d", "same", "same-1"}


def test_the_site_shows_every_page_of_docs_once() -> None:
    nav = list(files_of(yaml.load((pages.ROOT / "mkdocs.yml").read_text(), SiteFile)["nav"]))
    assert len(nav) == len(set(nav))
    docs = pages.ROOT / "docs"
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} == {
        name for name in nav if not name.startswith("repository/")
    }
    others = [name.removeprefix("repository/") for name in nav if name.startswith("repository/")]
    assert [name for name in others if not (pages.ROOT / name).is_file()] == []
