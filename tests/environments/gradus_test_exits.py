"""A taskset whose `load` ends the interpreter, as a script that was made a module does."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from gradus.environments.tasks import Stopped


class ExitsConfig(vf.TasksetConfig):
    """Who ends it."""

    is_signal: bool = False
    """Whether a stop signal comes meanwhile."""


class ExitsTaskset(vf.Taskset[vf.Task, ExitsConfig]):
    """Has no tasks."""

    def load(self) -> Iterable[vf.Task]:
        """Leave."""
        raise Stopped(0) if self.config.is_signal else SystemExit(4)


__all__ = ["ExitsTaskset"]
