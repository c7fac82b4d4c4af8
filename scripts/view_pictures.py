"""Write pictures of the page of a run, as `docs/view.md` shows them.

    python scripts/view_pictures.py runs/letters docs/images
    python scripts/view_pictures.py runs/tiny/debate-0/selfplay docs/images debate

Takes Chromium; each view at 1,100 pixels, some in dark.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from gradus.view.server import HOST, Viewer
from gradus.view.shelf import open_shelf

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from browser import Page, a_page

WIDTH = 1_100
HEIGHT_OF_TOOLS = 200
"""Of what stays at the top while an episode is scrolled."""
DEBATE = "debate"
"""Of a run whose episodes are debates."""
VIEWS = {
    "run": ("light", 1_080, "run", ".grown"),
    "curves": ("dark", 640, "curves?search=reward&smooth=0.8", "figure .uplot"),
    "episode": ("light", 620, "episode", ".token"),
    "evaluations": ("dark", 520, "evaluations", "tr[data-row]"),
    "time": ("light", 560, "time", ".span"),
    DEBATE: ("dark", 600, "episode", ".verdict"),
}
"""Name → theme, height, address, and what is there when the view is drawn."""


async def take(run: Path, folder: Path, names: Sequence[str]) -> None:
    runner = web.AppRunner(Viewer(open_shelf([run]), token="t").app())
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    address = f"http://{HOST}:{runner.addresses[0][1]}/?token=t"
    try:
        with tempfile.TemporaryDirectory() as profile:
            async with a_page(Path(profile), address) as page:
                for name in names:
                    await shoot(page, name, run.name, folder)
    finally:
        await runner.cleanup()


async def shoot(page: Page, name: str, run: str, folder: Path) -> None:
    theme, height, view, ready = VIEWS[name]
    await page.resize(WIDTH, height, theme=theme)
    if is_episode := view == "episode":
        view = f"episode/{await worst_with_numbers(page, run)}"
    await page.value(f"(location.hash = '#/{run}/{view}')")
    await page.until(f"document.querySelector('main {ready}')")
    await page.value("new Promise((done) => setTimeout(done, 500))")  # Until the tokens are there.
    if is_episode and ready == ".verdict":
        top = "document.querySelector('.round').closest('section').getBoundingClientRect().top"
        await page.value(f"(scrollBy(0, {top} - {HEIGHT_OF_TOOLS}), 1)")
        await page.value("new Promise((done) => setTimeout(done, 200))")
    await page.picture(folder / f"view-{name}.png")


async def worst_with_numbers(page: Page, run: str) -> str:
    """The worst episode of the newest step whose tokens the trainer said something of."""
    api = f"api/runs/{run}"
    table = f"fetch('{api}/episodes?purpose=train&rows=500').then((it) => it.json())"
    rows = (await page.value(table))["rows"]
    newest = [it for it in rows if it["step"] == rows[0]["step"]]
    for row in sorted(newest, key=lambda it: it["reward"] or 0.0):
        tokens = f"fetch('{api}/episodes/{row['key']}/tokens').then((it) => it.json())"
        if "trainer" not in (await page.value(tokens)).get("missing", {"trainer": ""}):
            return str(row["key"])
    return str(newest[0]["key"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "views", nargs="*", choices=[[], *VIEWS], help="all but the debate, without any"
    )
    chosen = parser.parse_args()
    asyncio.run(
        take(chosen.run, chosen.folder, chosen.views or [it for it in VIEWS if it != DEBATE])
    )
