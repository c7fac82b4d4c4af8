"""What every process of verifiers' pool does before it serves."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import os
import threading
from collections.abc import Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from verifiers.v1.serve import serve_env

from gradus.environments.pool import hide_variables
from gradus.environments.verifiers.table import WorkerSettings, apply
from gradus.errors import first_line
from gradus.log import LogSettings, configure_logging, end_quietly
from gradus.processes.child import die_with_parent, show_stacks

COLLECT_AFTER_ALLOCATIONS = (20_000, 20, 50)
"""An episode allocates about twelve thousand tracked objects and leaves few cycles; the collector's
default thresholds spent a fifth of a worker's time on walking the imported modules."""
WORKER_VARIABLE = "GRADUS_WORKER"
"""Mark of what a worker starts, with its pid: a lost worker's programs are found by it."""
_CAUSE = ".cause"
LEAVE_SECONDS = 5.0
"""How long threads and children of the environment may keep a process that has served."""


def run_worker(**settings: Any) -> None:
    """Run verifiers' server; the error that ends it is left beside its socket for `read_cause`."""
    try:
        serve_env(**settings)
    except Exception as error:
        folder = Path(settings["address"].removeprefix("ipc://")).parent
        (folder / f"{os.getpid()}{_CAUSE}").write_text(cause_of(error))
        raise


def cause_of(error: Exception) -> str:
    """An error in one line; of several, the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return first_line(f"{type(error).__name__}: {error}")


def read_cause(folder: Path, pid: int) -> str:
    """The error that ended a worker; empty when nothing is known."""
    try:
        return (folder / f"{pid}{_CAUSE}").read_text()
    except OSError:
        return ""


def prepare_worker(
    name: str, patching: WorkerSettings, secrets: Mapping[str, str], logs: LogSettings | None = None
) -> None:
    """Set up logs, collector and patches of one pool process; a worker dies with its broker.

    Log records name the source and the pid; `logs` came on stdin, since what a worker starts
    inherits its variables.
    """
    end_quietly()
    hide_variables(secrets)
    if multiprocessing.parent_process() is not None:
        die_with_parent()
        os.environ[WORKER_VARIABLE] = str(os.getpid())
        show_stacks()
        # Runs before the interpreter waits for children and threads.
        Finalize(None, leave_soon, exitpriority=1)
    configure_logging(f"env_{name}[{os.getpid()}]", logs)
    # Two lines per episode, which say less than its record.
    logging.getLogger("verifiers.v1.rollout").setLevel(logging.WARNING)
    # The interpreter's last collection walks every imported module and would take a second.
    atexit.register(gc.freeze)
    gc.set_threshold(*COLLECT_AFTER_ALLOCATIONS)
    apply(patching)


def leave_soon(seconds: float = LEAVE_SECONDS) -> None:
    """End this process in a few seconds, even if the environment left something running in it.

    A process whose event loop has ended plays no more, but the interpreter would wait forever for
    its threads and children, and the watch would count it as alive.
    """
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()
