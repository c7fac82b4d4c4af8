"""The guard: closed by default, opened by the right token only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import RunDirectoryError
from gradus.inference.guard import (
    MAX_BODY_BYTES,
    MAX_NOTED_REFUSALS,
    SERVED_ROUTES,
    Guard,
    ServedToken,
    Tokens,
)
from gradus.run.paths import RunDirectory
from gradus.wire.inference import ADMIN_ROUTES, DATA_ROUTES, STALE_WEIGHTS, reason_of

DATA, ADMIN = "d" * 64, "a" * 64
TOKENS = Tokens.of(data=DATA, admin=ADMIN)
VLLM_ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/load"),
    ("POST", "/detokenize"),
    ("POST", "/invocations"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/collective_rpc"),
    ("POST", "/update_weights"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/load_lora_adapter"),
]


class Inner:
    """The guarded application; records which requests reach it."""

    def __init__(self, *, reads_body: bool = False) -> None:
        self.reached: list[tuple[str, str]] = []
        self.messages: list[Any] = []
        self._reads_body = reads_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append((scope.get("method", scope["type"]), scope.get("path", "")))
        while self._reads_body:
            message = await receive()
            self.messages.append(message)
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def request(
    inner: Inner,
    method: str,
    path: str,
    *headers: tuple[bytes, bytes],
    body: list[Any] | None = None,
    guard: Guard | None = None,
) -> int:
    """Status of one request through the guard."""
    sent: list[Any] = []
    parts = iter(body or [{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    await (guard or Guard(inner, TOKENS))(scope, receive, send)
    status: int = sent[0]["status"]
    return status


def bearer(token: str) -> tuple[bytes, bytes]:
    return (b"authorization", f"Bearer {token}".encode())


@pytest.mark.shows("SEC1")
@pytest.mark.parametrize(
    ("method", "path"), [*sorted(DATA_ROUTES | ADMIN_ROUTES), *VLLM_ROUTES, ("OPTIONS", "/health")]
)
@pytest.mark.parametrize(
    "header",
    [
        None,
        bearer(""),
        bearer("wrong"),
        bearer(DATA[:-1]),
        bearer(DATA + "x"),
        (b"authorization", f"Basic {DATA}".encode()),
        (b"authorization", DATA.encode()),
        (b"x-api-key", DATA.encode()),
    ],
)
async def test_every_route_is_401_without_a_right_bearer_token(
    method: str, path: str, header: tuple[bytes, bytes] | None
) -> None:
    inner = Inner()
    assert await request(inner, method, path, *([header] if header else [])) == 401
    assert inner.reached == []


@pytest.mark.shows("SEC33")
async def test_calls_that_change_something_are_noted_and_of_refused_ones_the_first() -> None:
    noted: list[tuple[str, int]] = []
    guard = Guard(Inner(), TOKENS, lambda path, status: noted.append((path, status)))
    for method, path in sorted(DATA_ROUTES | ADMIN_ROUTES):
        await request(Inner(), method, path, bearer(ADMIN), guard=guard)
    changes = sorted(path for method, path in ADMIN_ROUTES if method == "POST")
    assert noted == [(path, 200) for path in changes]
    noted.clear()
    for _ in range(MAX_NOTED_REFUSALS + 5):
        await request(Inner(), "POST", "/gradus/apply", guard=guard)
    assert noted == [("/gradus/apply", 401)] * MAX_NOTED_REFUSALS


@pytest.mark.parametrize(("method", "path"), sorted(DATA_ROUTES))
@pytest.mark.parametrize("token", [DATA, ADMIN])
async def test_both_tokens_open_the_data_routes(method: str, path: str, token: str) -> None:
    inner = Inner()
    assert await request(inner, method, path, bearer(token)) == 200
    assert inner.reached == [(method, path)]


@pytest.mark.shows("SEC2")
@pytest.mark.parametrize(("method", "path"), sorted(ADMIN_ROUTES))
async def test_only_the_admin_token_opens_the_admin_routes(method: str, path: str) -> None:
    inner = Inner()
    assert await request(inner, method, path, bearer(DATA)) == 401
    assert await request(inner, method, path, bearer(ADMIN)) == 200
    assert inner.reached == [(method, path)]


@pytest.mark.parametrize(("method", "path"), VLLM_ROUTES)
async def test_routes_off_the_list_are_closed_even_for_the_admin(method: str, path: str) -> None:
    inner = Inner()
    assert await request(inner, method, path, bearer(ADMIN)) == 404
    assert inner.reached == []


@pytest.mark.shows("SEC1", "SEC39")
@given(path=st.text(max_size=40), method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD"]))
async def test_no_path_reaches_the_server_unless_it_is_listed(path: str, method: str) -> None:
    inner = Inner()
    status = await request(inner, method, path, bearer(ADMIN))
    is_listed = (method, path) in DATA_ROUTES | ADMIN_ROUTES
    assert (status == 200) is is_listed
    assert bool(inner.reached) is is_listed


@pytest.mark.parametrize("path", ["/health/", "//health", "/health/../gradus/apply", "/HEALTH"])
async def test_paths_that_only_look_like_a_listed_one_are_closed(path: str) -> None:
    assert await request(Inner(), "GET", path, bearer(ADMIN)) == 404


async def test_the_bearer_scheme_is_read_without_regard_to_case() -> None:
    header = (b"authorization", f"bearer {DATA}".encode())
    assert await request(Inner(), "GET", "/health", header) == 200


async def test_a_websocket_is_closed_before_it_opens() -> None:
    sent: list[Any] = []
    inner = Inner()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [bearer(ADMIN)]}
    await Guard(inner, TOKENS)(scope, None, send)  # type: ignore[arg-type]
    assert (sent, inner.reached) == ([{"type": "websocket.close", "code": 1008}], [])


async def test_start_and_end_of_the_server_pass_through() -> None:
    inner = Inner()

    async def send(message: Any) -> None: ...

    await Guard(inner, TOKENS)({"type": "lifespan"}, None, send)  # type: ignore[arg-type]
    assert inner.reached == [("lifespan", "")]


@pytest.mark.shows("SEC8")
async def test_a_body_declared_too_large_is_refused_unread() -> None:
    inner = Inner()
    length = (b"content-length", str(MAX_BODY_BYTES + 1).encode())
    assert await request(inner, "POST", "/tokenize", bearer(DATA), length) == 413
    assert inner.reached == []


@pytest.mark.shows("SEC8")
async def test_a_body_that_grows_too_large_is_cut_off() -> None:
    inner = Inner(reads_body=True)
    part = {"type": "http.request", "body": bytes(MAX_BODY_BYTES // 2 + 1), "more_body": True}
    await request(inner, "POST", "/tokenize", bearer(DATA), body=[part, part, part])
    assert [message["type"] for message in inner.messages] == ["http.request", "http.disconnect"]


def write_tokens(run_dir: RunDirectory, *, data: str, admin: str) -> None:
    run_dir.secrets.mkdir(parents=True)
    run_dir.inference_token.write_text(data)
    run_dir.admin_token.write_text(admin)


def test_tokens_are_read_from_the_run_directory(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    write_tokens(run_dir, data=DATA + "\n", admin=ADMIN + "\n")
    assert Tokens.read(run_dir) == TOKENS


@pytest.mark.shows("SEC3")
def test_tokens_do_not_keep_the_secrets_themselves() -> None:
    assert DATA not in repr(TOKENS)
    assert DATA.encode() not in (TOKENS.data, TOKENS.admin)


@pytest.mark.shows("SEC1", "SEC2")
@pytest.mark.parametrize(
    ("data", "admin", "words"),
    [("", ADMIN, "data token"), (DATA, "short", "admin token"), (DATA, DATA, "differ")],
)
def test_weak_or_equal_tokens_are_refused(
    tmp_path: Path, data: str, admin: str, words: str
) -> None:
    write_tokens(RunDirectory(tmp_path), data=data, admin=admin)
    with pytest.raises(RunDirectoryError, match=words):
        Tokens.read(RunDirectory(tmp_path))


def test_a_server_started_by_hand_makes_its_tokens_once(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "served")
    made = Tokens.read_or_make(run_dir)
    assert made == Tokens.of(
        data=run_dir.inference_token.read_text(), admin=run_dir.admin_token.read_text()
    )
    assert run_dir.inference_token.stat().st_mode & 0o777 == 0o600
    assert Tokens.read_or_make(run_dir) == made
    run_dir.admin_token.unlink()
    with pytest.raises(RunDirectoryError, match="cannot read the run's tokens"):
        Tokens.read_or_make(run_dir)


async def test_the_token_of_a_served_model_opens_what_clients_ask_and_no_more() -> None:
    bearer = (b"authorization", b"Bearer mine")
    for token, headers, status in (
        ("mine", (bearer,), 200),
        ("mine", (), 401),
        ("other", (bearer,), 401),
        (None, (), 200),
    ):
        guard = Guard(inner := Inner(), ServedToken.of(token))
        for method, path in SERVED_ROUTES:
            assert await request(inner, method, path, *headers, guard=guard) == status
        assert await request(inner, "POST", "/gradus/apply", *headers, guard=guard) == 401
        closed = 404 if status == 200 else 401
        assert await request(inner, "POST", "/collective_rpc", *headers, guard=guard) == closed


def test_missing_tokens_say_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"secrets.*gradus rl"):
        Tokens.read(RunDirectory(tmp_path))


@pytest.mark.shows("F09")
@pytest.mark.parametrize(("ends", "status"), [(True, 503), (False, 500)])
async def test_what_a_dead_engine_failed_is_to_be_asked_again(ends: bool, status: int) -> None:
    is_dead = False
    sent: list[Any] = []

    async def failing(_scope: Any, _receive: Any, send: Any) -> None:
        nonlocal is_dead
        is_dead = ends
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    guard = Guard(failing, TOKENS, is_stale=lambda: is_dead)
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
    await guard({**scope, "headers": [bearer(DATA)]}, receive, send)
    assert [it["type"] for it in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == status
    assert reason_of(sent[1]["body"]) == (STALE_WEIGHTS if ends else "")
