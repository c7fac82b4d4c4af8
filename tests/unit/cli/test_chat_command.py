"""`gradus chat` with a server that is there already."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from gradus.cli import chat as module
from gradus.cli.chat import Chat
from gradus.cli.main import main
from gradus.cli.serve import STARTING
from gradus.errors import ExitCode


class Server(ThreadingHTTPServer):
    """Streams the words of `reply`, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = ["tiny"]
        self.reply = ["Hel", "lo\n", "there"]
        self.thought = ""
        self.status = 200
        self.body = ""
        self.is_cut = False
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        models = [{"id": name, "object": "model"} for name in self.server.models]
        self._send(200, "application/json", json.dumps({"object": "list", "data": models}))

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        asked = json.loads(self.rfile.read(length))
        self.server.asked.append(asked)
        if not asked.get("stream"):
            self._send(200, "application/json", json.dumps(self._whole(asked)))
            return
        if self.server.status != 200:
            self._send(self.server.status, "application/json", '{"error": {"message": "too long"}}')
            return
        deltas: list[dict[str, str]] = [{"content": word} for word in self.server.reply]
        if self.server.thought:
            deltas.insert(0, {"reasoning": self.server.thought})
        chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        if self.server.body:
            self._send(200, "text/event-stream", self.server.body)
            return
        self._send(
            200,
            "text/event-stream",
            "".join([*lines, *([] if self.server.is_cut else ["data: [DONE]\n\n"])]),
        )

    def _whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A call of the first tool, and after its answer the reply."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.server.reply)}
        if asked.get("tools") and asked["messages"][-1]["role"] != "tool":
            function = {"name": asked["tools"][0]["function"]["name"], "arguments": '{"k": "a"}'}
            calls = [{"id": "c", "type": "function", "function": function}]
            message |= {"content": None, "tool_calls": calls}
        end = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": end}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        known = {"id": "x", "object": "chat.completion", "created": 0, "model": "tiny"}
        return {**known, "choices": [choice], "usage": usage}

    def _send(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        missing = 99 if self.server.is_cut and status == 200 and kind != "application/json" else 0
        self.send_header("Content-Length", str(len(text.encode()) + missing))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_replies_stream_and_the_conversation_is_kept(
    server: Server, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hi\n\nand now?\n")
    words = ["--system", "Be kind.", "--temperature", "0.5", "--max-tokens", "7"]
    assert main(["chat", server.url, *words]) == ExitCode.DONE
    assert capsys.readouterr().out == "Hello\nthere\n" * 2
    first, second = server.asked
    assert first["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0.5, 7, "tiny")
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "Hello\nthere"},
        {"role": "user", "content": "and now?"},
    ]


def test_a_conversation_can_begin_anew_and_be_left(server: Server, typed: Any) -> None:
    typed("hi\n/reset\nagain\n/quit\nnever\n")
    assert main(["chat", f"{server.url}/v1"]) == ExitCode.DONE
    assert [asked["messages"] for asked in server.asked] == [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "again"}],
    ]
    assert not {"temperature", "max_tokens"} & server.asked[0].keys()


def test_a_reply_drives_no_terminal_and_thoughts_are_not_sent_again(
    server: Server, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply, server.thought = ["\x1b[2J\x0b\x85gone"], "hm\xa0\u3000"
    typed("a\nb\n")
    assert main(["chat", server.url]) == ExitCode.DONE
    assert capsys.readouterr().out == "hm\xa0\u3000\\x1b[2J\\x0b\\x85gone\n" * 2
    assert server.asked[1]["messages"][1]["content"] == "\x1b[2J\x0b\x85gone"


def test_a_reply_that_is_stopped_is_kept_up_to_there(server: Server) -> None:
    class Interrupted(io.StringIO):
        def flush(self) -> None:
            if self.getvalue().endswith("lo\n"):
                raise KeyboardInterrupt

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        chat, shown = Chat(client, "tiny"), Interrupted()
        chat.say("hi", shown)
    assert shown.getvalue() == "Hello\n [stopped]\n"
    assert [message["content"] for message in chat.messages] == ["hi", "Hello\n"]


def test_no_proxy_is_asked_for_what_is_on_this_machine(
    server: Server, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    typed("hi\n")
    assert main(["chat", server.url]) == ExitCode.DONE


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://vllm:8000", "http://vllm:8000/v1/"),
        ("https://vm1.example.com/", "https://vm1.example.com/v1/"),
        ("http://here/api/v2", "http://here/api/v2/"),
    ],
)
def test_the_path_of_the_api_is_added_where_it_is_missing(url: str, base: str) -> None:
    client, _ = module._client_of_url([url], None)
    with client:
        assert str(client.base_url) == base


@pytest.mark.parametrize("body", ["data: {\n\n", "<html>", "data: 5\n\n"])
def test_nonsense_from_a_server_is_told_and_a_person_may_try_again(
    server: Server, body: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.body = body
    person = Person(["hi", "/quit"])
    monkeypatch.setattr("sys.stdin", person)
    monkeypatch.setattr("builtins.input", lambda _: person.lines.pop(0))
    assert main(["chat", server.url]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert person.lines == []


class Person(io.StringIO):
    """Somebody at a terminal."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def isatty(self) -> bool:
        return True


def test_a_connection_that_is_cut_is_no_internal_error(
    server: Server, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.is_cut = True
    typed("hi\n")
    assert main(["chat", server.url]) != ExitCode.DONE
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert "internal error" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_is_ended_from_outside_stops_its_server(
    server: Server, number: signal.Signals, tmp_path: Path
) -> None:
    stand_in = tmp_path / "serve.py"
    stand_in.write_text(
        "import pathlib, signal, sys\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def stop(*_): (folder / 'stopped').write_text('x'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path(sys.argv[-1]).write_text('token')\n"
        f"print('serves at   {server.url}/v1', flush=True)\n"
        "signal.pause()\n"
    )
    program = (
        "import sys\n"
        "from gradus.cli import chat\n"
        "from gradus.cli.main import main\n"
        f"chat.dying_with_parent = lambda words: [sys.executable, {str(stand_in)!r}, words[-1]]\n"
        "sys.exit(main(['chat', 'x']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hi\n")
    process.stdin.flush()
    assert process.stdout.readline() == "Hello\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert (tmp_path / "stopped").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["serve.py", "stopped"]


def test_a_refusal_is_told_and_ends_the_chat(
    server: Server, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 400
    typed("hi\n")
    assert main(["chat", server.url]) != ExitCode.DONE
    assert "too long" in capsys.readouterr().err


def test_one_of_several_models_is_named(
    server: Server, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = ["tiny", "other"]
    typed("hi\n")
    assert main(["chat", server.url]) == ExitCode.CONFIG
    assert "--name: tiny, other" in capsys.readouterr().err
    assert main(["chat", server.url, "--name", "none"]) == ExitCode.CONFIG
    assert main(["chat", server.url, "--name", "other"]) == ExitCode.DONE
    assert server.asked[0]["model"] == "other"


def test_the_key_of_a_server_comes_from_the_environment(
    server: Server, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed("")
    assert main(["chat", server.url, "--api-key-var", "CHAT_KEY"]) == ExitCode.CONFIG
    monkeypatch.setenv("CHAT_KEY", "secret")
    assert main(["chat", server.url, "--api-key-var", "CHAT_KEY"]) == ExitCode.DONE
    assert server.keys == ["Bearer secret"]


def test_of_a_url_and_a_model_each_gets_its_own_options() -> None:
    targets = ["http://127.0.0.1:1", "model"]
    options = ["--inference.port", "1", "--name", "it"]
    found = [module._for(target, targets, options) for target in targets]
    assert found == [["--name", "it"], ["--inference.port", "1"]]
    assert module._for("model", ["model"], options) == options


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--system", "x"],
        ["http://127.0.0.1:1/v1", "--temperature", "warm"],
        ["http://127.0.0.1:1/v1", "--temperature", "nan"],
        ["http://[::1", "--name", "x"],
        ["http://me:pw@127.0.0.1:1"],
        ["http://127.0.0.1:1/v1", "--inference.port", "1"],
        ["somewhere", "--api-key-var", "X"],
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str]) -> None:
    assert main(["chat", *words]) == ExitCode.CONFIG


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "http://127.0.0.1:1"]) != ExitCode.DONE
    assert "http://127.0.0.1:1/v1/ does not answer" in capsys.readouterr().err


@pytest.mark.slow
def test_why_a_model_cannot_be_served_is_told(
    tmp_path: Any, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hi\n")
    assert main(["chat", str(tmp_path)]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert said.startswith(f"gradus chat: {tmp_path} is neither a model directory")


@pytest.mark.parametrize(
    ("targets", "options", "added"),
    [
        (["a", "b"], ["--seed", "1"], ["--inference.gpu_memory_utilization", "0.45"]),
        (["a", "b"], ["--inference.gpu-memory-utilization", "0.3"], []),
        (["a", "http://127.0.0.1:8000"], [], []),
        (["a"], [], []),
    ],
)
def test_two_models_share_the_memory_of_a_gpu(
    targets: list[str], options: list[str], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []

    def opened(target: str, words: list[str], *_: Any) -> Any:
        given.append(words)
        return None, target

    monkeypatch.setattr(module, "_opened", opened)
    monkeypatch.setattr(module, "_converse", lambda *_: None)
    assert main(["chat", *targets, *options]) == ExitCode.DONE
    assert given == [[*options, *added]] * len(targets)


def test_two_answer_the_same_words_each_in_a_conversation_of_its_own(
    server: Server, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    again = f"{server.url}/v1"
    typed("hi\n/reset\nand now?\n")
    assert main(["chat", server.url, again]) == ExitCode.DONE
    one = f"--- {server.url}\nHello\nthere\n--- {again}\nHello\nthere\n"
    assert capsys.readouterr().out == 2 * one
    assert [asked["messages"] for asked in server.asked] == [
        [{"role": "user", "content": words}] for words in ("hi", "hi", "and now?", "and now?")
    ]


@pytest.mark.slow
def test_a_task_of_an_environment_is_played_with_its_tools_shown(
    server: Server, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.reply = ["\x1b[2Jgone"]
    command = [sys.executable, "-m", "gradus.cli.main", "chat", server.url, "--env", "word-lookup"]
    done = subprocess.run(
        [*command, "--task", "1"],
        input="more\n/quit\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0]) == (0, "[user] b"), done.stderr
    assert lines[1] == '  calls dict_get {"k": "a"}'
    assert lines[2].startswith("  -> ")
    assert lines[3] == lines[6] == "\\x1b[2Jgone"
    assert lines[-1] == "reward 0 (answer 0)"
    said = [m["content"] for m in server.asked[-1]["messages"] if m["role"] == "user"]
    assert said == ["b", "more"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "1"], "is one of an environment"),
        (["{url}/v1", "--env", "word-lookup"], "plays with one model"),
        (["--env", "word-lookup", "--system", "be"], "plays with one model"),
        (["--env"], "needs the id"),
        (["--env", "none-such"], "not installed"),
        (["--env", "none.toml"], "no such config file"),
        (["--env", "word-lookup", "--task", "x"], "is not a number"),
        (["{url}"], "named twice"),
        (["a", "b"], "name a model, a run or a URL, or two"),
    ],
)
def test_what_cannot_be_played_is_refused(
    words: list[str], said: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("{url}", server.url) for word in words]
    assert main(["chat", server.url, *words]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "said"), [("echo $3 >&2; exit 7", "talk"), (None, "no program")]
)
def test_an_environment_is_played_by_its_own_python(
    script: str | None, said: str, server: Server, tmp_path: Path, capfd: Any
) -> None:
    python, config = tmp_path / "python", tmp_path / "eval.toml"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    config.write_text(f'model.name = "x"\nenv = [{{ id = "not-here", python = "{python}" }}]\n')
    code = main(["chat", server.url, "--env", str(config)])
    assert code == (ExitCode.CONFIG if script is None else 7)
    assert said in capfd.readouterr().err


def test_one_model_named_twice_is_refused_before_it_is_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "no-such-model", "no-such-model"]) == ExitCode.CONFIG
    assert "no-such-model is named twice" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--port", "8000"], ["--inference.port=8000"]])
def test_one_port_for_two_models_is_refused_before_either_is_loaded(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "no-model", "none-either", *words]) == ExitCode.CONFIG
    assert f"{words[0]}: two models are served" in capsys.readouterr().err


def test_no_address_is_announced_that_does_not_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(f"model x\n{STARTING}; the address follows\nserves at   http://here/v1\n")
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        assert module._address(server, log) == "http://here/v1"
    assert capsys.readouterr().out == "model x\nstarting vLLM\n"
