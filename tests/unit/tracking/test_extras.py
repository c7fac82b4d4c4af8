"""A tracker whose package is not installed says which extra brings it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tracked import tracked_run

from gradus.errors import ConfigError
from gradus.tracking.base import Tracker
from gradus.tracking.mlflow import Mlflow
from gradus.tracking.trackio import Trackio
from gradus.tracking.wandb import Wandb


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("wandb", lambda: Wandb(project="tests", entity=None, mode="offline")),
        ("mlflow", lambda: Mlflow(experiment="tests", tracking_uri=None)),
        ("trackio", lambda: Trackio(project="tests", folder=None)),
    ],
)
def test_a_missing_package_names_its_extra(
    package: str, build: Callable[[], Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"needs a package: pip install 'gradus-rl\[{package}\]'"
    ):
        build().open(tracked_run(tmp_path))
