"""Images of samples: where their placeholders lie, and the store of a run, which holds each once.

A task gives an image as a data URL; addresses are never fetched. A sample names it by the SHA-256
of its bytes. Engine and trainer each make its pixels, by `open_image` or what comes to the same.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import re
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradus.errors import FullDiskError, ProtocolError
from gradus.files import PatientFiles, write_atomically
from gradus.run.paths import IMAGE_NAME

MAX_IMAGE_BYTES = 16 << 20
"""Of one image, as the task gave it."""
MAX_STORE_BYTES = 32 << 30
"""Of all images that a run shows; it deletes none."""
MAX_PIXELS = 50_000_000
"""Of one image, decoded."""
MIN_SIDE = 4
"""Pixels; the sides of a smaller one are taken for its colours by processors."""
MAX_ASPECT = 100
"""The longer side by the shorter one; a processor refuses more."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_TYPES = {
    "image/png": rb"\x89PNG\r\n\x1a\n",
    "image/jpeg": rb"\xff\xd8\xff",
    "image/webp": rb"RIFF....WEBP",
    "image/gif": rb"GIF8[79]a",
    "image/bmp": rb"BM",
}
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA"})
"""Of 8 bits for each of at most three colours, and perhaps an opacity, as Pillow names them."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


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


def bytes_of(url: str) -> bytes:
    """The bytes of a data URL; ProtocolError for any other, and for more than an image may have."""
    head = _DATA_URL.match(url)
    if head is None:
        raise ProtocolError(
            f"an image is given as {url[:60]!r}, expected data:image/...;base64,...; addresses are "
            "not fetched and files not read: let the task set load its images"
        )
    if (len(url) - head.end()) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        raise ProtocolError(
            f"an image has {len(url) * 3 // 4:,} bytes, and may have {MAX_IMAGE_BYTES:,}; "
            "give a smaller one"
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except ValueError as error:
        raise ProtocolError(f"an image is not base64 ({error})") from error


def type_of(content: bytes) -> str | None:
    """What a browser is told that an image is; None for what begins as none of `FORMATS`.

    >>> type_of(b"GIF89a and the rest"), type_of(b"<svg onload='alert(1)'>")
    ('image/gif', None)
    """
    return next((it for it, head in _TYPES.items() if re.match(head, content, re.DOTALL)), None)


def name_of(sha256: str) -> str:
    """What stands in a message for the data URL of an image that is in the store."""
    return f"{IMAGE_NAME}{sha256}"


def named_in(url: str) -> str | None:
    """The hash of an image whose data URL was replaced by its name.

    >>> named_in(name_of("ab" * 32)) == "ab" * 32, named_in("image:../x"), named_in("ab" * 32)
    (True, None, None)
    """
    sha256 = url.removeprefix(IMAGE_NAME)
    return sha256 if sha256 != url and _SHA256.fullmatch(sha256) else None


def open_image(content: bytes) -> Any:
    """A Pillow image of RGB, upright, what is transparent on white; ProtocolError for one that
    cannot be decoded, or that engine and trainer could read differently."""
    pillow = importlib.import_module("PIL.Image")
    try:
        image = pillow.open(io.BytesIO(content), formats=FORMATS)
        if refusal := _refusal(image):
            raise ProtocolError(f"an image {refusal}")
        image.load()
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        text = str(error).partition(" <")[0]
        raise ProtocolError(
            f"an image cannot be decoded ({text}); give {', '.join(FORMATS)}"
        ) from error
    try:
        image = importlib.import_module("PIL.ImageOps").exif_transpose(image)
    except Exception as error:  # whatever Pillow raises for notes of another making
        raise ProtocolError(
            f"an image has EXIF notes that cannot be read ({error}); save it without them"
        ) from error
    if image.mode == "RGB":
        return image  # also with a transparent colour, which the engine does not heed here
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    on_white = pillow.new("RGB", image.size, (255, 255, 255))
    on_white.paste(image, mask=image.getchannel("A"))
    return on_white


def _refusal(image: Any) -> str | None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        return f"has {width} x {height} pixels, and may have {MAX_PIXELS:,}; give a smaller one"
    if min(width, height) < MIN_SIDE:
        return f"has {width} x {height} pixels; each side needs {MIN_SIDE}"
    if max(width, height) > MAX_ASPECT * min(width, height):
        return f"has {width} x {height} pixels; a side may be {MAX_ASPECT} times the other"
    if image.mode not in MODES:
        return f"has pixels of the kind {image.mode}; convert it to RGB of 8 bits"
    if getattr(image, "n_frames", 1) > 1:
        return f"is animated, with {image.n_frames} frames; give one of them"
    return None


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
        self._disk = PatientFiles()
        self._lock = threading.Lock()
        """The episodes of a group bring the same image, each on a thread."""

    def put(self, content: bytes) -> str:
        """Keep the bytes, once; their SHA-256.

        A full disk holds the caller. ProtocolError for an image above the bound, FullDiskError
        where the store would grow above its own, or the disk stays full.
        """
        if not 0 < len(content) <= self._max_image_bytes:
            raise ProtocolError(
                f"an image has {len(content):,} bytes, expected 1 to {self._max_image_bytes:,}"
            )
        sha256 = hashlib.sha256(content).hexdigest()
        with self._lock:
            self._keep(self._path(sha256), content)
        return sha256

    def _keep(self, path: Path, content: bytes) -> None:
        if path.is_file():
            return
        if self._size is None or self._size + len(content) > self._max_bytes:
            self._size = sum(it.stat().st_size for it in self._files())
        if self._size + len(content) > self._max_bytes:
            raise FullDiskError(
                f"{self.folder} holds {self._size:,} bytes of images, and may hold "
                f"{self._max_bytes:,}; give the tasks fewer images, or smaller ones"
            )
        write = partial(write_atomically, content=content, mode=0o600)
        self._disk.stage_by(path, write, num_bytes=len(content))
        self._size += len(content)

    def read(self, sha256: str) -> bytes:
        """The bytes that have this hash; ProtocolError names it and the file where none has."""
        path = self._path(sha256)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ProtocolError(
                f"image {sha256} cannot be read from {path} ({error.strerror}); restore it"
            ) from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ProtocolError(f"image {sha256}: {path} holds other bytes; restore the file")
        return content

    def _files(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (it for it in self.folder.iterdir() if _SHA256.fullmatch(it.name))

    def _path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise ProtocolError(f"an image has the name {sha256[:80]!r}, which is no SHA-256")
        return self.folder / sha256
