"""The page talks to a server that the user named, through its own server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from browser import CHROMIUM, a_page
from run_folders import a_run, add_episode

from gradus.errors import ConfigError
from gradus.view.screens.talk import targets_of
from gradus.view.server import Viewer
from gradus.view.shelf import open_shelf

HOSTILE = "<img src=http://127.0.0.1:1/x>\u202e"
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ASKED = {"messages": [{"role": "user", "content": "hi"}], "settings": {"temperature": 0.5}}


def replied(text: str) -> dict[str, Any]:
    tokens: list[dict[str, Any]] = [
        {"token": text, "logprob": 0.0, "top_logprobs": [{"token": "other", "logprob": -3.0}]},
        {"token": " there", "logprob": -0.5},
    ]
    message = {"role": "assistant", "content": f"{text} there", "reasoning": "hm"}
    choice = {"message": message, "finish_reason": "length", "logprobs": {"content": tokens}}
    return {"choices": [choice]}


CALLING = replied(HOSTILE)
CALLING["choices"][0]["message"]["tool_calls"] = [CALL]


class AModel:
    """A server of one model; `answer` is what it says, `asked` what it heard."""

    def __init__(self, answer: Any = None, status: int = 200) -> None:
        self.answer = replied(HOSTILE) if answer is None else answer
        self.status = status
        self.asked: list[tuple[str | None, Any]] = []

    async def say(self, request: web.Request) -> web.Response:
        self.asked.append((request.headers.get("Authorization"), await request.json()))
        if self.status == 302:
            raise web.HTTPFound("http://127.0.0.1:1/elsewhere")
        text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        return web.Response(text=text, status=self.status)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.say)
        app.router.add_get("/v1/models", models)
        async with TestServer(app, host="127.0.0.1") as server:
            yield f"http://127.0.0.1:{server.port}"


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "tiny"}]})


def a_viewer(tmp_path: Path, *urls: str, key: str | None = None) -> Viewer:
    root = a_run(tmp_path / "run")
    add_episode(root, step=0, reward=1.0, reply="x")
    talks = targets_of(urls, {"KEY": key or ""}, "KEY" if key else None)
    return Viewer(open_shelf([root]), token="t", talks=talks)


@asynccontextmanager
async def opened(viewer: Viewer) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(viewer.app(), host="127.0.0.1")) as client:
        await client.get("/?token=t")
        yield client


async def test_a_reply_comes_with_its_tokens_and_the_key_stays_with_the_server(
    tmp_path: Path,
) -> None:
    model = AModel()
    async with model.served() as url, opened(a_viewer(tmp_path, url, key="secret")) as client:
        answer = await client.post("/api/talk/0", json=ASKED)
        said = await answer.json()
        assert said["text"] == f"{HOSTILE} there"
        assert said["tokens"] == [[HOSTILE, 0.0, [["other", -3.0]]], [" there", -0.5, []]]
        assert (said["reasoning"], said["finish"]) == ("hm", "length")
        assert "secret" not in await (await client.get("/api/runs")).text()
    key, body = model.asked[0]
    assert key == "Bearer secret"
    settings = {"logprobs": True, "top_logprobs": 5, "temperature": 0.5}
    assert body == settings | {"model": "tiny", "messages": ASKED["messages"]}


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ("no JSON", 200, "no JSON"),
        ({"choices": []}, 200, "no reply that can be read"),
        ({"choices": [{"message": 3}]}, 200, "no reply that can be read"),
        ([], 200, "no reply that can be read"),
        ("wrong key", 401, "refuses with 401: wrong key"),
        ("", 302, "refuses with 302"),
    ],
)
async def test_a_server_that_does_not_answer_well_is_named(
    tmp_path: Path, answer: Any, status: int, said: str
) -> None:
    model = AModel(answer, status)
    async with model.served() as url, opened(a_viewer(tmp_path, url)) as client:
        found = await client.post("/api/talk/0", json=ASKED)
        assert found.status == 409
        error = (await found.json())["error"]
        assert said in error
        assert url in error


async def test_tools_are_offered_and_a_call_comes_with_its_name_in_the_conversation(
    tmp_path: Path,
) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    model = AModel(CALLING)
    async with model.served() as url, opened(a_viewer(tmp_path, url)) as client:
        said = await (await client.post("/api/talk/0", json=ASKED | {"tools": [tool]})).json()
    assert model.asked[0][1]["tools"] == [tool]
    assert said["calls"] == [CALL]


async def test_what_cannot_be_said_reaches_no_server(tmp_path: Path) -> None:
    model = AModel()
    async with model.served() as url, opened(a_viewer(tmp_path, url)) as client:
        wrong = [b"", b"[]", b'{"messages": 3}', b'{"messages": [], "settings": {"n": 9}}']
        for body in wrong:
            assert (await client.post("/api/talk/0", data=body)).status == 400
        assert (await client.post("/api/talk/1", json=ASKED)).status == 404
        client.session.cookie_jar.clear()
        assert (await client.post("/api/talk/0", json=ASKED)).status == 403
    assert model.asked == []


async def test_a_server_that_is_gone_is_an_answer_too(tmp_path: Path) -> None:
    async with AModel().served() as url:
        pass
    async with opened(a_viewer(tmp_path, url)) as client:
        answer = await client.post("/api/talk/0", json=ASKED)
        assert "does not answer" in (await answer.json())["error"]


@pytest.mark.parametrize("url", ["", "x", "ftp://a", "http://", "http://a?b", "http://me:pw@a"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="such as http"):
        targets_of([url], {}, None)


def test_a_key_needs_its_variable_and_its_server() -> None:
    with pytest.raises(ConfigError, match="KEY: the variable is not set"):
        targets_of(["http://a/v1"], {"KEY": ""}, "KEY")
    with pytest.raises(ConfigError, match="--talk"):
        targets_of([], {"KEY": "k"}, "KEY")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_two_servers_answer_the_task_of_an_episode_side_by_side(tmp_path: Path) -> None:
    one, two, prompt = AModel(CALLING), AModel("busy", 503), "ask" * 10_000
    async with one.served() as first, two.served() as second:
        app = a_viewer(tmp_path, first, second).app()
        path = tmp_path / "run/episodes/step_0/train.jsonl"
        record = json.loads(path.read_text().replace('"ask"', json.dumps(prompt)))
        record["traces"].insert(0, {"nodes": record["traces"][0]["nodes"][:1]})
        path.write_text(json.dumps(record) + "\n")
        async with TestServer(app, host="127.0.0.1") as server:
            own = f"http://127.0.0.1:{server.port}/"
            async with a_page(tmp_path, f"{own}?token=t") as page:
                await page.until("document.querySelector('h1')")
                await page.value("(location.hash = '#/run/episode/train-0-0')")
                link = "[...document.querySelectorAll('a')].find((it) => it.textContent === 'talk with its task')"  # noqa: E501
                await page.until(link)
                # A button that could not get more says so, and may be tried again.
                more = "[...document.querySelectorAll('.turn button')].at(-1)"
                await page.value("(plain = fetch, fetch = async () => { throw new Error(); }, 1)")
                await page.value(f"{more}.click()")
                await page.until(f"{more}.textContent.includes('does not answer')")
                await page.value(f"(fetch = plain, {more}.click())")
                await page.until(
                    f"[...document.querySelectorAll('.turn')].at(-2).innerText.includes('{prompt}')"
                )
                await page.value(f"{link}.click()")
                await page.until(f"document.querySelector('textarea')?.value === '{prompt}'")
                assert "as agent was told it" in await page.value("document.body.textContent")
                await page.value("document.querySelector('.talk button').click()")
                await page.until("document.querySelectorAll('.panel .token').length === 2")
                await page.until("document.querySelector('.problem')")
                shown = await page.value("document.querySelector('.panel .token').textContent")
                assert shown == HOSTILE.replace("\u202e", "⟨U+202E⟩")
                assert "503: busy" in await page.value("document.body.textContent")
                title = await page.value("document.querySelector('.panel .token').title")
                assert 'or "other" -3' in title.replace("\u2212", "-")
                await page.value("(document.querySelector('textarea').value = '42', 1)")
                await page.value("document.querySelector('.talk button').click()")
                await page.until("document.querySelectorAll('.panel .token').length === 4")
            assert {it for it in page.requests if not it.startswith(own)} == set()
    assert one.asked[0][1]["messages"] == [{"role": "user", "content": prompt}]
    assert one.asked[0][1]["max_tokens"] == 256
    called, answered = one.asked[1][1]["messages"][-2:]
    assert called["tool_calls"] == [CALL]
    assert answered == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    # What one did not hear is not in its conversation.
    assert two.asked[1][1]["messages"] == [{"role": "user", "content": "42"}]
