"""Images of conversations: found with the rows and checked, then read again when they train.

A message names each by its hash. They are data URLs, files beside the data, bytes of a data set of
the hub, or in the store of a run whose episodes are learned; nothing is fetched.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from gradus.config import ModelConfig
from gradus.errors import ConfigError, ProcessError, ProtocolError
from gradus.heartbeat import beat
from gradus.run.model_files import image_token, merged_patches, model_config
from gradus.trainer.distributed import World
from gradus.wire.images import (
    MAX_IMAGE_BYTES,
    ImageStore,
    bytes_of,
    name_of,
    named_in,
    open_image,
)

_TYPES = frozenset({"image", "image_url", "input_image"})
_KEYS = ("image_url", "image", "url", "path")
"""Where a part has its image, by those who write such data."""
_FILE, _HERE = "file://", "localhost/"
_LONGEST_SCHEME = 16
"""Characters in which an address says that it is one."""
_UNKNOWN = (0, 0)
"""The size of an image that another rank decodes."""
_BETWEEN = 100
"""Images from one sign of life to the next."""


class DataImages:
    """Owns where the images of the data sets lie, and their sizes.

    The ranks of a `world`, which read the same data, decode each image once between them, and tell
    each other the sizes by `exchange`.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = world if world is not None and world.data_size > 1 else None
        self._refusal: ConfigError | None = None
        self._sources: dict[str, bytes | Path] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._known: dict[Path, str] = {}
        self.first = ""
        """The message that shows the first of them; empty where no message shows one."""

    def add(self, place: str, shown: Any, folder: Path | None, store: Path | None) -> str:
        """The hash of an image that can be read; ConfigError with its message for another.

        Files are relative to `folder`, names of images to `store`.
        """
        self.first = self.first or place
        try:
            source = _source(shown, folder, store)
            if isinstance(source, Path) and source in self._known:
                return self._known[source]
            content = _content(source)
            sha256 = hashlib.sha256(content).hexdigest()
            if sha256 not in self._sizes:
                self._sources[sha256] = source
                self._sizes[sha256] = self._size_of(place, content)
        except ProtocolError as error:
            raise ConfigError(f"{place}: {error}") from error
        if isinstance(source, Path):
            self._known[source] = sha256
        if len(self._sizes) % _BETWEEN == 0:
            beat(f"looked at {len(self._sizes)} images")
        return sha256

    def _size_of(self, place: str, content: bytes) -> tuple[int, int]:
        """Decoded, if it is this rank's turn; what it refuses then waits for `exchange`."""
        world, size = self._world, _UNKNOWN
        if world is None or len(self._sizes) % world.data_size == world.data_rank:
            try:
                size = open_image(content).size
            except ProtocolError as error:
                if world is None:
                    raise
                self._refusal = self._refusal or ConfigError(f"{place}: {error}")
        return size

    def exchange(self) -> None:
        """Learn the sizes that the other ranks found; a collective, after the last image.

        ConfigError on a rank that refuses an image, ProcessError on the others.
        """
        if self._world is None:
            return
        sides = torch.tensor([*self._sizes.values()], dtype=torch.float64).flatten()
        found = [*map(int, self._world.added_up(sides))]
        self._sizes = dict(zip(self._sizes, zip(found[::2], found[1::2], strict=True), strict=True))
        if self._refusal is not None:
            raise self._refusal
        if _UNKNOWN in self._sizes.values():
            raise ProcessError("another rank refused an image of the data; its message says why")

    def read(self, sha256: str) -> bytes:
        """The bytes that have this hash; ProtocolError where their file has changed since."""
        source = self._sources[sha256]
        content = _content(source)
        if isinstance(source, Path) and hashlib.sha256(content).hexdigest() != sha256:
            raise ProtocolError(f"{source} holds another image than at the start; restore it")
        return content

    def size(self, sha256: str) -> tuple[int, int]:
        """Width and height in pixels."""
        return self._sizes[sha256]


class ShownImages:
    """The images of one row: in the parts of its messages, or beside them in a list of their own,
    of which a part without an image, or `<image>` in a text, takes the next."""

    def __init__(
        self, images: DataImages, row: Mapping[str, Any], folder: Path | None, store: Path | None
    ) -> None:
        self._images = images
        self._folder, self._store = folder, store
        self.column = "images" if row.get("images") else "image"
        """Which of the row they stand in."""
        beside = row.get(self.column) or []
        beside = beside if isinstance(beside, list | tuple) else [beside]
        self._beside = [image for image in beside if not _is_empty(image)]
        self.shows_any = False
        """True if a message was found to show one."""
        self._next: Iterator[Any] = iter(self._beside)
        self.num_left = len(self._beside)

    @property
    def mark(self) -> str | None:
        """What stands for an image in a text; None where texts show none."""
        return "<image>" if self._beside else None

    def part(self, place: str, part: Any) -> dict[str, str] | None:
        """What a template reads of an image; None for a part that is none."""
        if not isinstance(part, Mapping) or part.get("type") not in _TYPES:
            return None
        found = [part[key] for key in _KEYS if not _is_empty(part.get(key))]
        return self._shown(place, found[0] if found else self._take(place))

    def take(self, place: str) -> dict[str, str]:
        """The next one that stands beside the messages."""
        return self._shown(place, self._take(place))

    def _take(self, place: str) -> Any:
        self.num_left -= 1
        if self.num_left < 0:
            raise ConfigError(
                f"{place} shows more images than the row has in {self.column!r} "
                f"({len(self._beside)}); give each part its own, as one of {', '.join(_KEYS)}, add "
                "what is missing, or write an '<image>' that is a word in another way"
            )
        return next(self._next)

    def _shown(self, place: str, value: Any) -> dict[str, str]:
        self.shows_any = True
        sha256 = self._images.add(place, value, self._folder, self._store)
        return {"type": "image", "image": name_of(sha256)}


class Placeholders:
    """The tokens that stand for an image, as the model's own processor writes them."""

    def __init__(
        self,
        images: DataImages,
        token_id: int,
        processor: Any,
        merge: int,
        around: tuple[int, int] | None = None,
    ) -> None:
        """`merge` patches along each side are one token; `around` are those that the processor
        writes before and after an image, where the template writes none."""
        self.token_id, self.around = token_id, around
        self._images, self._processor, self._merge = images, processor, merge

    @classmethod
    def of(cls, config: ModelConfig, images: DataImages, processor: Any) -> Placeholders:
        found = model_config(config.name)
        around = None
        if found["model_type"] == "gemma4":
            around = (found.get("boi_token_id", 255_999), found.get("eoi_token_id", 258_882))
        merge = merged_patches(found["vision_config"])
        return cls(images, image_token(found), processor, merge, around)

    def count(self, sha256: str) -> int:
        width, height = self._images.size(sha256)
        made_by = self._processor
        if self.around is None:
            patches: int = made_by.get_number_of_image_patches(height, width)
            return patches // self._merge**2
        # Gemma 4's says it by a function beside it alone.
        sized: Any = importlib.import_module(type(made_by).__module__)
        size, merge = made_by.patch_size, made_by.pooling_kernel_size
        rows, columns = sized.get_aspect_ratio_preserving_size(
            height, width, size, made_by.max_soft_tokens * merge**2, merge
        )
        return int(rows * columns // (size * merge) ** 2)


def _is_empty(shown: Any) -> bool:
    """Tell whether it is a cell without an image, as data sets write one."""
    return shown is None or (
        isinstance(shown, Mapping) and all(part is None for part in shown.values())
    )


def _source(shown: Any, folder: Path | None, store: Path | None) -> bytes | Path:
    """Bytes, or the file that has them; ProtocolError for what names none."""
    if isinstance(shown, Mapping):
        if isinstance(shown.get("bytes"), str):
            raise ProtocolError("an image has text as its 'bytes'; write it as a data URL")
        found = [shown[key] for key in ("bytes", *_KEYS) if shown.get(key) is not None]
        shown = found[0] if len(found) > 0 else shown
    if isinstance(shown, bytes | bytearray):
        return bytes(shown)
    if not isinstance(shown, str):
        raise ProtocolError(
            f"an image is a {type(shown).__name__}, expected a data URL or the name of a file"
        )
    if (sha256 := named_in(shown)) is not None and store is not None:
        ImageStore(store).read(sha256)
        return store / sha256
    is_url = shown[: len(_FILE)].lower() == _FILE
    if not is_url and "://" in shown[:_LONGEST_SCHEME]:
        raise ProtocolError(
            f"an image is the address {shown[:60]!r}, and addresses are not fetched; download it "
            "and name the file"
        )
    if shown[:5].lower() == "data:":
        return bytes_of(shown)
    if folder is None:
        raise ProtocolError(
            f"an image is the file {shown[:80]!r}, and a data set of the hub has no folder; "
            "use one that holds the bytes of its images"
        )
    local = shown
    if is_url:
        local = unquote(shown[len(_FILE) :])
        local = local[len(_HERE) - 1 :] if local.lower().startswith(_HERE) else local
    return Path(local) if Path(local).is_absolute() else _below(folder, local)


def _below(folder: Path, local: str) -> Path:
    """A file by its path from the folder of the data; ProtocolError where that leads out of it."""
    file = folder / local
    try:
        is_below = file.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError) as error:
        raise ProtocolError(f"an image is {local[:200]!r}: {error}") from error
    if not is_below:
        raise ProtocolError(
            f"an image is {local[:200]!r}, which lies outside of the data file's folder "
            f"({folder}); write the path from / if it is meant"
        )
    return file


def _content(source: bytes | Path) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        if not source.is_file():
            raise ProtocolError(f"an image is {source}, which is no file; restore it")
        if source.stat().st_size > MAX_IMAGE_BYTES:
            raise ProtocolError(
                f"{source} has {source.stat().st_size:,} bytes, and an image may have "
                f"{MAX_IMAGE_BYTES:,}; give a smaller one"
            )
        return source.read_bytes()
    except (OSError, ValueError) as error:
        raise ProtocolError(f"an image is {str(source)[:200]!r}: {error}") from error
