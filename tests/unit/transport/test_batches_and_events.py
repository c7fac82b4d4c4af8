"""What a transport must hold: numbered, at least once, fenced."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from builders import build_micro_batch, build_sample

from gradus.errors import DeadlineError, FencedError, ProtocolError
from gradus.run.paths import RunDirectory
from gradus.transport import BatchesEnded, SpoolReceiver, SpoolSender
from gradus.wire.codec import encode
from gradus.wire.events import Event, PolicyPublished, StepFinished, TrainerDone
from gradus.wire.micro_batch import Batch
from gradus.wire.versions import VersionSpan


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def build_batch(step: int, *, term: int = 1, ranks: int = 1, seed: int = 0) -> Batch:
    parts = [[build_micro_batch([build_sample(seed=seed + r)])] for r in range(ranks)]
    return Batch(step, term, VersionSpan(0, 0), parts)


def ends(run_dir: RunDirectory) -> tuple[SpoolSender, SpoolReceiver]:
    sender = SpoolSender(run_dir, term=1)
    return sender, SpoolReceiver(run_dir, term=1, rank=0)


def receive(receiver: SpoolReceiver, step: int) -> int:
    return receiver.receive(step, timeout_seconds=60).step


async def test_a_batch_arrives_as_it_was_sent(run_dir: RunDirectory) -> None:
    sender, receiver = ends(run_dir)
    batch = build_batch(0)
    await sender.send(batch)
    arrived = receiver.receive(0, timeout_seconds=60)
    assert [encode(m) for m in arrived.micro_batches] == [encode(m) for m in batch.ranks[0]]


async def test_every_rank_gets_its_own_part(run_dir: RunDirectory) -> None:
    sender, first = ends(run_dir)
    second = SpoolReceiver(run_dir, term=1, rank=1)
    batch = build_batch(0, ranks=2)
    await sender.send(batch)
    parts = [r.receive(0, timeout_seconds=60).micro_batches[0] for r in (first, second)]
    assert [p.sample_ids for p in parts] == [m[0].sample_ids for m in batch.ranks]


async def test_a_rank_without_a_part_is_refused(run_dir: RunDirectory) -> None:
    sender, _ = ends(run_dir)
    await sender.send(build_batch(0, ranks=1))
    with pytest.raises(ProtocolError, match="parts for 1 ranks, this is rank 3"):
        SpoolReceiver(run_dir, term=1, rank=3).receive(0, timeout_seconds=60)


async def test_a_batch_can_be_received_again(run_dir: RunDirectory) -> None:
    sender, receiver = ends(run_dir)
    await sender.send(build_batch(0))
    assert [receive(receiver, 0), receive(receiver, 0)] == [0, 0]


@pytest.mark.shows("F31")
async def test_a_waiting_rank_is_woken_by_the_batch(run_dir: RunDirectory) -> None:
    sender, receiver = ends(run_dir)
    waiting = asyncio.create_task(asyncio.to_thread(receive, receiver, 4))
    await sender.send(build_batch(4))
    assert await waiting == 4


def test_a_missing_batch_ends_with_the_deadline(run_dir: RunDirectory) -> None:
    receiver = SpoolReceiver(run_dir, term=1, rank=0)
    with pytest.raises(DeadlineError, match=r"batch 7 .* from the orchestrator in 0.02 s"):
        receiver.receive(7, timeout_seconds=0.02)


async def test_the_end_of_the_batches_wakes_who_waits_and_hides_none_before_it(
    run_dir: RunDirectory,
) -> None:
    sender, receiver = ends(run_dir)
    waiting = asyncio.create_task(asyncio.to_thread(receive, receiver, 1))
    await sender.send(build_batch(0))
    await sender.end(1)
    with pytest.raises(BatchesEnded):
        await waiting
    assert receive(receiver, 0) == 0


async def test_the_end_that_an_older_launch_announced_is_none(run_dir: RunDirectory) -> None:
    sender, _ = ends(run_dir)
    await sender.end(0)
    with pytest.raises(DeadlineError):
        SpoolReceiver(run_dir, 2, 0).receive(0, timeout_seconds=0.05)


@pytest.mark.shows("F56")
async def test_a_resend_is_no_duplicate(run_dir: RunDirectory) -> None:
    sender, receiver = ends(run_dir)
    await sender.send(build_batch(0))
    await sender.send(build_batch(0))
    await sender.send(build_batch(1))
    assert receive(receiver, 1) == 1


async def test_the_same_step_with_other_content_is_refused(run_dir: RunDirectory) -> None:
    sender, _ = ends(run_dir)
    await sender.send(build_batch(0))
    with pytest.raises(ProtocolError, match="batch 0 was already sent with other content"):
        await sender.send(build_batch(0, seed=9))


async def test_a_batch_of_another_term_is_not_sent(run_dir: RunDirectory) -> None:
    sender, _ = ends(run_dir)
    with pytest.raises(ProtocolError, match="carries term 2, its sender has 1"):
        await sender.send(build_batch(0, term=2))


@pytest.mark.shows("F58", "I6")
@pytest.mark.parametrize("term", [1, 3])
async def test_a_batch_of_another_term_stops_the_trainer(run_dir: RunDirectory, term: int) -> None:
    receiver = SpoolReceiver(run_dir, term=2, rank=0)
    sender = SpoolSender(run_dir, term=term)
    await sender.send(build_batch(0, term=term))
    with pytest.raises(FencedError, match=f"under term {term}; this trainer has term 2"):
        receiver.receive(0, timeout_seconds=60)


@pytest.mark.shows("F56")
async def test_events_arrive_in_order_and_once(run_dir: RunDirectory) -> None:
    sender, receiver = ends(run_dir)
    sent: list[Event] = [
        StepFinished(0, 1, {"loss/total/mean": 0.5}),
        PolicyPublished(1, 1, "weights/version_00000001", "ab"),
        TrainerDone(0, 1),
    ]
    for event in sent:
        receiver.send_event(event)
    assert [await sender.receive_event() for _ in sent] == sent
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sender.receive_event(), 0.05)


@pytest.mark.shows("F58")
async def test_events_of_an_older_term_are_ignored(run_dir: RunDirectory) -> None:
    SpoolReceiver(run_dir, term=1, rank=0).send_event(TrainerDone(0, 1))
    sender = SpoolSender(run_dir, term=2)
    SpoolReceiver(run_dir, term=2, rank=0).send_event(TrainerDone(5, 2))
    assert await asyncio.wait_for(sender.receive_event(), 60) == TrainerDone(5, 2)


@pytest.mark.shows("F58", "I6")
async def test_an_event_of_a_newer_term_stops_the_orchestrator(run_dir: RunDirectory) -> None:
    sender, _ = ends(run_dir)
    SpoolReceiver(run_dir, term=2, rank=0).send_event(TrainerDone(0, 2))
    with pytest.raises(FencedError, match="term 2, this orchestrator has term 1"):
        await asyncio.wait_for(sender.receive_event(), 60)


def test_an_event_with_another_term_is_not_sent(run_dir: RunDirectory) -> None:
    receiver = SpoolReceiver(run_dir, term=1, rank=0)
    with pytest.raises(ProtocolError, match="TrainerDone carries term 2"):
        receiver.send_event(TrainerDone(0, 2))


async def test_a_whole_run_of_steps_flows_through_the_spool(run_dir: RunDirectory) -> None:
    sender, receiver = ends(run_dir)
    seen: list[int] = []

    def train() -> None:
        for step in range(6):
            seen.append(receive(receiver, step))
            receiver.send_event(StepFinished(step, 1, {}))

    trainer = threading.Thread(target=train)
    trainer.start()
    for step in range(6):
        await asyncio.wait_for(sender.send(build_batch(step)), 60)
    events = [await asyncio.wait_for(sender.receive_event(), 60) for _ in range(6)]
    await asyncio.to_thread(trainer.join, 60)
    assert seen == list(range(6))
    assert [e.step for e in events if isinstance(e, StepFinished)] == list(range(6))
