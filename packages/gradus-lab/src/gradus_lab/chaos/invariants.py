"""What must hold in the folder of a run, whatever happened to its processes.

The rules are numbered as the history and `docs/operations.md` name them; those about time and exit
codes need somebody who watched (`gradus_lab.chaos.soak`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradus.errors import ConfigError, CorruptStateError, GradusError
from gradus.files import read_json
from gradus.orchestrator.records.journal import (
    JournalEvent,
    Line,
    check_journal,
    read_journal,
    surviving,
)
from gradus.processes.leftovers import left_of
from gradus.run.checkpoints import CheckpointStore
from gradus.run.json_lines import read_objects
from gradus.run.lease import is_in_use, read_marker, read_term
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records

RULES = {
    "I1": "every episode and every group ends once, or is open where the journal ends",
    "I2": "no sample trains twice, and each step is recorded once",
    "I3": "the served version never goes back within a term",
    "I4": "where checkpoints were committed, one of them verifies",
    "I6": "nothing was written by a launch that had lost the run, or will have it",
    "I7": "a run that is over leaves no process and no temporary folder",
    "I8": "a run that is over says why, and one that is done has its model",
    "I9": "no secret stands in the run's files",
}
"""Rule → what it says. I5, equal weights, needs a second run; I10, growth, needs a soak."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Broken:
    """One rule that does not hold."""

    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule} {self.what}"


def check_run(run_dir: RunDirectory, *, secrets: Sequence[bytes] = ()) -> list[Broken]:
    """Every rule that does not hold in a run's folder; of a run that is in use, those that can be
    asked while it goes on. `secrets` are texts that, as the run's own tokens, must stand in none of
    its files."""
    found = [*_journal(run_dir), *_steps(run_dir), *_checkpoints(run_dir)]
    if not is_in_use(run_dir):
        found += [*_left(run_dir), *_end(run_dir)]
    own = [it.read_bytes() for it in run_dir.secrets.glob("*") if it.is_file()]
    return found + list(_secrets(run_dir, [*secrets, *own]))


def compare_weights(run_dir: RunDirectory, other: RunDirectory) -> list[Broken]:
    """The first version that both runs served and that is another in each; for deterministic runs
    of one config. ConfigError when they served no version in common."""
    ours, theirs = _served(run_dir), _served(other)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise ConfigError(f"{run_dir.root} and {other.root} have no version of weights in common")
    differing = [it for it in common if ours[it] != theirs[it]]
    return [Broken("I5", f"version {it} is another in {other.root}") for it in differing[:1]]


def _served(run_dir: RunDirectory) -> dict[int, str]:
    lines = read_journal(run_dir.journal) if run_dir.journal.is_file() else []
    applied = [it for it in lines if it["event"] == JournalEvent.POLICY_APPLIED]
    return {it["version"]: it["weights"] for it in applied if it.get("weights")}


def _journal(run_dir: RunDirectory) -> Iterator[Broken]:
    if not run_dir.journal.is_file():
        marker = read_marker(run_dir)
        if marker is not None and marker.kind == "rl" and any(read_records(run_dir.metrics)):
            yield Broken("I1", f"there is no {run_dir.journal.name}")
        return
    try:
        lines = read_journal(run_dir.journal)
    except CorruptStateError as error:
        yield Broken("I1", str(error))
        return
    for problem in check_journal(lines).problems:
        yield Broken(_rule_of(problem), problem)
    kept = surviving(lines)
    yield from _finished(kept)
    yield from _too_old(run_dir, kept)
    yield from _unpublished(run_dir, lines)
    events = {line["event"] for line in lines}
    if JournalEvent.CHECKPOINT_COMMITTED in events and not _store(run_dir).folders():
        yield Broken("I4", "checkpoints were committed, and none is there")
    terms = [line["term"] for line in lines if "term" in line]
    if terms != sorted(terms):
        yield Broken("I6", f"the terms of {run_dir.journal.name} go back")
    if terms and terms[-1] > read_term(run_dir):
        yield Broken("I6", f"{run_dir.journal.name} has term {terms[-1]}, and the lease less")


def _finished(lines: Sequence[Line]) -> Iterator[Broken]:
    """Each step is finished once, in order, up to the one with which the run ended."""
    num_finished = 0
    for line in lines:
        event = line["event"]
        is_end = event == JournalEvent.RUN_ENDED and "step" in line
        wanted = num_finished - 1 if is_end else num_finished
        if (is_end or event == JournalEvent.STEP_FINISHED) and line["step"] != wanted:
            yield Broken("I2", f"{event} says step {line['step']} where step {wanted} belongs")
            return
        num_finished += event == JournalEvent.STEP_FINISHED


def _too_old(run_dir: RunDirectory, lines: Sequence[Line]) -> Iterator[Broken]:
    """Samples whose newest token is older than `orchestrator.max_staleness` at their batch."""
    if not run_dir.launched.is_file():
        return
    launched = read_json(run_dir.launched)["config"]
    most = launched.get("orchestrator", {}).get("max_staleness")
    newest: dict[str, int] = {}
    for line in lines:
        if line["event"] == JournalEvent.EPISODE_ENDED:
            newest[line["episode"]] = line["version"]
        elif line["event"] == JournalEvent.BATCH_SHIPPED and most is not None:
            for sample in line["samples"]:
                age = line["step"] - newest.get(sample.partition("/")[0], line["step"])
                if age > most:
                    yield Broken("I2", f"sample {sample} is {age} versions old, more than {most}")
                    return


def _unpublished(run_dir: RunDirectory, lines: Sequence[Line]) -> Iterator[Broken]:
    """The first weights that inference served under a version for which none such were written."""
    written: dict[int, set[str]] = {}
    for line in read_objects(run_dir.audit) if run_dir.audit.is_file() else ():
        if line.get("event") == "published" and line.get("weights"):
            written.setdefault(line["version"], set()).add(line["weights"])
    applied = [line for line in lines if line["event"] == JournalEvent.POLICY_APPLIED]
    for version, weights in ((line["version"], line["weights"]) for line in applied):
        if weights and weights not in written.get(version, {weights}):
            yield Broken("I3", f"version {version} was served with other weights")
            return


def _store(run_dir: RunDirectory) -> CheckpointStore:
    return CheckpointStore(run_dir, read_term(run_dir))


def _rule_of(problem: str) -> str:
    """Which rule the checker of journals speaks of."""
    if "version" in problem:
        return "I3"
    return "I2" if "sample" in problem or "batch" in problem else "I1"


def _steps(run_dir: RunDirectory) -> Iterator[Broken]:
    steps = [it.step for it in read_records(run_dir.metrics) if not it.is_evaluation]
    wanted = list(range(len(steps)))
    if steps != wanted:
        at = next(i for i, (a, b) in enumerate(zip(steps, wanted, strict=True)) if a != b)
        yield Broken("I2", f"{run_dir.metrics.name} has step {steps[at]} where step {at} belongs")


def _checkpoints(run_dir: RunDirectory) -> Iterator[Broken]:
    try:
        newest = _store(run_dir).latest()
    except GradusError as error:
        yield Broken("I4", str(error))
        return
    if newest is not None and newest.label.term > read_term(run_dir):
        yield Broken("I6", f"{newest.folder.name} has term {newest.label.term}, the lease less")


def _left(run_dir: RunDirectory) -> Iterator[Broken]:
    if not run_dir.processes.is_file():
        return
    for entry in left_of(run_dir.processes):
        yield Broken("I7", f"process {entry.pid} is left")
    folder = read_json(run_dir.processes).get("temporary_folder")
    if folder and Path(folder).exists():
        yield Broken("I7", f"{folder} is left")


def _end(run_dir: RunDirectory) -> Iterator[Broken]:
    marker = read_marker(run_dir)
    if marker is not None and marker.kind == "eval":
        if not (run_dir.root / "results.json").is_file():
            yield Broken("I8", "there is no results.json")
        return
    try:
        summary = read_json(run_dir.summary)
    except FileNotFoundError:
        yield Broken("I8", f"there is no {run_dir.summary.name}")
        return
    if summary.get("outcome") != "done" and not summary.get("cause"):
        yield Broken("I8", f"{run_dir.summary.name} names no cause")
    num_recorded = sum(not it.is_evaluation for it in read_records(run_dir.metrics))
    if num_recorded < summary.get("steps", 0):
        told = f"{num_recorded} steps of the {summary['steps']} in {run_dir.summary.name}"
        yield Broken("I2", f"{run_dir.metrics.name} has {told}")
    is_trained = marker is not None and marker.kind in ("rl", "sft")
    if is_trained and summary.get("outcome") == "done" and not run_dir.model.is_dir():
        yield Broken("I8", f"a run that is done has no {run_dir.model.name}/")


def _secrets(run_dir: RunDirectory, secrets: Sequence[bytes]) -> Iterator[Broken]:
    if not secrets:
        return
    # What a run that goes on deletes meanwhile is passed over.
    for folder, _, names in os.walk(run_dir.root):
        for path in (Path(folder) / name for name in sorted(names)):
            if path.is_file() and not path.is_symlink() and path.parent != run_dir.secrets:
                for secret in _held(path, secrets):
                    yield Broken("I9", f"{path.relative_to(run_dir.root)} holds {secret[:4]!r}…")


def _held(path: Path, secrets: Sequence[bytes]) -> set[bytes]:
    """Which of the texts a file holds, also across the pieces in which it is read."""
    found: set[bytes] = set()
    overlap = max(map(len, secrets)) - 1
    before = b""
    with suppress(FileNotFoundError), path.open("rb") as file:
        while piece := file.read(_CHUNK):
            text = before + piece
            found |= {secret for secret in secrets if secret in text}
            before = text[-overlap:] if overlap else b""
    return found
