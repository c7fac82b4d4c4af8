"""The file system that a boxed program sees, as options of bubblewrap.

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
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/alternatives")


def room(python: str, disk_bytes: int) -> Iterator[str]:
    """What is built, in this order; the rest of the root stays empty and cannot be written."""
    yield from ("--ro-bind", "/usr", "/usr")
    for path in _SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.exists(path):
            yield from ("--ro-bind", path, path)
    prefix = str(Path(python).parents[1])
    if not prefix.startswith("/usr") and prefix != "/":
        yield from ("--ro-bind", prefix, prefix)
    for folder in _hidden(prefix):
        yield from ("--size", "4096", "--tmpfs", folder, "--remount-ro", folder)
    # A program of root's, without its own user, could set the kernel's variables in /proc/sys.
    yield from ("--proc", "/proc", "--remount-ro", "/proc")
    yield from ("--dev", "/dev", "--remount-ro", "/dev")
    yield from ("--size", str(disk_bytes), "--tmpfs", INSIDE, "--chdir", INSIDE)
    yield from ("--symlink", INSIDE.lstrip("/"), "/tmp", "--remount-ro", "/")


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
