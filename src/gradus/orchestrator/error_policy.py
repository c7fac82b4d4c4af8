"""Whether a failed episode is played again, and after which wait (pure).

Only errors on an explicit list are tried again. A bug of a task or a reward fails the same way each
time; hiding it behind retries would cost time and bias what trains. Such an error is recorded on
the episode and counted by its type.
"""

from __future__ import annotations

import math
from typing import Protocol

from gradus.config.error_policy import ErrorPolicyConfig
from gradus.orchestrator.failures import ERROR_POLICY_FAILED, Failure, blaming
from gradus.plugins import building, find_plugin, refuse_async

MAX_BACKOFF_SECONDS = 60.0


class ErrorPolicy(Protocol):
    """What one source does with failed episodes. Built as `Class(config, **config.options)`."""

    def wait_before_retry(self, failure: Failure, *, retry: int) -> float | None:
        """Seconds before the given retry, counted from 0; None when the failure is final.

        Must be final from some retry on, or the slot of the group is never free again.
        """
        ...


class ListedErrors:
    """Owns the list of one source.

    >>> policy = ListedErrors(ErrorPolicyConfig(retry_on=["SandboxError"], retries=1))
    >>> policy.wait_before_retry(Failure("SandboxError", "no box"), retry=0)
    1.0
    >>> policy.wait_before_retry(Failure("TaskError", "bug"), retry=0) is None
    True
    """

    def __init__(self, config: ErrorPolicyConfig) -> None:
        self._retry_on = frozenset(config.retry_on)
        self._retries = config.retries
        self._backoff_seconds = config.backoff_seconds

    def wait_before_retry(self, failure: Failure, *, retry: int) -> float | None:
        """The backoff, doubled with each retry; None for what is not on the list."""
        if failure.kind not in self._retry_on or retry >= self._retries:
            return None
        wait: float = min(self._backoff_seconds * 2.0 ** min(retry, 30), MAX_BACKOFF_SECONDS)
        return wait


def ask_policy(policy: ErrorPolicy, failure: Failure, *, retry: int, where: str) -> float | None:
    """The policy's answer; EpisodeFailed when it raises, or answers with what is no wait."""
    wait = None
    place = f"{where}, asked about {failure.kind}"
    with blaming("error policy", policy, place, failure=ERROR_POLICY_FAILED):
        wait = policy.wait_before_retry(failure, retry=retry)
        if wait is not None and not 0 <= wait < math.inf:
            raise ValueError(f"{wait!r} is no wait; give seconds, or None for a final failure")
    return wait


ERROR_POLICIES: dict[str, type] = {"listed": ListedErrors}
"""Registered names; anything else is "package.module:Class"."""


def build_error_policy(config: ErrorPolicyConfig, *, source: str) -> ErrorPolicy:
    """The policy of one source; refuses unknown names and options."""
    kind = find_plugin("error policy", config.type, ERROR_POLICIES)
    name = f"source {source!r}: error policy {config.type!r}"
    refuse_async(name, kind, "wait_before_retry")
    with building(name, config.options):
        policy: ErrorPolicy = kind(config, **config.options)
    return policy
