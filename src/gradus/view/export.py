"""A view of one run as a folder of plain files, or as one file, which needs no server and asks no
network."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from aiohttp import web

from gradus.errors import ConfigError
from gradus.files import DISK_ERRORS, storage_error
from gradus.redact import REMOVED, without_any_secret
from gradus.report.series import AXES
from gradus.view.index import EXPRESSION
from gradus.view.server import HOST, Viewer, page_files
from gradus.view.shelf import Shelf

MAX_EPISODES, MAX_IN_A_FILE = 500, 100
MAX_IMAGE_BYTES, MAX_IMAGES_BYTES = 1 << 20, 64 << 20
"""Of an image that goes into an export, and of all together."""
_NAMES_AT_ONCE = 64
_ROWS = 500
_TIME_STEPS = 20
_SHORT = 8
"""Texts below are no secret, and tokens are many."""
_POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file:; "
    "base-uri 'none'; form-action 'none'"
)
_FILE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_LINKED = re.compile(
    r'<link rel="(icon|stylesheet)" href="([^"]+)">|<script src="([^"]+)" defer></script>'
)
_Query = Sequence[tuple[str, str | int]]


@dataclass(frozen=True)
class Exported:
    """All that an export shows, before anything is written."""

    core: Mapping[str, Any]
    """What the page asks first, with the answers to it."""
    episodes: Mapping[str, Mapping[str, Any]]
    """Key → the answers about one episode."""
    images: Mapping[str, bytes]
    """By the names of their files."""
    num_left_out: int

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The files of a folder by their names; an episode is loaded when it is looked at."""
        core = {**self.core, "images": {Path(name).stem: name for name in self.images}}
        told = {
            f"data/{key}.js": f"gradusTake({_script(it)});\n".encode()
            for key, it in self.episodes.items()
        }
        data = f"globalThis.gradusExport = {_script(core)};\n".encode()
        return {**dict(_page()), "data/core.js": data, **told, **self.images}

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.files.values()))

    def page(self) -> bytes:
        """The same as one HTML file."""
        answers = [self.core["answers"], *self.episodes.values()]
        images = {
            Path(name).stem: f"data:image/{Path(name).suffix[1:]};base64,"
            + base64.b64encode(content).decode()
            for name, content in self.images.items()
        }
        core = {**self.core, "images": images, "isWhole": True}
        core["answers"] = {path: it for some in answers for path, it in some.items()}
        files = dict(_page())
        files["data/core.js"] = f"globalThis.gradusExport = {_script(core)};".encode()
        return _inlined(files).encode()

    def write(self, folder: Path) -> None:
        """All of it, or nothing: StorageError for a disk that is full or fails."""
        is_there = folder.is_dir()
        try:
            for name, content in self.files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if is_there:
                folder.mkdir(exist_ok=True)
            if error.errno in DISK_ERRORS:
                raise storage_error(error, folder, needed_bytes=self.num_bytes) from error
            raise


def refuse_place(folder: Path, shelf: Shelf) -> None:
    """ConfigError for a folder with anything in it, and for a place inside of the run."""
    if folder.suffix == ".html" and folder.is_dir():
        raise ConfigError(f"--export {folder} is a folder; name a file")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--export {folder}: there is something in it; name a new folder")
    if folder.exists() and not folder.is_dir() and folder.suffix != ".html":
        raise ConfigError(f"--export {folder} is a file; name a new folder")
    for run_dir in shelf.runs.values():
        if folder.resolve().is_relative_to(run_dir.root):
            raise ConfigError(f"--export {folder} lies in the run, into which nothing is written")
    if len(shelf.runs) != 1:
        raise ConfigError(f"--export takes one run, not {len(shelf.runs)}")


async def collect(shelf: Shelf, *, where: str, max_episodes: int) -> Exported:
    """What the page would ask, answered by its own server, with what may be secret taken out."""
    viewer = Viewer(shelf, token="t")
    runner = web.AppRunner(viewer.app(), handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        address = f"http://{HOST}:{runner.addresses[0][1]}/"
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(address, cookie_jar=jar) as session:
            async with session.get("/?token=t"):
                pass
            return await _Collection(session, next(iter(shelf.runs))).all(where, max_episodes)
    finally:
        await runner.cleanup()


class _Collection:
    """Asks the server for all that an export shows."""

    def __init__(self, session: aiohttp.ClientSession, run: str) -> None:
        self._session, self._run = session, f"api/runs/{quote(run, safe='')}"
        self._answers: dict[str, Any] = {}
        self._images: dict[str, bytes] = {}
        """Of all episodes, by the names of their files."""

    async def all(self, where: str, max_episodes: int) -> Exported:
        filters: _Query = [(EXPRESSION, where)] if where else []
        rows, passing = await self._rows(filters, max_episodes)
        overview = await self._keep("")
        self._answers["api/runs"] = await self._ask("api/runs", [])
        for view in ("metrics", "marks", "settings", "changes"):
            await self._keep(f"/{view}")
        await self._keep_evaluations()
        await self._keep_times(int(overview["steps"]))
        followed = self._answers[f"{self._run}/changes"]["followed"]["replies"]
        shown = [it["key"] for it in (*overview["newest_replies"]["replies"], *followed)]
        keys = list(dict.fromkeys([*(row["key"] for row in rows), *shown]))
        episodes = {key: await self._episode(key) for key in keys}
        core = {
            "answers": self._answers,
            "curves": {axis: await self._curves(axis) for axis in AXES},
            "logs": await self._ask(f"{self._run}/logs", []),
            "rows": rows,
            "passing": passing,
            "columns": self._columns,
            "where": where,
            "keys": keys,
        }
        return Exported(core, episodes, self._images, max(0, passing - len(rows)))

    async def _rows(self, filters: _Query, most: int) -> tuple[list[dict[str, Any]], int]:
        rows: list[dict[str, Any]] = []
        self._columns: list[str] = []
        # While the index is read, the table grows.
        while (await self._ask(f"{self._run}/histograms", [])) and await self._is_reading():
            pass
        known: _Query = ()
        while True:
            asked = [*filters, ("from", len(rows)), ("rows", min(_ROWS, most - len(rows))), *known]
            table = await self._ask(f"{self._run}/episodes", asked)
            rows += table["rows"]
            self._columns, known = table["columns"], known or [("all", table["all"])]
            if not table["rows"] or len(rows) >= most:
                return rows, int(table["passing"])

    async def _is_reading(self) -> bool:
        async with self._session.get(f"/{self._run}/events") as answer:
            line = await answer.content.readline()
        return bool(json.loads(line.removeprefix(b"data: "))["has_more"])

    async def _episode(self, key: str) -> dict[str, Any]:
        """What is answered of an episode, its tokens and its group."""
        place, group = f"{self._run}/episodes/{key}", f"{self._run}/groups/{key}"
        paths = (place, f"{place}/tokens", group)
        answers = {path: await self._ask(path, []) for path in paths}
        if REMOVED in json.dumps(answers[place]) or _spells_secret(answers[paths[1]]):
            answers[paths[1]] = {"why": "they would spell what may be a secret"}
        for trace in answers[place].get("traces", ()):
            for name in {it for node in trace["nodes"] for it in node["images"] if it}:
                await self._keep_image(name)
        return answers

    async def _keep_image(self, name: str) -> None:
        """Nothing where it cannot be read, or there is no room for it."""
        async with self._session.get(f"/{self._run}/images/{name}") as answer:
            content = await answer.read()
            room = MAX_IMAGES_BYTES - sum(map(len, self._images.values()))
            if answer.status == 200 and len(content) <= min(room, MAX_IMAGE_BYTES):
                kind = answer.content_type.removeprefix("image/")
                self._images[f"data/images/{name}.{kind}"] = content

    async def _keep_evaluations(self) -> None:
        page = await self._keep("/evaluations")
        for source in page["sources"]:
            own = [it["version"] for it in page["cells"] if it["source"] == source]
            pairs = {(own[0], own[-1]), *pairwise(own)}
            for first, second in sorted(pairs) if len(own) > 1 else []:
                query: _Query = [("source", source), ("first", first), ("second", second)]
                await self._keep("/evaluations", query)

    async def _keep_times(self, num_steps: int) -> None:
        # The page asks for the newest step by no number.
        for step in (None, *range(max(0, num_steps - _TIME_STEPS), num_steps)):
            for count in (1, 3):
                which = [] if step is None else [("step", step)]
                await self._keep("/time", [*which, ("count", count)])

    async def _curves(self, axis: str) -> dict[str, Any]:
        names = [it["name"] for it in self._answers[f"{self._run}/metrics"]]
        found: dict[str, Any] = {}
        for start in range(0, len(names), _NAMES_AT_ONCE):
            some = names[start : start + _NAMES_AT_ONCE]
            query: _Query = [("over", axis), *(("name", name) for name in some)]
            found |= await self._ask(f"{self._run}/curves", query)
        return found

    async def _keep(self, view: str, query: _Query = ()) -> Any:
        path = self._run + view
        words = f"?{urlencode(list(query))}" if query else ""
        self._answers[path + words] = answer = await self._ask(path, query)
        return answer

    async def _ask(self, path: str, query: _Query) -> Any:
        words = f"?{urlencode(list(query))}" if query else ""
        async with self._session.get(f"/{path}{words}") as answer:
            told = _without_secrets(await answer.json())
            # What the page would be refused, such as the time of a supervised run, it shows so.
            if answer.status != 200 and EXPRESSION in dict(query):
                raise ConfigError(f"--where: {told['error']}")
            return told


def _without_secrets(value: Any) -> Any:
    """Secrets taken out of every text; the names of an answer, such as `key`, say nothing here."""
    if isinstance(value, str):
        return value if len(value) < _SHORT else without_any_secret(value, os.environ)
    if isinstance(value, list):
        return [_without_secrets(it) for it in value]
    if isinstance(value, dict):
        return {name: _without_secrets(it) for name, it in value.items()}
    return value


def _spells_secret(tokens: Mapping[str, Any]) -> bool:
    """Whether the texts of tokens together are what none of them is alone."""
    texts = ["".join(n["texts"] or ()) for nodes in tokens.get("traces", ()) for n in nodes]
    return any(_without_secrets(it) != it for it in [*texts, "".join(texts)])


def _script(value: Any) -> str:
    """JSON that no HTML around it can end."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _page() -> Iterator[tuple[str, bytes]]:
    """The page itself, with its data before its scripts."""
    for name, content in page_files():
        if name == "index.html":
            head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<title>'
            data = '<script src="data/core.js" defer></script>\n<script '
            text = content.decode().replace("<title>", head).replace("<script ", data, 1)
            yield name, text.encode()
        else:
            yield f"page/{name}", content


def _inlined(files: Mapping[str, bytes]) -> str:
    """The page with its style sheets and scripts inside, without its icon.

    Scripts stand behind what they draw in, since one without a file of its own cannot be deferred.
    """
    scripts = []

    def inline(linked: re.Match[str]) -> str:
        kind, sheet, script = linked.groups()
        if script is not None:
            scripts.append(f"<script>{files[script].decode()}</script>")
        return f"<style>{files[sheet].decode()}</style>" if kind == "stylesheet" else ""

    html = _LINKED.sub(inline, files["index.html"].decode().replace(_POLICY, _FILE_POLICY))
    return html.replace("</body>", "".join([*scripts, "</body>"]))
