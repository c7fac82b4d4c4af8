"""Which ways work on this machine: each is tried once, by running a program in it as later ones
run, from the folder in which theirs will lie."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gradus.errors import ConfigError
from gradus_kit.sandbox.order import launch_words, memory_file, order_of
from gradus_kit.sandbox.program import Limits, python_program
from gradus_kit.sandbox.ways import Protection, Way, as_user, claimed_user

_TRY_SECONDS = 20.0
_REMOVE_SECONDS = 60.0
_TRIED = """
import os, sys
assert os.geteuid() != 0 or {may_be_root}
assert open(os.path.join(os.environ["HOME"], "main.py")).read()
assert not any(map(os.path.exists, {hidden}))
print("seen")
"""
"""Reads its own file by its full name, and sees none of ours."""


def ways_here() -> Iterator[Way]:
    """The ways that work here, the strongest first."""
    own = (True, False) if os.geteuid() == 0 else (False,)
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    base = getattr(sys, "_base_executable", None) or sys.executable
    pythons = list(dict.fromkeys(os.path.realpath(path) for path in (base, system) if path))
    # A process of a run has a temporary folder that no other user can enter.
    folders = list(dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]))
    for own_user in own:
        for kind in ("bwrap", "unshare", "plain"):
            places = folders if kind == "plain" else [""]
            found = (Way(kind, p, own_user, place) for p in pythons for place in places)
            yield from itertools.islice(filter(_works, found), 1)


@cache
def strongest_way(require: frozenset[str] = frozenset()) -> Way:
    """The first of `ways_here` that holds what is required; ConfigError where none does."""
    found: list[Way] = []
    for way in ways_here():
        if missing_in(way, require):
            found.append(way)
        else:
            return way
    if found:
        raise ConfigError(refusal(found[0], require))
    raise ConfigError(
        "no program can be boxed here: install util-linux (setpriv) and a system Python, better "
        "also bubblewrap"
    )


def missing_in(way: Way, require: frozenset[str]) -> list[str]:
    """The required protections that a way does not hold."""
    return sorted(require - set(way.held))


def refusal(way: Way, require: frozenset[str]) -> str:
    """Why no program is run in this way."""
    return (
        f"programs of a model would run without the protections {missing_in(way, require)}: this "
        f"machine offers {way.name!r}. Install bubblewrap and allow user namespaces (in Docker: "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined), use a "
        "container for each program, or require less (`require = []`), where no answers lie on "
        "this disk"
    )


def make_folder(way: Way, user: int | None) -> Path:
    """A folder of the program's own; where it lies in memory, any will do."""
    if not way.base:
        return Path("/")
    folder = Path(tempfile.mkdtemp(prefix="gradus-box-", dir=way.base))
    if user is not None:
        os.chown(folder, user, user)
    return folder


def remove_folder(way: Way, folder: Path) -> None:
    """Remove a folder of `make_folder` that may be deeper than Python's own removal can go."""
    if not way.base:
        return
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():
        words = ["sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", str(folder)]
        subprocess.run(words, capture_output=True, timeout=_REMOVE_SECONDS, check=False)


def _works(way: Way) -> bool:
    """Whether a program runs in it, without privileges, and sees what it should."""
    try:
        return _trial(way) == "seen\n"
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


def _trial(way: Way) -> str:
    """What the program says that is tried."""
    limits = Limits()
    source = _TRIED.format(
        may_be_root=way.kind == "plain" and not way.own_user and os.geteuid() == 0,
        hidden=[__file__] if Protection.FILES in way.held else [],
    )
    with contextlib.ExitStack() as stack:
        user = stack.enter_context(claimed_user(way))
        folder = make_folder(way, user)
        stack.callback(remove_folder, way, folder)
        order = order_of(way, folder, user, python_program(source), limits)
        order_fd = stack.enter_context(memory_file("order", order))
        said = stack.enter_context(open(os.devnull, "wb")).fileno()
        done: subprocess.CompletedProcess[str] = subprocess.run(
            launch_words(way, limits, order_fd, said),
            env={"PATH": "/usr/bin:/bin"},
            cwd=folder,
            pass_fds=(order_fd, said),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRY_SECONDS,
            check=False,
            start_new_session=True,
            **as_user(user),
        )
    return done.stdout
