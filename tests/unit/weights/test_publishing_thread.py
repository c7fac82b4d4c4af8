"""What is written and told behind the trainer's back happens in order, or is raised."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import msgspec
import pytest
from commands import wait_until

from gradus.errors import FencedError, StorageError
from gradus.heartbeat import Heartbeat, Sign
from gradus.weights import publishing_thread
from gradus.weights.publishing_thread import PublishingThread


def fail() -> None:
    raise FencedError("a newer owner took the run")


def test_tasks_are_done_in_their_order_on_one_other_thread() -> None:
    done: list[int] = []
    threads: set[int] = set()

    def task(number: int) -> None:
        threads.add(threading.get_ident())
        done.append(number)

    with PublishingThread() as thread:
        for number in range(100):
            thread.submit(lambda number=number: task(number))
        thread.wait()
        assert done == list(range(100))
    assert len(threads - {threading.get_ident()}) == 1


def test_after_a_failure_nothing_more_is_done_and_everybody_gets_it() -> None:
    done: list[str] = []
    may_fail = threading.Event()
    with PublishingThread() as thread:
        thread.submit(lambda: (may_fail.wait(60), fail()))
        thread.submit(lambda: done.append("told"))
        thread.check()
        may_fail.set()
        for ask in (thread.wait, thread.check, lambda: thread.submit(fail)):
            with pytest.raises(FencedError, match="newer owner"):
                ask()
    assert done == []


def test_an_end_with_an_error_first_does_what_was_begun() -> None:
    done: list[str] = []
    may_end = threading.Event()

    def step() -> None:
        with PublishingThread() as thread:
            thread.submit(lambda: done.append("written" if may_end.wait(60) else "late"))
            thread.submit(lambda: done.append("told"))
            threading.Timer(0.05, may_end.set).start()
            raise StorageError("of the step")

    with pytest.raises(StorageError, match="of the step"):
        step()
    assert done == ["written", "told"]


def test_an_end_with_an_error_does_not_wait_forever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishing_thread, "CLOSING_SECONDS", 0.01)
    told: list[str] = []
    may_end, ended = threading.Event(), threading.Event()
    thread = PublishingThread()
    thread.submit(lambda: (may_end.wait(60), ended.set()))
    thread.submit(lambda: told.append("told"))
    thread.close()
    assert "left undone" in caplog.text
    may_end.set()
    assert ended.wait(60)
    wait_until(lambda: "publish" not in {it.name for it in threading.enumerate()})
    assert told == []


def test_a_task_that_hangs_is_silent_and_who_waits_for_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing_thread, "BEAT_SECONDS", 0.01)
    hangs, signs = threading.Event(), []

    def look() -> None:
        while len(signs) < 3 or signs[-1][0].number < 5:
            files = (tmp_path / "trainer.json", tmp_path / "strands" / "trainer.publish.json")
            # Not there yet, empty, or in the middle of a write.
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                own, other = (msgspec.json.decode(it.read_bytes(), type=Sign) for it in files)
                signs.append((own, other))
        hangs.set()

    with Heartbeat(tmp_path / "trainer.json").beating(), PublishingThread() as thread:
        thread.submit(hangs.wait)
        looking = threading.Thread(target=look)
        looking.start()
        thread.wait()
        looking.join()
    own, other = signs[-1]
    assert own.last == "waits for the publishing thread"
    assert (other.number, other.last, other.seconds) == (1, "publishing", 1800.0)
    ended = msgspec.json.decode((tmp_path / "strands/trainer.publish.json").read_bytes(), type=Sign)
    assert (ended.number, ended.seconds) == (2, None)
