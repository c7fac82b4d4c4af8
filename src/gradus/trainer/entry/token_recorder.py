"""What the trainer keeps of the tokens of a step, beside what the engine said of them.

    forward ──► observe: logprobs and entropies stay on the device
    backward ─► the gradient of each logprob, which is all that any loss does to its token
    step over ─► write: copied, cut into samples, written on a thread

Ranks of one context group see the whole logprobs, so the first of them keeps them; each
data-parallel rank has a file of its own, so that nothing is gathered.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradus.files import write_atomically
from gradus.log import get_logger
from gradus.monitor.token_record import TokenRecord, pack_records, record_file, record_folder
from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import World
from gradus.trainer.losses import clamped_exp
from gradus.trainer.model.policy_model import TokenScores
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.sample import group_of
from gradus.wire.tokens import FloatArray

logger = get_logger(__name__)
MAX_BYTES = 16 << 20
"""Of one step, over all ranks; the groups of the largest hashes are left out above it."""


@dataclass
class _Seen:
    """One micro batch; the tensors are [T], on the device."""

    micro_batch: MicroBatch
    logprobs: Tensor
    entropies: Tensor
    scale: float
    gradients: Tensor | None = None

    def take_gradients(self, gradients: Tensor) -> None:
        """Called on the way back."""
        self.gradients = gradients


class TokenRecorder:
    """Owns `tokens/` of the run, as far as this rank writes it. What cannot be written is lost."""

    def __init__(self, run_dir: RunDirectory, *, share: float, term: int, world: World) -> None:
        """`share` of the groups, the same in every run, are kept."""
        self.failed = 0
        """Steps of which nothing is kept because it could not be written."""
        self._run_dir = run_dir
        self._term = term
        self._world = world
        self._is_writer = world.context is None or world.context.rank == 0
        self._end_of_share = share * (1 << 32)
        self._seen: list[_Seen] = []
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokens")

    def observe(self, micro_batch: MicroBatch, scores: TokenScores, num_counted: int) -> None:
        """Note a forward before its backward; `num_counted` tokens divide the loss."""
        if not self._is_writer or not any(map(self._is_chosen, micro_batch.sample_ids)):
            return
        # The ladder multiplies the loss by the number of ranks, for FSDP's average over them.
        seen = _Seen(
            micro_batch,
            scores.logprobs.detach(),
            scores.entropies.detach(),
            -num_counted / self._world.size,
        )
        if scores.logprobs.requires_grad:
            scores.logprobs.register_hook(seen.take_gradients)  # type: ignore[no-untyped-call]
        self._seen.append(seen)

    def write(self, step: int) -> None:
        """Keep what was seen since the last call as that of `step`.

        A step that ends before the one before is written keeps nothing.
        """
        seen, self._seen = self._seen, []
        if not self._is_writer:
            return
        if self._writing is not None and not self._writing.done():
            self._fail(step, "the disk is still busy with the step before")
            return
        records = [record for micro_batch in seen for record in self._records(micro_batch)]
        self._writing = self._thread.submit(self._write, step, records)

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()

    def _is_chosen(self, sample_id: str) -> bool:
        return _hash(sample_id) < self._end_of_share

    def _records(self, seen: _Seen) -> Iterator[TokenRecord]:
        batch, arrays = seen.micro_batch, seen.micro_batch.arrays
        logprobs, entropies = _on_host(seen.logprobs), _on_host(seen.entropies)
        gradients = np.zeros_like(logprobs) if seen.gradients is None else _on_host(seen.gradients)
        is_trained = np.any([it != 0 for it in arrays.loss_weights.values()], axis=0)
        # As `trainer/tensors.py` has it: nothing predicts the first token of a sample.
        is_trained &= arrays.loss_mask & (batch.position_ids > 0)
        ends = np.cumsum(batch.sequence_lengths)
        for number, (sample_id, end) in enumerate(zip(batch.sample_ids, ends, strict=True)):
            if not self._is_chosen(sample_id):
                continue
            of_sample = slice(end - batch.sequence_lengths[number], end)
            chosen = np.flatnonzero(is_trained[of_sample]) + of_sample.start
            weights = {name: it[chosen] for name, it in arrays.loss_weights.items()}
            references = arrays.reference_logprobs[chosen]
            yield TokenRecord(
                sample_id=sample_id,
                term=self._term,
                versions=batch.token_versions[number] if batch.token_versions else [],
                token_ids=arrays.token_ids[of_sample],
                is_trained=is_trained[of_sample],
                sampling_logprobs=arrays.sampling_logprobs[chosen],
                policy_logprobs=logprobs[chosen],
                entropies=entropies[chosen],
                advantages=arrays.advantages[chosen],
                loss_weights={name: weight for name, weight in weights.items() if weight.any()},
                pushes=(gradients[chosen] * seen.scale).astype(np.float32),
                reference_logprobs=None if np.isnan(references).all() else references,
            )

    def _write(self, step: int, records: Sequence[TokenRecord]) -> None:
        """On the thread. What an earlier training of the step left goes first."""
        try:
            self._delete_earlier(step)
            kept = _within(sorted(records, key=lambda it: _hash(it.sample_id)), self._max_bytes)
            if kept:
                path = record_file(self._run_dir, step, self._world.data_rank)
                write_atomically(path, pack_records(kept))
        except Exception as error:  # No record may end a run, whatever is wrong with it.
            self._fail(step, str(error))

    @property
    def _max_bytes(self) -> int:
        return MAX_BYTES // self._world.data_size

    def _delete_earlier(self, step: int) -> None:
        """The file of this rank, and on the first rank those of ranks that are no more."""
        rank, size = self._world.data_rank, self._world.data_size
        for path in record_folder(self._run_dir, step).glob("rank_*.bin"):
            found = path.stem.removeprefix("rank_")
            number = int(found) if found.isdecimal() else rank
            if number == rank or (rank == 0 and number >= size):
                path.unlink(missing_ok=True)

    def _fail(self, step: int, reason: str) -> None:
        self.failed += 1
        if self.failed == 1:
            logger.warning("the tokens of step %d are not kept: %s", step, reason)


class SourceNumbers:
    """Owns entropy and mismatch of the rl tokens of each source, where a run has several: sums
    over the forwards since the last `take`, which stay on the device until then.
    """

    def __init__(self, sources: Sequence[str], world: World) -> None:
        self._places = {name: place for place, name in enumerate(sources)}
        self._world = world
        self._sums = self._zeros()

    def _zeros(self) -> Tensor:
        """Tokens, entropy and mismatch KL of each source."""
        shape = (len(self._places), 3)
        return torch.zeros(shape, dtype=torch.float64, device=self._world.device)

    @torch.no_grad()
    def observe(self, micro_batch: MicroBatch, scores: TokenScores, num_counted: int) -> None:
        """Add a forward."""
        del num_counted
        weights = micro_batch.arrays.loss_weights.get("rl")
        if len(self._places) < 2 or weights is None or not micro_batch.environments:
            return
        is_counted = (weights != 0) & micro_batch.arrays.loss_mask & (micro_batch.position_ids > 0)
        chosen = np.flatnonzero(is_counted)
        places = np.array([self._places.get(name, -1) for name in micro_batch.environments])
        if (places < 0).any():
            return  # of a batch that another config made
        of_token = np.repeat(places, micro_batch.sequence_lengths)[chosen]
        rows = self._moved(chosen)
        sampled = self._moved(micro_batch.arrays.sampling_logprobs[chosen])
        drift = scores.logprobs[rows].float() - sampled
        entropies = scores.entropies[rows].float()
        values = [torch.ones_like(drift), entropies, clamped_exp(drift) - drift - 1.0]
        self._sums.index_add_(0, self._moved(of_token), torch.stack(values, 1).double())

    def _moved(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._world.device)

    def take(self) -> dict[str, float]:
        """Of every source that trained, over all ranks, which must all call it."""
        if len(self._places) < 2:
            return {}
        sums, self._sums = self._sums, self._zeros()
        totals = np.array(self._world.added_up(sums.flatten())).reshape(-1, 3)
        found = {}
        for name, (tokens, entropy, mismatch) in zip(self._places, totals, strict=True):
            if tokens:
                found[f"loss/{name}/entropy/mean"] = float(entropy / tokens)
                found[f"loss/{name}/mismatch_kl/mean"] = float(mismatch / tokens)
        return found


def _hash(sample_id: str) -> int:
    """The same for all samples of a group, so that groups are kept whole."""
    return zlib.crc32(group_of(sample_id).encode())


def _on_host(tensor: Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array


def _within(records: Sequence[TokenRecord], max_bytes: int) -> Sequence[TokenRecord]:
    sizes = [_size(record) for record in records]
    return records[: int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right"))]


def _size(record: TokenRecord) -> int:
    """Bytes in the file, about."""
    per_trained = 4 * (5 + len(record.loss_weights) + (record.reference_logprobs is not None))
    return 256 + 5 * len(record.token_ids) + per_trained * len(record.pushes)
