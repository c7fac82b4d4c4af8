"""`gradus serve` with a real vLLM: an ordinary client finds everything, Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from commands import finish, start, wait_until

from gradus.processes.table import descendants, is_alive, living_processes

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def ask(url: str, token: str | None, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of one request."""
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_model_is_served_to_ordinary_clients(tiny_model: Path, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    words = ["serve", str(tiny_model), "--name", "my/model", "--token-file", str(token_file)]
    server = start(*words, "--inference.kv-cache-gib", "0.25")
    assert server.stdout is not None
    printed = ""
    while not (found := re.search(r"^serves at +(\S+)$", printed, re.M)):
        line = server.stdout.readline()
        assert line, printed
        printed += line
    base_url, token = found[1], token_file.read_text().strip()
    started = descendants(server.pid, living_processes())
    try:
        assert ask(f"{base_url}/models", None)[0] == 401
        (card,) = json.loads(ask(f"{base_url}/models", token)[1])["data"]
        assert card["id"] == "my/model"
        message = {"role": "user", "content": "hi"}
        chat = {"model": "my/model", "max_tokens": 4, "messages": [message]}
        spoken = json.loads(ask(f"{base_url}/chat/completions", token, chat)[1])
        reply = spoken["choices"][0]["message"]
        assert reply["content"], "a reply without tags is content, and no reasoning"
        assert not reply.get("reasoning")
        streamed = ask(f"{base_url}/chat/completions", token, chat | {"stream": True})[1]
        chunks = re.findall(r"^data: (\{.*)$", streamed, re.M)
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        assert any(delta.get("content") for delta in deltas), streamed
        assert not any(delta.get("reasoning") for delta in deltas), streamed
        tools = {"tools": [{"type": "function", "function": TOOL}]}
        status, answer = ask(f"{base_url}/chat/completions", token, chat | tools)
        assert (status, json.loads(answer)["model"]) == (200, "my/model"), answer
        prompt = {"model": "my/model", "max_output_tokens": 4, "input": "hi"}
        assert ask(f"{base_url}/responses", token, prompt)[0] == 200
        status, metrics = ask(f"{base_url.removesuffix('/v1')}/metrics", token)
        assert (status, "vllm:generation_tokens_total" in metrics) == (200, True)
    finally:
        server.send_signal(signal.SIGINT)
        rest = finish(server)
    assert token not in printed + rest
    wait_until(
        lambda: not [entry for entry in started if is_alive(entry.pid, entry.start_time)],
        what="the end of every process of the server",
    )
