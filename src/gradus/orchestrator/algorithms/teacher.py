"""A model that answers questions about tokens: how likely are these, how is this text written.

vLLM scores a prompt while it reads it: one request per branch asks for `prompt_logprobs` of the
given tokens and a single token more, which is thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from gradus.config import algorithms
from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.processes.secured import client_context
from gradus.wire.control_tokens import common_prefix
from gradus.wire.tokens import HIGHEST_LOGPROB

log = get_logger(__name__)

UNAVAILABLE = "reference_unavailable"
"""Kind of failure of an episode whose reference model gave no answer, even after retries."""
REFUSED = "reference_refused"
"""Kind of failure of an episode that the reference model refuses, e.g. for its length."""

PROBE = (
    "The quick brown fox jumps over 13 lazy dogs.\n\n\tdef f(x):\n        return x**2 # 3.14e-10\n"
    "Größe café naïve Привет 数学 日本語 العربية 한국어 🙂 ∑∫√ "
    "<tag id='a'/> {\"key\": [null, true]}"
)
"""Where tokenizers of different families differ: digits, indentation, scripts, symbols."""

RETRY_DELAYS_SECONDS = (0.5, 2.0, 8.0)
RETRIES_PER_REQUEST = 0.2
"""A server that fails is asked little more often than one that works."""
RETRIES_AT_FIRST = 100.0
MAX_RETRY_AFTER_SECONDS = 120.0
_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_LEAST_LOGPROB = -100.0
"""Stands for -inf and for vLLM's -9999; e to this power is zero in float32 too."""


class ReferenceModel:
    """Owns the connections to one server, and limits how many requests run at once.

    >>> async with ReferenceModel(config, token=None) as teacher:  # doctest: +SKIP
    ...     await teacher.score([5, 6, 7])
    [nan, -1.2, -0.3]
    """

    def __init__(
        self,
        config: algorithms.ReferenceConfig,
        *,
        token: str | None,
        retry_delays_seconds: Sequence[float] = RETRY_DELAYS_SECONDS,
        stop_token_ids: frozenset[int] = frozenset(),
        addresses: Callable[[], Sequence[str]] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Must be called inside the running event loop. `addresses` says which replicas of the
        model can be asked at this moment; None means that there is one."""
        self.stop_token_ids = stop_token_ids
        """Tokens at which the model ends its turn; empty when they are not known."""
        self._config = config
        self._url = config.base_url.rstrip("/").removesuffix("/v1")
        self._addresses = addresses
        self._num_asked = 0
        self._turns = asyncio.Semaphore(config.max_concurrent_requests)
        self._delays = tuple(retry_delays_seconds)
        self._retries_left = RETRIES_AT_FIRST
        self._random, self._sleep = random.Random().random, sleep
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # The replicas are those of the run.
            connector=aiohttp.TCPConnector(ssl=client_context(is_own=addresses is not None)),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def __aenter__(self) -> ReferenceModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprob of each token given those before it, [T] nats at temperature 1; NaN for the
        first. EpisodeFailed when the server refuses the tokens or does not answer."""
        body = {
            "model": self._config.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "return_token_ids": False,
        }
        answer = await self._ask("/v1/completions", body)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            return _chosen_logprobs(token_ids, entries)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            text = f"{self._url} sent no usable prompt_logprobs ({error!r}); is it vLLM?"
            raise EpisodeFailed(Failure(REFUSED, text)) from error

    async def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
    ) -> list[int]:
        """The tokens of a conversation by the server's chat template."""
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            body["tools"] = list(tools)
        return _tokens(await self._ask("/tokenize", body), self._url)

    async def encode(self, text: str) -> list[int]:
        """The tokens of a plain text; EpisodeFailed when the server cannot say."""
        body = {"model": self._config.model, "prompt": text, "add_special_tokens": False}
        return _tokens(await self._ask("/tokenize", body), self._url)

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self._turns:
            for number, delay in enumerate([*self._delays, None], start=1):
                self._retries_left += RETRIES_PER_REQUEST
                try:
                    return await self._post(route, body)
                except _Unavailable as error:
                    if delay is None or self._retries_left < 1:
                        text = f"{error} ({number} attempts)"
                        raise EpisodeFailed(Failure(UNAVAILABLE, text)) from error
                    self._retries_left -= 1
                    # Spread, or all that were refused together would come back together.
                    await self._sleep(max(delay, error.after_seconds) * (1 + self._random() / 2))
            raise AssertionError("the last attempt returns or raises")

    def _next_address(self) -> str:
        """Each replica in its turn, so that an attempt after a failure asks another."""
        if self._addresses is None or not (found := self._addresses()):
            return self._url
        self._num_asked += 1
        return found[self._num_asked % len(found)]

    async def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        url = f"{self._next_address()}{route}"
        try:
            async with (
                asyncio.timeout(self._config.timeout_seconds),
                self._session.post(url, json=body) as response,
            ):
                raw = await response.read()
        except TimeoutError as error:
            seconds = self._config.timeout_seconds
            raise _Unavailable(f"{url} did not answer in {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise _Unavailable(f"{url} cannot be reached ({error})") from error
        if response.status in _RETRIED_STATUSES:
            after = _retry_after(response.headers.get("Retry-After", ""))
            raise _Unavailable(f"{url} answered {response.status}", after)
        if response.status in (401, 403):
            raise ConfigError(
                f"reference model at {self._url} answered {response.status}: the key is wrong; "
                f"set the variable that algo.reference.api_key_var names"
            )
        if response.status != 200:
            text = raw.decode(errors="replace")[:300]
            raise EpisodeFailed(Failure(REFUSED, f"{url} answered {response.status}: {text}"))
        try:
            return msgspec.json.decode(raw, type=dict[str, Any])
        except ValueError as error:
            raise _Unavailable(f"{url} sent no JSON object") from error


class _Unavailable(Exception):
    """The server may answer the same request later."""

    def __init__(self, message: str, after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds
        """How long it asked to be left alone."""


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header, a number or a date; 0 for none."""
    with contextlib.suppress(ValueError):
        return min(max(float(value), 0.0), MAX_RETRY_AFTER_SECONDS)
    with contextlib.suppress(ValueError, TypeError):
        left = parsedate_to_datetime(value).timestamp() - time.time()
        return min(max(left, 0.0), MAX_RETRY_AFTER_SECONDS)
    return 0.0


async def compare_tokenizers(teacher: ReferenceModel, policy: ReferenceModel, source: str) -> None:
    """ConfigError when a teacher reads other tokens than the policy writes.

    One text of many kinds of characters is compared; a server that cannot say how it writes
    it gets a warning, because it may not be vLLM.
    """
    try:
        theirs, ours = await teacher.encode(PROBE), await policy.encode(PROBE)
    except EpisodeFailed as failed:
        log.warning(
            "source %r: the tokenizers of policy and teacher cannot be compared (%s); the teacher "
            "must read the policy's tokens",
            source,
            failed,
        )
        return
    if theirs != ours:
        raise ConfigError(
            f"source {source!r}: the teacher of algo.reference has another tokenizer than the "
            f"policy: it writes a probe text in {len(theirs)} tokens, the policy in {len(ours)}, "
            f"and they differ from token {common_prefix(theirs, ours)} on; use a teacher of "
            "the policy's family"
        )


def _tokens(answer: Mapping[str, Any], url: str) -> list[int]:
    try:
        return msgspec.convert(answer["tokens"], list[int])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        text = f"{url}/tokenize sent no tokens ({error!r})"
        raise EpisodeFailed(Failure(REFUSED, text)) from error


def open_reference(config: algorithms.ReferenceConfig, source: str) -> ReferenceModel:
    """The frozen model of a source; ConfigError when the variable of its key is not set."""
    token = None
    if config.api_key_var is not None:
        token = os.environ.get(config.api_key_var)
        if not token:
            raise ConfigError(
                f"source {source!r}: algo.reference.api_key_var names {config.api_key_var!r}, "
                "which is not set; export it before the start"
            )
    return ReferenceModel(config, token=token)


def _chosen_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[str, Any] | None]
) -> list[float]:
    if len(entries) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens got {len(entries)} entries")
    chosen = [math.nan]
    for token, entry in zip(token_ids[1:], entries[1:], strict=True):
        if entry is None:
            raise ValueError("an entry after the first is null")
        logprob = entry[str(token)]["logprob"]
        if isinstance(logprob, bool) or not isinstance(logprob, int | float):
            raise ValueError(f"a logprob is {logprob!r}, which is not a number")
        if math.isnan(logprob):
            raise ValueError("a logprob is NaN")
        if logprob > HIGHEST_LOGPROB:
            raise ValueError(f"a logprob is {logprob:g}, above 0")
        chosen.append(max(float(logprob), _LEAST_LOGPROB))
    return chosen
