"""Images on the page, in an export and in texts: those of this run, and nothing else."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import CookieJar
from aiohttp.test_utils import TestClient, TestServer
from browser import CHROMIUM, a_page
from PIL import Image
from run_folders import a_run, add_episode, showing

from gradus.run.episodes import read_episodes
from gradus.run.paths import RunDirectory
from gradus.view import export
from gradus.view.export import collect
from gradus.view.server import Viewer
from gradus.view.shelf import open_shelf
from gradus.wire.images import ImageStore, name_of

NONE = "ab" * 32
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"


def picture(kind: str = "PNG", side: int = 64) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (200, 30, 30)).save(file, kind)
    return file.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with an episode of three images: one that is kept, one that went away, one that no
    model was shown."""
    root = a_run(tmp_path / "run", metrics=[{"episode/reward/mean": 0.5}])
    kept = name_of(ImageStore(RunDirectory(root).images).put(picture()))
    asked = showing(kept, name_of(NONE), "http://127.0.0.1:1/a.png")
    add_episode(root, step=0, reward=1.0, reply="3", asked=asked)
    return root


def kept(root: Path) -> str:
    (path,) = RunDirectory(root).images.iterdir()
    return path.name


async def ask(root: Path, name: str) -> tuple[int, bytes, str]:
    """Status, body and type of what the page is answered for an image."""
    server = TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1")
    async with TestClient(server, cookie_jar=CookieJar(unsafe=True)) as client:
        await client.get("/?token=t")
        async with client.get(f"/api/runs/run/images/{name}") as answer:
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
            return answer.status, await answer.read(), answer.content_type


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
async def test_an_image_comes_with_the_type_of_its_bytes(root: Path, kind: str) -> None:
    name = ImageStore(RunDirectory(root).images).put(content := picture(kind))
    assert await ask(root, name) == (200, content, f"image/{kind.lower()}")


async def test_what_is_no_image_is_not_sent_whatever_its_name(root: Path) -> None:
    name = ImageStore(RunDirectory(root).images).put(SVG)
    status, body, kind = await ask(root, name)
    assert (status, kind) == (404, "application/json")
    assert b"no kind that a browser shows" in body


@pytest.mark.parametrize(
    "name",
    ["..%2F..%2Flease.json", "%2Fetc%2Fpasswd", "a" * 63, "A" * 64, f"{'a' * 64}.png", "%00"],
)
async def test_no_path_is_an_image(root: Path, name: str) -> None:
    status, body, _ = await ask(root, name)
    assert status == 409
    assert b"which is no SHA-256" in body


async def test_an_image_of_another_run_or_other_bytes_is_none_of_this_run(
    root: Path, tmp_path: Path
) -> None:
    images = RunDirectory(root).images
    other = ImageStore(tmp_path / "other").put(picture("GIF"))
    assert (await ask(root, other))[0] == 409
    secret = tmp_path / "secret"
    secret.write_bytes(picture("BMP"))
    os.symlink(secret, images / NONE)
    status, body, _ = await ask(root, NONE)
    assert status == 409
    assert b"holds other bytes" in body


async def test_nobody_without_the_cookie_sees_one(root: Path) -> None:
    server = TestServer(Viewer(open_shelf([root]), token="t").app(), host="127.0.0.1")
    async with TestClient(server) as client:
        answer = await client.get(f"/api/runs/run/images/{kept(root)}")
        assert answer.status == 403


def test_a_text_names_the_images_that_it_stands_beside(root: Path) -> None:
    files = [root / "episodes" / "step_0" / "train.jsonl"]
    (episode,) = [it for path in files for it in read_episodes(path)]
    name = kept(root)
    assert episode.traces[0].messages[0].text == (
        f"[image {name[:12]}]\n[image {NONE[:12]}]\n[image]\nhow many?"
    )


async def test_an_export_holds_small_images_and_says_which_it_has_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = ImageStore(RunDirectory(root).images).put(os.urandom(3000) + picture())
    noise = ImageStore(RunDirectory(root).images).put(b"BM" + os.urandom(3000))
    asked = showing(*map(name_of, (large, noise)))
    add_episode(root, step=0, reward=0.0, reply="1", asked=asked)
    monkeypatch.setattr(export, "MAX_IMAGE_BYTES", 2000)
    small = hashlib.sha256(picture()).hexdigest()
    found = await collect(open_shelf([root]), where="", max_episodes=9)
    images = {name: it for name, it in found.files.items() if "images" in name}
    assert images == {f"data/images/{small}.png": picture()}
    core = found.files["data/core.js"].decode().removeprefix("globalThis.gradusExport = ")[:-2]
    listed: dict[str, Any] = json.loads(core)["images"]
    assert listed == {small: f"data/images/{small}.png"}
    monkeypatch.setattr(export, "MAX_IMAGES_BYTES", 10)
    found = await collect(open_shelf([root]), where="", max_episodes=9)
    assert [name for name in found.files if "images" in name] == []


OPEN = "(location.hash = '#/run/episode/train-0-0', 1)"
SHOWN = "[...document.querySelectorAll('.turn .shown')].map((it) => it.naturalWidth).join()"
SAID = "document.querySelector('.turn').innerText"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_the_page_and_an_export_show_what_there_is_and_say_why_the_rest_is_not(
    root: Path, tmp_path: Path
) -> None:
    found = await collect(open_shelf([root]), where="", max_episodes=9)
    found.write(tmp_path / "export")
    app = Viewer(open_shelf([root]), token="t").app()
    async with TestServer(app, host="127.0.0.1") as server:
        own = f"http://127.0.0.1:{server.port}/"
        async with a_page(tmp_path, f"{own}?token=t") as page:
            await page.value(OPEN)
            await page.until(f"{SHOWN} === '64' && {SAID}.includes('cannot be read')")
            said = await page.value(SAID)
            assert f"image {NONE[:12]} cannot be read" in said
            assert "an image that the run did not keep" in said
            assert [it for it in page.requests if not it.startswith(own)] == []
            await page.picture(tmp_path / "episode.png")
            await page.go((tmp_path / "export" / "index.html").as_uri())
            await page.value(OPEN)
            await page.until(f"{SHOWN} === '64'")
            assert f"image {NONE[:12]} is not in this export" in await page.value(SAID)
