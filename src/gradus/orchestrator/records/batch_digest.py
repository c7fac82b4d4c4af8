"""A batch in a few hex digits per field, so that two batches can be compared field by field (pure).

The digests cover what trains, not how it is packed: another number of ranks, another size of the
micro batches or another launch of the same run gives the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from gradus.wire.sample import Sample

_HEX_DIGITS = 16


def digest_samples(samples: Sequence[Sample]) -> dict[str, str]:
    """One digest per field over all samples, in their order.

    >>> digest_samples([build_sample()])["token_ids"]  # doctest: +SKIP
    '3f1c0a9be2d47788'
    """
    arrays = [sample.arrays.by_name() for sample in samples]
    names = {name for found in arrays for name in found}
    digests = {name: _digest_arrays([found.get(name) for found in arrays]) for name in names}
    spans = " ".join(f"{s.versions.oldest}-{s.versions.newest}" for s in samples)
    digests["versions"] = hashlib.sha256(spans.encode()).hexdigest()[:_HEX_DIGITS]
    return dict(sorted(digests.items()))


def first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The first field, by name, whose digests are not the same; None when all are."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return name
    return None


def _digest_arrays(arrays: Sequence[np.ndarray | None]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        if array is None:
            digest.update(b"-")
            continue
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:_HEX_DIGITS]
