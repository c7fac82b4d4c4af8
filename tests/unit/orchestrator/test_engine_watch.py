"""The engine's load becomes the in-flight limit and metrics; a silent engine costs only polls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs
from scripted_peers import ScriptedEnvironment, ScriptedPolicy

from gradus.errors import DeadlineError, ProcessError
from gradus.orchestrator.play.concurrency import EngineWatch, InFlightController, build_controller
from gradus.orchestrator.play.inference_client import NoServer
from gradus.wire.inference import EngineStatus


class Rig:
    """A watch over a scripted engine; `limits` are those that it announced."""

    def __init__(self, *, in_flight: int = 40, initial: int = 40) -> None:
        self.policy = ScriptedPolicy()
        self.limits: list[int] = []
        self.num_token_calls = 0
        controller = InFlightController(least=1, most=100, initial=initial)
        self.watch = EngineWatch(
            self.policy,
            controller,
            count=lambda: (in_flight, 1000),
            on_limit=self.limits.append,
            on_tokens=self.note_tokens,
        )

    def note_tokens(self) -> None:
        self.num_token_calls += 1

    async def poll(self, **load: Any) -> None:
        self.policy.load = dict(load)
        await self.watch.poll()


async def test_a_full_cache_lowers_the_limit_and_a_calm_engine_announces_growth() -> None:
    rig = Rig()
    await rig.poll(kv_usage=0.875)
    assert rig.limits == [32]
    calm = Rig()
    await calm.poll(kv_usage=0.1)
    assert calm.limits == [50]


async def test_a_paused_engine_says_nothing_about_the_limit() -> None:
    rig = Rig()
    await rig.poll(kv_usage=0.95, is_paused=True)
    assert rig.limits == []


async def test_the_limit_follows_the_number_of_servers() -> None:
    rig, one = Rig(in_flight=1, initial=40), EngineStatus(1, 1, 0, 0, 0.0, 0, 0, 0, False)
    for names in ("a", "ab", "ab", "b", "abc"):
        await rig.poll(kv_usage=0.7, parts=dict.fromkeys(names, one))
    assert rig.limits == [80, 40, 100]


async def test_while_there_is_no_server_nothing_starts_and_nothing_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()

    async def none() -> EngineStatus:
        raise NoServer("none")

    with monkeypatch.context() as patched:
        patched.setattr(rig.policy, "status", none)
        await rig.poll()
        await rig.poll()
    assert (rig.limits, rig.num_token_calls) == ([0], 2)
    await rig.poll(kv_usage=0.7)
    assert rig.limits == [0, 40]


async def test_metrics_are_means_extremes_and_differences() -> None:
    rig = Rig(initial=100)
    await rig.poll(generated_tokens=1000, preemptions=3, prefix_queries=50, prefix_hits=10)
    rig.watch.take()
    await rig.poll(generated_tokens=1500, preemptions=3, prefix_queries=80, prefix_hits=20)
    await rig.poll(
        generated_tokens=1800, preemptions=4, prefix_queries=150, prefix_hits=60, waiting=8
    )
    metrics = rig.watch.take()
    assert metrics["policy/generated_tokens/sum"] == 800.0
    assert metrics["policy/preemptions/sum"] == 1.0
    assert metrics["policy/prefix_hit/share"] == pytest.approx(0.5)
    assert metrics["policy/waiting/mean"] == 4.0
    assert metrics["policy/waiting/max"] == 8.0
    assert metrics["policy/in_flight/mean"] == 40.0
    assert metrics["policy/in_flight_limit"] == 80.0


async def test_counters_of_an_engine_that_was_started_anew_count_from_zero() -> None:
    rig = Rig()
    await rig.poll(generated_tokens=1000)
    rig.watch.take()
    await rig.poll(generated_tokens=70)
    assert rig.watch.take()["policy/generated_tokens/sum"] == 70.0


async def test_a_step_without_a_poll_tells_the_limit_all_the_same() -> None:
    metrics = Rig().watch.take()
    assert metrics == {
        "policy/status_failed/sum": 0.0,
        "policy/servers_replaced/sum": 0.0,
        "policy/in_flight_limit": 40.0,
        "time/event_loop_lag_seconds/max": 0.0,
    }


async def test_the_fewest_replicas_that_served_at_once_are_told() -> None:
    rig = Rig()
    status = await rig.policy.status()
    for names in (["a", "b"], ["a"], ["a", "b"]):
        await rig.poll(parts=dict.fromkeys(names, status))
    assert rig.watch.take()["policy/replicas_up/min"] == 1.0


async def test_a_new_server_is_told_what_to_serve_and_counted() -> None:
    rig = Rig()
    await rig.poll(incarnation="first", asked_again=7)
    await rig.poll(incarnation="second", is_stale=True)
    assert rig.policy.num_served_again == 1
    await rig.poll(incarnation="second", asked_again=3)
    metrics = rig.watch.take()
    assert metrics["policy/servers_replaced/sum"] == 1.0
    assert metrics["policy/asked_again/sum"] == 3.0


async def test_servers_that_join_and_leave_take_nobody_s_place() -> None:
    rig = Rig()
    status = await rig.policy.status()
    for names in ("a1", "a1 b1", "b1", "a1 b1", "a2 b1", "b1", "a3 b1"):
        servers = {it[0]: structs.replace(status, incarnation=it) for it in names.split()}
        await rig.poll(incarnation=names, parts=servers)
    assert rig.watch.take()["policy/servers_replaced/sum"] == 2.0


@pytest.mark.shows("F09")
async def test_a_new_server_that_ends_before_it_was_told_costs_the_poll() -> None:
    rig = Rig()

    async def ended() -> Any:
        raise ProcessError("the server may have ended")

    rig.policy.serve_again = ended  # type: ignore[method-assign]
    await rig.poll(is_stale=True)
    assert rig.watch.status is None


async def test_an_engine_that_does_not_answer_costs_the_poll_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()

    async def silent() -> Any:
        raise DeadlineError("no status")

    rig.policy.status = silent  # type: ignore[method-assign]
    await rig.watch.poll()
    await rig.watch.poll()
    assert caplog.text.count("the engine's load is unknown: no status") == 1
    assert rig.watch.take()["policy/status_failed/sum"] == 2.0


async def test_new_tokens_are_a_sign_of_life() -> None:
    rig = Rig()
    for tokens in (10, 10, 20):
        await rig.poll(generated_tokens=tokens)
    assert rig.num_token_calls == 2


async def test_a_run_records_the_engine_and_its_limit_with_every_step(build_rig: Any) -> None:
    rig = build_rig(max_in_flight_episodes=6)
    rig.policy.kv_capacity_tokens = 4 * rig.config.model.max_length_tokens
    rig.policy.load = {"kv_usage": 0.7, "running": 3}
    await rig.play()
    metrics = rig.monitor.records[0][1]
    assert metrics["policy/in_flight_limit"] == 4.0
    assert metrics["policy/running/mean"] == 3.0
    assert metrics["policy/kv_usage/max"] == 0.7


async def test_the_limit_that_the_engine_asks_for_holds_for_the_episodes(build_rig: Any) -> None:
    """The first poll sees a cache that is full, so fewer episodes start from then on."""
    running, most_later, seen = 0, 0, 0

    async def wait(number: int) -> None:
        nonlocal running, most_later, seen
        seen += 1
        running += 1
        if seen > 16:
            most_later = max(most_later, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1

    rig = build_rig(
        max_steps=6,
        groups_per_batch=4,
        group_size=4,
        max_in_flight_episodes=16,
        environment=ScriptedEnvironment(wait=wait),
    )
    rig.policy.load = {"kv_usage": 1.0}
    await rig.play()
    assert 1 <= most_later <= 8


def test_the_limit_starts_at_what_the_cache_holds(build_rig: Any) -> None:
    config = build_rig(max_in_flight_episodes=100).config
    assert build_controller(config, kv_capacity_tokens=64 * 20).limit == 20
    assert build_controller(config, kv_capacity_tokens=0).limit == 100
    assert build_controller(config, kv_capacity_tokens=10**9).limit == 100


async def test_the_rate_of_starts_holds_back_and_never_blocks(build_rig: Any) -> None:
    """The rig's clock moves by one at every look: each start waits for a thirtieth of a second."""
    rig = build_rig(max_steps=2, groups_per_batch=1, max_episodes_per_minute=58)
    await rig.play()
    assert len(rig.trainer.batches) == 2
