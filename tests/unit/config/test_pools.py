"""The processes of an environment are a number, also where a file calls them a pool."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gradus.config.schema.environment import EnvironmentConfig


@pytest.mark.parametrize(
    ("written", "workers", "servers"),
    [
        ({}, 1, 8),
        ({"num_workers": 3}, 3, 8),
        ({"num_workers": "auto"}, 1, 8),
        ({"pool": {"type": "static", "num_workers": 3, "max_tool_servers": 2}}, 3, 2),
        ({"pool": {"type": "static"}}, 4, 8),
        ({"pool": {"type": "elastic", "max_workers": 7, "multiplex": 9}}, 1, 8),
        ({"pool": {"type": "static", "num_workers": 3}, "num_workers": 2}, 2, 8),
    ],
)
def test_a_pool_is_read_as_a_number(written: dict[str, Any], workers: int, servers: int) -> None:
    config = EnvironmentConfig.model_validate({"id": "words", **written})
    assert (config.num_workers, config.max_tool_servers) == (workers, servers)


@pytest.mark.parametrize("pool", [3, {"type": "elastik"}, {"type": "static", "num_wrkers": 3}])
def test_what_is_no_pool_is_an_unknown_key(pool: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        EnvironmentConfig.model_validate({"id": "words", "pool": pool})
    assert caught.value.errors()[0]["loc"] == ("pool",)
