"""What environment processes and the orchestrator agree on about episodes, beyond verifiers."""

from __future__ import annotations

import msgspec

LOST = "EnvironmentLost"
"""Kind of the failure of episodes whose process, a worker or all of the environment, was lost."""
FROM_OUTSIDE = "from outside"
"""Words in the message of such a failure where somebody else ended the process, not its code."""
NO_MEMORY = "the kernel had no memory left"
"""Words where that was the kernel, for want of memory."""
CONTEXT_FULL = "context_length"
"""Stop condition of a trace whose next prompt does not fit into the engine's context."""

POLICY_VERSIONS = "policy_versions"
"""In a trace's `info`: number of a message → which versions of the policy sampled its tokens."""


class TaskRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request on the task socket: `info`, `task` or `health`."""

    method: str
    index: int | None = None
    """Of the task; belongs to `task` alone."""


class TaskSetInfo(msgspec.Struct, frozen=True):
    """What an environment offers."""

    num_tasks: int | None
    """None means endless."""
    taskset: str
    """Id of the taskset."""
    agents: dict[str, bool] = {}
    """Agents of an episode → whether the environment lets them train."""
    tools: bool = False
    """Whether the policy is offered tools."""


class Health(msgspec.Struct, frozen=True):
    """Whether the environment can play episodes, and why not."""

    healthy: bool
    reason: str | None = None
    num_workers: int = 0
