"""What a file of evaluated episodes holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


def read_gradus_fields(path: Path) -> list[dict[str, Any]]:
    """The `gradus` object of every whole line."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line)["gradus"] for line in lines]
