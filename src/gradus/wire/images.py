"""Images of samples: where their placeholders lie, and the store of a run, which holds each once.

A sample names an image by the SHA-256 of the bytes that the task gave; whoever needs its pixels
reads these bytes and makes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradus.errors import FullDiskError, ProtocolError
from gradus.files import write_atomically

MAX_IMAGE_BYTES = 16 << 20
"""Of one image, as the task gave it."""
MAX_STORE_BYTES = 32 << 30
"""Of all images that a run keeps at one time."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ImageSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One image in the tokens of a sample.

    >>> ImageSpan("ab" * 32, start=3, length=6).end
    9
    """

    sha256: str
    """Of the original bytes, in hex."""
    start: int
    """Its first placeholder, counted from the sample's first token."""
    length: int
    """Its placeholders, which lie side by side."""

    @property
    def end(self) -> int:
        return self.start + self.length


def check_spans(spans: Sequence[ImageSpan], loss_mask: NDArray[np.bool_], what: str) -> None:
    """ProtocolError, with the image of `what`, unless they lie one behind the other in the tokens
    of `loss_mask`, none of them a target."""
    free, num_tokens = 0, len(loss_mask)
    for number, span in enumerate(spans):
        image = f"{what}: image {number}"
        if not _SHA256.fullmatch(span.sha256):
            raise ProtocolError(f"{image} has the name {span.sha256[:80]!r}, which is no SHA-256")
        if span.length < 1:
            raise ProtocolError(f"{image} has {span.length} placeholders, expected one or more")
        if span.start < free or span.end > num_tokens:
            raise ProtocolError(
                f"{image} has the tokens {span.start} to {span.end}, expected some between {free} "
                f"and {num_tokens}"
            )
        if bool(loss_mask[span.start : span.end].any()):
            raise ProtocolError(f"{image} has placeholders that are to be learned; none is sampled")
        free = span.end


def whole_length(spans: Sequence[ImageSpan], length: int) -> int:
    """The longest beginning of at most `length` tokens that cuts through no image.

    >>> whole_length([ImageSpan("ab" * 32, start=3, length=6)], 5)
    3
    """
    return next((span.start for span in spans if span.start < length < span.end), length)


class ImageStore:
    """Owns a folder of images, each a file whose name is the SHA-256 of its bytes."""

    def __init__(
        self,
        folder: Path,
        *,
        max_image_bytes: int = MAX_IMAGE_BYTES,
        max_bytes: int = MAX_STORE_BYTES,
    ) -> None:
        self.folder = folder
        self._max_image_bytes = max_image_bytes
        self._max_bytes = max_bytes
        self._size: int | None = None

    def put(self, content: bytes) -> str:
        """Keep the bytes, once; their SHA-256.

        ProtocolError for an image above the bound, FullDiskError where the store would grow above
        its own.
        """
        if not 0 < len(content) <= self._max_image_bytes:
            raise ProtocolError(
                f"an image has {len(content):,} bytes, expected 1 to {self._max_image_bytes:,}"
            )
        sha256 = hashlib.sha256(content).hexdigest()
        path = self._path(sha256)
        if path.is_file():
            return sha256
        if self._size is None:
            self._size = sum(it.stat().st_size for it in self._files())
        if self._size + len(content) > self._max_bytes:
            raise FullDiskError(
                f"{self.folder} holds {self._size:,} bytes of images, and may hold "
                f"{self._max_bytes:,}; keep fewer episodes, or give the tasks smaller images"
            )
        write_atomically(path, content, mode=0o600)
        self._size += len(content)
        return sha256

    def read(self, sha256: str) -> bytes:
        """The bytes that have this hash; ProtocolError names it and the file where none has."""
        path = self._path(sha256)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ProtocolError(f"image {sha256} cannot be read from {path}: {error}") from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ProtocolError(f"image {sha256}: {path} holds other bytes; restore the file")
        return content

    def keep_only(self, named: set[str]) -> int:
        """Remove every other image; how many these were."""
        gone = [path for path in self._files() if path.name not in named]
        for path in gone:
            path.unlink(missing_ok=True)
        self._size = None
        return len(gone)

    def _files(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (it for it in self.folder.iterdir() if _SHA256.fullmatch(it.name))

    def _path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise ProtocolError(f"an image has the name {sha256[:80]!r}, which is no SHA-256")
        return self.folder / sha256
