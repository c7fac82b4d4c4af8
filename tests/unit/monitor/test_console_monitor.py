"""One line per step for a person."""

from __future__ import annotations

import io

from gradus.monitor import SFT_COLUMNS, ConsoleMonitor, aligned, format_step

RL_STEP = {
    "episode/reward/mean": 0.5124,
    "loss/mismatch_kl/mean": 0.00213,
    "loss/entropy/mean": 1.2,
    "episode/length_tokens/mean": 23.14,
    "throughput/trained_tokens_per_second": 5210.4,
    "throughput/generated_tokens_per_second": 812.0,
    "sample/staleness/max": 1.0,
    "time/step_seconds": 2.314,
}


def test_the_line_of_an_rl_step_shows_what_matters() -> None:
    assert format_step(RL_STEP, step=11, max_steps=30) == (
        "step 12/30  reward  0.512  mismatch 2.1e-03  entropy 1.200  length   23.1  "
        "trained  5,210 tok/s  generated    812 tok/s  stale 1    2.31 s"
    )


def test_what_kept_episodes_from_training_is_shown_when_it_is_not_zero() -> None:
    shares = {"error": 0.125, "flat": 0.5, "dropped": 0.0, "truncated": 0.03}
    notes = {f"episode/{name}/share": value for name, value in shares.items()}
    line = format_step(RL_STEP | notes, step=0, max_steps=30)
    assert line.endswith("   2.31 s  failed 12.5%  flat 50.0%  truncated 3.0%")


def test_steps_are_counted_from_one_for_people() -> None:
    assert format_step(RL_STEP, step=0, max_steps=5).startswith("step 1/5  ")
    assert format_step(RL_STEP, step=0).startswith("step 1  ")


def test_lines_of_one_run_are_aligned() -> None:
    lines = [format_step(RL_STEP, step=step, max_steps=100) for step in (0, 9, 99)]
    assert len({line.index("reward") for line in lines}) == 1


def test_a_missing_number_is_a_dash() -> None:
    line = format_step({"episode/reward/mean": 0.5}, step=0, max_steps=1)
    assert line == (
        "step 1/1  reward  0.500  mismatch -  entropy -  length -  "
        "trained -  generated -  stale -  -"
    )


def test_the_line_of_a_supervised_step_shows_its_own_columns() -> None:
    metrics = {"loss/total/mean": 1.25, "optimizer/lr": 3e-3, "time/step_seconds": 0.3}
    line = format_step(metrics, step=4, max_steps=400, columns=SFT_COLUMNS)
    assert line.startswith("step   5/400  loss  1.2500  epoch -  lr 3.0e-03  grad norm -")


def test_the_monitor_writes_and_flushes_one_line_per_record() -> None:
    stream = io.StringIO()
    monitor = ConsoleMonitor(stream, max_steps=2)
    monitor.record(RL_STEP, step=0)
    monitor.record(RL_STEP, step=1)
    monitor.close()
    assert [line[:8] for line in stream.getvalue().splitlines()] == ["step 1/2", "step 2/2"]
    assert not stream.closed


def game(source: str, **rewards: float) -> dict[str, float]:
    found = {f"episode/{source}/agent/{a}/reward/mean": value for a, value in rewards.items()}
    trained = {f"episode/{source}/agent/{a}/trained/share": a != "judge" for a in rewards}
    return found | {name: float(share) for name, share in trained.items()}


def test_where_several_agents_train_each_has_its_reward_in_the_line() -> None:
    metrics = game("debate", pro=0.25, con=-0.25, judge=9.0)
    assert "  reward pro 0.250 con -0.250  mismatch" in format_step(metrics, step=0)
    both = metrics | game("rematch", pro=0.5)
    assert "  reward debate/pro 0.250 debate/con -0.250 rematch/pro 0.500  mismatch" in format_step(
        both, step=0
    )


def test_the_rewards_of_many_agents_are_a_range() -> None:
    metrics = game("poker", a=0.5, b=-0.5, c=0.125, d=-1.0)
    assert "  reward -1.000 to 0.500  mismatch" in format_step(metrics, step=0)


def test_a_source_with_a_reward_of_its_own_is_shown_before_any_agent() -> None:
    metrics = game("debate", pro=0.25, con=-0.25) | {"episode/reward/mean": 0.5}
    assert "  reward  0.500  mismatch" in format_step(metrics, step=0)


def test_columns_of_a_table_stand_below_each_other() -> None:
    rows = [["metric", "run", "first"], ["reward", "a", "0.25"]]
    assert aligned(rows) == ["metric  run  first", "reward    a   0.25"]
    assert aligned(rows, num_left=2) == ["metric  run  first", "reward  a     0.25"]
