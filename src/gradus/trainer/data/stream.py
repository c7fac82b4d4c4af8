"""The order in which conversations are learned: endless passes, as samples, from a seed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.trainer.data.conversation_samples import ConversationEncoder
from gradus.trainer.data.conversations import Conversation, PlainText
from gradus.trainer.data.mixture import Mixture
from gradus.wire.packing import image_tokens
from gradus.wire.sample import Sample

logger = get_logger(__name__)

_KEPT_TOKENS = 1 << 26
"""Encoded tokens that are kept for the next pass, about 1 GiB; the others are encoded again."""
_DIGEST_BITS = 63
_BACKGROUND_SHARE = 0.2
"""Of the time, once steps run: who encodes in Python holds up who trains."""


@dataclass(frozen=True)
class EncodedRow:
    """The samples of a conversation, or why it is left out."""

    samples: list[Sample]
    skipped: str = ""


@dataclass
class _Passes:
    """Where one data set stands in its passes."""

    size: int
    """Rows in this pass, which those that came later wait for the next."""
    number: int = 0
    position: int = 0
    """Rows drawn in this pass."""
    covered: int = 0
    """Rows of the passes before."""
    taken: int = 0
    """Rows drawn in all."""


class ConversationStream:
    """Endless passes over the conversations, in an order that follows from the seed."""

    def __init__(
        self,
        conversations: Sequence[Conversation | PlainText],
        encoder: ConversationEncoder,
        *,
        max_tokens: int,
        seed: int,
        shuffle: bool,
        kept_tokens: int = _KEPT_TOKENS,
        mixture: Mixture | None = None,
    ) -> None:
        """`mixture` says of which data sets the conversations consist; None means of one."""
        self._conversations = conversations
        self._mixture = mixture or Mixture((len(conversations),), (1.0,))
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._samples: dict[int, list[Sample]] = {}
        self._skipped: dict[int, str] = {}
        self._looked_at: set[int] = set()
        self._free_tokens = kept_tokens
        self._encoding = threading.Lock()
        self._seed = seed
        self._shuffle = shuffle
        self._passes = [_Passes(size) for size in self._mixture.sizes]
        self._drawn_digest = 0
        self._order = self._draws()
        self.num_read = 0
        """Conversations drawn so far, over all passes."""
        self.num_learned = 0
        """Those of them that were not left out."""

    @cached_property
    def num_cut(self) -> int:
        """Replies of episodes that a limit cut, which are never learned."""
        return sum(it.num_cut for it in self._conversations if isinstance(it, Conversation))

    @property
    def num_skipped(self) -> int:
        """Different conversations that are left out, of those looked at."""
        return len(self._skipped)

    @property
    def skipped_share(self) -> float:
        return len(self._skipped) / max(1, len(self._looked_at))

    @property
    def epoch(self) -> float:
        """How often the rows that can be learned were, on average."""
        return self.num_learned / max(1, len(self._conversations) - self.num_skipped)

    def take(self, num_conversations: int) -> list[Sample]:
        """Samples of the next conversations that can be learned; ConfigError when none can."""
        taken: list[Sample] = []
        remaining, misses = num_conversations, [0] * len(self._mixture.sizes)
        while remaining:
            part, index = next(self._order)
            samples = self.look_at(index)
            self.num_read += 1
            taken += samples
            self.num_learned += bool(samples)
            remaining -= bool(samples)
            misses[part] = 0 if samples else misses[part] + 1
            if misses[part] > 2 * self._mixture.sizes[part]:
                first = self._conversations[self._mixture.starts[part]].id
                raise ConfigError(
                    f"none of {self._mixture.sizes[part]} conversations has tokens to learn within "
                    f"{self._max_tokens} tokens (the first is {first}); look at train_roles and "
                    "max_length_tokens"
                )
        return taken

    def encoded(self, conversation: Conversation | PlainText) -> EncodedRow:
        """Of any conversation, while another thread encodes others."""
        with self._encoding:
            return encode_row(self._encoder, conversation, self._max_tokens)

    def look_at(self, index: int) -> list[Sample]:
        """The samples of a conversation, from any thread; ConfigError for one that is wrong."""
        with self._encoding:
            if index in self._skipped:
                return []
            if index in self._samples:
                return self._samples[index]
            conversation = self._conversations[index]
            row = encode_row(self._encoder, conversation, self._max_tokens)
            self._looked_at.add(index)
            if row.skipped:
                level = logging.DEBUG if self._skipped else logging.WARNING
                logger.log(level, "%s is left out: %s", conversation.id, row.skipped)
                self._skipped[index] = row.skipped
                return []
            num_tokens = sum(map(len, row.samples))
            if num_tokens <= self._free_tokens:
                self._free_tokens -= num_tokens
                self._samples[index] = row.samples
            return row.samples

    @property
    def num_conversations(self) -> int:
        return len(self._conversations)

    def counters(self) -> dict[str, int]:
        """What a resume continues from, and compares: nothing of it is of rows not drawn yet."""
        found = {
            "conversations_read": self.num_read,
            "conversations_learned": self.num_learned,
            "data_digest": self._digest(),
        }
        for part, passes in enumerate(self._passes):
            for key, value in dataclasses.asdict(passes).items():
                found[f"data_{part}_{key}"] = value
        return found

    def resume_at(self, counters: Mapping[str, int]) -> bool:
        """Continue where another stream stood; False where rows that it drew have changed. Those
        that it did not draw may, and others may follow."""
        names = [field.name for field in dataclasses.fields(_Passes)]
        wanted = [f"data_{part}_{name}" for part in range(len(self._passes)) for name in names]
        if (
            not all(key in counters for key in wanted)
            or f"data_{len(self._passes)}_size" in counters
        ):
            return False
        self._passes = [
            _Passes(**{name: counters[f"data_{part}_{name}"] for name in names})
            for part in range(len(self._passes))
        ]
        self._drawn_digest = 0
        for part, (passes, size) in enumerate(zip(self._passes, self._mixture.sizes, strict=True)):
            if passes.size > size:
                return False
            order = itertools.islice(self._pass(part, passes), passes.position)
            drawn = {*range(passes.covered), *order}
            self._drawn_digest += sum(self._digest_of(part, index) for index in drawn)
        self._order = self._draws()
        self.num_read = counters["conversations_read"]
        self.num_learned = counters["conversations_learned"]
        return self._digest() == counters["data_digest"]

    def _digest(self) -> int:
        """Of the rows drawn so far and of the weights, whatever the order and the places."""
        weights = self._mixture.weights if len(self._mixture.weights) > 1 else ()
        return (self._drawn_digest + _number_of(repr(weights))) % (1 << _DIGEST_BITS)

    def _digest_of(self, part: int, index: int) -> int:
        conversation = self._conversations[self._mixture.starts[part] + index]
        # The place is left out: data that moved is the same data.
        return _number_of(f"{part} {index} {dataclasses.replace(conversation, id='')!r}")

    def _draws(self) -> Iterator[tuple[int, int]]:
        """Data set and index of each conversation, from where the passes stand."""
        orders = [self._indices(part) for part in range(len(self._passes))]
        for part in self._mixture.parts([passes.taken for passes in self._passes]):
            yield part, self._mixture.starts[part] + next(orders[part])

    def _indices(self, part: int) -> Iterator[int]:
        passes = self._passes[part]
        while True:
            for index in itertools.islice(self._pass(part, passes), passes.position, None):
                passes.position += 1
                passes.taken += 1
                if index >= passes.covered:
                    self._drawn_digest += self._digest_of(part, index)
                yield index
            passes.covered, passes.size = passes.size, self._mixture.sizes[part]
            passes.number, passes.position = passes.number + 1, 0

    def _pass(self, part: int, passes: _Passes) -> Sequence[int]:
        if not self._shuffle:
            return range(passes.size)
        # Each data set has orders of its own; the first those that it has alone.
        seed = (self._seed, passes.number, part) if part else (self._seed, passes.number)
        order: list[int] = np.random.default_rng(seed).permutation(passes.size).tolist()
        return order


class RowsAhead:
    """Encodes every row on a thread, so that a wrong one ends the run before it is drawn."""

    def __init__(self, stream: ConversationStream) -> None:
        self._stream = stream
        self._refusal: Exception | None = None
        self._is_closed = threading.Event()
        self._is_slow = False
        self._thread = threading.Thread(target=self._look, name="rows", daemon=True)
        self._thread.start()

    def wait(self, seconds: float, *, goes_on: bool) -> None:
        """Give it so long before the first step; then it `goes_on` in the background, or ends."""
        self._thread.join(seconds)
        self._is_slow = True
        if not goes_on:
            self._is_closed.set()
        self.check()

    def check(self) -> None:
        """Raise what it found."""
        if self._refusal is not None:
            raise self._refusal

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _look(self) -> None:
        for index in range(self._stream.num_conversations):
            start = time.perf_counter()
            try:
                self._stream.look_at(index)
            except Exception as error:
                self._refusal = error
                return
            spent = time.perf_counter() - start
            if self._is_closed.wait(spent / _BACKGROUND_SHARE - spent if self._is_slow else 0):
                return


def encode_row(
    encoder: ConversationEncoder, conversation: Conversation | PlainText, max_tokens: int
) -> EncodedRow:
    """The samples of a conversation with something to learn; it is left out whole when one of them
    is too long, or its images have too many patches."""
    samples = [s for s in encoder.encode(conversation) if s.arrays.loss_mask[1:].any()]
    limit = encoder.max_image_tokens
    if not samples:
        return EncodedRow([], "nothing to learn")
    if any(len(sample) > max_tokens for sample in samples):
        return EncodedRow([], f"longer than {max_tokens:,} tokens")
    if limit is not None and any(image_tokens([sample.images]) > limit for sample in samples):
        return EncodedRow([], "more patches than micro_batch_patches")
    return EncodedRow(samples)


def _number_of(text: str) -> int:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) >> 1
