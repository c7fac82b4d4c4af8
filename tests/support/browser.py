"""Chromium without a window, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_SECONDS = 60.0
"""Bounds a failure; nothing that works takes as long."""


class Page:
    """One open page: what it complained about, and what it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if waiting := self._answers.pop(event.get("id", 0), None):
                waiting.set_result(event.get("result", {"error": event.get("error")}))
            about = event.get("params", {})
            if event.get("method") == "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            elif event.get("method") == "Page.loadEventFired":
                self._loaded.set()
            elif event.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(about["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
                self.complaints.append(str(about["entry"]))

    async def go(self, address: str) -> None:
        self._loaded.clear()
        await self.send("Page.navigate", url=address)
        await asyncio.wait_for(self._loaded.wait(), _SECONDS)

    async def follow(self, link: str) -> None:
        """Click on a link, and wait for what it leads to."""
        self._loaded.clear()
        await self.value(f"({link}.click(), 1)")
        await asyncio.wait_for(self._loaded.wait(), _SECONDS)

    async def send(self, method: str, **about: Any) -> Any:
        number = self._number = self._number + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": about})
        return await asyncio.wait_for(self._answers[number], _SECONDS)

    async def value(self, expression: str) -> Any:
        """What an expression, or its promise, comes to."""
        found = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        look = f"const look = () => (({expression}) ? done(true) : setTimeout(look, 20)); look();"
        assert await self.value(f"new Promise((done) => {{ {look} }})")

    async def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def mouse(self, kind: str, x: float, y: float, count: int = 1) -> None:
        held = {"button": "left", "clickCount": count, "buttons": 1}
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    async def resize(self, width: int, height: int, *, theme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        await self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )

    async def picture(self, path: Path) -> None:
        found = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await self._socket.close()


@contextlib.asynccontextmanager
async def a_page(folder: Path, address: str) -> AsyncIterator[Page]:
    """A page at an address, in a browser of its own whose profile lies in `folder`."""
    assert CHROMIUM is not None
    options = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder / 'profile'}",
        "--remote-debugging-port=0",
    ]
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM, *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert browser.stderr is not None
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(10 * _SECONDS):
            line = b""
            while b"DevTools listening on" not in line:
                line = await browser.stderr.readline()
                assert line, "the browser ended"
            port = line.decode().split("127.0.0.1:")[1].split("/")[0]
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                target = await answer.json(content_type=None)
            draining = asyncio.create_task(browser.stderr.read())
            socket = await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.send(f"{domain}.enable")
            await page.go(address)
            yield page
            await page.close()
            draining.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            browser.kill()
        await browser.wait()
