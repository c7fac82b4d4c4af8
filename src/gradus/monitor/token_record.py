"""What was trained, token by token: `tokens/step_N/rank_R.bin`, one file of each rank with batches.

    gradus-tokens 2     a line: the version of the form; 1 had no reference logprobs
    entry               as in `replay/`: a header, the id of a sample, and a `TokenRecord`

The trainer writes it. A file is of one step and replaced as a whole when the step is trained again;
what a kill cut off at its end is not an entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from gradus.errors import ConfigError, CorruptStateError
from gradus.run.paths import RunDirectory
from gradus.run.recording import iter_entries, pack_entry, read_body
from gradus.wire.codec import decode, encode
from gradus.wire.tokens import BoolArray, FloatArray, IntArray
from gradus.wire.versions import VersionRuns

FORM = 2
"""Raised when an older gradus could not read what this one writes."""
_NAME = "gradus-tokens"
_FIRST_LINE = re.compile(rb"gradus-tokens (\d{1,6})\n")
_FIRST_BYTES = 32


class TokenRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The T tokens of one sample, and the numbers of those N that trained, in their order."""

    sample_id: str
    term: int
    versions: VersionRuns
    """Which version sampled which tokens, as in `Sample`."""
    token_ids: IntArray
    """[T]."""
    is_trained: BoolArray
    """[T]."""
    sampling_logprobs: FloatArray
    """[N] nats, of the engine."""
    policy_logprobs: FloatArray
    """[N] nats, of the trainer in the forward whose gradient was taken."""
    entropies: FloatArray
    """[N] nats, of the trainer."""
    advantages: FloatArray
    """[N]."""
    loss_weights: dict[str, FloatArray]
    """[N], of each component with a weight in the sample."""
    pushes: FloatArray
    """[N] by how much the step pushed the logprob up: -dL / d logprob, times the tokens that L is
    divided by. Advantage times weight times ratio under most losses; 0 where the loss drops it."""
    reference_logprobs: FloatArray | None = None
    """[N] nats, NaN where the reference model did not score; None where it scored nothing."""


def pack_records(records: Iterable[TokenRecord]) -> bytes:
    """The content of a file."""
    entries = (pack_entry(record.sample_id, encode(record)) for record in records)
    return b"".join((f"{_NAME} {FORM}\n".encode(), *entries))


def record_folder(run_dir: RunDirectory, step: int) -> Path:
    return run_dir.tokens / f"step_{step}"


def record_file(run_dir: RunDirectory, step: int, rank: int) -> Path:
    return record_folder(run_dir, step) / f"rank_{rank}.bin"


def read_records(run_dir: RunDirectory, step: int, episode_id: str) -> Iterator[TokenRecord]:
    """What is kept of an episode's samples in a step; nothing where nothing is; errors as below."""

    def is_of_episode(sample_id: str) -> bool:
        return sample_id.rpartition("/")[0].rpartition("/")[0] == episode_id

    return all_records(run_dir, step, is_wanted=is_of_episode)


def all_records(
    run_dir: RunDirectory, step: int, *, is_wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[TokenRecord]:
    """What is kept of a step's samples; nothing where nothing is.

    ConfigError for a file of a newer gradus, CorruptStateError for a damaged one.
    """
    for path in sorted(record_folder(run_dir, step).glob("rank_*.bin")):
        try:
            with path.open("rb") as file:
                start = _check_first_line(path, file.read(_FIRST_BYTES))
                for entry in iter_entries(path, start=start) if start else ():
                    if is_wanted(entry.id):
                        yield decode(read_body(file, entry, path), TokenRecord)
        except FileNotFoundError:
            continue  # Deleted for `orchestrator.keep_gib` meanwhile.


def _check_first_line(path: Path, first: bytes) -> int:
    """Where the entries begin; 0 for a file that was cut off before."""
    found = _FIRST_LINE.match(first)
    if found is None:
        if len(first) < _FIRST_BYTES and f"{_NAME} {FORM}\n".encode().startswith(first):
            return 0
        raise CorruptStateError(
            f"{path} does not begin as a record of tokens; delete or restore it"
        )
    if int(found[1]) > FORM:
        raise ConfigError(
            f"{path} was written by a newer gradus, in form {int(found[1])}; this one reads form "
            f"{FORM}: look at the run with the version that trained it"
        )
    return found.end()
