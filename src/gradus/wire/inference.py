"""What the inference server is asked and answers over HTTP, and when it must refuse new weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

SERVED_MODEL_NAME = "policy"
"""The `model` of every request, whatever weights are served."""

INFERENCE_TOKEN_VARIABLE = "GRADUS_INFERENCE_TOKEN"
"""Name of the variable with the token of a run's own server."""

GENERATE_ROUTE = ("POST", "/inference/v1/generate")
SESSION_HEADER = "X-Session-ID"
AGAIN_HEADER = "X-Gradus-Again"
"""Of a request that an earlier server did not answer."""
LIVE_HEADER = "X-Gradus-Lines"
"""Of a request whose tokens are told while they are sampled: lines of JSON lists, and the answer
last."""
LINES_TYPE = b"application/x-ndjson"

DATA_ROUTES: frozenset[tuple[str, str]] = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/v1/models"),
        GENERATE_ROUTE,
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/gradus/status"),
    }
)
"""Routes that the data token opens; the admin token opens them too."""

GENERATING_ROUTES: frozenset[tuple[str, str]] = frozenset(
    {
        GENERATE_ROUTE,
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
    }
)
"""Routes whose answers depend on the weights; closed while it is not settled which they are."""

ADMIN_ROUTES: frozenset[tuple[str, str]] = frozenset(
    {
        ("POST", "/gradus/apply"),
        ("GET", "/gradus/weights"),
        ("POST", "/gradus/sleep"),
        ("POST", "/gradus/wake"),
    }
)
"""Routes that only the admin token opens. Every other route is closed."""


class ApplyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /gradus/apply`: serve these weights."""

    run_id: str
    term: int
    version: int
    directory: str
    """Empty for the weights that the server was started with."""
    digest: str
    """SHA-256 of the directory's manifest.json, in hex; empty like `directory`."""
    only_verifies: bool = False
    """Whether the weights are checked now and served by a later request."""

    @property
    def is_initial(self) -> bool:
        """Whether it asks for the weights that the server was started with."""
        return not (self.directory or self.digest)


class ApplyResult(msgspec.Struct, frozen=True):
    """Answer of `POST /gradus/apply`: this version is served, and what the change cost."""

    version: int
    """What the engine reports after the change, not what was asked for."""
    pause_seconds: float
    load_seconds: float
    resume_seconds: float


class TurnRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /gradus/sleep` and `/gradus/wake`: the trainer takes the GPU, or gives it back.

    `sleep` is answered once the engine has left the GPU, `wake` once it is back.
    """

    run_id: str
    term: int
    version: int
    """The version that is trained: it is served before the engine sleeps."""
    wait_seconds: float
    """Longest that `sleep` waits for it."""
    sleep_seconds: float
    """After this long the engine wakes by itself."""


class TurnResult(msgspec.Struct, frozen=True):
    """Answer of both: the engine is where it was asked to be."""

    seconds: float
    """Of `sleep`: how long it took. Of `wake`: how long the engine slept."""
    was_in_time: bool = True
    """False when the engine had woken by itself before it was asked to."""


class EngineStatus(msgspec.Struct, frozen=True):
    """Answer of `GET /gradus/status`; counters run from the start of the server."""

    version: int
    term: int
    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    is_paused: bool
    kv_capacity_tokens: int = 0
    """Tokens that the KV cache holds; 0 means that the engine does not say."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    asked_again: int = 0
    """Requests that an earlier server at this address did not answer."""
    incarnation: str = ""
    """Of this server; a new one at the same address has another."""
    is_stale: bool = False
    """Whether it answers no requests, because it was not told yet which version it serves."""
    run_id: str = ""
    """The run that is served."""
    model: str = ""
    """Name of the model that the server was started with."""
    text_digests: dict[str, str] = {}
    """Of what decides how it writes and reads text, part by part; empty where it does not say."""
    parts: dict[str, EngineStatus] | None = None
    """Of the replicas that serve the live version, where several are asked as one."""


FILE_SCHEME = "file://"
"""Begins the address of a policy whose servers come and go: a file names them, one on a line."""


def split_addresses(base_url: str) -> list[str]:
    """The addresses of a policy: one, or those of its replicas.

    >>> split_addresses(join_addresses(["http://127.0.0.1:1", "http://127.0.0.1:2"]))
    ['http://127.0.0.1:1', 'http://127.0.0.1:2']
    """
    return base_url.split(",")


def join_addresses(addresses: Sequence[str]) -> str:
    """As `split_addresses` reads them; no address of a server has a comma."""
    return ",".join(addresses)


def salt_of(version: int) -> str:
    return f"v{version}"


_OLDER_VERSION = "older_version"
"""Reason of a refusal: the server's weights are older than what the caller was promised."""


def behind(salt: str | None, served: int) -> str | None:
    """Why a server may not answer a request with this salt; None where it may.

    An episode notes the version it began with as the oldest that its tokens may come from. A
    server that missed a version, or came back with those it was started with, finds it here.

    >>> behind("v3", 3), behind("v3", 4), behind("mine", 0)
    (None, None, None)
    """
    if salt is None or salt[:1] != "v" or not salt[1:].isdecimal() or int(salt[1:]) <= served:
        return None
    return f"{_OLDER_VERSION}: this server serves version {served}, and {salt} is asked for"


def is_behind_refusal(body: bytes) -> bool:
    """Whether an answer refuses a request for what `behind` says."""
    return _OLDER_VERSION.encode() in body


STALE_TERM = "stale_term"
"""Reason of a refusal: a newer owner holds the run."""
STALE_WEIGHTS = "stale_weights"
"""Reason of a refusal: the server was not told yet which version it serves; ask again later."""


class ApplyRefusal(Exception):
    """Why new weights are not served, with the HTTP status that says so.

    What a client does about it depends on `reason`, never on the words of the message.
    """

    def __init__(self, status: int, message: str, *, reason: str = "refused") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason

    def body(self) -> bytes:
        error = {"message": self.message, "code": self.status, "reason": self.reason}
        return msgspec.json.encode({"error": error})


def is_stale(body: bytes) -> bool:
    """Whether an answer refuses a request because a newer owner holds the run."""
    return reason_of(body) == STALE_TERM


def reason_of(body: bytes) -> str:
    """Why a request was refused; "" in an answer that does not say."""
    try:
        return msgspec.json.decode(body, type=_Refused).error.reason
    except ValueError:
        return ""


class _Refusal(msgspec.Struct):
    reason: str = ""


class _Refused(msgspec.Struct):
    error: _Refusal


class ServedPolicy(msgspec.Struct, frozen=True):
    """Which version a server serves, and for which run; decides what it may serve next (pure).

    >>> served = ServedPolicy(run_id="demo", term=1, version=0, digest=None)
    >>> served.is_current(ApplyRequest("demo", 1, 1, "weights/version_00000001", "ab"))
    False
    """

    run_id: str
    term: int
    version: int
    digest: str | None
    """Of the served version's manifest; None for the weights that the server started with."""
    is_stale: bool = False
    """Whether nobody said yet that this is the version to serve."""

    def is_current(self, request: ApplyRequest) -> bool:
        return (self.digest or "") == request.digest and self.version == request.version

    def check(self, request: ApplyRequest) -> None:
        """ApplyRefusal unless `request` comes from the owner of the run and moves forward."""
        self.check_owner(request)
        if request.version < 0:
            raise ApplyRefusal(400, f"version {request.version} is negative")
        if self.is_current(request):
            return
        if request.is_initial:
            raise ApplyRefusal(409, "the weights that this server started with are replaced")
        if request.term > self.term:
            return
        if request.version < self.version:
            raise ApplyRefusal(
                409, f"version {request.version} is older than the served {self.version}"
            )
        if request.version == self.version and self.digest is not None:
            raise ApplyRefusal(
                409, f"version {request.version} is served already with another digest"
            )

    def check_owner(self, request: ApplyRequest | TurnRequest) -> None:
        """ApplyRefusal unless `request` comes from the owner of the run."""
        if request.run_id != self.run_id:
            raise ApplyRefusal(
                409, f"this server serves run {self.run_id!r}, not {request.run_id!r}"
            )
        if request.term < self.term:
            text = f"term {request.term} is stale; term {self.term} owns the run"
            raise ApplyRefusal(409, text, reason=STALE_TERM)

    def after(self, request: ApplyRequest) -> ServedPolicy:
        return ServedPolicy(self.run_id, request.term, request.version, request.digest or None)


Asked = TypeVar("Asked", ApplyRequest, TurnRequest)


def decode_request(body: bytes, kind: type[Asked]) -> Asked:
    """The request in `body`; ApplyRefusal(400) when it is anything else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError as error:
        raise ApplyRefusal(400, f"not a valid {kind.__name__}: {error}") from error


def check_weights_directory(directory: str, weights_root: Path) -> Path:
    """The resolved directory; ApplyRefusal(403) unless it is inside `weights_root`."""
    root = weights_root.resolve()
    if "\0" not in directory:
        resolved = Path(directory).resolve()
        if root in resolved.parents:
            return resolved
    raise ApplyRefusal(403, f"{directory!r} is not inside the run's weights directory {root}")
