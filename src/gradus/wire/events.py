"""Messages from the trainer to the orchestrator, and the one word back that is not a batch."""

from __future__ import annotations

import msgspec


class StepFinished(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Step `step` was trained; `metrics` are reduced over all ranks."""

    step: int
    term: int
    metrics: dict[str, float]
    is_saved: bool = False
    """Whether the trainer saves the version that the step made; the orchestrator then does too."""


class PolicyPublished(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`directory` holds version `version`, complete; `digest` is that of its manifest."""

    version: int
    term: int
    directory: str
    digest: str


class CheckpointStaged(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The trainer's part of checkpoint `step` (= batches trained) is complete in staging."""

    step: int
    term: int


class TrainerDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The trainer has trained its last step and exits."""

    step: int
    term: int


Event = StepFinished | PolicyPublished | CheckpointStaged | TrainerDone


class EndOfBatches(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The orchestrator sends no batch from `step` on; the trainer saves what it has and ends."""

    step: int
    term: int
