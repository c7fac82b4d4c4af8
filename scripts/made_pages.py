"""Pages that are made when the site is built, from schema, metrics, commands and marks of tests.

    python scripts/made_pages.py FOLDER      # where scripts/site_pages.py finds them

In `docs/` a page of a few lines stands in the place of each.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import commands_page
import reliability_page

from gradus.config import reference
from gradus.environments.verifiers import table
from gradus.monitor import catalogue

DOCS = Path(__file__).resolve().parents[1] / "docs"


@cache
def made_pages() -> dict[str, str]:
    """Path below `docs/` → the whole page."""
    upstream = (DOCS / "upstream.md").read_text(encoding="utf-8")
    return {
        "configuration.md": reference.reference(),
        "metrics.md": catalogue.page(),
        "look-up/commands.md": commands_page.page(),
        "reliability.md": reliability_page.page(
            reliability_page.catalogue(), reliability_page.marks()
        ),
        "upstream.md": table.page(upstream),
    }


def main() -> None:
    """Write every page below the folder that the command line names."""
    for name, text in made_pages().items():
        page = Path(sys.argv[1]) / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
