"""What every registered error policy promises, and one of a user's own too."""

from __future__ import annotations

import math
import sys

import pytest

from gradus.config import RETRIED_ERRORS, ErrorPolicyConfig
from gradus.config.check import ERROR_POLICIES as CHECKED_NAMES
from gradus.errors import ConfigError
from gradus.orchestrator.failures import ERROR_POLICIES, ErrorPolicy, build_error_policy
from gradus.orchestrator.types import Failure

MOST_RETRIES = 10_000


class OnlyDeadlines:
    """An error policy as a user writes it: no base class, no registration."""

    def __init__(self, config: ErrorPolicyConfig, *, wait_seconds: float = 0.5) -> None:
        self._retries = config.retries
        self._wait_seconds = wait_seconds

    def wait_before_retry(self, failure: Failure, *, retry: int) -> float | None:
        is_deadline = failure.kind.endswith("timeout")
        return self._wait_seconds if is_deadline and retry < self._retries else None


OWN = "my_errors:OnlyDeadlines"


@pytest.fixture(params=[*sorted(ERROR_POLICIES), OWN])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "my_errors", sys.modules[__name__])
    return str(request.param)


@pytest.fixture
def policy(name: str) -> ErrorPolicy:
    return build_error_policy(ErrorPolicyConfig(type=name), source="words")


def test_the_checks_know_it(name: str) -> None:
    assert set(ERROR_POLICIES) == CHECKED_NAMES
    assert name in CHECKED_NAMES or ":" in name


@pytest.mark.parametrize("kind", [*RETRIED_ERRORS, "TaskError", "", "never heard of"])
def test_every_failure_is_final_in_the_end(policy: ErrorPolicy, kind: str) -> None:
    waits = [policy.wait_before_retry(Failure(kind, ""), retry=n) for n in range(MOST_RETRIES)]
    first_final = waits.index(None)
    assert all(wait is None for wait in waits[first_final:])
    assert all(wait is not None and 0 <= wait < math.inf for wait in waits[:first_final])


def test_it_keeps_no_count_of_its_own(policy: ErrorPolicy) -> None:
    failure = Failure("episode_timeout", "")
    assert len({policy.wait_before_retry(failure, retry=0) for _ in range(5)}) == 1


def test_a_deadline_is_worth_another_attempt(policy: ErrorPolicy) -> None:
    assert policy.wait_before_retry(Failure("episode_timeout", ""), retry=0) is not None


def test_without_retries_everything_is_final(name: str) -> None:
    policy = build_error_policy(ErrorPolicyConfig(type=name, retries=0), source="words")
    assert policy.wait_before_retry(Failure("episode_timeout", ""), retry=0) is None


def test_an_unknown_option_is_refused_with_the_source(name: str) -> None:
    config = ErrorPolicyConfig(type=name, options={"patience": 1})
    with pytest.raises(ConfigError, match=r"source 'words'.*patience"):
        build_error_policy(config, source="words")


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="error policy 'patient' is not known"):
        build_error_policy(ErrorPolicyConfig(type="patient"), source="words")
