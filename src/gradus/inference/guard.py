"""The guard in front of every route of the inference server: closed unless a token opens it.

vLLM's own `--api-key` covers three path prefixes and leaves the rest open, admin routes among them;
here a route is reachable only when it is on the allow-list and the bearer token is right.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from gradus.errors import RunDirectoryError
from gradus.log import get_logger
from gradus.run.paths import RunDirectory
from gradus.run.ready import make_tokens
from gradus.wire.inference import ADMIN_ROUTES, DATA_ROUTES, GENERATING_ROUTES, STALE_WEIGHTS

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = get_logger(__name__)
MAX_BODY_BYTES = 64 << 20
MIN_TOKEN_LENGTH = 32
MAX_NOTED_REFUSALS = 1_000


@dataclass(frozen=True)
class Tokens:
    """Digests of the run's two tokens; the tokens themselves are not kept."""

    data: bytes
    admin: bytes

    @classmethod
    def of(cls, *, data: str, admin: str) -> Tokens:
        """Digests of two different, long enough tokens."""
        for name, token in (("data", data), ("admin", admin)):
            if len(token) < MIN_TOKEN_LENGTH:
                raise RunDirectoryError(
                    f"the {name} token has {len(token)} characters, {MIN_TOKEN_LENGTH} are needed"
                )
        if data == admin:
            raise RunDirectoryError("the data token and the admin token must differ")
        return cls(data=_digest(data.encode()), admin=_digest(admin.encode()))

    @classmethod
    def read_or_make(cls, run_dir: RunDirectory) -> Tokens:
        """The run's tokens; new ones where none are written, for a server started by hand."""
        files = (run_dir.inference_token, run_dir.admin_token)
        if not any(file.exists() for file in files):
            make_tokens(run_dir)
            logger.info("made the tokens of the data and the admin routes: %s, %s", *files)
        return cls.read(run_dir)

    @classmethod
    def read(cls, run_dir: RunDirectory) -> Tokens:
        """The tokens that the launcher wrote; RunDirectoryError when they are missing."""
        try:
            data = run_dir.inference_token.read_text().strip()
            admin = run_dir.admin_token.read_text().strip()
        except OSError as error:
            raise RunDirectoryError(
                f"cannot read the run's tokens in {run_dir.secrets} ({error.strerror}); "
                "start the server through `gradus rl`, or write both token files"
            ) from error
        return cls.of(data=data, admin=admin)

    def open_routes(self, given: bytes) -> frozenset[tuple[str, str]]:
        """Routes that the bearer token `given` opens; both comparisons always run."""
        digest = _digest(given)
        is_admin = hmac.compare_digest(digest, self.admin)
        is_data = hmac.compare_digest(digest, self.data)
        if is_admin:
            return ADMIN_ROUTES | DATA_ROUTES
        return DATA_ROUTES if is_data else frozenset()


class RouteOpener(Protocol):
    """Knows which routes a bearer token opens."""

    def open_routes(self, given: bytes) -> frozenset[tuple[str, str]]:
        """Routes that the bearer token `given` opens, none for a wrong one."""


SERVED_ROUTES: frozenset[tuple[str, str]] = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("POST", "/detokenize"),
        ("POST", "/tokenize"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
    }
)
"""What ordinary clients of a served model may ask."""


@dataclass(frozen=True)
class ServedToken:
    """The one token of a served model."""

    digest: bytes | None
    """None lets everyone in."""

    @classmethod
    def of(cls, token: str | None) -> ServedToken:
        return cls(None if token is None else _digest(token.encode()))

    def open_routes(self, given: bytes) -> frozenset[tuple[str, str]]:
        is_open = self.digest is None or hmac.compare_digest(_digest(given), self.digest)
        return SERVED_ROUTES if is_open else frozenset()


@dataclass(frozen=True)
class Refusal:
    """An answer that the guard gives itself."""

    status: int
    message: str
    reason: str | None = None
    """For a client that acts on it."""

    @property
    def body(self) -> bytes:
        error = {"message": self.message, "code": self.status}
        reason = {} if self.reason is None else {"reason": self.reason}
        return msgspec.json.encode({"error": {**error, **reason}})

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body)).encode()),
            (b"connection", b"close"),
        ]
        return headers + ([(b"www-authenticate", b"Bearer")] if self.status == 401 else [])


_STALE = Refusal(
    503, "this server was not told yet which version it serves, or its engine ended", STALE_WEIGHTS
)


class Guard:
    """ASGI middleware that answers 401, 404, 413 or 503 itself and passes only allowed requests on.

    No token: 401 whatever the route. A data token on an admin route: 401. A valid token on any
    route that is not on the allow-list: 404. A data token on a route that generates, while the
    server is stale: 503. Websockets are always refused.
    """

    def __init__(
        self,
        app: AsgiApp,
        tokens: RouteOpener,
        note: Callable[[str, int], None] = lambda _path, _status: None,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> None:
        """`note` hears of every call that would change something, with the answer."""
        self._app = app
        self._tokens = tokens
        self._note = note
        self._is_stale = is_stale
        self._num_refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self.refusal_of(scope)
        send = self._noting(scope, send, is_refused=refusal is not None)
        if refusal is None:
            await self._app(scope, _limited(receive), self._asking_again(scope, send))
        else:
            await _refuse(send, refusal)

    def _asking_again(self, scope: Scope, send: Send) -> Send:
        """`send` that refuses for now what a dead engine failed: it was no fault of the request,
        and the next server answers it. A 500 of an engine that lives stays one."""
        if (scope["method"], scope["path"]) not in GENERATING_ROUTES:
            return send
        is_refused = False

        async def asking_again(message: Message) -> None:
            nonlocal is_refused
            is_failure = message.get("status") == HTTPStatus.INTERNAL_SERVER_ERROR
            if is_failure and self._is_stale():
                is_refused = True
                await _refuse(send, _STALE)
            elif not is_refused:
                await send(message)

        return asking_again

    def _noting(self, scope: Scope, send: Send, *, is_refused: bool) -> Send:
        """`send` that notes the answer to an admin call; of those without a token only the first
        thousand, so that nobody fills the disk."""
        self._num_refused += is_refused
        if (scope["method"], scope["path"]) not in ADMIN_ROUTES or scope["method"] == "GET":
            return send
        if is_refused and self._num_refused > MAX_NOTED_REFUSALS:
            return send

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(scope["path"], message["status"])
            await send(message)

        return noting

    def refusal_of(self, scope: Scope) -> Refusal | None:
        """Why a request must not pass; None where it may."""
        headers = dict(scope["headers"])
        route = (scope["method"], scope["path"])
        open_routes = self._tokens.open_routes(_bearer_token(headers))
        if not open_routes or (route in ADMIN_ROUTES and route not in open_routes):
            return Refusal(401, "missing or wrong bearer token")
        if route not in open_routes:
            return Refusal(404, "no such route")
        is_admin = open_routes >= ADMIN_ROUTES
        if route in GENERATING_ROUTES and not is_admin and self._is_stale():
            return _STALE
        if _declared_length(headers) > MAX_BODY_BYTES:
            return Refusal(413, f"the body must not exceed {MAX_BODY_BYTES} bytes")
        return None


def _limited(receive: Receive) -> Receive:
    """`receive` that ends the request once its body exceeds the limit (no declared length)."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            return {"type": "http.disconnect"}
        return message

    return receive_limited


def _bearer_token(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _declared_length(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


async def _refuse(send: Send, refusal: Refusal) -> None:
    headers = refusal.headers
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})
