"""The numbers of a step and their denominators."""

from __future__ import annotations

import math

import msgspec
import pytest
from builders import build_sample
from checkpoints import reread
from hypothesis import given, settings
from hypothesis import strategies as st
from mishaps import FailureProfile
from verifiers.v1.trace import Reward, TimeSpan
from verifiers.v1.types import ToolMessage

from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.play.inference_client import AppliedPolicy
from gradus.orchestrator.records.counts import is_flat
from gradus.orchestrator.records.metrics import PendingStepMetrics, StepCounters, batch_metrics
from gradus.orchestrator.records.numbers import MAX_NAMES, Mean, percentiles
from gradus.orchestrator.traces import control_spellings
from gradus.orchestrator.types import Failure, Group, PlayedEpisode, Task, TaskPointer, Verdict
from gradus.testing.episodes import build_episode, build_trace
from gradus.wire.inference import EngineStatus
from gradus.wire.versions import VersionSpan


def group_of(source: str, rewards: list[float], failures: int = 0, turns: int = 1) -> Group:
    group = Group("g0", TaskPointer(source, 0, 0), Task({}, 0))
    span = VersionSpan(0, 0)
    for number, reward in enumerate(rewards):
        episode = build_episode([build_trace(reward=reward, turns=turns)])
        group.played.append(PlayedEpisode(f"g0.{number}", "g0", span, episode))
    for number in range(failures):
        failure = Failure("ProviderError", "refused")
        group.played.append(PlayedEpisode(f"g0.f{number}", "g0", span, failure=failure))
    return group


def applied(version: int, generated_tokens: int) -> AppliedPolicy:
    status = EngineStatus(version, 1, 0, 0, 0.0, 0, 0, generated_tokens, is_paused=False)
    return AppliedPolicy(version, apply_seconds=0.5, pause_seconds=0.25, status=status)


def test_means_over_finished_and_shares_over_all_that_ended() -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", [1.0, 0.5, 0.0], failures=1, turns=2))
    metrics = counters.take()
    assert metrics["episode/reward/mean"] == pytest.approx(0.5)
    assert metrics["episode/turns/mean"] == 2.0
    assert metrics["episode/length_tokens/mean"] == 8.0
    assert metrics["episode/error/share"] == pytest.approx(1 / 4)
    assert metrics["episode/error/ProviderError/sum"] == 1.0
    assert metrics["episode/truncated/share"] == 0.0


def test_sources_are_told_apart_and_summed() -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", [1.0]))
    counters.add_group(group_of("sums", [0.0, 0.0, 0.0]))
    metrics = counters.take()
    assert metrics["episode/words/reward/mean"] == 1.0
    assert metrics["episode/sums/reward/mean"] == 0.0
    assert metrics["episode/reward/mean"] == 0.25


def test_a_source_with_nothing_but_errors_has_no_mean_reward() -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", [], failures=2))
    metrics = counters.take()
    assert "episode/reward/mean" not in metrics
    assert metrics["episode/error/share"] == 1.0


def test_episodes_that_were_given_up_are_counted_apart_from_errors() -> None:
    group = group_of("words", [1.0])
    group.played.append(PlayedEpisode("g0.c", "g0", VersionSpan(0, 0)))
    counters = StepCounters()
    counters.add_group(group)
    metrics = counters.take()
    assert metrics["episode/words/cancelled/sum"] == 1.0
    assert metrics["episode/error/share"] == 0.0


def test_a_tally_with_failures_survives_a_restart() -> None:
    counters = StepCounters()
    group = group_of("words", [1.0, 0.5], failures=2)
    group.numbers["baseline"] = float("inf")
    group.finished[0][1].traces[0].metrics = {"num_calls": 2.0}
    counters.add_group(group)
    counters.add("episode", "words", "retried", "ProviderError")
    resumed = StepCounters()
    resumed.state = reread(counters.state)
    assert resumed.take() == counters.take()


@settings(max_examples=40, deadline=None)
@given(seeds=st.lists(st.integers(0, 1 << 31), max_size=12), cut=st.integers(0, 12))
def test_a_restart_changes_no_metric_whatever_went_wrong(seeds: list[int], cut: int) -> None:
    straight, resumed = StepCounters(), StepCounters()
    for number, seed in enumerate(seeds):
        if number == cut:
            stored = reread(resumed.state)
            resumed = StepCounters()
            resumed.state = stored
        for counters in (straight, resumed):
            counters.add_group(group_of_mishaps(seed))
    assert resumed.take() == straight.take()


def group_of_mishaps(seed: int) -> Group:
    """Three episodes, most of which went wrong in some way."""
    group = Group("g0", TaskPointer("words", 0, 0), Task({}, 0))
    for number in range(3):
        episode = FailureProfile(share=0.75).play(seed + number)
        failure = find_failure(episode)
        played = PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), episode, failure)
        group.played.append(played)
    group.give_up("stale")
    return group


@pytest.mark.parametrize("limit", ["max_turns", "context_length"])
def test_truncated_episodes_are_counted(limit: str) -> None:
    group = group_of("words", [1.0, 1.0])
    group.finished[0][1].traces[0].stop_condition = limit
    counters = StepCounters()
    counters.add_group(group)
    assert counters.take()["episode/truncated/share"] == 0.5


def test_what_the_environment_measured_is_a_mean_under_its_own_name() -> None:
    group = group_of("words", [1.0, 0.0])
    for number, (_, episode) in enumerate(group.finished):
        trace = episode.traces[0]
        trace.metrics = {"num_calls": float(2 * number), "broken": float("nan"), "absent": None}
        trace.rewards["style"] = Reward(score=0.5, weight=0.1)
        trace.timing.setup = TimeSpan(start=10.0, end=10.5)
        trace.timing.scoring = TimeSpan(start=20.0, end=22.0 + 2 * number)
    counters = StepCounters()
    counters.add_group(group)
    metrics = counters.take()
    assert metrics["episode/words/metric/num_calls/mean"] == 1.0
    assert metrics["episode/words/reward/style/mean"] == 0.5
    assert metrics["episode/words/setup_seconds/mean"] == 0.5
    assert metrics["episode/words/scoring_seconds/mean"] == 3.0
    assert not [name for name in metrics if "broken" in name or "absent" in name]
    assert not [name for name in metrics if "agent_seconds" in name], "it was never measured"


def test_an_environment_that_names_a_metric_after_each_task_does_not_flood_the_record() -> None:
    group = group_of("words", [1.0])
    group.finished[0][1].traces[0].metrics = {f"task_{n}": 1.0 for n in range(1000)}
    counters = StepCounters()
    counters.add_group(group)
    metrics = counters.take()
    assert len([name for name in metrics if "/metric/" in name]) == MAX_NAMES - 1
    assert metrics["episode/words/names_left_out/sum"] == 1001 - MAX_NAMES


def test_episodes_of_groups_with_equal_rewards_are_flat() -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", [0.1 + 0.2, 0.3]))
    counters.add_group(group_of("words", [1.0, 0.0]))
    counters.add_group(group_of("sums", [1.0]))
    metrics = counters.take()
    assert metrics["episode/words/flat/share"] == 0.5
    assert metrics["episode/sums/flat/share"] == 0.0, "one episode has nothing to be equal to"


def test_a_game_whose_rewards_sum_to_zero_is_not_flat() -> None:
    group = Group("g0", TaskPointer("game", 0, 0), Task({}, 0))
    for number, reward in enumerate([1.0, -1.0]):
        traces = [build_trace(reward=reward, agent="a"), build_trace(reward=-reward, agent="b")]
        played = PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), build_episode(traces))
        group.played.append(played)
    assert not is_flat(group)


def test_finished_episodes_of_which_nothing_trains_are_dropped() -> None:
    group = group_of("words", [1.0, 1.0, 1.0], failures=1)
    group.samples = [
        msgspec.structs.replace(build_sample(), id=f"g0.{n}/0/0", episode_id=f"g0.{n}")
        for n in range(2)
    ]
    group.dropped = {"g0.1/0/0": "stale", "g0.2": "no_trainable_tokens"}
    counters = StepCounters()
    counters.add_group(group)
    assert counters.take()["episode/dropped/share"] == pytest.approx(2 / 3)


def test_dropped_samples_are_counted_by_source_and_reason_and_errors_are_not() -> None:
    group = group_of("words", [1.0, 1.0], failures=1)
    group.dropped = {
        "g0.0/0/0": "zero_advantage",
        "g0.1": "no_trainable_tokens",
        "g0.f0": "error:ProviderError",
    }
    counters = StepCounters()
    counters.add_group(group)
    metrics = counters.take()
    assert metrics["sample/dropped/sum"] == 2.0
    assert metrics["sample/words/dropped/zero_advantage/sum"] == 1.0
    assert metrics["sample/words/dropped/no_trainable_tokens/sum"] == 1.0


def test_a_tally_starts_again_after_it_was_taken() -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", [1.0]))
    counters.add("group", "words", "abandoned", "too_old")
    counters.add("group", "words", "dropped")
    metrics = counters.take()
    assert metrics["group/words/abandoned/too_old/sum"] == 1.0
    assert metrics["group/words/dropped/sum"] == 1.0
    assert counters.take() == {"episode/ended/sum": 0.0, "sample/dropped/sum": 0.0}


def test_batch_metrics_say_size_and_age() -> None:
    samples = [
        build_sample(length=6, prompt_length=2, versions=VersionSpan(1, 1)),
        build_sample(length=4, prompt_length=1, versions=VersionSpan(3, 3)),
    ]
    assert batch_metrics(samples, step=3) == {
        "sample/advantage/std": 0.0,
        **{f"sample/advantage/p{percent}": 1.0 for percent in (5, 50, 95)},
        "sample/staleness/max": 2.0,
        "sample/staleness/mean": 1.0,
        "sample/staleness/p50": 0.0,
        "sample/staleness/p95": 2.0,
        "batch/samples/sum": 2.0,
        "batch/tokens/sum": 10.0,
        "batch/trainable_tokens/sum": 7.0,
    }


@pytest.mark.parametrize("is_applied_first", [True, False])
def test_a_record_is_complete_when_trained_and_served_in_any_order(
    is_applied_first: bool,
) -> None:
    records = PendingStepMetrics(now=0.0)
    records.shipped(0, {"batch/samples/sum": 4.0})
    if is_applied_first:
        assert records.applied(applied(1, 300), now=2.0) is None
        record = records.finished(0, {"loss/total/mean": 0.125})
    else:
        assert records.finished(0, {"loss/total/mean": 0.125}) is None
        record = records.applied(applied(1, 300), now=2.0)
    assert record == {
        "batch/samples/sum": 4.0,
        "batch/samples/total": 4.0,
        "loss/total/mean": 0.125,
        "weights/version": 1.0,
        "weights/apply_seconds": 0.5,
        "weights/pause_seconds": 0.25,
        "throughput/generated_tokens_per_second": 150.0,
        "time/step_seconds": 2.0,
    }


def test_totals_grow_over_steps_and_over_a_resume() -> None:
    records = PendingStepMetrics(now=0.0)
    for step in range(2):
        records.shipped(step, {"batch/tokens/sum": 10.0, "episode/ended/sum": 3.0})
        records.applied(applied(step + 1, 0), now=1.0)
        records.finished(step, {})
    resumed = PendingStepMetrics(now=0.0)
    resumed.state = reread(records.state)
    resumed.shipped(2, {"batch/tokens/sum": 5.0})
    resumed.applied(applied(3, 0), now=1.0)
    record = resumed.finished(2, {})
    assert record is not None
    assert (record["batch/tokens/total"], record["episode/ended/total"]) == (25.0, 6.0)


def test_prompts_stops_tools_and_the_spread_of_rewards_are_counted() -> None:
    traces = [build_trace(reward=reward, turns=2) for reward in (0.0, 1.0)]
    for trace, content in zip(traces, ["Error executing tool", "42"], strict=True):
        trace.nodes[2].message = ToolMessage(tool_call_id="a", content=content)
    traces[0].stop("agent_completed")
    traces[1].stop("max_turns")
    group = group_of("words", [])
    group.played = [
        PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), build_episode([trace]))
        for number, trace in enumerate(traces)
    ]
    counters = StepCounters()
    counters.add_group(group)
    found = counters.take()
    assert found["episode/reward/std"] == 0.5
    assert found["episode/words/prompt_tokens/p50"] == 1.0
    assert (found["episode/tool_calls/mean"], found["episode/words/tool_error/share"]) == (1.0, 0.5)
    assert found["episode/words/stop/max_turns/share"] == 0.5


@pytest.mark.parametrize(
    ("rewards", "bad", "good"),
    [([0.0, 0.0], 1.0, 0.0), ([1.0, 1.0], 0.0, 1.0), ([0.0, 1.0], 0.0, 0.0), ([-1, -1], 1.0, 0.0)],
)
def test_groups_that_all_earn_nothing_and_all_earn_are_told_apart(
    rewards: list[float], bad: float, good: float
) -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", rewards))
    found = counters.take()
    assert (found["group/all_bad/share"], found["group/all_good/share"]) == (bad, good)
    assert found["group/words/flat/share"] == bad + good


def test_the_spread_of_advantages_is_over_samples() -> None:
    samples = [build_sample(length=6, prompt_length=2, advantage=it) for it in (-1.0, 1.0)]
    found = batch_metrics(samples, step=0)
    assert (found["sample/advantage/std"], found["sample/advantage/p5"]) == (1.0, -1.0)


def test_generated_tokens_are_counted_between_two_versions() -> None:
    records = PendingStepMetrics(now=0.0)
    for version, tokens in ((1, 100), (2, 400)):
        records.finished(version - 1, {})
        record = records.applied(applied(version, tokens), now=float(version))
    assert record is not None
    assert record["throughput/generated_tokens_per_second"] == 300.0


def test_our_step_time_wins_over_the_trainer_s() -> None:
    records = PendingStepMetrics(now=0.0)
    records.applied(applied(1, 0), now=4.0)
    record = records.finished(0, {"time/step_seconds": 1.0})
    assert record is not None
    assert record["time/step_seconds"] == 4.0


def test_verdicts_of_filters_are_counted_and_metrics_count_what_they_drop() -> None:
    group = group_of("words", [1.0, 1.0])
    group.verdicts = {
        "g0.0/0/0": {"repetition": Verdict.FLAG, "zero_advantage": Verdict.KEEP},
        "g0.1/0/0": {"repetition": Verdict.FLAG, "zero_advantage": Verdict.DROP},
    }
    counters = StepCounters()
    counters.add_group(group)
    metrics = counters.take()
    assert metrics["sample/trainable/share"] == 0.5
    assert metrics["sample/words/flagged/repetition/sum"] == 2.0
    assert metrics["episode/reward/mean"] == 1.0
    assert "sample/trainable/share" not in counters.take()


def test_numbers_of_an_algorithm_are_averaged_over_groups() -> None:
    counters = StepCounters()
    for value in (1.0, 0.0, 0.5):
        group = group_of("words", [1.0])
        group.numbers["rae_baseline/first"] = value
        counters.add_group(group)
    assert counters.take()["group/words/rae_baseline/first/mean"] == 0.5
    assert not any(name.startswith("group/") for name in counters.take())


def game_of(white: float, black: float, *, black_trains: bool = True) -> Group:
    traces = [
        build_trace(reward=white, agent="white"),
        build_trace(reward=black, agent="black", trainable=black_trains),
    ]
    traces[0].metrics = {"moves": 3.0, "episode/length": 5.0}
    traces[1].metrics = {"moves": 2.0, "episode/is_tie": 1.0}
    for trace in traces:
        trace.record_reward("chips", trace.reward, 0.0)
    group = Group("g0", TaskPointer("poker", 0, 0), Task({}, 0))
    group.played.append(PlayedEpisode("g0.0", "g0", VersionSpan(0, 0), build_episode(traces)))
    return group


def test_the_agents_of_a_zero_sum_game_have_rewards_of_their_own() -> None:
    before, counters = StepCounters(), StepCounters()
    before.add_group(game_of(1.0, -1.0))
    counters.state = reread(before.state)
    counters.add_group(game_of(0.5, -0.5))
    metrics = counters.take()
    assert metrics["episode/poker/agent/white/reward/mean"] == 0.75
    assert metrics["episode/poker/agent/black/reward/mean"] == -0.75
    assert metrics["episode/poker/agent/white/reward/chips/mean"] == 0.75
    assert metrics["episode/poker/agent/black/metric/moves/mean"] == 2.0
    for name in ("episode/poker/reward/mean", "episode/reward/mean"):
        assert name not in metrics, "nothing has the mean of a zero-sum game as its aim"
    assert "episode/poker/reward/chips/mean" not in metrics


def test_where_one_agent_of_two_trains_its_reward_is_that_of_the_source() -> None:
    counters = StepCounters()
    counters.add_group(game_of(1.0, -1.0, black_trains=False))
    metrics = counters.take()
    assert metrics["episode/poker/reward/mean"] == metrics["episode/reward/mean"] == 1.0
    assert metrics["episode/poker/agent/black/reward/mean"] == -1.0
    assert metrics["episode/poker/metric/moves/mean"] == 3.0


def test_a_metric_of_the_whole_episode_counts_on_whichever_trace_it_lies() -> None:
    counters = StepCounters()
    counters.add_group(game_of(1.0, -1.0, black_trains=False))
    metrics = counters.take()
    assert metrics["episode/poker/metric/episode/length/mean"] == 5.0
    assert metrics["episode/poker/metric/episode/is_tie/mean"] == 1.0
    assert not [
        name for name in metrics if name.startswith("episode/poker/agent/black/metric/episode")
    ]


def test_a_single_agent_has_no_mean_beside_that_of_its_source() -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", [1.0, 0.5]))
    assert [name for name in counters.take() if "/agent/" in name] == []


@given(st.lists(st.lists(st.integers(-1000, 1000), min_size=1), min_size=1))
def test_a_mean_of_parts_is_the_mean_of_the_whole(parts: list[list[int]]) -> None:
    whole = [value for part in parts for value in part]
    merged = Mean(0.0, 0.0)
    for part in reversed(parts):
        merged = merged.merge(Mean(sum(part), len(part)))
    assert merged.value == pytest.approx(sum(whole) / len(whole))


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (5, 1), (50, 5), (90, 9), (91, 10)])
def test_a_percentile_is_one_of_the_values(percent: int, value: float) -> None:
    found = percentiles("x", [float(n) for n in range(10, 0, -1)], (percent,))
    assert found == {f"x/p{percent}": value}


def test_a_median_tells_what_a_mean_of_rewards_hides() -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", [0.0, 0.0, 0.0, 0.0, 10.0]))
    metrics = counters.take()
    assert metrics["episode/words/reward/mean"] == metrics["episode/reward/mean"] == 2.0
    assert metrics["episode/words/reward/p50"] == metrics["episode/reward/p50"] == 0.0
    assert metrics["episode/words/reward/p95"] == 10.0


def test_the_seconds_of_a_stage_keep_their_tail_over_a_resume() -> None:
    before, counters = StepCounters(), StepCounters()
    for tally, seconds in ((before, 1.0), (before, 1.0), (counters, 9.0)):
        if tally is counters:
            counters.state = reread(before.state)
        group = group_of("words", [1.0])
        group.finished[0][1].traces[0].timing.setup = TimeSpan(start=10.0, end=10.0 + seconds)
        tally.add_group(group)
    metrics = counters.take()
    assert metrics["episode/words/setup_seconds/p50"] == 1.0
    assert metrics["episode/words/setup_seconds/p95"] == 9.0


def test_failures_by_type_and_drops_by_reason_are_shares_of_their_source() -> None:
    group = group_of("words", [1.0, 1.0, 1.0], failures=1)
    group.samples = [msgspec.structs.replace(build_sample(), id="g0.0/0/0", episode_id="g0.0")]
    group.dropped = {"g0.1/0/0": "stale", "g0.2": "no_trainable_tokens", "g0.f0": "error:X"}
    counters = StepCounters()
    counters.add_group(group)
    counters.add_group(group_of("sums", [1.0, 0.0]))
    metrics = counters.take()
    assert metrics["episode/words/error/ProviderError/share"] == 0.25
    assert metrics["sample/words/dropped/stale/share"] == pytest.approx(1 / 3)
    assert metrics["group/words/flat/share"] == 1.0
    assert metrics["group/sums/flat/share"] == 0.0
    assert metrics["group/flat/share"] == 0.5


def test_a_source_of_which_nothing_ended_says_so_and_nothing_else() -> None:
    counters = StepCounters()
    counters.add_group(group_of("words", [1.0]))
    metrics = counters.take(["words", "sums"])
    assert metrics["episode/words/ended/sum"] == 1.0
    assert {name: value for name, value in metrics.items() if "/sums/" in name} == {
        "episode/sums/ended/sum": 0.0
    }
    assert "episode/words/reward/mean" not in counters.take(["words", "sums"])


def test_agents_that_never_train_are_told_from_those_that_do() -> None:
    counters = StepCounters()
    counters.add_group(game_of(1.0, -1.0, black_trains=False))
    counters.add_group(game_of(1.0, -1.0))
    metrics = counters.take()
    assert metrics["episode/poker/agent/white/trained/share"] == 1.0
    assert metrics["episode/poker/agent/black/trained/share"] == 0.5


def parted_group(parts: list[dict[str, tuple[float, float]]], agents: str = "a") -> Group:
    """One episode for each entry: score and weight of every part of its reward."""
    group = Group("g0", TaskPointer("words", 0, 0), Task({}, 0))
    for number, scores in enumerate(parts):
        traces = [build_trace(agent=agent) for agent in agents]
        for trace in traces:
            trace.rewards = {n: Reward(score=s, weight=w) for n, (s, w) in scores.items()}
        played = PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), build_episode(traces))
        group.played.append(played)
    return group


def variance_shares(*groups: Group) -> dict[str, float]:
    counters = StepCounters()
    for group in groups:
        counters.add_group(group)
    found = counters.take()
    return {
        name.split("/")[3]: value
        for name, value in found.items()
        if name.endswith("/variance_share")
    }


def test_the_share_of_a_part_in_the_variance_counts_its_weight_and_only_groups() -> None:
    """Between the groups `goal` differs by 8, which teaches nothing."""
    first = parted_group([{"goal": (8.0, 1.0), "form": (f, 0.5)} for f in (0.0, 2.0)])
    second = parted_group([{"goal": (g, 1.0), "form": (1.0, 0.5)} for g in (0.0, 3.0)])
    assert variance_shares(first, second) == pytest.approx({"goal": 0.9, "form": 0.1})


def test_a_part_that_works_against_the_reward_has_a_negative_share() -> None:
    group = parted_group([{"goal": (g, 2.0), "cost": (-g, 1.0)} for g in (0.0, 1.0)])
    assert variance_shares(group) == pytest.approx({"goal": 2.0, "cost": -1.0})


@pytest.mark.parametrize(
    "group",
    [
        parted_group([{"goal": (1.0, 1.0), "form": (0.5, 1.0)}]),
        parted_group([{"goal": (1.0, 1.0), "form": (0.5, 1.0)}] * 3),
        parted_group([{"goal": (g, 1.0)} for g in (0.0, 1.0)]),
        parted_group([{"goal": (g, 1.0), "form": (0.5, 1.0)} for g in (1.0, math.nan)]),
        parted_group([{"goal": (g, 1.0), "form": (0.5, 1.0)} for g in (0.0, 1.0)], agents="ab"),
        parted_group([{"goal": (g, 1.0), "form": (0.5, 1.0)} for g in (-1e200, 1e200)]),
    ],
    ids=["one episode", "equal rewards", "one part", "not finite", "several agents", "huge"],
)
def test_where_parts_cannot_be_compared_there_is_no_share(group: Group) -> None:
    assert variance_shares(group) == {}


def test_quarantined_turns_are_counted_of_all_turns() -> None:
    group = group_of("words", [1.0, 0.5], turns=2)
    assert group.played[0].episode is not None
    group.played[0].episode.traces[0].info["quarantined_turns"] = [1]
    counters = StepCounters()
    counters.add_group(group)
    metrics = counters.take()
    assert metrics["episode/words/quarantined/share"] == 0.25
    assert metrics["episode/quarantined/share"] == 0.25


def test_turns_that_a_program_wanted_sampled_otherwise_are_not_taken_for_unreadable() -> None:
    group = group_of("words", [1.0, 0.5], turns=2)
    assert group.played[0].episode is not None
    info = group.played[0].episode.traces[0].info
    info |= {"quarantined_turns": [0, 1], "untrained_turns": {"temperature 0": [1], "unread": []}}
    counters = StepCounters()
    counters.add_group(group)
    assert counters.take()["episode/words/quarantined/share"] == 0.25


def test_tokens_are_counted_with_the_reason_for_which_they_do_not_train() -> None:
    group = group_of("words", [1.0, 0.5], turns=2)
    assert group.played[0].episode is not None
    info = group.played[0].episode.traces[0].info
    info |= {"quarantined_turns": [0], "untrained_turns": {"top_p": [0]}}
    group.dropped[group.played[1].id] = "zero_advantage"
    counters = StepCounters()
    counters.add_group(group)
    metrics = counters.take()
    assert (
        metrics["episode/tokens/sampled/sum"] == metrics["episode/words/tokens/sampled/sum"] == 16
    )
    assert metrics["episode/words/tokens/trained/share"] == 0
    prefix = "episode/words/tokens/untrained/"
    shares = {name[len(prefix) :]: it for name, it in metrics.items() if name.startswith(prefix)}
    assert shares == {"top_p/share": 0.25, "no_credit/share": 0.25, "zero_advantage/share": 0.5}


def test_turns_that_a_tool_spelled_are_counted_and_those_of_the_task_are_not() -> None:
    trace = build_trace(turns=3)
    trace.nodes[0].message.content = "end with <|im_end|>"
    assert control_spellings(trace) is None
    trace.nodes[2].message.content = "now</s>[INST] yes"
    trace.nodes[4].message.content = "<b>1 < 2 | 3 > 2</b> <|im_end|>\n<|im_start|>assistant"
    assert control_spellings(trace) == 4.0
