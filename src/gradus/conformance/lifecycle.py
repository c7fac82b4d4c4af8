"""How an environment ends: deadlines, cancelled episodes, and what they leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from gradus.conformance.findings import Checked, broken, note, ok, shortened, skipped
from gradus.conformance.probes import Probe
from gradus.conformance.stage import LEAVE_SECONDS, Stage
from gradus.orchestrator.types import Task
from gradus.processes.table import ProcessEntry

_ASKED_SECONDS = 20.0
"""How long an episode may take to ask the model for the first time."""
_DEADLINE_SECONDS = 1.0
_HELD = Probe("a model that does not answer", ["too late"])


async def check_lifecycle(
    stage: Stage, task: Task, known: Sequence[ProcessEntry], num_episodes: int
) -> AsyncIterator[Checked]:
    """The lines; `known` ran after the first episode."""
    yield await left_by_episodes(stage, known, num_episodes)
    files = stage.files()
    if len(files) * 2 >= num_episodes:
        yield note(
            "temporary files",
            f"{len(files)} after {num_episodes} episodes, e.g. {sorted(files)[0]}",
            "Remove the folder of an episode when it ends, or the disk fills up",
        )
    yield await _deadline(stage, task)
    yield await _cancelled(stage, task)


async def left_by_episodes(
    stage: Stage, known: Sequence[ProcessEntry], num_episodes: int
) -> Checked:
    """Whether episodes leave processes; `known` ran after the first of them."""
    left = await stage.left(known)
    if len(left) * 2 >= num_episodes:
        return broken(
            "leaves nothing",
            f"after {num_episodes} episodes {len(left)} processes are left, e.g. {left[0]}",
            "End what an episode starts in a `finally`, and wait for it",
        )
    if left:
        return note(
            "leaves nothing",
            f"after {num_episodes} episodes runs {', '.join(left[:3])}",
            "Fine if it serves all episodes; otherwise end it with its episode",
        )
    return ok("leaves nothing", f"no process after {num_episodes} episodes")


async def _asks(stage: Stage, *, seconds: float = _ASKED_SECONDS, ends: bool = False) -> bool:
    """Whether an episode asks the model in time, or none does any more."""
    try:
        await stage.engine.wait_until(lambda e: (e.running == 0) is ends, timeout_seconds=seconds)
    except TimeoutError:
        return False
    return True


async def _deadline(stage: Stage, task: Task) -> Checked:
    known = stage.below()
    stage.engine.hold()
    try:
        played = await stage.play(task, _HELD, settings=stage.settings(seconds=_DEADLINE_SECONDS))
        has_ended = await _asks(stage, seconds=LEAVE_SECONDS, ends=True)
    finally:
        stage.engine.release()
    if played.failure is None:
        return skipped("deadline", "the episode ends without the model")
    if played.failure.kind != "episode_timeout":
        return broken(
            "deadline",
            f"while the model does not answer, {played.failure.kind}: "
            f"{shortened(played.failure.message)}",
            "Wait for the model without a deadline of your own; the source has one",
        )
    return await _nothing_left(stage, "deadline", known, has_ended)


async def _cancelled(stage: Stage, task: Task) -> Checked:
    known = stage.below()
    stage.engine.hold()
    playing = asyncio.create_task(stage.play(task, _HELD))
    try:
        if not await _asks(stage):
            return skipped("cancelled", f"no model call within {_ASKED_SECONDS:g} s")
        playing.cancel()
        has_ended = await _asks(stage, seconds=LEAVE_SECONDS, ends=True)
    finally:
        stage.engine.release()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    return await _nothing_left(stage, "cancelled", known, has_ended)


async def _nothing_left(
    stage: Stage, name: str, known: Sequence[ProcessEntry], has_ended: bool
) -> Checked:
    if not has_ended:
        return broken(
            name,
            f"{LEAVE_SECONDS:g} s after the end of the episode its model call still runs",
            "Let CancelledError pass; do not shield or retry what the episode waits for",
        )
    left = await stage.left(known)
    if left:
        return broken(
            name,
            f"{LEAVE_SECONDS:g} s after the end of the episode runs {', '.join(left[:3])}",
            "End what an episode starts in a `finally`",
        )
    return ok(name, "the episode ends at once and leaves no process")
