"""What every weight transfer promises to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradus.errors import FencedError
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus.weights.broadcast import BroadcastSettings, BroadcastWeights
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import WeightPublisher, verify_version

Build = Callable[[RunDirectory, int], WeightPublisher]

PUBLISHERS: dict[str, Build] = {
    "filesystem": lambda run_dir, term: FilesystemWeights(run_dir, term=term, extra_files={}),
    "broadcast": lambda run_dir, term: BroadcastWeights(
        run_dir,
        term=term,
        extra_files={},
        settings=BroadcastSettings(num_receivers=1, device=torch.device("cpu")),
    ),
}

pytestmark = [pytest.mark.torch, pytest.mark.parametrize("name", sorted(PUBLISHERS))]


def stream(value: float = 1.0) -> Iterator[tuple[str, Tensor]]:
    yield "weight", torch.full((3,), value)
    yield "bias", torch.zeros(2, dtype=torch.bfloat16)


def test_a_publish_announces_what_it_wrote(name: str, tmp_path: Path) -> None:
    with closing(PUBLISHERS[name](RunDirectory(tmp_path), 0)) as publisher:
        published = publisher.publish_version(2, stream())
    assert published.version == 2
    assert verify_version(published.directory, published.digest).label.version == 2


def test_other_weights_have_another_digest(name: str, tmp_path: Path) -> None:
    with closing(PUBLISHERS[name](RunDirectory(tmp_path), 0)) as publisher:
        digests = {publisher.publish_version(v, stream(float(v))).digest for v in (1, 2)}
    assert len(digests) == 2


def test_a_stale_owner_publishes_nothing(name: str, tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    publisher = PUBLISHERS[name](run_dir, 0)
    lease = RunLease.take(run_dir)
    with pytest.raises(FencedError):
        publisher.publish_version(1, stream())
    lease.release()


def test_an_error_in_the_stream_publishes_nothing(name: str, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.zeros(1)
        raise RuntimeError("a rank died")

    run_dir = RunDirectory(tmp_path)
    with pytest.raises(RuntimeError, match="a rank died"):
        PUBLISHERS[name](run_dir, 0).publish_version(1, broken())
    assert not run_dir.version(1).exists()
