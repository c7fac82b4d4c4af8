"""The client's side of a tool server: which tools it has, and what one call answers.

The protocol's newest form has no session, so a list and a call are one post each. The SDK's client
does the same with 33 ms of CPU time to connect and 3.5 ms a call, where a post costs 1 ms, and it
repeats a call that failed up to six times, whatever the call did. It serves only the servers that
speak an older form.
"""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import AsyncExitStack
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
from verifiers.v1.errors import ToolsetError
from verifiers.v1.harnesses.utils.mcp import connect_mcp

from gradus_chat.model_calls import RetryPolicy

PROTOCOL = "2026-07-28"
"""Version of the form without sessions."""
LIST_TIMEOUT_SECONDS = 60.0
MAX_ANSWER_BYTES = 16 * 2**20
"""Of one answer; the rest is not read."""
MAX_PAGES = 100
CONNECT_RETRIES = RetryPolicy(max_retries=4, first_delay_seconds=0.5)
"""For servers on other machines. One of this machine that refuses a connection is dead."""
_META = {
    "io.modelcontextprotocol/protocolVersion": PROTOCOL,
    "io.modelcontextprotocol/clientInfo": {"name": "gradus", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
_NEEDS_SDK = '"x-mcp-header"'
"""In a schema: arguments that are sent once more as headers."""


class ToolServer(Protocol):
    """One server, as an episode uses it."""

    tools: list[dict[str, Any]]
    """As the server declares them."""

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """What a tool answers as text, its errors included; ToolsetError for a dead server."""


async def open_server(
    name: str, url: str, http: aiohttp.ClientSession, stack: AsyncExitStack, *, timeout: float
) -> ToolServer:
    """Ask a server for its tools; ToolsetError names one that is dead."""
    try:
        async with asyncio.timeout(LIST_TIMEOUT_SECONDS):
            direct = HttpToolServer(name, url, http)
            if await direct.list_tools():
                return direct
            return await SdkToolServer.open(name, url, stack, timeout=timeout)
    except TimeoutError as error:
        raise ToolsetError(
            f"tool server {name!r} did not list its tools within {LIST_TIMEOUT_SECONDS:g} s"
        ) from error


class HttpToolServer:
    """A server that answers each post by itself."""

    def __init__(self, name: str, url: str, http: aiohttp.ClientSession) -> None:
        self.tools: list[dict[str, Any]] = []
        self._name = name
        self._url = url
        self._http = http

    async def list_tools(self) -> bool:
        """Fill `tools`; False when the server speaks another form of the protocol."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            payload = await self._post("tools/list", cursor)
            result: Any = payload.get("result")
            result = result if isinstance(result, dict) else {}
            tools = result.get("tools")
            if not isinstance(tools, list) or _NEEDS_SDK in json.dumps(tools):
                return False
            found += tools
            if not result.get("nextCursor"):
                break
            cursor = {"cursor": result["nextCursor"]}
        self.tools = found
        return True

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        payload = await self._post("tools/call", {"name": tool, "arguments": arguments}, tool)
        if isinstance(payload.get("result"), dict):
            return text_of(payload["result"].get("content"))
        error = payload.get("error")
        text = error.get("message", error) if isinstance(error, dict) else error
        return f"error: {text}"

    async def _post(
        self, method: str, params: dict[str, Any], name: str | None = None
    ) -> dict[str, Any]:
        request = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": method,
            "params": {**params, "_meta": _META},
        }
        headers = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "mcp-protocol-version": PROTOCOL,
            "mcp-method": method,
        }
        if name is not None:
            headers["mcp-name"] = _header(name)
        content = json.dumps(request).encode()
        for retry in range(CONNECT_RETRIES.max_retries + 1):
            try:
                async with self._http.post(self._url, data=content, headers=headers) as response:
                    return _payload(response, await _bounded_body(response))
            except aiohttp.ClientConnectorError as error:
                # Nothing was sent, so that the call may come again.
                if retry == CONNECT_RETRIES.max_retries or _is_here(self._url):
                    raise self._dead(error) from error
                await asyncio.sleep(CONNECT_RETRIES.delay_seconds(retry))
            except (aiohttp.ClientError, ConnectionError) as error:
                raise self._dead(error) from error
        raise AssertionError("the last retry returns or raises")

    def _dead(self, error: BaseException) -> ToolsetError:
        address, _, query = self._url.partition("?")
        reason = f"{type(error).__name__}: {error}"
        if query:  # holds the signature of the episode's state
            reason = reason.replace(query, "...")
        return ToolsetError(
            f"tool server {self._name!r} is gone: {address} gave no answer ({reason}). Its "
            "process ended or closed the connection"
        )


class SdkToolServer:
    """A server of an older form, through the SDK's client: one call at a time, none repeated."""

    def __init__(self, name: str, tools: list[dict[str, Any]], connection: Any) -> None:
        self.tools = tools
        self._name = name
        self._connection = connection

    @classmethod
    async def open(
        cls, name: str, url: str, stack: AsyncExitStack, *, timeout: float
    ) -> SdkToolServer:
        """Connect and list the tools; `stack` closes the connection."""
        spec = {"mcpServers": {"": {"url": url, "timeout": timeout}}}
        try:
            schemas, _, connections = await connect_mcp(spec, stack)
        except Exception as error:
            raise ToolsetError(
                f"tool server {name!r} does not list its tools: {type(error).__name__}: {error}"
            ) from error
        functions = [schema["function"] for schema in schemas]
        tools = [{**f, "inputSchema": f["parameters"]} for f in functions]
        return cls(name, tools, connections[""])

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        try:
            # `run` would repeat the call.
            result = await self._connection._run(lambda client: client.call_tool(tool, arguments))
        except Exception as error:
            told = getattr(getattr(error, "error", None), "message", None)
            if told is not None:
                return f"error: {told}"
            raise ToolsetError(
                f"tool server {self._name!r} is gone: {type(error).__name__}: {error}"
            ) from error
        return text_of([block.model_dump(mode="json", by_alias=True) for block in result.content])


def text_of(blocks: Any) -> str:
    """The blocks of an answer as text that a tokenizer can read."""
    if not isinstance(blocks, list):
        return "error: the tool server's answer has no content"
    text = "\n".join(_block_text(block) for block in blocks)
    # A pair of surrogates becomes its character; one alone is none, and no tokenizer takes it.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _block_text(block: Any) -> str:
    if not isinstance(block, dict):
        return str(block)
    inside = block.get("resource")
    holder = inside if isinstance(inside, dict) else block
    if isinstance(holder.get("text"), str):
        return str(holder["text"])
    coded = holder.get("data", holder.get("blob"))
    if isinstance(coded, str):
        kind = holder.get("mimeType") or block.get("type")
        return f"[{kind} of about {len(coded) * 3 // 4} bytes is left out: only text is read here]"
    return json.dumps(block)


async def _bounded_body(response: aiohttp.ClientResponse) -> bytes | None:
    """The body; None when it is longer than an answer may be."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            response.close()
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def _payload(response: aiohttp.ClientResponse, body: bytes | None) -> dict[str, Any]:
    """The object in an answer, with `error` where it holds none."""
    if body is None:
        return {"error": f"the tool's answer is longer than {MAX_ANSWER_BYTES} bytes"}
    if response.content_type == "text/event-stream":
        events = [line[5:] for line in body.splitlines() if line.startswith(b"data:")]
        body = next((data for data in reversed(events) if data.strip()), b"")
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        return {
            "error": f"the tool server answered {response.status} with something that is no JSON"
        }
    return payload if isinstance(payload, dict) else {"error": "the tool server answered no object"}


def _header(value: str) -> str:
    """A name as a header, as the protocol codes what a header cannot hold."""
    if value.isascii() and value.isprintable() and value == value.strip() and value[:2] != "=?":
        return value
    return f"=?base64?{base64.b64encode(value.encode(errors='replace')).decode()}?="


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in {"127.0.0.1", "localhost", "::1"}
