"""What works on this machine, tried once as later programs use it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from functools import cache

from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus_kit.sandbox.isolation import Isolation, as_user, claimed_user
from gradus_kit.sandbox.order import launch_words, memory_file, order_of
from gradus_kit.sandbox.program import Limits, python_program

log = get_logger(__name__)

_TRY_SECONDS = 20.0
_TRIED = """
import os, sys
assert os.geteuid() != 0
assert open(os.path.join(os.environ["HOME"], "main.py")).read()
assert not any(map(os.path.exists, {hidden}))
print("seen")
"""
"""Reads its own file by its full name, and sees none of ours."""


@cache
def find_isolation() -> Isolation:
    """The strongest that works here, tried once; ConfigError where none does."""
    own = (True, False) if os.geteuid() == 0 else (False,)
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    base = getattr(sys, "_base_executable", None) or sys.executable
    pythons = list(dict.fromkeys(os.path.realpath(path) for path in (base, system) if path))
    for isolation in (Isolation(python, own_user) for own_user in own for python in pythons):
        if _works(isolation):
            if not isolation.limits_processes:
                log.warning("the limit on processes of programs does not bind: gradus is root")
            return isolation
    raise ConfigError(
        "no program of a model can be boxed here: install bubblewrap and a system Python, and "
        "allow user namespaces (in Docker: --security-opt seccomp=unconfined --security-opt "
        "systempaths=unconfined), or use a container for each program"
    )


def _works(isolation: Isolation) -> bool:
    """Tell whether a program runs in it, without privileges, and sees what it should."""
    try:
        return _trial(isolation) == "seen\n"
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


def _trial(isolation: Isolation) -> str:
    """Return what the program says that is tried."""
    limits = Limits()
    source = _TRIED.format(hidden=[__file__])
    with contextlib.ExitStack() as stack:
        user = stack.enter_context(claimed_user(isolation))
        order = order_of(isolation, python_program(source), limits)
        order_fd = stack.enter_context(memory_file("order", order))
        said = stack.enter_context(open(os.devnull, "wb")).fileno()
        done: subprocess.CompletedProcess[str] = subprocess.run(
            launch_words(isolation, limits, order_fd, said),
            env={"PATH": "/usr/bin:/bin"},
            cwd="/",
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
