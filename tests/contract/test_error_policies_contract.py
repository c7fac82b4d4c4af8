"""What every error policy promises."""

from __future__ import annotations

import math

import pytest

from gradus.config import RETRIED_ERRORS, ErrorPolicyConfig
from gradus.orchestrator.failures import ErrorPolicy, ListedErrors
from gradus.orchestrator.types import Failure

MOST_RETRIES = 10_000


@pytest.fixture(params=[ListedErrors(ErrorPolicyConfig())])
def policy(request: pytest.FixtureRequest) -> ErrorPolicy:
    chosen: ErrorPolicy = request.param
    return chosen


@pytest.mark.parametrize("kind", [*RETRIED_ERRORS, "TaskError", "", "never heard of"])
def test_every_failure_is_final_in_the_end(policy: ErrorPolicy, kind: str) -> None:
    waits = [policy.wait_before_retry(Failure(kind, ""), retry=n) for n in range(MOST_RETRIES)]
    first_final = waits.index(None)
    assert all(wait is None for wait in waits[first_final:])
    assert all(wait is not None and 0 <= wait < math.inf for wait in waits[:first_final])


def test_the_list_keeps_no_count() -> None:
    policy = ListedErrors(ErrorPolicyConfig())
    failure = Failure("episode_timeout", "")
    assert len({policy.wait_before_retry(failure, retry=0) for _ in range(5)}) == 1


def test_without_retries_everything_is_final() -> None:
    policy = ListedErrors(ErrorPolicyConfig(retries=0))
    assert policy.wait_before_retry(Failure("episode_timeout", ""), retry=0) is None
