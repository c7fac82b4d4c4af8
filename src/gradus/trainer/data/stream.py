"""The order in which conversations are learned: endless passes, as samples, from a seed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence

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
        self._free_tokens = kept_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._order = self._draws([0] * len(self._mixture.sizes))
        self.num_read = 0
        """Conversations drawn so far, over all passes; where a resumed run continues."""
        self.num_skipped = 0
        """Conversations that are too long or hold nothing to learn, seen since the start."""

    @property
    def num_conversations(self) -> int:
        return len(self._conversations)

    def take(self, num_conversations: int) -> list[Sample]:
        """Samples of the next conversations that can be learned; ConfigError when none can."""
        taken: list[Sample] = []
        remaining, misses = num_conversations, [0] * len(self._mixture.sizes)
        while remaining:
            part, index = next(self._order)
            samples = self._learnable(index)
            self.num_read += 1
            taken += samples
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

    def go_to(self, num_read: int) -> None:
        """Continue as if `num_read` conversations had been drawn, without reading them again."""
        self._order = self._draws(self._mixture.taken(num_read))
        self.num_read = num_read

    def digest(self) -> int:
        """A number that changes with the conversations and their order on disk, 63 bits."""
        digest = hashlib.sha256()
        if len(self._mixture.sizes) > 1:
            digest.update(repr(self._mixture).encode())
        for conversation in self._conversations:
            # The place is left out: data that moved is the same data.
            content = repr(dataclasses.replace(conversation, id=""))
            digest.update(content.encode(errors="surrogatepass"))
        return int.from_bytes(digest.digest()[:8]) >> 1

    def _learnable(self, index: int) -> list[Sample]:
        if index in self._samples:
            return self._samples[index]
        conversation = self._conversations[index]
        samples = learnable_samples(self._encoder, conversation, self._max_tokens)
        if not samples:
            self.num_skipped += 1
            is_bounded = self._encoder.max_image_tokens is not None
            images = ", or more patches than micro_batch_patches" if is_bounded else ""
            level = logging.WARNING if self.num_skipped == 1 else logging.DEBUG
            logger.log(
                level, "%s is skipped: too long or nothing to learn%s", conversation.id, images
            )
        num_tokens = sum(map(len, samples))
        if num_tokens <= self._free_tokens:
            self._free_tokens -= num_tokens
            self._samples[index] = samples
        return samples

    def _draws(self, taken: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Data set and index of each conversation, after so many of each data set."""
        orders = [self._passes(part, count) for part, count in enumerate(taken)]
        for part in self._mixture.parts(taken):
            yield part, next(orders[part])

    def _passes(self, part: int, num_drawn: int) -> Iterator[int]:
        count, start = self._mixture.sizes[part], self._mixture.starts[part]
        number, position = divmod(num_drawn, count)
        for each in itertools.count(number):
            order: Iterable[int] = range(count)
            if self._shuffle:
                # Each data set has orders of its own; the first those that it has alone.
                seed = (self._seed, each, part) if part else (self._seed, each)
                order = np.random.default_rng(seed).permutation(count).tolist()
            yield from (start + i for i in itertools.islice(order, position, None))
            position = 0


def learnable_samples(
    encoder: ConversationEncoder, conversation: Conversation | PlainText, max_tokens: int
) -> list[Sample]:
    """The samples of a conversation with something to learn; none when one of them is too long, or
    its images have too many patches."""
    samples = [s for s in encoder.encode(conversation) if s.arrays.loss_mask[1:].any()]
    limit = encoder.max_image_tokens
    is_large = limit is not None and any(image_tokens([it.images]) > limit for it in samples)
    return [] if is_large or any(len(it) > max_tokens for it in samples) else samples
