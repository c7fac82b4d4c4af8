"""What a sender knows about its batches, without any transport."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import FencedError, ProtocolError
from gradus.transport.spool import SendLedger
from gradus.wire.events import BatchReceived, StepFinished, TrainerDone
from gradus.wire.micro_batch import Batch
from gradus.wire.versions import VersionSpan


def batch(step: int, *, term: int = 1) -> Batch:
    return Batch(step, term, VersionSpan(0, 0), [])


def test_room_comes_back_with_the_acknowledgement() -> None:
    ledger = SendLedger(term=1, capacity=1)
    ledger.note_sent(0, "a")
    assert not ledger.has_room
    ledger.note_event(BatchReceived(0, 1))
    assert ledger.has_room


def test_an_acknowledgement_that_comes_before_the_sender_knows_frees_the_place_too() -> None:
    """The trainer is quicker than the thread that wrote the batch: a run hung for good."""
    ledger = SendLedger(term=1, capacity=1)
    ledger.note_event(BatchReceived(0, 1))
    ledger.note_sent(0, "a")
    assert ledger.has_room
    ledger.note_sent(1, "b")
    assert not ledger.has_room


def test_events_of_an_older_term_say_nothing_about_this_one() -> None:
    ledger = SendLedger(term=2, capacity=1)
    ledger.note_event(BatchReceived(3, 1))
    ledger.note_event(StepFinished(3, 1, {}))
    assert not ledger.is_resend(batch(2, term=2), "a")
    ledger.note_sent(2, "a")
    assert not ledger.has_room


def test_a_batch_found_acknowledged_takes_no_room() -> None:
    ledger = SendLedger(term=1, capacity=1)
    ledger.note_sent(0, "a", acknowledged=True)
    assert ledger.has_room
    assert ledger.is_resend(batch(0), "a")


def test_an_acknowledgement_that_comes_twice_frees_one_place() -> None:
    ledger = SendLedger(term=1, capacity=2)
    ledger.note_sent(0, "a")
    ledger.note_sent(1, "b")
    ledger.note_event(BatchReceived(0, 1))
    ledger.note_event(BatchReceived(0, 1))
    ledger.note_sent(2, "c")
    assert not ledger.has_room


def test_a_trained_step_is_never_sent_again() -> None:
    ledger = SendLedger(term=1, capacity=2)
    ledger.note_event(StepFinished(4, 1, {}))
    assert ledger.is_resend(batch(3), "whatever")
    assert not ledger.is_resend(batch(5), "new")


def test_another_content_or_term_is_refused() -> None:
    ledger = SendLedger(term=1, capacity=2)
    ledger.note_sent(0, "a")
    with pytest.raises(ProtocolError, match="already sent with other content"):
        ledger.is_resend(batch(0), "b")
    with pytest.raises(ProtocolError, match="carries term 3"):
        ledger.is_resend(batch(1, term=3), "c")
    with pytest.raises(FencedError, match="answers to term 2"):
        ledger.note_event(TrainerDone(0, 2))


@pytest.mark.shows("F57", "I10")
@given(trained=st.integers(0, 30), capacity=st.integers(1, 4))
def test_the_number_of_unacknowledged_batches_is_bounded(trained: int, capacity: int) -> None:
    ledger = SendLedger(term=1, capacity=capacity)
    waiting: list[int] = []
    for step in range(trained):
        if not ledger.has_room:
            oldest = waiting.pop(0)
            ledger.note_event(BatchReceived(oldest, 1))
            ledger.note_event(StepFinished(oldest, 1, {}))
        assert ledger.has_room
        ledger.note_sent(step, str(step))
        waiting.append(step)
        assert len(waiting) <= capacity
