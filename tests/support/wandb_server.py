"""A stand-in for the API of Weights & Biases: as much of it as its service asks for one run."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Keeps the lines of one run by number, as the real one does."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = [json.dumps(line) for line in lines]
        self.exit_codes: list[int] = []
        self.url = ""

    def stream(self, sent: dict[str, Any]) -> dict[str, Any]:
        """Lines from a number on replace what was there."""
        history = sent.get("files", {}).get("wandb-history.jsonl")
        if history:
            self.lines[history["offset"] :] = history["content"]
        if sent.get("complete"):
            self.exit_codes.append(sent["exitcode"])
        return {"exitcode": None, "limits": {}}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """What the service asks before and after it sends."""
        project = {"id": "1", "name": "tests", "entity": {"id": "2", "name": "me"}}
        count = len(self.lines)
        run = {"id": "3", "name": variables.get("name"), "displayName": "demo", "project": project}
        progress = {
            **{"historyLineCount": count, "logLineCount": 0, "eventsLineCount": 0},
            **{"historyTail": json.dumps(self.lines[-1:]), "eventsTail": "[]", "tags": []},
            **{"summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": {"value": 1}}'},
        }
        if "UpsertBucket" in query:
            return {"upsertBucket": {"bucket": run, "inserted": not count}}
        if "RunResumeStatus" in query:
            bucket = {**run, **progress} if count else None
            return {"model": {**project, "internalId": "1", "bucket": bucket}}
        if "Viewer" in query:
            return {"viewer": {"id": "2", "entity": "me", "username": "me", "flags": "{}"}}
        if "ServerFeatures" in query:
            return {"serverInfo": {"features": []}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": self.url} for name in variables["files"]]
            return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
        return {}


@contextmanager
def wandb_server(lines: list[dict[str, Any]]) -> Iterator[WandbServer]:
    """A server that has these lines already."""
    server = WandbServer(lines)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_PUT(self) -> None:
            self._read()
            self._reply({})

        def do_POST(self) -> None:
            sent = self._read()
            if self.path.endswith("/file_stream"):
                self._reply(server.stream(sent))
            elif self.path.endswith("/graphql"):
                found = server.answer(sent["query"], sent.get("variables") or {})
                self._reply({"data": found})
            else:
                self._reply({})

        def _read(self) -> dict[str, Any]:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
            is_json = "json" in (self.headers.get("Content-Type") or "")
            return json.loads(content) if is_json and content else {}

        def _reply(self, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
