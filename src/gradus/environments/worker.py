"""What every process of verifiers' pool does before it serves."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
from collections.abc import Mapping

from gradus.death_watch import die_with_parent
from gradus.environments import compat
from gradus.environments.child_environment import hide_variables
from gradus.environments.tool_servers import ToolServerLimits
from gradus.log import configure_logging, end_quietly

COLLECT_AFTER_ALLOCATIONS = (20_000, 20, 50)
"""An episode allocates about twelve thousand tracked objects and leaves few cycles; the collector's
default thresholds spent a fifth of a worker's time on walking the imported modules."""


def prepare_worker(name: str, tool_servers: ToolServerLimits, secrets: Mapping[str, str]) -> None:
    """Set up logs, collector and patches of one pool process; a worker dies with its broker.

    Log lines go to stderr, marked with the source and the pid.
    """
    end_quietly()
    hide_variables(secrets)
    if multiprocessing.parent_process() is not None:
        die_with_parent()
    configure_logging(f"env_{name}[{os.getpid()}]")
    # The interpreter's last collection walks every imported module and would take a second.
    atexit.register(gc.freeze)
    gc.set_threshold(*COLLECT_AFTER_ALLOCATIONS)
    compat.apply(tool_servers)
