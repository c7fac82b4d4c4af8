"""Which isolations work on this machine: each is tried once, as later programs use it, from the
folder in which theirs will lie."""

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
from gradus_kit.sandbox.isolation import Isolation, Protection, as_user, claimed_user
from gradus_kit.sandbox.order import launch_words, memory_file, order_of
from gradus_kit.sandbox.program import Limits, python_program

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


def working_isolations() -> Iterator[Isolation]:
    """Those that work here, the strongest first."""
    own = (True, False) if os.geteuid() == 0 else (False,)
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    base = getattr(sys, "_base_executable", None) or sys.executable
    pythons = list(dict.fromkeys(os.path.realpath(path) for path in (base, system) if path))
    # A process of a run has a temporary folder that no other user can enter.
    folders = list(dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]))
    for own_user in own:
        for kind in ("bwrap", "unshare", "plain"):
            places = folders if kind == "plain" else [""]
            found = (Isolation(kind, p, own_user, place) for p in pythons for place in places)
            yield from itertools.islice(filter(_works, found), 1)


@cache
def strongest_isolation(require: frozenset[str] = frozenset()) -> Isolation:
    """The first that works here and holds what is required; ConfigError where none does."""
    found: list[Isolation] = []
    for isolation in working_isolations():
        if missing_in(isolation, require):
            found.append(isolation)
        else:
            return isolation
    if found:
        raise ConfigError(refusal(found[0], require))
    raise ConfigError(
        "no program can be boxed here: install util-linux (setpriv) and a system Python, better "
        "also bubblewrap"
    )


def missing_in(isolation: Isolation, require: frozenset[str]) -> list[str]:
    """The required protections that it does not give."""
    return sorted(require - set(isolation.held))


def refusal(isolation: Isolation, require: frozenset[str]) -> str:
    """Why no program is run behind it."""
    return (
        "programs of a model would run without the protections "
        f"{missing_in(isolation, require)}: this machine offers {isolation.name!r}. "
        "Install bubblewrap and allow user namespaces (in Docker: "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined), use a "
        "container for each program, or require less (`require = []`), where no answers lie on "
        "this disk"
    )


def make_folder(isolation: Isolation, user: int | None) -> Path:
    """A folder of the program's own; where it lies in memory, any will do."""
    if not isolation.base:
        return Path("/")
    folder = Path(tempfile.mkdtemp(prefix="gradus-box-", dir=isolation.base))
    if user is not None:
        os.chown(folder, user, user)
    return folder


def remove_folder(isolation: Isolation, folder: Path) -> None:
    """Remove a folder of `make_folder` that may be deeper than Python's own removal can go."""
    if not isolation.base:
        return
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():
        words = ["sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", str(folder)]
        subprocess.run(words, capture_output=True, timeout=_REMOVE_SECONDS, check=False)


def _works(isolation: Isolation) -> bool:
    """Whether a program runs in it, without privileges, and sees what it should."""
    try:
        return _trial(isolation) == "seen\n"
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


def _trial(isolation: Isolation) -> str:
    """What the program says that is tried."""
    limits = Limits()
    source = _TRIED.format(
        may_be_root=isolation.kind == "plain" and not isolation.own_user and os.geteuid() == 0,
        hidden=[__file__] if Protection.FILES in isolation.held else [],
    )
    with contextlib.ExitStack() as stack:
        user = stack.enter_context(claimed_user(isolation))
        folder = make_folder(isolation, user)
        stack.callback(remove_folder, isolation, folder)
        order = order_of(isolation, folder, user, python_program(source), limits)
        order_fd = stack.enter_context(memory_file("order", order))
        said = stack.enter_context(open(os.devnull, "wb")).fileno()
        done: subprocess.CompletedProcess[str] = subprocess.run(
            launch_words(isolation, limits, order_fd, said),
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
