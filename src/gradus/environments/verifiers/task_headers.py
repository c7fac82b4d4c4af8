"""Headers that a task carries for the model requests of its episode, such as a routing key.

Only endpoints that are not the run's own get them: the policy that gradus serves is asked over a
connection without headers. The key of an endpoint and what HTTP itself sets stay as they are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import httpx
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.errors import TaskError
from verifiers.v1.interception.server import InterceptionServer

MAX_CHARACTERS = 4096
"""Of all names and values together; servers refuse longer heads."""
OWNED = frozenset(
    {
        *("authorization", "proxy-authorization", "x-api-key", "api-key", "cookie"),
        *("host", "connection", "keep-alive", "te", "trailer", "upgrade", "expect"),
        *("content-length", "content-type", "content-encoding", "transfer-encoding"),
        *("accept-encoding", "x-session-id"),
    }
)
"""Names that have another owner: the endpoint's key, verifiers, and HTTP itself."""
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
_ABSENT = object()


def headers_of(task_data: Any, field: str) -> dict[str, str]:
    """The headers in `field` of a task's data, none where it is null.

    Raises ValueError with what is wrong; without the value, which may be long or hold line ends.
    """
    is_table = isinstance(task_data, Mapping)
    given = task_data.get(field, _ABSENT) if is_table else getattr(task_data, field, _ABSENT)
    if given is _ABSENT:
        raise ValueError(f"its data has no field {field!r}")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{field} must be a table of names and values, not {type(given).__name__}")
    for name, value in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{field} holds {name!r}, which is not a name of a header")
        if name.lower() in OWNED:
            raise ValueError(f"{field} holds {name!r}, which a task may not set")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise ValueError(f"{field}.{name} must be text in ASCII without control characters")
    if len({name.lower() for name in given}) < len(given):
        raise ValueError(f"{field} holds a name twice; case does not tell names apart")
    if sum(len(name) + len(value) for name, value in given.items()) > MAX_CHARACTERS:
        raise ValueError(f"{field} has more than {MAX_CHARACTERS} characters")
    return dict(given)


class _ClientWithHeaders:
    """One rollout's view of a client that many rollouts share."""

    def __init__(self, client: Any, own: Mapping[str, str]) -> None:
        self._client = client
        self._own = own

    async def get_response(
        self, *arguments: Any, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Any:
        return await self._client.get_response(*arguments, headers=self._joined(headers), **more)

    async def relay(
        self, *arguments: Any, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Any:
        return await self._client.relay(*arguments, headers=self._joined(headers), **more)

    async def relay_aux(
        self, *arguments: Any, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Any:
        return await self._client.relay_aux(*arguments, headers=self._joined(headers), **more)

    def _joined(self, given: Mapping[str, str] | None) -> httpx.Headers:
        """The task's headers over those that a program sent."""
        joined = httpx.Headers(given)
        joined.update(self._own)
        return joined


def send_task_headers(field: str) -> None:
    """Let each rollout send the headers in `field` of its task to endpoints of others."""
    register = InterceptionServer.register
    if hasattr(register, "__wrapped__"):
        return

    @functools.wraps(register)
    def register_with_headers(server: Any, session: Any) -> tuple[str, str]:
        own: dict[str, str] = {}
        if isinstance(session.ctx.client, EvalClientConfig):
            try:
                own = headers_of(session.trace.task.data, field)
            except ValueError as error:
                raise TaskError(f"headers_from: {error}") from error
        secrets: tuple[str, str] = register(server, session)
        if own:
            session.client = _ClientWithHeaders(session.client, own)
        return secrets

    InterceptionServer.register = register_with_headers
