"""What every test starts from."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _fresh_log_level() -> None:
    """Libraries that a test imports may raise the root logger's level for all tests behind it."""
    logging.getLogger().setLevel(logging.WARNING)
