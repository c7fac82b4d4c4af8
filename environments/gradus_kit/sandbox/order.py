"""What the launcher in a box is given, and how it is started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gradus_kit.sandbox.isolation import Isolation
from gradus_kit.sandbox.program import Limits, UntrustedProgram
from gradus_kit.sandbox.room import INSIDE

_PATH = "/usr/local/bin:/usr/bin:/bin"
_LAUNCHER = (Path(__file__).parent / "launcher.py").read_text(encoding="utf-8")


def launch_words(isolation: Isolation, limits: Limits, order: int, said: int) -> list[str]:
    """The command of a box; it reads `order` and tells `said` when it is ready."""
    return [
        *isolation.command(limits),
        *(isolation.python, "-I", "-S", "-c", _LAUNCHER),
        *(str(order), str(said)),
    ]


def order_of(isolation: Isolation, program: UntrustedProgram, limits: Limits) -> bytes:
    """What the launcher reads: files, limits, command and variables."""
    own = {"PATH": _PATH, "HOME": INSIDE, "TMPDIR": INSIDE, "LANG": "C.UTF-8"}
    bounds = {
        name: value for name, value in dataclasses.asdict(limits).items() if isinstance(value, int)
    }
    first, *rest = program.command
    words = [isolation.python if first == "python" else first, *rest]
    sections: dict[str, Mapping[str, object]] = {
        "word": {str(place): word for place, word in enumerate(words)},
        "file": program.files,
        "variable": own | dict(program.variables),
        "limit": bounds | {"processes": limits.processes + 1},  # bubblewrap's own
    }
    return b"".join(
        _entry(kind, name, str(value))
        for kind, entries in sections.items()
        for name, value in entries.items()
    )


def _entry(kind: str, name: str, value: str) -> bytes:
    """As the launcher reads it; half characters travel as the three bytes that they would be."""
    name_bytes, value_bytes = name.encode(), value.encode("utf-8", "surrogatepass")
    return f"{kind} {len(name_bytes)} {len(value_bytes)}\n".encode() + name_bytes + value_bytes


@contextlib.contextmanager
def memory_file(name: str, content: bytes) -> Iterator[int]:
    """A descriptor from which `content` can be read once."""
    descriptor = os.memfd_create(name, 0)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
