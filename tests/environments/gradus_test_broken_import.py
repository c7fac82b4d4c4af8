"""An environment whose module cannot be imported."""

from __future__ import annotations

raise RuntimeError("the data of this environment is not there")
