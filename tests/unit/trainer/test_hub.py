"""An exported model reaches the hub by its own client, and what goes wrong is said."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from gradus.cli import results
from gradus.cli.main import main
from gradus.errors import ConfigError, ExitCode, HubError
from gradus.trainer import export as exporting
from gradus.trainer.export import HubRepository, open_repository, push

pytestmark = [
    pytest.mark.torch,
    # The hub's client sends large files in a way that its own HTTP library wants changed.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]

NAME = "someone/model"
TOKEN = "hf_SecretOfTheUser"
LARGE = ".safetensors"


@dataclass
class Hub:
    """The routes of a hub that an upload asks, and what arrived there."""

    address: str = ""
    tokens: dict[str, str] = field(default_factory=lambda: {TOKEN: "someone"})
    repositories: dict[str, bool] = field(default_factory=dict)
    """Name → whether it is private."""
    files: dict[str, bytes] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    broken: bool = False
    is_full: bool = False

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """The status and the reply to one request."""
        if path.startswith("/large/"):
            self.large[path.removeprefix("/large/")] = body
            return (400, {"error": "no room is left"}) if self.is_full else (200, {})
        if self.broken:
            return 503, {"error": "the hub is being repaired"}
        if token not in self.tokens:
            return 401, {"error": f"{token} is not a user's"}
        if path == "/api/repos/create":
            return self._create(self.tokens[token], json.loads(body))
        if method == "GET":
            name = path.removeprefix("/api/models/")
            if name not in self.repositories:
                return 404, {"error": "Repository not found"}
            return 200, {"id": name, "private": self.repositories[name], "siblings": []}
        if path.endswith("/preupload/main"):
            return 200, {"files": [_mode(file["path"]) for file in json.loads(body)["files"]]}
        if path.endswith("/objects/batch"):
            return 200, {"objects": [self._place(file) for file in json.loads(body)["objects"]]}
        assert path == f"/api/models/{NAME}/commit/main"
        return 200, self._commit([json.loads(line) for line in body.splitlines()])

    def _create(self, owner: str, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != owner:
            return 403, {"error": f"You don't have the rights to create {name}"}
        url = f"{self.address}/{name}"
        if name in self.repositories:
            return 409, {"error": "You already created this repo", "url": url}
        self.repositories[name] = asked.get("visibility") == "private"
        return 200, {"url": url}

    def _place(self, file: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.address}/large/{file['oid']}"}
        return {**file, "actions": {"upload": upload}}

    def _commit(self, lines: list[dict[str, Any]]) -> dict[str, str]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            else:
                self.files[value["path"]] = self.large[value["oid"]]
        return {"commitUrl": f"{self.address}/{NAME}/commit/{'0' * 40}", "commitOid": "0" * 40}


def _mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(LARGE) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def _reply(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        status, reply = self.hub.answer(self.command, self.path.partition("?")[0], token, body)
        payload = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        chunk = self.rfile.read(size)
        self.rfile.readline()
        return chunk

    do_GET = do_POST = do_PUT = _reply

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # The protocol of large files that every hub has; xet needs a second server.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub
        huggingface_hub.close_session()
        server.shutdown()
        thread.join()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """What an export leaves behind."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return folder


def repository(hub: Hub, name: str = NAME, *, private: bool = False) -> HubRepository:
    return open_repository(name, private=private, endpoint=hub.address)


def test_every_file_arrives_whole_in_one_commit(hub: Hub, exported: Path) -> None:
    address = push(exported, repository(hub), message="after 2 steps")
    assert address == f"{hub.address}/{NAME}"
    assert hub.files == {file.name: file.read_bytes() for file in exported.iterdir()}
    assert hub.messages == ["after 2 steps"]
    assert hub.repositories == {NAME: False}


def test_a_second_push_writes_into_the_same_repository(hub: Hub, exported: Path) -> None:
    push(exported, repository(hub), message="first")
    (exported / "config.json").write_text('{"a": 1}')
    push(exported, repository(hub), message="second")
    assert hub.messages == ["first", "second"]
    assert hub.files["config.json"] == b'{"a": 1}'


def test_a_private_repository_is_made_and_a_public_one_is_not_taken_for_it(
    hub: Hub, exported: Path
) -> None:
    push(exported, repository(hub, private=True), message="secret")
    assert hub.repositories == {NAME: True}
    hub.repositories[NAME] = False
    hub.files.clear()
    with pytest.raises(ConfigError, match="exists already and is public, so nothing was sent"):
        push(exported, repository(hub, private=True), message="secret")
    assert hub.files == {}


def test_a_token_without_the_right_to_write_is_told_apart_from_an_unknown_one(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="this token may not write there") as refused:
        push(exported, repository(hub, "another/model"), message="m")
    monkeypatch.setenv("HF_TOKEN", "hf_Unknown")
    with pytest.raises(ConfigError, match="does not know this token") as unknown:
        push(exported, repository(hub), message="m")
    for caught in (refused, unknown):
        text = str(caught.value)
        assert f"stays in {exported}" in text
        assert "hf upload" in text
        assert TOKEN not in text
        assert "hf_Unknown" not in text


def test_what_was_to_be_private_is_sent_again_as_such(hub: Hub, exported: Path) -> None:
    hub.broken = True
    folder = exported.rename(exported.with_name("my model"))
    with pytest.raises(HubError, match=r"hf upload --private .* '.*/my model'"):
        push(folder, repository(hub, private=True), message="m")


def test_a_hub_that_is_broken_or_away_leaves_the_export(hub: Hub, exported: Path) -> None:
    hub.broken = True
    with pytest.raises(HubError, match=r"answered 503 .*being repaired.*stays in") as broken:
        push(exported, repository(hub), message="m")
    assert broken.value.exit_code == ExitCode.TRY_AGAIN
    away = open_repository(NAME, endpoint="http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127.0.0.1:9 was not reached .*refused"):
        push(exported, away, message="m")
    assert sorted(file.name for file in exported.iterdir()) == ["config.json", "model.safetensors"]


def test_a_large_file_that_the_hub_does_not_take_is_told_with_the_reason(
    hub: Hub, exported: Path
) -> None:
    hub.is_full = True
    with pytest.raises(HubError, match=r"answered 400 .*no room is left"):
        push(exported, repository(hub), message="m")
    assert hub.messages == []


def test_a_token_that_the_hub_quotes_is_not_shown(hub: Hub, exported: Path) -> None:
    hub.tokens.clear()
    with pytest.raises(ConfigError, match="<token> is not a user's") as caught:
        push(exported, repository(hub), message="m")
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("name", ["model", "a/b/c", "/model", "some one/model", "a/..", ""])
def test_a_name_without_an_owner_or_with_odd_characters_is_refused(hub: Hub, name: str) -> None:
    with pytest.raises(ConfigError, match="--push"):
        repository(hub, name)


@pytest.mark.shows("F77")
def test_without_a_token_or_offline_nothing_is_tried(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="set HF_TOKEN to one that may write, or log in"):
        repository(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        repository(hub)


def test_the_token_is_no_part_of_a_repository_that_is_shown(hub: Hub) -> None:
    assert TOKEN not in repr(repository(hub))


@pytest.fixture
def fake_export(monkeypatch: pytest.MonkeyPatch, exported: Path) -> None:
    """An export that takes no time: its files are there already."""
    monkeypatch.setattr(exporting, "export", lambda source, directory: 7)


@pytest.mark.usefixtures("fake_export")
def test_the_command_pushes_what_it_exported(
    hub: Hub,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    words = [str(exported.parent), str(exported), "--private", "--push", NAME]
    assert main(["export", *words]) == ExitCode.DONE
    assert f"{hub.address}/{NAME} holds them too" in capsys.readouterr().out
    assert hub.repositories == {NAME: True}
    assert hub.messages == ["Weights after 7 steps of gradus"]
    hub.broken = True
    assert main(["export", *words]) == ExitCode.TRY_AGAIN
    captured = capsys.readouterr()
    assert "holds the weights after 7 steps" in captured.out
    assert "Traceback" not in captured.err
    assert TOKEN not in captured.err + captured.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--push", "model"], "must be owner/name"),
        (["--push"], "--push needs owner/name after it"),
        (["--private"], "give --push owner/name too"),
    ],
)
def test_the_command_refuses_before_it_exports(
    hub: Hub, tmp_path: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    assert main(["export", str(tmp_path), str(out), *words]) == ExitCode.CONFIG
    assert told in capsys.readouterr().err
    assert not out.exists()
    assert "--push owner/name" in results.EXPORT_HELP
