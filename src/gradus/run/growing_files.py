"""Files that only grow, cut back to where they ended at a checkpoint.

`metrics.jsonl` and the files of `episodes/` hold records of steps that a resumed run does again.
A checkpoint notes how long each of them was; before the run continues, what came later is cut off,
so that no step and no episode appears twice; so are the folders of `tokens/`, each of one step. The
journal is never cut. `RecordLimit` bounds what episodes and tokens take.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradus.files import DurableFiles, add_line, append_whole, write_json
from gradus.run.json_lines import whole_lines
from gradus.run.paths import RunDirectory
from gradus.run.records import parse_record

GIB = 1 << 30
_STEP = re.compile(r"step_(\d+)")


def audit(run_dir: RunDirectory, event: str, **fields: Any) -> None:
    """Append what happened to `audit.jsonl`, which several processes of the run do; a disk that
    does not take it ends nothing."""
    line = {"time": round(time.time(), 3), "event": event, "pid": os.getpid(), **fields}
    add_line(run_dir.audit, json.dumps(line))


class RecordLimit:
    """Owns how much `replay/`, `tokens/` and `episodes/` may take together.

    Images count apart and stay: a group, a batch or a checkpoint may name what no record does.

    >>> limit = RecordLimit(RunDirectory(Path("runs/demo")), keep_gib=20)
    >>> limit.is_exceeded()
    False
    """

    def __init__(self, run_dir: RunDirectory, keep_gib: float) -> None:
        self._run_dir = run_dir
        self._keep_gib = keep_gib
        self._has_told = False

    def is_exceeded(self) -> bool:
        return self._excess() > 0

    def delete_oldest(self, step: int) -> str:
        """Delete until the rest fits; what went, for a person, or nothing where that was told.

        First the tokens that a replay needs, which are of use as a whole only; nobody may append
        to them any more. Then what is kept of the oldest steps before `step`.
        """
        size = self._delete_recorded(step)
        steps, freed = self._delete_readable(step)
        told = []
        if size:
            told.append(f"the tokens of all episodes ({_gib(size)}), so it cannot be replayed")
        if steps and not self._has_told:
            self._has_told = True
            which = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps up to {steps[-1]}"
            told.append(f"the oldest episodes, of {which} ({_gib(freed)}), and will again")
        if not told:
            return ""
        return f"orchestrator.keep_gib = {self._keep_gib:g}: the run deleted {'; '.join(told)}"

    def _delete_recorded(self, step: int) -> int:
        recorded = self._recorded()
        if not recorded or not self.is_exceeded():
            return 0
        size = sum(path.stat().st_size for path in recorded)
        # First the note: a replay must never take what is left for the whole.
        write_json(self._run_dir.replay_deleted, {"keep_gib": self._keep_gib, "step": step})
        for path in recorded:
            path.unlink()
        return size

    def _delete_readable(self, step: int) -> tuple[list[int], int]:
        steps, freed, excess = [], 0, self._excess()
        for number, path in sorted(self._readable()):
            if freed >= excess or number >= step:
                break
            if path.stem == "eval" and not path.with_suffix(".json").is_file():
                continue  # An evaluation that is not complete is continued from it.
            freed += path.stat().st_size
            path.unlink()
            steps.append(number)
            with contextlib.suppress(OSError):  # Not empty: the numbers of an evaluation stay.
                path.parent.rmdir()
        return steps, freed

    def _excess(self) -> float:
        files = [*self._recorded(), *(path for _, path in self._readable())]
        return sum(path.stat().st_size for path in files) - self._keep_gib * GIB

    def _recorded(self) -> list[Path]:
        return sorted(self._run_dir.replay.glob("term_*/episodes.bin"))

    def _readable(self) -> Iterator[tuple[int, Path]]:
        for folder in (*_step_folders(self._run_dir, 0), *_steps_in(self._run_dir.tokens, 0)):
            number = int(folder.name.removeprefix("step_"))
            yield from ((number, path) for path in folder.glob("*.jsonl"))
            yield from ((number, path) for path in folder.glob("rank_*.bin"))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"


@contextlib.contextmanager
def _noted_cut(run_dir: RunDirectory, step: int) -> Iterator[None]:
    """Within this block records are cut. Whoever finds the file shorter before the cut is noted
    waits for that; it is noted before anything is appended again."""
    path = run_dir.metrics
    if not path.is_file():
        yield
        return
    _note(run_dir, {"cutting": step})
    yield
    _note(run_dir, {"num_bytes": path.stat().st_size if path.is_file() else 0, "step": step})


def _note(run_dir: RunDirectory, values: Mapping[str, int]) -> None:
    descriptor = os.open(run_dir.cuts, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    try:
        append_whole(descriptor, f"\n{json.dumps(values)}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    DurableFiles().sync(run_dir.root)


def _growing(run_dir: RunDirectory, step: int) -> list[Path]:
    """The files that may still grow once `step` steps are trained."""
    files = [run_dir.metrics] if run_dir.metrics.is_file() else []
    for folder in _step_folders(run_dir, step):
        files += [path for path in folder.iterdir() if path.is_file()]
    return sorted(files)


def note_sizes(run_dir: RunDirectory, step: int) -> dict[str, int]:
    """Bytes of every file that may still grow once `step` steps are trained, by relative path."""
    files = _growing(run_dir, step)
    return {str(path.relative_to(run_dir.root)): path.stat().st_size for path in files}


def truncate_to_sizes(run_dir: RunDirectory, step: int, sizes: Mapping[str, int]) -> None:
    """Cut every file back to its noted size; delete those of `step` and later without one."""
    files = _growing(run_dir, step)
    with _noted_cut(run_dir, step):
        for path in files:
            noted = sizes.get(str(path.relative_to(run_dir.root)))
            if noted is None:
                path.unlink(missing_ok=True)
            elif path.stat().st_size > noted:
                os.truncate(path, noted)
        _cut_tokens(run_dir, step)
    for folder in _step_folders(run_dir, step):
        with contextlib.suppress(OSError):  # Not empty: it holds records from before.
            folder.rmdir()


def cut_episodes(run_dir: RunDirectory, step: int, sizes: Mapping[str, int]) -> None:
    """Cut the readable episodes of `step` and later steps back to their noted sizes."""
    for folder in _step_folders(run_dir, step):
        path = folder / "train.jsonl"
        if path.is_file():
            noted = sizes.get(str(path.relative_to(run_dir.root)), 0)
            os.truncate(path, min(noted, path.stat().st_size))


def truncate_to_step(run_dir: RunDirectory, step: int) -> None:
    """Without noted sizes: cut the records of `step` and later steps, and their episodes.

    The evaluation of version `step` stays: it is of the weights that the run continues from.
    """
    with _noted_cut(run_dir, step):
        if run_dir.metrics.is_file():
            os.truncate(run_dir.metrics, _bytes_before(run_dir.metrics, step))
        _cut_tokens(run_dir, step)
    kept = run_dir.evaluation(step)
    for folder in _step_folders(run_dir, step):
        if folder != kept.parent:
            shutil.rmtree(folder)
            continue
        for path in folder.iterdir():
            if path.stem != kept.stem:
                path.unlink()
        with contextlib.suppress(OSError):  # Not empty: it holds that evaluation.
            folder.rmdir()


def _cut_tokens(run_dir: RunDirectory, step: int) -> None:
    for folder in _steps_in(run_dir.tokens, step):
        shutil.rmtree(folder)


def _step_folders(run_dir: RunDirectory, step: int) -> list[Path]:
    return _steps_in(run_dir.episodes, step)


def _steps_in(root: Path, step: int) -> list[Path]:
    if not root.is_dir():
        return []
    matches = [(path, _STEP.fullmatch(path.name)) for path in root.iterdir()]
    return [path for path, match in matches if match and int(match[1]) >= step]


def _bytes_before(path: Path, step: int) -> int:
    """Length of the whole lines up to the first record of `step` or later."""
    length = 0
    with path.open("rb") as file:
        for line in whole_lines(file):
            record = parse_record(line)
            if record is not None and record.step >= step:
                break
            length = line.end
    return length
