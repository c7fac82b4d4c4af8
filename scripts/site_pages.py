"""Hook of mkdocs: the site holds what its pages link to outside docs/, so it is whole offline,
and the pages that `scripts/made_pages.py` made, in the place of those that stand for them in docs/.

Below `repository/` a README becomes a page, another text a page with its code, a picture itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
MKDOCS = ROOT / "mkdocs.yml"
MADE = ROOT / ".venv-docs" / "made"
OUTSIDE = "repository"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
PICTURES = (".png", ".svg")


def _source_of(uri: str) -> Path:
    """Where in the repository a page of the site comes from."""
    inside = uri.removeprefix(f"{OUTSIDE}/")
    return ROOT / inside.removesuffix(".code.md") if inside != uri else ROOT / "docs" / uri


def _uri_of(target: Path) -> str:
    """The page of the site for a file or folder of the repository."""
    docs = ROOT / "docs"
    if target.is_dir():
        target = target / "README.md"
    if target.is_relative_to(docs):
        return target.relative_to(docs).as_posix()
    uri = f"{OUTSIDE}/{target.relative_to(ROOT).as_posix()}"
    return uri if target.suffix in (".md", *PICTURES) else f"{uri}.code.md"


def _targets(text: str, page: Path) -> list[Path]:
    """Files of the repository that a page links to."""
    links = [link for _, link, _ in LINK.findall(text) if ":" not in link]
    return [Path(os.path.normpath(page.parent / link)) for link in links]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file outside docs/ that the nav or a page names, and what those link to."""
    todo = [ROOT / name for name in re.findall(rf"{OUTSIDE}/(\S+)", MKDOCS.read_text())]
    for file in files.documentation_pages():
        page = ROOT / "docs" / file.src_uri
        todo += _targets(page.read_text(), page)
    while todo:
        target = todo.pop()
        uri = _uri_of(target)
        source = target / "README.md" if target.is_dir() else target
        if files.get_file_from_path(uri) is not None or not source.is_file():
            continue
        if source.suffix in PICTURES:
            files.append(File.generated(config, uri, abs_src_path=str(source)))
        elif source.suffix == ".md":
            files.append(File.generated(config, uri, content=source.read_text()))
            todo += _targets(source.read_text(), source)
        else:
            name, kind = source.relative_to(ROOT), source.suffix.lstrip(".")
            code = f"# {name}\n\n~~~~{kind}\n{source.read_text()}\n~~~~\n"
            files.append(File.generated(config, uri, content=code))
    return files


def on_page_read_source(page: Page, **_: object) -> str | None:
    """Give the page that was made, where there is one."""
    made = MADE / page.file.src_uri
    return made.read_text(encoding="utf-8") if made.is_file() else None


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links at the pages of the site."""
    uri = page.file.src_uri
    here = _source_of(uri)

    def moved(found: re.Match[str]) -> str:
        start, link, anchor = found.groups()
        target = Path(os.path.normpath(here.parent / link))
        if ":" in link or not target.exists():
            return found[0]
        return f"{start}{os.path.relpath(_uri_of(target), os.path.dirname(uri))}{anchor or ''})"

    return markdown if uri.endswith(".code.md") else LINK.sub(moved, markdown)
