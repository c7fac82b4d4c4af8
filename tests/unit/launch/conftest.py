"""What the tests of launches share."""

from __future__ import annotations

import pytest

from gradus.launch import launch


@pytest.fixture(autouse=True)
def _no_subreaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests must not get the orphans of all that it starts."""
    monkeypatch.setattr(launch, "become_subreaper", lambda: None)
