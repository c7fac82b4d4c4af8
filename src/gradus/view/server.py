"""The server of the page: on loopback, for whoever holds its token, and only to read.

An address names a run by its id, an episode by its place in the index and a file of the page by its
name in a table, so that no path of a request reaches the file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from gradus.errors import ConfigError, GradusError
from gradus.report.folder import read_folder
from gradus.report.series import AXES, Axis
from gradus.view.groups import group_page, search_texts, summed_rows
from gradus.view.index import HISTOGRAMS, EpisodePlace
from gradus.view.opened import OpenRun
from gradus.view.screens.about import samples_behind, settings_page
from gradus.view.screens.evaluations import compared_tasks, evaluations_page
from gradus.view.screens.logs import logs_page
from gradus.view.screens.talk import Asked, Target
from gradus.view.screens.timeline import MAX_STEPS, timeline_page
from gradus.view.shelf import Shelf, row_of
from gradus.wire.images import ImageStore, type_of

T = TypeVar("T")
HOST = "127.0.0.1"
_OWN_NAMES = {HOST, "localhost", "::1"}
_IDLE_SECONDS = 10.0
LOOK_SECONDS = 1.0
"""Between two looks at a run that somebody follows."""
_CALM_LOOKS = 3
"""Looks in which what is no hurry is told once: more episodes, and how full queues are."""
_AT_ONCE = ("records", "newest", "generation", "has_more", "outcome")
_PAUSES = 19
"""Times the processor time of a look, a pause lasts at least; and as long as the look took."""
_MAX_ROWS = 500
_MAX_CURVES = 64
_MAX_RUNS = 8
_MAX_SEARCHED = 200
_NO_FILTERS = ("from", "rows", "sort", "text", "by", "all")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Look(NamedTuple):
    """What a look at a run says of the next one."""

    has_more: bool
    pause: float


def _timed_look(run: OpenRun) -> tuple[Mapping[str, Any], _Look]:
    # Waiting for others who ask is no reason to look less often.
    wall, cpu = time.monotonic(), time.thread_time()
    seen = run.look()
    pause = max(LOOK_SECONDS, time.monotonic() - wall, _PAUSES * (time.thread_time() - cpu))
    return seen, _Look(bool(seen["has_more"]), pause)


@dataclass
class _Followed:
    """A run that was opened, and those who follow it; one reader at a time."""

    run: OpenRun
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    seen: Mapping[str, Any] = field(default_factory=dict)
    told_at: float = -math.inf
    num_followers: int = 0
    looking: asyncio.Task[None] | None = None

    async def ask(self, question: Callable[[OpenRun], T]) -> T:
        """The answer. Who asks may go away, but the next waits until this reading has ended."""
        asking = asyncio.create_task(self._ask(question))
        asking.add_done_callback(lambda it: it.cancelled() or it.exception())
        return await asyncio.shield(asking)

    async def _ask(self, question: Callable[[OpenRun], T]) -> T:
        async with self.lock:
            return await asyncio.to_thread(question, self.run)

    async def look(self) -> _Look:
        """Read on once, and tell the followers when anything changed."""
        seen, took = await self.ask(_timed_look)
        is_urgent = seen["has_more"] or any(seen[it] != self.seen.get(it) for it in _AT_ONCE)
        is_calm = time.monotonic() - self.told_at < _CALM_LOOKS * LOOK_SECONDS
        if seen != self.seen and (is_urgent or not is_calm):
            async with self.news:
                self.told_at = time.monotonic()
                self.seen = seen
                self.news.notify_all()
        return took

    async def follow(self) -> None:
        """Look again and again while there are followers.

        consumes: the files of the run    waits for: a second
        produces: `seen`                  unblocked by: time
        """
        while self.num_followers:
            took = _Look(has_more=False, pause=LOOK_SECONDS)
            with contextlib.suppress(OSError, GradusError):  # It is looked at again.
                took = await self.look()
            await asyncio.sleep(0.01 if took.has_more else took.pause)


class Viewer:
    """Answers every request; owns the opened runs.

    >>> web.run_app(Viewer(open_shelf([Path("runs")]), token="...").app())  # doctest: +SKIP
    """

    def __init__(self, shelf: Shelf, *, token: str, talks: Sequence[Target] = ()) -> None:
        self._shelf = shelf
        self._talks = talks
        self._token = token
        self._pass = secrets.token_urlsafe(24)
        self._opened: dict[str, _Followed] = {}
        self._page = dict(page_files())

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._index)
        app.router.add_get("/page/{name:[a-zA-Z0-9_./-]+}", self._file)
        app.router.add_get("/api/runs", self._runs)
        app.router.add_post("/api/talk/{number:[0-9]}", self._talk)
        run = "/api/runs/{run}"
        app.router.add_get(run, self._of_run(lambda it, _: it.overview()))
        app.router.add_get(f"{run}/metrics", self._of_run(lambda it, _: it.catalogue()))
        app.router.add_get(f"{run}/changes", self._of_run(lambda it, _: it.changes()))
        app.router.add_get(f"{run}/curves", self._of_run(_curves))
        app.router.add_get(f"{run}/curves.parquet", self._of_run(_curves_as_parquet))
        app.router.add_get(f"{run}/episodes.parquet", self._of_run(_episodes_as_parquet))
        app.router.add_get(f"{run}/episodes", self._of_run(_episodes))
        app.router.add_get(f"{run}/histograms", self._of_run(_histograms))
        app.router.add_get(f"{run}/search", self._of_run(_search))
        app.router.add_get(f"{run}/episodes/{{key}}", self._of_run(_episode))
        app.router.add_get(f"{run}/episodes/{{key}}/tokens", self._of_run(_tokens))
        app.router.add_get(f"{run}/episodes/{{key}}/text", self._of_run(_text))
        app.router.add_get(f"{run}/images/{{name}}", self._image)
        app.router.add_get(f"{run}/groups/{{key}}", self._of_run(_group))
        app.router.add_get(f"{run}/evaluations", self._of_run(_evaluations))
        app.router.add_get(f"{run}/time", self._of_run(_time))
        app.router.add_get(f"{run}/logs", self._of_run(_logs))
        app.router.add_get(f"{run}/settings", self._settings)
        app.router.add_get(f"{run}/samples", self._of_run(_samples))
        app.router.add_get(f"{run}/marks", self._of_run(lambda it, _: it.marks()))
        app.router.add_get(f"{run}/events", self._events)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse whoever came by another name of this host, or without token and cookie."""
        if _host_name(request) not in _OWN_NAMES:
            return _refusal(403, "This page answers only to 127.0.0.1 and localhost.")
        site = request.headers.get("Sec-Fetch-Site", "none")
        if request.method != "GET" and site not in ("none", "same-origin"):
            return _refusal(403, "This page answers no other page's requests.")
        cookie = request.cookies.get(_cookie_name(request), "")
        given = request.query.get("token", "")
        if request.path == "/" and given and _same(given, self._token):
            answer = web.Response(status=303, headers={"Location": "/", **_HEADERS})
            answer.set_cookie(_cookie_name(request), self._pass, httponly=True, samesite="Lax")
            return answer
        if not _same(cookie, self._pass):
            return _refusal(
                403,
                "Open the address that gradus view printed: it holds a token, and "
                "without one any user of this machine could read the run.",
            )
        try:
            answer_of = await handler(request)
        except web.HTTPException as error:
            return _refusal(error.status, error.reason)
        except ConfigError as error:
            return _refusal(404, str(error))
        except GradusError as error:
            return _refusal(409, str(error))
        except OSError as error:
            return _refusal(409, f"{error.filename} cannot be read: {error.strerror}")
        if not answer_of.prepared:
            answer_of.headers.update(_HEADERS)
        return answer_of

    async def _index(self, _: web.Request) -> web.Response:
        return self._content("index.html")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._page:
            raise ConfigError(f"the page has no file {name[:80]!r}")
        return self._content(name)

    def _content(self, name: str) -> web.Response:
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=self._page[name], content_type=kind, charset="utf-8")

    async def _runs(self, _: web.Request) -> web.Response:
        runs = self._shelf.runs.items()
        rows = await asyncio.to_thread(lambda: [row_of(run_id, it) for run_id, it in runs])
        talks = [it.url for it in self._talks]
        return _json({"runs": rows, "left_out": self._shelf.num_left_out, "talks": talks})

    async def _talk(self, request: web.Request) -> web.Response:
        """What a server that was named says to some messages."""
        number = int(request.match_info["number"])
        if number >= len(self._talks):
            raise ConfigError("gradus view was started without this --talk")
        try:
            asked = msgspec.json.decode(await request.read(), type=Asked)
        except msgspec.DecodeError as error:
            return _refusal(400, f"this cannot be said: {error}")
        return _json(await self._talks[number].say(asked))

    async def _open(self, request: web.Request) -> _Followed:
        run_id = request.match_info["run"]
        run_dir = self._shelf.runs.get(run_id)
        if run_dir is None:
            raise ConfigError(f"no run {run_id[:80]!r} was named when gradus view was started")
        if run_id not in self._opened:
            self._opened[run_id] = _Followed(OpenRun(run_dir))
        followed = self._opened[run_id]
        if not followed.seen or not followed.num_followers:
            await followed.look()
        return followed

    def _of_run(self, answer: Callable[[OpenRun, web.Request], Any]) -> _Handler:
        """A handler that asks one question about the run in the address."""

        async def handler(request: web.Request) -> web.Response:
            followed = await self._open(request)
            found = await followed.ask(lambda run: answer(run, request))
            if callable(found):  # The rest needs the run no more.
                found = await asyncio.to_thread(found)
            return web.Response(body=found) if isinstance(found, bytes) else _json(found)

        return handler

    async def _image(self, request: web.Request) -> web.Response:
        """One that episodes of the run were shown, by the hash of its bytes."""
        run_dir = (await self._open(request)).run.run_dir
        name = request.match_info["name"]
        content = await asyncio.to_thread(ImageStore(run_dir.images).read, name)
        if (kind := type_of(content)) is None:
            raise ConfigError(f"image {name} is of no kind that a browser shows")
        return web.Response(body=content, content_type=kind)

    async def _settings(self, request: web.Request) -> web.Response:
        """Of the run in the address, beside the others that `with` names."""
        names = [request.match_info["run"], *request.query.getall("with", [])[:_MAX_RUNS]]
        shelf = {name: self._shelf.runs.get(name) for name in names}
        if missing := next((name for name, it in shelf.items() if it is None), None):
            raise ConfigError(f"no run {missing[:80]!r} was named when gradus view was started")
        folders = {name: it.root for name, it in shelf.items() if it is not None}

        def read() -> dict[str, Any]:
            return settings_page({name: read_folder(root) for name, root in folders.items()})

        return _json(await asyncio.to_thread(read))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Tell what is new as server-sent events, until the page goes."""
        followed = await self._open(request)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
        await answer.prepare(request)
        followed.num_followers += 1
        if followed.looking is None or followed.looking.done():
            followed.looking = asyncio.create_task(followed.follow())
        told: Mapping[str, Any] = {}
        try:
            while True:
                if followed.seen != told:
                    told = followed.seen
                    await answer.write(b"data: " + msgspec.json.encode(told) + b"\n\n")
                async with followed.news:
                    is_new = followed.news.wait_for(lambda: followed.seen != told)  # noqa: B023
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(is_new, 15 * LOOK_SECONDS)
                if followed.seen == told:
                    await answer.write(b": still here\n\n")
        except (ConnectionError, asyncio.CancelledError):
            return answer
        finally:
            followed.num_followers -= 1


async def serve(
    shelf: Shelf,
    *,
    port: int,
    announce: Callable[[int, str], None],
    talks: Sequence[Target] = (),
) -> None:
    """Answer until cancelled; `announce` gets the port and the first address.

    ConfigError when the port is taken or not allowed.
    """
    token = secrets.token_urlsafe(24)
    runner = web.AppRunner(
        Viewer(shelf, token=token, talks=talks).app(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.5,
        # Also for whoever sends half a request.
        keepalive_timeout=_IDLE_SECONDS,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be used ({error.strerror}); choose another, "
                "or leave it out and a free one is taken"
            ) from error
        chosen = int(runner.addresses[0][1])
        announce(chosen, f"http://{HOST}:{chosen}/?token={token}")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def page_files() -> Sequence[tuple[str, bytes]]:
    """Every file of the page by its name, read once."""
    root = files("gradus.view").joinpath("page")
    found = [(it.name, it) for it in root.iterdir()]
    for folder in ("views", "vendor"):
        found += [(f"{folder}/{it.name}", it) for it in root.joinpath(folder).iterdir()]
    return [(n, it.read_bytes()) for n, it in found if n.rpartition(".")[2] in _TYPES]


def _curves(run: OpenRun, request: web.Request) -> Any:
    return run.curves(request.query.getall("name", [])[:_MAX_CURVES], _axis(request))


def _curves_as_parquet(run: OpenRun, request: web.Request) -> bytes:
    names = request.query.getall("name", [])[:_MAX_CURVES]
    return run.curves_as_parquet(names, _axis(request))


def _episodes_as_parquet(run: OpenRun, request: web.Request) -> Callable[[], bytes]:
    return run.episodes_as_parquet(_where(request), request.query.get("sort", ""))


def _axis(request: web.Request) -> Axis:
    axis = next((it for it in AXES if it == request.query.get("over", AXES[0])), None)
    if axis is None:
        raise ConfigError(f"over: choose one of {', '.join(AXES)}")
    return axis


def _where(request: web.Request) -> dict[str, list[str]]:
    """The filters of a table: all of a query but what says which rows, in which order."""
    names = dict.fromkeys(name for name in request.query if name not in _NO_FILTERS)
    return {name: list(request.query.getall(name)) for name in names}


def _episodes(run: OpenRun, request: web.Request) -> Any:
    first, count = _number(request, "from", 0), min(_number(request, "rows", 100), _MAX_ROWS)
    sort, by = request.query.get("sort", ""), request.query.get("by", "")
    # Who reads on from rows that were there earlier is told of no newer ones, which move them.
    known = _number(request, "all", run.index.num_rows)
    whole = {
        "from": first,
        "all": run.index.num_rows,
        "generation": run.index.generation,
        "columns": run.index.names,
        "words": run.index.first_words,
    }
    where = _where(request)
    if by:
        sums = summed_rows(run.index, by, where, sort, known=known, first=first, count=count)
        return whole | sums
    return whole | {
        "rows": run.index.cells(where, sort, first=first, count=count, known=known),
        "passing": run.index.count(where, known),
        "parts_left_out": run.index.num_parts_left_out,
    }


def _search(run: OpenRun, request: web.Request) -> Any:
    text = request.query.get("text", "")
    if not 1 < len(text) <= _MAX_SEARCHED:
        raise ConfigError(f"text: search for 2 to {_MAX_SEARCHED} characters")
    where, sort = _where(request), request.query.get("sort", "")
    rows, place = search_texts(run.index, where, sort, text, _number(request, "from", 0))
    of = {"next": place, "of": run.index.count(where), "generation": run.index.generation}
    return of | {"rows": rows}


def _histograms(run: OpenRun, request: web.Request) -> Any:
    where = _where(request)
    words = ("source", "agent", "outcome", "dropped", "error", "purpose")
    return {
        "histograms": {name: run.index.histogram(name, where) for name in HISTOGRAMS},
        "words": {name: run.index.words(name, 200) for name in words},
    }


def _episode(run: OpenRun, request: web.Request) -> Any:
    return run.episode(_key(request), first=_number(request, "from", 0))


def _tokens(run: OpenRun, request: web.Request) -> Any:
    return run.episode_tokens(_key(request))


def _group(run: OpenRun, request: web.Request) -> Any:
    return group_page(
        run.index,
        _key(request),
        sort=request.query.get("sort", ""),
        first=_number(request, "from", 0),
        with_texts="keys" not in request.query,
    )


def _evaluations(run: OpenRun, request: web.Request) -> Any:
    if "source" not in request.query:
        return evaluations_page(run.index, run.series.evaluations)
    first, second = _number(request, "first", 0), _number(request, "second", 0)
    return compared_tasks(run.index, request.query["source"], first, second)


def _time(run: OpenRun, request: web.Request) -> Any:
    last = _number(request, "step", 0) if "step" in request.query else None
    count = min(max(1, _number(request, "count", 3)), MAX_STEPS)
    return timeline_page(run.run_dir, run.series.steps, last, count)


def _logs(run: OpenRun, request: web.Request) -> Any:
    return logs_page(run.run_dir, dict(request.query))


def _samples(run: OpenRun, request: web.Request) -> Any:
    return samples_behind(run.run_dir, _number(request, "version", 0))


def _text(run: OpenRun, request: web.Request) -> Any:
    trace, node = _number(request, "trace", 0), _number(request, "node", 0)
    return {"text": run.episode_text(_key(request), trace, node)}


def _key(request: web.Request) -> EpisodePlace:
    return EpisodePlace.of(request.match_info["key"])


def _number(request: web.Request, name: str, default: int) -> int:
    word = request.query.get(name, str(default))
    if not re.fullmatch(r"\d{1,12}", word):
        raise ConfigError(f"{name}: {word[:40]!r} is no whole number from 0 on")
    return int(word)


def _json(value: Any) -> web.Response:
    try:
        body = msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):  # Half a character, or a number of 20 digits.
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        body = json.dumps(finite).encode()
    return web.Response(body=body, content_type="application/json")


def _refusal(status: int, sentence: str) -> web.Response:
    answer = web.json_response({"error": sentence}, status=status)
    answer.headers.update(_HEADERS)
    return answer


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _host_name(request: web.Request) -> str:
    try:
        return urlsplit(f"//{request.host}").hostname or ""
    except ValueError:  # Such as half an address of IPv6.
        return ""


def _cookie_name(request: web.Request) -> str:
    """Cookies are not told apart by port, so that each server's has a name of its own."""
    local = request.transport and request.transport.get_extra_info("sockname")
    return f"gradus_view_{local[1] if local else 0}"
