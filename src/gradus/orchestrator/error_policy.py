"""Whether a failed episode is played again, and after which wait (pure).

Only errors on an explicit list are tried again. A bug of a task or a reward fails the same way each
time; hiding it behind retries would cost time and bias what trains. Such an error is recorded on
the episode and counted by its type.
"""

from __future__ import annotations

from gradus.config.error_policy import ErrorPolicyConfig
from gradus.orchestrator.episode_check import Failure

MAX_BACKOFF_SECONDS = 60.0


class ErrorPolicy:
    """Owns the list of one source.

    >>> policy = ErrorPolicy(ErrorPolicyConfig(retry_on=["SandboxError"], retries=1))
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
        """Seconds before the given retry, counted from 0; None when the failure is final."""
        if failure.kind not in self._retry_on or retry >= self._retries:
            return None
        wait: float = min(self._backoff_seconds * 2.0 ** min(retry, 30), MAX_BACKOFF_SECONDS)
        return wait
