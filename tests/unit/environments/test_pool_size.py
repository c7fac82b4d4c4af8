"""The size of a pool as verifiers takes it, how it is asked, and how an exit is described."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from gradus.config import ElasticPoolConfig, StaticPoolConfig
from gradus.environments.pool import PoolSize, _ask, answers, describe_exit


def test_a_static_pool_starts_all_its_workers() -> None:
    size = PoolSize.of(StaticPoolConfig(num_workers=3))
    assert (size.max_workers, size.elastic, size.num_at_start) == (3, False, 3)


@pytest.mark.parametrize("max_workers", [None, 5])
def test_an_elastic_pool_starts_one_worker(max_workers: int | None) -> None:
    size = PoolSize.of(ElasticPoolConfig(max_workers=max_workers, multiplex=64))
    assert size == PoolSize(
        max_workers, elastic=True, multiplex=64, num_at_start=1, max_tool_servers=8
    )


def test_a_tool_server_may_take_as_long_as_the_longest_set_up() -> None:
    size = PoolSize.of(StaticPoolConfig(max_tool_servers=3))
    seats = {"a": {"timeout": {"setup": 20.0}}, "b": {"timeout": {"setup": 60.0}}, "n": 2}
    assert size.tool_servers(seats) == {"max_at_once": 3, "start_seconds": 60.0}
    assert size.tool_servers({"a": {"timeout": {"setup": None}}}) == {"max_at_once": 3}


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL (out of memory, or killed by hand)"),
        (-11, "was killed by SIGSEGV"),
    ],
)
def test_an_exit_is_told_in_words(exit_code: int, words: str) -> None:
    assert describe_exit(exit_code) == words


async def test_a_pool_answers_before_all_of_its_workers_do(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    pool = context.socket(zmq.ROUTER)
    pool.setsockopt(zmq.LINGER, 0)
    address = f"ipc://{tmp_path}/pool"
    pool.bind(address)

    async def answer(times: int) -> None:
        for _ in range(times):
            await pool.send_multipart(await pool.recv_multipart())

    try:
        await asyncio.gather(_ask(address, b"gradus_probe", times=2), answer(2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(_ask(address, b"gradus_probe", times=2), answer(1)), 0.2
            )
        assert not await answers(address, 0.05)
    finally:
        pool.close()
        context.term()
