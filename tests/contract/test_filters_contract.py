"""What every registered filter promises."""

from __future__ import annotations

import numpy as np
import pytest
from builders import build_sample
from configs import build_filter_config

from gradus.config import FilterConfig
from gradus.orchestrator.groups.filters import ActiveFilter, FilterContext, build_filters
from gradus.orchestrator.types import Verdict
from gradus.testing.episodes import build_trace

CONTEXT = FilterContext(build_trace(), is_truncated=False, task_key="a1", episodes=())


@pytest.fixture(params=sorted(FilterConfig.registered()))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chosen(name: str) -> ActiveFilter:
    (active,) = build_filters([build_filter_config(name, enforce=True)], vocabulary_size=32)
    return active


def test_a_filter_is_named_as_it_is_registered(chosen: ActiveFilter, name: str) -> None:
    assert chosen.name == name


def test_a_plain_sample_is_kept(chosen: ActiveFilter) -> None:
    assert chosen.judge(build_sample(), CONTEXT) is Verdict.KEEP


def test_a_verdict_depends_on_the_sample_alone_and_leaves_it_alone(chosen: ActiveFilter) -> None:
    sample = build_sample(9, advantage=0.0)
    before = {key: array.copy() for key, array in sample.arrays.by_name().items()}
    assert chosen.judge(sample, CONTEXT) == chosen.judge(sample, CONTEXT)
    for key, array in sample.arrays.by_name().items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_samples_have_a_verdict(chosen: ActiveFilter, length: int) -> None:
    assert chosen.judge(build_sample(length, prompt_length=0), CONTEXT) is Verdict.KEEP


def test_a_sample_without_any_loss_has_a_verdict(chosen: ActiveFilter) -> None:
    assert chosen.judge(build_sample().with_arrays(loss_weights={}), CONTEXT) in Verdict
