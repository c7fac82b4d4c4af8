"""An environment that needs a package which is not installed."""

from __future__ import annotations

import a_package_that_nobody_has  # noqa: F401

__all__: list[str] = []
