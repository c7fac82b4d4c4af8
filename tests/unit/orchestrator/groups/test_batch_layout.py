"""How a batch is laid out for the trainer: ranks, micro batches, updates."""

from __future__ import annotations

import msgspec
import pytest
from builders import build_sample
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import ProtocolError
from gradus.orchestrator.groups.packing import Layout, build_batch, split_by_group
from gradus.wire.micro_batch import RankBatch
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan


def samples_of(group_sizes: list[int]) -> list[Sample]:
    """Groups of that many samples, one after the other."""
    return [
        msgspec.structs.replace(
            build_sample(4 + (3 * group + number) % 9, seed=10 * group + number),
            group_id=f"group-{group}",
        )
        for group, size in enumerate(group_sizes)
        for number in range(size)
    ]


@given(
    group_sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    num_updates=st.integers(1, 9),
    num_ranks=st.integers(1, 3),
)
def test_every_sample_trains_in_exactly_one_update(
    group_sizes: list[int], num_updates: int, num_ranks: int
) -> None:
    samples = samples_of(group_sizes)
    layout = Layout(num_ranks, max_tokens=30, num_updates=num_updates)
    batch = build_batch(samples, step=3, term=1, layout=layout)
    updates = [rank.updates() for rank in batch.by_rank()]
    assert len({len(of_rank) for of_rank in updates}) == 1
    trained = []
    for of_ranks in zip(*updates, strict=True):
        assert len({len(micro_batches) for micro_batches in of_ranks}) == 1
        trained.append({id for parts in of_ranks for part in parts for id in part.sample_ids})
    expected = [{s.id for s in part} for part in split_by_group(samples, num_updates)]
    assert trained == expected
    assert sum(map(len, trained)) == len(samples)


def test_the_parts_differ_by_one_group_at_most_and_keep_groups_whole() -> None:
    parts = split_by_group(samples_of([2, 1, 3, 1, 2]), 3)
    groups = [sorted({sample.group_id for sample in part}) for part in parts]
    assert groups == [["group-0"], ["group-1", "group-2"], ["group-3", "group-4"]]


def test_one_update_is_the_batch_as_it_always_was() -> None:
    samples = samples_of([2, 2])
    batch = build_batch(samples, step=0, term=1, layout=Layout(1, max_tokens=30))
    assert batch.update_sizes == []
    [rank] = batch.by_rank()
    assert rank.updates() == [rank.micro_batches]


@pytest.mark.parametrize("sizes", [[1, 2], [0, 2], [3], [-1, 3]])
def test_updates_that_do_not_fit_the_micro_batches_are_refused(sizes: list[int]) -> None:
    layout = Layout(1, max_tokens=30, num_updates=2)
    batch = build_batch(samples_of([1, 1]), step=0, term=1, layout=layout)
    odd = RankBatch(0, 1, 0, VersionSpan(0, 0), batch.ranks[0], sizes)
    with pytest.raises(ProtocolError, match="do not add up"):
        odd.updates()
