"""`live.json`: what it says of a run, over a resume, and when it cannot be written."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import ScriptedEnvironment

from gradus.monitor import read_live, write_live
from gradus.orchestrator import live
from gradus.orchestrator.live import LiveWriter
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.testing.episodes import build_episode


async def play_and_look(rig: Any, path: Path, *, term: int = 1) -> dict[str, float]:
    """The numbers in the file after a whole run."""
    orchestrator, journal = rig.build()
    live = LiveWriter(path, orchestrator, term=term)
    with journal:
        writing = asyncio.create_task(live.run())
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(rig.trainer.train())
            tasks.create_task(orchestrator.play())
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    last = read_live(path)
    assert last is not None
    assert last.term == term
    return last.numbers


async def test_the_last_look_has_every_episode_of_the_run_by_source_and_outcome(
    build_rig: Any, tmp_path: Path
) -> None:
    def play(number: int) -> Any:
        if number == 3:
            return EpisodeFailed(Failure("TaskError", "no"))
        return build_episode(reward=number % 2, seed=number)

    rig = build_rig(max_steps=3, environment=ScriptedEnvironment(play=play))
    numbers = await play_and_look(rig, tmp_path / "live.json")
    ended = [line["outcome"] for line in rig.events("episode_ended")]
    assert ended.count("failed") == 1
    for outcome in ("finished", "failed", "cancelled"):
        assert numbers[f"live/episodes/words/{outcome}/total"] == ended.count(outcome)
    assert numbers["live/batches/trained"] == numbers["live/version"] == 3
    assert numbers["live/in_flight/now"] == numbers["live/running/words"] == 0


async def test_the_queues_are_those_of_the_moment(build_rig: Any, tmp_path: Path) -> None:
    hold = asyncio.Event()

    async def wait(_: int) -> None:
        await hold.wait()

    rig = build_rig(
        max_steps=2, max_lag=0, group_size=2, environment=ScriptedEnvironment(wait=wait)
    )
    rig.policy.load = {"running": 4, "kv_usage": 0.25, "generated_tokens": 70}
    orchestrator, journal = rig.build()
    live = LiveWriter(tmp_path / "live.json", orchestrator, term=1)
    with journal:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(rig.trainer.train())
            tasks.create_task(orchestrator.play())
            while len(rig.environment.calls) < 4 or orchestrator.engine.status is None:
                await asyncio.sleep(0)
            numbers = live.numbers()
            hold.set()
    assert numbers["live/running/words"] == numbers["live/in_flight/now"] == 4
    assert numbers["live/groups/open"] == 2
    assert numbers["live/slots/free"] == 0
    assert numbers["live/engine/running"] == 4
    assert numbers["live/engine/kv_usage"] == 0.25
    assert numbers["live/engine/generated_tokens/total"] == 70
    assert numbers["live/episodes/words/finished/total"] == 0


async def test_counts_go_on_after_a_resume_and_never_fall(build_rig: Any, tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    write_live(path, {"live/episodes/words/finished/total": 100.0, "live/version": 7.0}, term=1)
    rig = build_rig(max_steps=1)
    orchestrator, journal = rig.build()
    with journal:
        live = LiveWriter(path, orchestrator, term=2)
        numbers = live.numbers()
    assert numbers["live/episodes/words/finished/total"] == 100
    assert numbers["live/version"] == 0


@pytest.mark.parametrize("content", [b"", b'{"time": 1', b"[]", b'{"numbers": 3}', b"\xff\x00"])
def test_a_damaged_file_is_no_look(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "live.json"
    path.write_bytes(content)
    assert read_live(path) is None


async def test_the_last_look_waits_for_the_one_that_is_being_written(
    build_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, now, most = threading.Event(), threading.Event(), [], []

    def write(*_: Any, **__: Any) -> None:
        now.append(1)
        most.append(len(now))
        begun.set()
        assert may_end.wait(60)
        now.pop()

    monkeypatch.setattr(live, "write_live", write)
    orchestrator, journal = build_rig().build()
    with journal:
        looking = asyncio.create_task(
            LiveWriter(tmp_path / "live.json", orchestrator, term=1).run()
        )
        await asyncio.to_thread(begun.wait, 60)
        looking.cancel()
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await looking
    assert most == [1, 1]


async def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(
    build_rig: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    orchestrator, journal = build_rig(max_steps=1).build()
    live = LiveWriter(tmp_path / "absent" / "live.json", orchestrator, term=1)
    with journal:
        live.write(live.numbers())
        live.write(live.numbers())
    assert len([r for r in caplog.records if "not written" in r.message]) == 1
