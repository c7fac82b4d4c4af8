"""Who blocks the event loop of an environment process is named, and has a deadline."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

import pytest
import verifiers.v1 as vf

from gradus.environments import blocking
from gradus.environments.blocking import BlockedFor, LoopWatch
from gradus.environments.verifiers.exits import scored
from gradus.errors import ExitCode


@vf.reward
async def sleeps_too_long() -> float:
    threading.Event().wait(0.3)
    return 1.0


@pytest.mark.shows("F08")
async def test_a_reward_that_blocks_the_loop_is_named_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocking, "TELL_SECONDS", 0.1)
    watch = LoopWatch(BlockedFor(), source="words", look_seconds=0.02)
    with caplog.at_level(logging.WARNING), watch.watching():
        assert await asyncio.create_task(scored(sleeps_too_long, {})) == 1.0
    text = caplog.records[0].getMessage()
    assert "reward sleeps_too_long (test_blocking.py:" in text


PROGRAM = """
import asyncio, time
import verifiers.v1 as vf
from gradus.environments import blocking
from gradus.environments.verifiers.exits import scored
from gradus.log import configure_logging

configure_logging("env_words")
blocking.TELL_SECONDS = 0.1

@vf.reward
async def never_ends():
    time.sleep(60)

async def main():
    limits = blocking.BlockedFor({scoring}, {episode})
    with blocking.LoopWatch(limits, source="words", look_seconds=0.02).watching():
        await {asked}

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.shows("F08")
@pytest.mark.parametrize(
    ("scoring", "episode", "asked", "key"),
    [
        (0.2, 50.0, "asyncio.create_task(scored(never_ends, {}))", "agent.timeout.scoring"),
        (50.0, 0.2, "never_ends()", "timeout.episode_seconds"),
    ],
)
def test_one_that_blocks_it_beyond_its_deadline_ends_the_process_under_its_name(
    scoring: float, episode: float, asked: str, key: str
) -> None:
    program = PROGRAM.format(scoring=scoring, episode=episode, asked=asked)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == ExitCode.INTERNAL
    (line,) = [it for it in done.stderr.splitlines() if "gradus env-server: " in it]
    assert "never_ends" in line
    assert key in line
