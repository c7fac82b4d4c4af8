"""What a run did, in numbers and in lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from gradus.launch.summary import MOST_KEPT, PhaseSeconds, Summary, Totals
from gradus.log import as_json, as_text
from gradus.run.records import Record

VALUES = {
    "time": "2026-11-22T14:15:52.123Z",
    "level": "WARNING",
    "process": "trainer",
    "logger": "gradus.trainer",
    "message": "a",
}


def build_summary(records: Iterable[Record], **changes: object) -> Summary:
    values: dict[str, object] = {
        "kind": "rl",
        "run_dir": "runs/demo",
        "term": 1,
        "outcome": "done",
        "cause": None,
        "max_steps": 5,
        "seconds": PhaseSeconds(start_up=30.0, steps=100.0, stop=1.5),
        "totals": Totals.of(records),
    }
    return Summary(**(values | changes))  # type: ignore[arg-type]


def rl_records() -> list[Record]:
    return [
        Record(
            step,
            1.0,
            {
                "episode/reward/mean": 0.1 * step,
                "time/step_seconds": 2.0 + step,
                "time/forward_backward_seconds": 1.0,
                "time/optimize_seconds": 0.5,
                "weights/apply_seconds": 0.2,
            },
        )
        for step in range(5)
    ]


def test_the_reward_at_the_end_is_the_mean_of_the_last_steps() -> None:
    ends = build_summary(rl_records()).first_and_last()
    assert ends is not None
    assert [round(value, 6) for value in ends] == [0.0, 0.3]


def test_rewards_whose_sum_is_no_number_do_not_hide_how_a_run_ended() -> None:
    records = [Record(step, 1.0, {"episode/reward/mean": 1.5e308}) for step in range(3)]
    ends = build_summary(records).first_and_last()
    assert ends is not None
    assert abs(ends[1] / 1.5e308 - 1) < 1e-9


def test_the_first_and_the_last_evaluation_stand_below_the_verdict() -> None:
    evaluated = [
        Record(version, 1.0, {"eval/version": version, "eval/avg@2": value})
        for version, value in ((0, 0.333), (2, 0.5), (4, 0.293))
    ]
    lines = build_summary(rl_records() + evaluated).lines()
    assert "evaluated   0.333 at version 0, 0.293 at version 4" in lines
    lines = build_summary(rl_records() + evaluated[:1]).lines()
    assert not any(line.startswith("evaluated") for line in lines)


def test_warnings_are_counted_by_log_in_both_formats(tmp_path: Path) -> None:
    (tmp_path / "logs/envs").mkdir(parents=True)
    text = as_text(VALUES | {"message": "a\nWARNING b"}) + "\n" + as_text(VALUES) + "\n"
    text += as_text(VALUES | {"logger": "vllm"}) + "\n"
    (tmp_path / "logs/trainer.log").write_text(text)
    (tmp_path / "logs/envs/words.log").write_text(as_json(VALUES) + "\n")
    (tmp_path / "logs/quiet.log").write_text(as_text(VALUES | {"level": "INFO"}) + "\n")
    lines = build_summary(rl_records(), run_dir=str(tmp_path)).lines()
    assert any(line.endswith("1 in logs/envs/words.log, 2 in logs/trainer.log") for line in lines)


def test_the_parts_of_a_step_are_medians() -> None:
    medians = build_summary(rl_records()).totals.median_seconds()
    assert medians == {"step": 4.0, "weights apply": 0.2, "training": 1.5}


def test_the_records_of_a_long_run_take_no_more_room_and_say_the_same() -> None:
    number = 5 * MOST_KEPT
    records = (
        Record(step, 1.0, {"episode/reward/mean": step / number, "episode/error/X/sum": 1.0})
        for step in range(number)
    )
    summary = build_summary(records)
    kept = summary.totals.records
    assert len(kept) <= MOST_KEPT + 3
    assert [kept[0].step, *(it.step for it in kept[-3:])] == [0, *range(number - 3, number)]
    content = summary.as_json()
    assert (content["steps"], content["failures"]) == (number, {"X": number})
    assert content["reward_last"] == pytest.approx((number - 2) / number)
    assert content["verdict"]["word"] == "rising"


def test_the_json_holds_what_the_lines_say() -> None:
    content = json.loads(json.dumps(build_summary(rl_records()).as_json(), allow_nan=False))
    assert (content["outcome"], content["steps"], content["max_steps"]) == ("done", 5, 5)
    assert round(content["reward_last"], 6) == 0.3
    assert content["seconds"]["total"] == 131.5
    assert content["median_seconds_per_step"]["weights_apply"] == 0.2


def test_the_lines_are_short_and_complete() -> None:
    assert build_summary(rl_records()).lines() == [
        "done        5 of 5 steps in 131.5 s",
        "reward      0.000 at the first step, 0.300 at the end (mean of the last 3 steps)",
        "verdict     too short to tell: 20 steps with a reward are needed to tell a trend from "
        "noise",
        "time        start-up 30.0 s, steps 100.0 s, stop 1.5 s",
        "per step    step 4.00 s, weights apply 0.20 s, training 1.50 s (medians)",
        "results     runs/demo",
    ]


def test_where_several_agents_train_the_reward_is_that_of_each() -> None:
    records = [
        Record(
            step,
            1.0,
            {
                "episode/go/agent/black/reward/mean": 0.1 * step,
                "episode/go/agent/black/trained/share": 1.0,
                "episode/go/agent/white/reward/mean": -0.1 * step,
                "episode/go/agent/white/trained/share": 1.0,
                "episode/go/agent/judge/reward/mean": 9.0,
                "episode/go/agent/judge/trained/share": 0.0,
            },
        )
        for step in range(1, 6)
    ]
    summary = build_summary(records)
    assert summary.lines()[1] == (
        "reward      black 0.100 white -0.100 at the first step, "
        "black 0.400 white -0.400 at the end (mean of the last 3 steps)"
    )


def test_failed_episodes_are_summed_by_kind_over_all_sources_once() -> None:
    metrics = {"episode/error/TaskError/sum": 2.0, "episode/words/error/TaskError/sum": 2.0}
    records = [
        Record(0, 1.0, metrics),
        Record(1, 1.0, {**metrics, "episode/error/timeout/sum": 1.0}),
    ]
    summary = build_summary(records)
    assert "failures    5 episodes: 4 x TaskError, 1 x timeout" in summary.lines()
    assert summary.as_json()["failures"] == {"TaskError": 4, "timeout": 1}


def test_sampled_tokens_are_summed_by_what_became_of_them() -> None:
    metrics = {
        "episode/tokens/sampled/sum": 1500.0,
        "episode/tokens/trained/share": 0.8,
        "episode/a/b/tokens/sampled/sum": 1000.0,
        "episode/a/b/tokens/untrained/unread/share": 0.1,
        "episode/a/b/tokens/untrained/failed/share": 0.15,
        "episode/c/tokens/sampled/sum": 500.0,
        "episode/c/tokens/untrained/unread/share": 0.1,
    }
    summary = build_summary([Record(0, 1.0, metrics), Record(1, 1.0, metrics), Record(2, 1.0, {})])
    line = "3,000 sampled, 2,400 of them trained (80.0%); not: 300 unread, 300 failed"
    assert f"tokens      {line}" in summary.lines()
    fates = {"trained": 2400, "unread": 300, "failed": 300}
    assert summary.as_json()["sampled_tokens"] == fates
    all_train = {"episode/tokens/sampled/sum": 5.0, "episode/tokens/trained/share": 1.0}
    lines = build_summary([Record(0, 1.0, all_train)]).lines()
    assert "tokens      5 sampled, 5 of them trained (100.0%)" in lines


def test_a_run_without_a_step_still_has_a_summary() -> None:
    summary = build_summary([], outcome="failed", cause="inference was killed by SIGKILL")
    assert summary.lines()[0] == "failed      0 of 5 steps in 131.5 s"
    content = summary.as_json()
    assert content["reward_first"] is None
    assert content["cause"] == "inference was killed by SIGKILL"


def test_a_supervised_run_is_judged_by_its_loss() -> None:
    records = [Record(step, 1.0, {"loss/total/mean": 2.0 - step}) for step in range(2)]
    content = build_summary(records, kind="sft").as_json()
    assert (content["loss_first"], content["loss_last"]) == (2.0, 1.5)


def test_a_supervised_run_ends_with_what_to_do_with_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    losses = {"loss/total/mean": 1.0, "validation/loss/before": 2.0, "validation/loss/mean": 1.0}
    run = {"kind": "sft", "run_dir": str(tmp_path / "runs" / "my-sft")}
    summary = build_summary([Record(0, 1.0, losses)], **run)
    assert [line for line in summary.lines() if line.startswith("then")] == [
        "then        gradus chat runs/my-sft"
    ]
    for name in ("eval.toml", "rl.toml"):
        (tmp_path / name).touch()
    assert summary.lines()[2:6] == [
        "verdict     learned: validation loss 2.000 before the first step, 1.000 at the end",
        "then        gradus eval @ eval.toml --name my-sft-eval --model.name runs/my-sft/model",
        "then        gradus rl @ rl.toml --model.name runs/my-sft/model",
        "then        gradus chat runs/my-sft",
    ]
    failed = build_summary([Record(0, 1.0, losses)], **run, outcome="failed")
    assert not [line for line in failed.lines() if line.startswith("then")]


def test_a_reward_that_stays_is_told_with_what_to_do_next() -> None:
    records = [
        Record(step, 1.0, {"episode/reward/mean": step % 2, "episode/truncated/share": 0.5})
        for step in range(30)
    ]
    summary = build_summary(records, max_steps=30)
    verdict, advice = summary.lines()[2:4]
    assert verdict.startswith("verdict     flat: reward +0.000 (")
    assert "50% of the episodes are cut off" in advice
    content = json.loads(json.dumps(summary.as_json(), allow_nan=False))
    assert content["verdict"]["word"] == "flat"
    assert content["verdict"]["changes"]["episode/reward/mean"]["value"] == 0.0


def test_a_validation_loss_that_is_no_number_at_the_end_is_not_passed_over() -> None:
    loss, held_out = "loss/total/mean", "validation/loss/mean"
    records = [Record(step, 1.0, {loss: 1.0 - step / 9, held_out: 2.0 - step}) for step in (0, 1)]
    records.append(Record(2, 1.0, {loss: 0.5}, non_finite=(held_out,)))
    verdict = build_summary(records, kind="sft").verdict()
    assert verdict is not None
    assert verdict.word != "learned"


def test_a_run_that_solved_its_task_needs_no_verdict() -> None:
    records = [Record(step, 1.0, {"episode/reward/mean": 1.0}) for step in range(30)]
    lines = build_summary(records, max_steps=99, outcome="solved").lines()
    assert not [line for line in lines if line.startswith(("verdict", "next"))]
