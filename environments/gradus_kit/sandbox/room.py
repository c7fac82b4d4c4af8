"""The file system that a boxed program sees, as steps that bubblewrap or our own launcher takes.

System libraries to read, one memory disk to write, and nothing else: neither files of ours nor
installed Python packages, which may hold the answers.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

INSIDE = "/box"
"""The program's folder, a memory disk."""
Step = tuple[str, ...]
"""`bind PATH`, `link PATH TARGET`, `hide PATH`, `proc`, `dev` or `disk BYTES`."""
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/alternatives")


def room(python: str, disk_bytes: int) -> Iterator[Step]:
    """What is built, in this order; the rest of the root stays empty and cannot be written."""
    yield ("bind", "/usr")
    for path in _SYSTEM:
        if os.path.islink(path):
            yield ("link", path, os.readlink(path))
        elif os.path.exists(path):
            yield ("bind", path)
    prefix = str(Path(python).parents[1])
    if not prefix.startswith("/usr") and prefix != "/":
        yield ("bind", prefix)
    for folder in _hidden(prefix):
        yield ("hide", folder)
    # A program of root's, without its own user, could set the kernel's variables in /proc/sys.
    yield ("proc",)
    yield ("dev",)
    yield ("disk", str(disk_bytes))
    yield ("link", "/tmp", INSIDE.lstrip("/"))


def as_bubblewrap(steps: Iterator[Step]) -> Iterator[str]:
    """The steps as options of bwrap."""
    for kind, *rest in steps:
        if kind == "bind":
            yield from ("--ro-bind", rest[0], rest[0])
        elif kind == "link":
            yield from ("--symlink", rest[1], rest[0])
        elif kind == "hide":
            yield from ("--size", "4096", "--tmpfs", rest[0], "--remount-ro", rest[0])
        elif kind == "disk":
            yield from ("--size", rest[0], "--tmpfs", INSIDE, "--chdir", INSIDE)
        else:
            yield from (f"--{kind}", f"/{kind}", "--remount-ro", f"/{kind}")
    yield from ("--remount-ro", "/")


@cache
def _hidden(prefix: str) -> tuple[str, ...]:
    """Folders inside those that a box shows, but with packages or files of ours."""
    packages = (
        folder
        for root in ("/usr", "/usr/local", prefix)
        for name in ("site-packages", "dist-packages")
        for folder in Path(root).glob(f"lib*/python3*/{name}")
    )
    ours = [Path(place) for place in (*sys.path, sys.prefix, os.getcwd()) if place]
    library = Path(sysconfig.get_path("stdlib")).resolve()
    needed = (Path("/usr"), Path(prefix), library, Path("/usr/lib"), Path("/usr/bin"))
    found = {folder.resolve() for folder in (*packages, *ours) if folder.is_dir()}
    hidden = {
        folder
        for folder in found
        if any(folder.is_relative_to(root) for root in ("/usr", prefix))
        and not any(path.is_relative_to(folder) for path in needed)
        and (folder.name.endswith("-packages") or not folder.is_relative_to(library))
    }
    return tuple(sorted(str(folder) for folder in hidden if not hidden & {*folder.parents}))
