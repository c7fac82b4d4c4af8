"""Whether a launch continues by itself after one of its processes failed, and when it does so.

failure                                        what follows
─────────────────────────────────────────────  ──────────────────────────────────────────
of the launcher, or of what the user wrote     the end: it would repeat (64, 65, 78)
of a disk that takes nothing, for a role       the end: the same steps would be lost again (75)
before everything was ready for the first time the end: somebody watches, nothing is lost
by itself, before a first step was finished    the end: most likely a bug in a plug-in
by itself as before, at the same step          the end: a bug, not a fault
any other, with restarts left: in the window,  a restart, after 1 s; after 2, 4 … 60 s where
  and in a row that came no further              those before it came no further
any other                                      the end, with the causes of all

By itself is what ends with another code than 75, or by a signal of its own making: a server whose
engine was killed says 75, and as little as the engine itself did it do that.

An inference server beside which another serves has restarts of its own, as many, which count for
nothing else. When they are used up it stays out, and the run continues with the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from gradus.config import LaunchConfig
from gradus.errors import ExitCode, GradusError
from gradus.processes.started import Fault, ProcessFailed

FIRST_WAIT_SECONDS = 1.0
MOST_WAIT_SECONDS = 60.0
"""Before a restart: doubled with each one in a row that came no further, up to the most."""

_REPEATS = (ExitCode.CONFIG, ExitCode.UNFIT, ExitCode.CORRUPT_STATE)
_CHANGES = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
"""What differs between two messages about the same bug: addresses, pids, seconds."""


_WINDOW_SECONDS = 3600.0
"""Older restarts do not count."""


class RestartsUsedUp(GradusError):
    """Processes failed more often than `launch.restarts` allows; names the cause of each."""

    exit_code = ExitCode.TRY_AGAIN


@dataclass(frozen=True)
class Decision:
    """What follows a failure."""

    wait_seconds: float | None
    """Until the restart. None: the failure ends the launch."""
    told: str = ""
    """For a person; "" where the failure says enough."""


@dataclass(frozen=True)
class _Failed:
    """One failure that may have been a fault, at a monotonic time."""

    at: float
    step: int
    fault: Fault
    message: str


class Restarts:
    """Owns what one launch knows of its failures."""

    def __init__(
        self,
        config: LaunchConfig,
        *,
        is_allowed: bool = True,
        is_resumed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A run that is resumed has been ready before: whoever kills its start repeats nothing."""
        self._number = config.restarts if is_allowed else 0
        self._is_resumed = is_resumed
        self._clock = clock
        self._failed: list[_Failed] = []
        self._num_begun = 0
        self._of_replica: dict[str, list[_Failed]] = {}
        self.left_out: set[str] = set()
        """Replicas that used up their own restarts."""
        self.was_ready = False
        """Whether all processes were ready at once, at any time."""
        self._has_finished_a_step = False

    @property
    def causes(self) -> list[str]:
        """The messages of the failures that a restart followed, and of those of replicas, the
        oldest first."""
        replicas = [failed for series in self._of_replica.values() for failed in series]
        failed = sorted([*self._failed[: self._num_begun], *replicas], key=lambda it: it.at)
        return [it.message for it in failed]

    def begin(self) -> None:
        """A restart begins: nobody asked to end meanwhile, and nothing is in its way."""
        self._num_begun += 1

    def after(self, error: GradusError, *, began_at: int, step: int, was_ready: bool) -> Decision:
        """What follows a failure after `step` steps, in an attempt that began after `began_at`.

        RestartsUsedUp when it would be a restart too many.
        """
        self.was_ready |= was_ready
        self._has_finished_a_step |= step > began_at
        if not self._number or not isinstance(error, ProcessFailed):
            return Decision(None)
        if not (self.was_ready or (self._is_resumed and error.fault.is_from_outside)):
            return Decision(None)
        is_own_doing = error.exit_code is not ExitCode.TRY_AGAIN
        if error.exit_code in _REPEATS or (is_own_doing and not self._has_finished_a_step):
            return Decision(None)
        if (error.fault.kind, error.fault.number) == ("exit", ExitCode.UNWRITABLE):
            return Decision(None, "the disk takes nothing: no restart would help")
        fault = _comparable(error.fault)
        seen = any((it.step, it.fault) == (step, fault) for it in self._failed)
        if seen and is_own_doing:
            return Decision(None, "it failed so at this point before: no restart would help")
        now = self._clock()
        since = now - _WINDOW_SECONDS
        num_recent = sum(it.at > since for it in self._failed)
        num_in_vain = self._num_in_vain(step)
        if (num_used := max(num_recent, num_in_vain)) >= self._number:
            why = f"allows {self._number} in an hour"
            if num_recent < num_in_vain:
                why = f"allows {self._number} that come no further than the attempts before them"
            causes = [*self._failed[-num_used:], _Failed(now, step, fault, str(error))]
            raise RestartsUsedUp(
                f"launch.restarts {why}, and this is one failure more:\n"
                + "\n".join(it.message for it in causes)
            )
        self._failed.append(_Failed(now, step, fault, str(error)))
        wait = min(MOST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(num_recent, num_in_vain))
        return Decision(wait, f"restart {num_recent + 1} of {self._number} in {wait:g} s")

    def after_replica(self, error: ProcessFailed, *, num_replicas: int) -> Decision | None:
        """What follows when one of several inference servers fails while another serves: without a
        wait it stays out. None where nothing may restart by itself."""
        if not self._number:
            return None
        name, now = error.fault.process, self._clock()
        failed = self._of_replica.setdefault(name, [])
        num_recent = sum(it.at > now - _WINDOW_SECONDS for it in failed)
        failed.append(_Failed(now, 0, _comparable(error.fault), str(error)))
        if error.exit_code not in _REPEATS and num_recent < self._number:
            wait = min(MOST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0**num_recent)
            number = f"restart {num_recent + 1} of {self._number}"
            return Decision(wait, f"{number} in {wait:g} s, of {name} alone")
        self.left_out.add(name)
        why = f"launch.restarts allows {self._number} in an hour"
        if error.exit_code in _REPEATS:
            why = "it would end so again"
        left = f"the run continues with {num_replicas - len(self.left_out)} of {num_replicas}"
        return Decision(None, f"{name} stays out, because {why}; {left} replicas")

    def _num_in_vain(self, step: int) -> int:
        """Restarts in a row, up to a failure after `step` steps, none of which came further than
        an attempt before: each may take longer to fail than a checkpoint is away."""
        steps = [*(failed.step for failed in self._failed), step]
        return len(steps) - 1 - steps.index(max(steps))


def _comparable(fault: Fault) -> Fault:
    """The fault with nothing that differs when the same happens again."""
    return Fault(fault.process, fault.kind, fault.number, _CHANGES.sub("#", fault.cause))
