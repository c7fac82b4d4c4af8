"""A published version of the weights, the publisher's interface, and how a version is verified."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from gradus.errors import CorruptStateError
from gradus.sealed import MANIFEST_NAME, SealedFolder, open_sealed

if TYPE_CHECKING:
    # The inference server verifies versions before it loads torch.
    from torch import Tensor

BASE_FILE = "gradus_base.json"
"""In the folder of an adapter: the digest of the base model that it was trained with."""


class VersionLabel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest of a version says of it."""

    version: int
    term: int


@dataclass(frozen=True)
class Published:
    """A version that inference may apply."""

    version: int
    directory: Path
    """Where its files lie."""
    digest: str
    """Of its manifest, so of every byte of the version."""


class WeightPublisher(Protocol):
    """The trainer's end of a weight transfer; only rank 0 has one."""

    def wait_for_room(self) -> None:
        """Return when one more version can be published; may take as long as an evaluation."""

    def publish_version(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        """Make `version` available, whole or not at all; FencedError under a newer term."""

    def drain(self) -> None:
        """Return when inference needs nothing more from this process."""

    def close(self) -> None:
        """Release what the transfer holds; published versions stay."""


def verify_version(directory: Path, digest: str) -> SealedFolder[VersionLabel]:
    """The version in `directory`, after every byte of it was checked.

    Refuses with CorruptStateError: a manifest with another digest, a file that is missing, changed,
    not a regular file, or not listed.
    """
    sealed = open_sealed(directory, VersionLabel)
    if sealed.digest != digest:
        raise CorruptStateError(
            f"{directory / MANIFEST_NAME} does not have the digest {digest[:16]}… announced; "
            "publish the version again"
        )
    try:
        sealed.verify()
    except CorruptStateError as error:
        raise CorruptStateError(f"{error}; publish the version again") from error
    return sealed
