"""Where a run of the same name continues, whether it may, and what must be cleared first."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gradus.config import SftProcessConfig, StrictConfig
from gradus.errors import ConfigError, CorruptStateError, StalledError
from gradus.files import read_json, remove
from gradus.plan.processes import LAUNCHED, config_file
from gradus.run.checkpoints import Checkpoint, CheckpointStore
from gradus.run.growing_files import truncate_to_sizes, truncate_to_step
from gradus.run.lease import RunLease
from gradus.run.model_files import published_models
from gradus.run.paths import GOOD_OUTCOMES, RunDirectory
from gradus.run.settings import continued_identity, differences

IDENTITY_NAME = "evaluation.json"
"""What the episodes of an evaluation depend on."""

SIZES = "orchestrator/sizes.json"
"""Where the orchestrator's part of a checkpoint notes the files that only grow."""

STATE = "orchestrator/state.json"
"""What the orchestrator's part of a checkpoint needs of other files."""

_REFUSED = re.compile(
    r"model\..+|seed"
    r"|sources\.[^.]+(\.(name|group_size|curriculum|is_frozen)(\..+)?)?"
    r"|sources\.[^.]+\.algo(\.(?!scoring_timeout_seconds$).+)?"
    r"|orchestrator\.groups_per_batch"
    r"|orchestrator\.train\.env\.[^.]+\.(id|taskset|tasks)(\..+)?"
    r"|(trainer\.)?lora(\.(rank|alpha|target_modules)(\..+)?)?"
    r"|(trainer\.)?(optimizer\.type|train_vision)"
    r"|data\.(?!(mix\.\d+\.)?(path|split)$).+|batch_conversations"
)
"""Keys that decide what the state in a checkpoint means.

Data may lie elsewhere than before: the trainer compares its digest with that in the checkpoint.
"""

_SILENT = re.compile(
    r"run_dir|term|name|output_dir|max_steps|(checkpoint|launch|log|slurm|kubernetes|identity)\..+"
    r"|(sources|evaluation_sources)\..+|.*\.?env_vars(\..+)?"
)
"""Keys whose change is not shown; what `sources` inherit is shown where it is written."""


@dataclass(frozen=True)
class Preparation:
    """What a launch found in its run directory; nothing has changed yet."""

    lines: list[str]
    """For a person."""
    apply: Callable[[], None]
    """Clears what will be done again, and notes what this launch does."""
    is_finished: bool = False
    """Whether nothing is left to start."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run continues."""

    checkpoint: Checkpoint | None
    """None when the run has none: it starts again."""
    kept: Path | None = None
    """Where the newest published version goes when the run starts again without a checkpoint."""
    finished_steps: int | None = None
    """The steps of a run that is done; None when something is left to do."""
    good_end: str = ""
    """Why the run ended well before this max_steps, with the outcome in front. Only other settings
    may find more to learn."""

    @property
    def is_finished(self) -> bool:
        return self.finished_steps is not None or bool(self.good_end)

    @property
    def step(self) -> int | None:
        """For the process configs; None means to start fresh."""
        return self.checkpoint.step if self.checkpoint else None

    def has_batches(self, run_dir: RunDirectory) -> bool:
        """Whether a trainer alone can continue from here; batches before a checkpoint that was
        damaged later are deleted already."""
        names = [it.name for it in run_dir.spool.glob("batch_" + 8 * "[0-9]")]
        return min(names, default="") <= f"batch_{self.step or 0:08d}"

    def describe(self, max_steps: int) -> str:
        if self.good_end:
            named = (key for key in ("target_reward", "patience_steps") if key in self.good_end)
            ends = next(named, "max_steps")
            return f"{self.good_end}; to continue, raise {ends}"
        if self.is_finished:
            return (
                f"finished: all {self.finished_steps} steps are done; raise max_steps to continue"
            )
        if self.kept is not None:
            return f"no checkpoint: starts again at step 1, and keeps the weights in {self.kept}"
        if self.checkpoint is None:
            return "no checkpoint: starts again at step 1"
        return f"from checkpoint {self.checkpoint.step} of {max_steps} steps"


def find_resume_point(lease: RunLease, max_steps: int) -> ResumePoint:
    """The newest checkpoint that verifies; newer ones are renamed where the lease is held, nothing
    else is changed yet.

    Refuses max_steps below the checkpoint, a finished run without a checkpoint, and, with
    CorruptStateError, checkpoints of which none verifies.
    """
    ended_at, good_end = _good_end(lease.run_dir)
    is_done = ended_at is not None and ended_at >= max_steps
    if is_done and not good_end:
        return ResumePoint(None, finished_steps=ended_at)
    store = CheckpointStore(lease.run_dir, lease.term)
    checkpoint = store.latest(sets_aside=lease.is_held)
    if checkpoint is None and ended_at is not None and not is_done:
        raise ConfigError(
            f"{lease.run_dir.root} finished its {ended_at} steps without a checkpoint, so it "
            "cannot continue to more; set checkpoint.interval_minutes in a new run"
        )
    if checkpoint is not None and checkpoint.step > max_steps:
        raise ConfigError(
            f"max_steps = {max_steps} is less than the {checkpoint.step} steps of "
            f"{checkpoint.folder}; use at least {checkpoint.step}"
        )
    if checkpoint is not None:
        _check_journal(lease.run_dir, checkpoint.folder / STATE)
    good_end = good_end if is_done else ""
    published = published_models(lease.run_dir)
    if checkpoint is not None or not published:
        return ResumePoint(checkpoint, good_end=good_end)
    kept = lease.run_dir.kept / f"version_{max(published):08d}"
    return ResumePoint(None, kept, good_end=good_end)


def _check_journal(run_dir: RunDirectory, state: Path) -> None:
    """CorruptStateError when the journal does not hold what a checkpoint continues."""
    if not state.is_file():
        return
    wanted = read_json(state)["journal_lines"]
    try:
        with run_dir.journal.open(encoding="utf-8", newline="\n") as file:
            found = sum(1 for _ in islice(file, wanted))
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise CorruptStateError(
            f"{run_dir.journal} is missing or no journal ({error}); the run continues it: restore "
            "it, or start a run under another name"
        ) from error
    if found < wanted:
        raise CorruptStateError(
            f"{run_dir.journal} has {found} lines and {state} continues {wanted}; restore the "
            "journal, or start a run under another name"
        )


def changed_settings(run_dir: RunDirectory, config: StrictConfig, *, is_fresh: bool) -> list[str]:
    """What differs from the config of the last launch, a line each.

    Refuses changes that the state in a checkpoint does not survive, all of them by name; a run that
    starts again has no state to protect (`is_fresh`).
    """
    try:
        before = read_json(config_file(run_dir, LAUNCHED))
    except FileNotFoundError:
        return []
    lines: list[str] = []
    refused: list[str] = []
    for key, was, now in differences(before, config.without_secrets()):
        line = f"{key} was {was!r} and is {now!r}"
        if _REFUSED.fullmatch(key):
            refused.append(line)
        elif not _SILENT.fullmatch(key):
            lines.append(line)
    if refused and not is_fresh:
        raise ConfigError(
            "the checkpoint was made with other settings; put them back or start a new run:\n"
            + "\n".join(refused)
        )
    return [*refused, *lines]


def refuse_other_evaluation(run_dir: RunDirectory, config: StrictConfig) -> None:
    """ConfigError when versions were evaluated with settings that the evaluator now has not."""
    path = run_dir.root / IDENTITY_NAME
    if isinstance(config, SftProcessConfig) and config.eval is not None and path.is_file():
        continued_identity(read_json(path), config.identity)


def clear_for_resume(lease: RunLease, point: ResumePoint, *, keeps_versions: bool = False) -> None:
    """Remove what belongs to dead processes and to steps that will be done again.

    Committed checkpoints, the journal, logs and the records of surviving steps stay, and with
    `keeps_versions` the published versions of those steps.
    """
    run_dir = lease.run_dir
    if point.kept is not None:
        point.kept.parent.mkdir(mode=0o700, exist_ok=True)
        if point.kept.is_dir():
            shutil.rmtree(point.kept)
        shutil.move(run_dir.weights / point.kept.name, point.kept)
    for folder in (
        run_dir.ready,
        run_dir.spool,
        run_dir.standing,
        *_void_versions(run_dir, point, keeps_versions),
    ):
        empty(folder)
    run_dir.summary.unlink(missing_ok=True)
    CheckpointStore(run_dir, lease.term).discard_stale()
    if point.checkpoint is None:
        truncate_to_step(run_dir, 0)
        return
    sizes = point.checkpoint.folder / SIZES
    if sizes.is_file():
        truncate_to_sizes(run_dir, point.checkpoint.step, read_json(sizes))
    else:
        truncate_to_step(run_dir, point.checkpoint.step)


def empty(folder: Path) -> None:
    """Remove a folder; one that is a link to another disk loses what lies in it."""
    if folder.is_symlink():
        for path in folder.iterdir():
            remove(path)
    elif folder.is_dir():
        remove(folder)


def _void_versions(run_dir: RunDirectory, point: ResumePoint, keeps_versions: bool) -> list[Path]:
    """The published versions to remove: all, or those that training will publish again."""
    if not keeps_versions or not run_dir.weights.is_dir():
        return [run_dir.weights]
    newest = run_dir.version(point.step or 0).name
    return [path for path in run_dir.weights.glob("version_*") if path.name > newest]


def _good_end(run_dir: RunDirectory) -> tuple[int | None, str]:
    """`max_steps` of a run that ended well, and why it ended before, if it did."""
    try:
        summary = read_json(run_dir.summary)
    except FileNotFoundError:
        return None, ""
    try:
        outcome, cause = summary["outcome"], summary.get("cause")
        is_untrained = outcome == StalledError.outcome and summary.get("steps") == 0
        if outcome not in GOOD_OUTCOMES or is_untrained:
            return None, ""
        return int(summary["max_steps"]), f"{outcome}: {cause}" if cause else ""
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(
            f"{run_dir.summary} does not say how the run ended ({error!r}); delete it, and the run "
            "continues from its newest checkpoint"
        ) from error
