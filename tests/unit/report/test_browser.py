"""The page in a real browser: nothing is asked of any network, and nothing complains."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from run_folders import a_run, add_episode

from gradus.report.page.render import read_run, render

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_OWN_HOSTS = ("googleapis.com", "google.com", "gvt1.com")
"""What the browser itself asks for when it starts; it finds none of them here."""


def visit(page: Path, folder: Path) -> tuple[str, set[str]]:
    """What the browser says on its console while it shows a page, and the addresses it asks for."""
    assert CHROMIUM is not None
    log = folder / "net.json"
    shown = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}",
            "--window-size=1000,2000",
            f"--screenshot={folder / 'page.png'}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = "\n".join(line for line in shown.stderr.splitlines() if "CONSOLE" in line)
    return said, _asked_for(log)


def _asked_for(log: Path) -> set[str]:
    """Every address in a network log of Chromium, but files and its own."""
    events = json.loads(log.read_text())["events"]
    found = {str(event.get("params", {}).get("url", "")) for event in events}
    return {
        url
        for url in found
        if url.startswith(("http", "ws", "ftp"))
        and not (urlsplit(url).hostname or "").endswith(_OWN_HOSTS)
    }


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_a_hostile_page_without_a_request_or_a_complaint(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run", metrics=[{"episode/reward/mean": x / 20} for x in range(20)])
    hostile = (
        "<script>console.error('ran')</script><img src=http://127.0.0.1:1/a>"
        "<link rel=stylesheet href=http://127.0.0.1:1/b><iframe src=//127.0.0.1:1/c></iframe>"
        "<style>@import url(http://127.0.0.1:1/d)</style>\u202e\x00"
    )
    for step in (0, 19):
        add_episode(root, step=step, reward=0.5, reply=hostile)
    page = tmp_path / "page.html"
    page.write_bytes(render(read_run(root)).encode())
    assert visit(page, tmp_path) == ("", set())
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_browser_would_tell_of_a_request_and_a_complaint(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('ran')</script><img src=http://127.0.0.1:1/a>")
    said, asked = visit(page, tmp_path)
    assert "ran" in said
    assert "http://127.0.0.1:1/a" in asked
