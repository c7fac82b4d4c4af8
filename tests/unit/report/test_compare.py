"""Comparing runs: what the table says, how sure it is, and what it refuses."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import a_run

from gradus.cli.main import main
from gradus.errors import ConfigError
from gradus.monitor import JsonlMonitor
from gradus.monitor.statistics import mean_of, over_runs, over_steps
from gradus.report.compare import as_json, as_lines, compare
from gradus.report.series import RunSeries, read_series
from gradus.run.records import Record

REWARD = "episode/reward/mean"


def noisy(mean: float, *, seed: int, steps: int = 100) -> list[dict[str, float]]:
    draw = random.Random(seed)
    return [{REWARD: draw.gauss(mean, 0.1), "loss/entropy/mean": 1.0} for _ in range(steps)]


def test_runs_that_differ_differ_and_runs_that_do_not_do_not(tmp_path: Path) -> None:
    same = a_run(tmp_path / "same", metrics=noisy(0.5, seed=1))
    first = a_run(tmp_path / "first", metrics=noisy(0.5, seed=2))
    better = a_run(tmp_path / "better", metrics=noisy(0.8, seed=3))
    (row,) = compare([first, same, better], patterns=[REWARD]).rows
    assert not row.differences[1].is_clear
    assert row.differences[2].is_clear
    assert row.differences[2].value == pytest.approx(0.3, abs=0.05)
    assert row.cells[2].num_last == 50


def test_intervals_over_steps_hold_the_truth_also_when_steps_are_alike() -> None:
    draw = random.Random(0)

    def wandering(steps: int) -> list[float]:
        values = [0.0]
        for _ in range(steps + 20):
            values.append(0.6 * values[-1] + draw.gauss(0, 1))
        return values[-steps:]

    found = [over_steps(wandering(50), wandering(50)) for _ in range(150)]
    held = sum((d.low or 0) <= 0 <= (d.high or 0) for d in found)
    assert 0.88 <= held / 150 <= 0.99


def test_minutes_do_not_count_the_night_before_a_run_was_resumed(tmp_path: Path) -> None:
    times = [0.0, 60.0, 120.0, 36_000.0, 36_060.0]
    run = a_run(tmp_path / "run", metrics=[{"time/step_seconds": 60.0}] * len(times))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [{**row, "time": time} for row, time in zip(rows, times, strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(it) + "\n" for it in timed))
    assert read_series(run / "metrics.jsonl").end("minutes") == 601
    (run / "cuts.jsonl").write_text('{"num_bytes": 9, "step": 3}\n')
    series = read_series(run / "metrics.jsonl")
    assert [x for x, _ in series.positions("time/step_seconds", "minutes")] == [0, 1, 2, 3, 4]
    late = replace(series, evaluations=[Record(3, 35_000.0, {"eval/version": 3.0})])
    assert late.positions("eval/version", "minutes") == [(2, 3.0)]


def test_the_interval_over_runs_is_that_of_welch() -> None:
    found = over_runs([27.5, 21.0, 19.0, 23.6, 17.0, 17.9], [27.1, 22.0, 20.8, 23.4, 23.4, 23.5])
    # By hand: standard error 1.835, 7.64 degrees of freedom, quantile 2.325 between two of a table.
    assert found.value == pytest.approx(2.367, abs=0.001)
    assert found.low == pytest.approx(-1.900, abs=0.01)
    assert found.high == pytest.approx(6.634, abs=0.01)


def test_one_run_or_a_few_steps_give_no_interval() -> None:
    assert over_runs([1.0], [2.0, 3.0]).low is None
    assert over_steps([1.0] * 9, [2.0] * 50).low is None
    assert not over_runs([0.0, 0.0], [0.01, 0.01]).is_clear
    assert over_runs([0.5, 0.5], [0.5, 0.5]).high == 0, "no difference needs no spread"
    assert over_runs([0.0] * 4, [0.01] * 4).is_clear, "eight are no chance"


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_few_rewards_alike_show_no_mean_on_either_side(reward: float) -> None:
    assert mean_of([[reward] * 4]).low is None
    assert mean_of([[reward] * 8]).low == reward
    assert (mean_of([[reward] * 4], are_changes=True).low == 0) == (reward == 0)


def test_settings_with_several_seeds_are_compared_over_runs(tmp_path: Path) -> None:
    a = [a_run(tmp_path / f"a{n}", metrics=noisy(0.5, seed=n)) for n in range(3)]
    b = [a_run(tmp_path / f"b{n}", metrics=noisy(0.8, seed=9 + n)) for n in range(3)]
    comparison = compare(a, b, patterns=[REWARD])
    (row,) = comparison.rows
    assert row.differences[1].way == "runs"
    assert row.differences[1].is_clear
    assert any(line.strip().startswith("B minus A") for line in as_lines(comparison))


def counting(steps: int, tokens: float) -> list[dict[str, float]]:
    return [{REWARD: float(step), "batch/tokens/sum": tokens} for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("at", "long", "said"),
    [
        ("steps", 10.0, "compared at step 10, the last that all runs reached"),
        ("tokens", 20.0, "compared at 2,000 trained tokens, the last"),
        (None, 40.0, "each run at its own end"),
    ],
)
def test_runs_of_different_lengths_are_compared_where_all_of_them_came(
    tmp_path: Path, at: str, long: float, said: str
) -> None:
    one = a_run(tmp_path / "one", metrics=counting(40, 100.0))
    two = a_run(tmp_path / "two", metrics=counting(10, 200.0))
    comparison = compare([one, two], patterns=[REWARD], last=1, at=at)  # type: ignore[arg-type]
    (row,) = comparison.rows
    assert (row.cells[0].mean_last, row.cells[1].mean_last) == (long, 10.0)
    assert any(line.startswith(said) for line in as_lines(comparison))
    assert as_json(comparison)["at"].startswith(said)


def test_cells_of_a_grid_are_also_shown_over_their_seeds(tmp_path: Path) -> None:
    runs = [
        a_run(
            tmp_path / f"{steps}-{seed}",
            metrics=[{REWARD: steps / 10 + seed / 100}] * 2,
            changes={"max_steps": steps, "seed": seed},
        )
        for steps in (2, 4)
        for seed in (0, 1, 2)
    ]
    lines = [line.split() for line in as_lines(compare(runs, patterns=[REWARD]))]
    assert [REWARD, *["max_steps", "=", "2", "3", "0.2100", "0.2000", "0.2200"]] in lines
    assert ["max_steps", "=", "4", "3", "0.4100", "0.4000", "0.4200"] in lines
    assert not any("over seeds" in line for line in as_lines(compare(runs[:3], patterns=[REWARD])))
    assert not any("over seeds" in line for line in as_lines(compare(runs[:4:3])))


def test_settings_that_differ_late_in_a_long_value_are_not_pooled(tmp_path: Path) -> None:
    names = {"a": "x" * 80 + "1", "b": "x" * 80 + "2"}
    runs = [
        a_run(
            tmp_path / f"{name}-{seed}",
            metrics=[{REWARD: 0.5}] * 2,
            changes={"model": {"name": model}, "seed": seed},
        )
        for name, model in names.items()
        for seed in (0, 1)
    ]
    rows = [line for line in as_lines(compare(runs, patterns=[REWARD]), width=999) if " … " in line]
    assert [("1'" in line, "2'" in line, line.split()[-4]) for line in rows] == [
        (True, False, "2"),
        (False, True, "2"),
    ]


def test_where_a_run_is_seen_is_no_setting_that_differs(tmp_path: Path) -> None:
    changes = [{"monitor": [{"type": it}], "seed": n} for n, it in enumerate(("wandb", "mlflow"))]
    runs = [a_run(tmp_path / str(n), changes=it) for n, it in enumerate(changes)]
    assert [key for key, _ in compare(runs).settings] == ["seed"]


def test_runs_without_tokens_are_not_compared_after_so_many(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, metrics=[{REWARD: 0.5}] * 3) for name in ("one", "two")]
    with pytest.raises(ConfigError, match="one counts none; use --at steps"):
        compare(runs, at="tokens")
    assert compare(runs).at == ""
    assert main(["compare", *map(str, runs), "--at", "weeks"]) == 64


def test_of_an_evaluation_the_last_version_counts_that_all_runs_measured(tmp_path: Path) -> None:
    runs = []
    for name, versions in (("one", (0, 10, 20)), ("two", (0, 10))):
        run = a_run(tmp_path / name, metrics=[{REWARD: 0.5}] * 20)
        monitor = JsonlMonitor(run / "metrics.jsonl")
        for version in versions:
            values = {"eval/version": float(version), "eval/avg@4": version / 100}
            monitor.record(values, step=version)
        monitor.close()
        runs.append(run)
    (row,) = compare(runs, patterns=["eval/avg@4"]).rows
    assert [(cell.mean_last, cell.num_last) for cell in row.cells] == [(0.1, 1), (0.1, 1)]
    other = a_run(tmp_path / "three", metrics=[{REWARD: 0.5}] * 20)
    monitor = JsonlMonitor(other / "metrics.jsonl")
    monitor.record({"eval/version": 20.0, "eval/other": 0.5}, step=20)
    monitor.close()
    (row,) = compare([*runs, other], patterns=["eval/avg@4"]).rows
    assert [cell.mean_last for cell in row.cells] == [0.1, 0.1, None], "what it never measured"


def test_runs_are_compared_after_so_many_episodes_with_the_evaluations_until_there(
    tmp_path: Path,
) -> None:
    runs = []
    for name, steps in (("one", 20), ("two", 10)):
        run = a_run(tmp_path / name, metrics=[{"episode/ended/sum": 4.0}] * steps)
        monitor = JsonlMonitor(run / "metrics.jsonl")
        for version in range(0, steps + 1, 5):
            monitor.record({"eval/version": float(version), "eval/avg@4": version}, step=version)
        monitor.close()
        runs.append(run)
    found = compare(runs, patterns=["eval/avg@4"], at="episodes")
    assert found.at.startswith("compared at 40 episodes, the last that all")
    assert [(cell.first, cell.last) for cell in found.rows[0].cells] == [(0.0, 10.0)] * 2
    assert main(["compare", *map(str, runs), "--at", "episodes"]) == 0


def test_an_evaluation_between_sampled_records_lies_at_the_step_before_it() -> None:
    steps = [Record(step, float(step), {"batch/tokens/sum": 10.0}) for step in (0, 4, 8)]
    tests = [Record(v, 9.0, {"eval/version": float(v), "eval/avg": 0.5}) for v in (0, 3, 9)]
    series = RunSeries(steps, tests, names=["eval/avg"])
    assert [x for x, _ in series.positions("eval/avg", "tokens")] == [0.0, 10.0, 90.0]


def test_the_last_records_of_a_sampled_run_are_not_called_steps(tmp_path: Path) -> None:
    found = compare([a_run(tmp_path / name, metrics=noisy(0.5, seed=1)) for name in "ab"])
    sampled = replace(found.runs[1], series=replace(found.runs[1].series, is_sampled=True))
    text = " ".join(as_lines(replace(found, runs=[found.runs[0], sampled]), width=999))
    assert "the mean of the last 50 records (sampled ones" in text


def test_the_table_fits_the_terminal_and_says_what_it_left_out(tmp_path: Path) -> None:
    names = ("a-run-with-a-name-of-some-length", "another")
    runs = [a_run(tmp_path / it, metrics=noisy(0.5, seed=1)) for it in names]
    comparison = compare(runs, patterns=[REWARD])
    wide, narrow = (as_lines(comparison, width=width) for width in (160, 80))
    assert "left out" not in "\n".join(wide)
    assert any(line.split()[2:5] == ["first", "last", "best"] for line in wide)
    assert any("left out: first, last, best" in line for line in narrow)
    assert "episode/reward/mean" in narrow
    assert max(map(len, narrow)) <= 80


def test_the_settings_that_differ_are_listed_by_their_keys_and_secrets_hidden(
    tmp_path: Path,
) -> None:
    def source(**taskset: object) -> dict[str, object]:
        return {"orchestrator": {"train": {"env": [{"id": "words", "taskset": taskset}]}}}

    one = a_run(tmp_path / "one", changes={"seed": 1, **source(level=1, api_key="abc123")})
    two = a_run(tmp_path / "two", changes={"seed": 2, **source(level=2, api_key="def456")})
    comparison = compare([one, two])
    assert dict(comparison.settings) == {
        "orchestrator.train.env.words.taskset.level": [1, 2],
        "seed": [1, 2],
    }
    text = "\n".join(as_lines(comparison)) + json.dumps(as_json(comparison))
    assert "abc123" not in text


def test_of_a_source_that_only_one_run_has_what_was_chosen_is_listed(tmp_path: Path) -> None:
    def sources(*sources: dict[str, object]) -> dict[str, object]:
        return {"orchestrator": {"train": {"env": list(sources)}}}

    words = {"id": "words", "agent": {"max_turns": 3}}
    one = a_run(tmp_path / "one", changes=sources(words))
    two = a_run(tmp_path / "two", changes=sources({"id": "words"}, {"id": "sums", "ratio": 2.0}))
    assert dict(compare([one, two]).settings) == {
        "orchestrator.train.env.sums.id": [None, "sums"],
        "orchestrator.train.env.sums.ratio": [None, 2.0],
        "orchestrator.train.env.words.agent.max_turns": [3, None],
    }


def test_a_folder_without_a_config_differs_in_no_setting(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"seed{seed}", changes={"seed": seed}) for seed in range(2)]
    bare = a_run(tmp_path / "bare")
    shutil.rmtree(bare / "config")
    for order in ([bare, *runs], [*runs, bare]):
        comparison = compare(order)
        assert [key for key, _ in comparison.settings] == ["seed"]
        assert "bare: The folder holds no config." in as_lines(comparison)


def test_a_metric_that_only_one_run_has_is_shown(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", metrics=[{REWARD: 1.0}])
    two = a_run(tmp_path / "two")
    (row,) = compare([one, two], patterns=["*reward*"]).rows
    assert (row.cells[0].last, row.cells[1].last, dict(row.differences)) == (1.0, None, {})


def test_numbers_that_are_not_finite_leave_a_gap_in_the_last_steps(tmp_path: Path) -> None:
    broken = [{REWARD: 1.0}, {REWARD: float("nan")}, {REWARD: 3.0}, {REWARD: float("inf")}]
    runs = [a_run(tmp_path / name, metrics=broken) for name in ("one", "two")]
    (row,) = compare(runs, patterns=[REWARD], last=3).rows
    assert (row.cells[0].mean_last, row.cells[0].num_last, row.cells[0].last) == (3.0, 1, 3.0)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", metrics=[{REWARD: 1.0}])
    two = a_run(tmp_path / "two")
    with pytest.raises(ConfigError, match="no metric matches 'nothing'; one has episode/reward"):
        compare([one, two], patterns=["nothing"])
    three = a_run(tmp_path / "three", metrics=[{"loss/total/mean": 1.0, REWARD: 1.0}])
    with pytest.raises(ConfigError, match="no metric matches 'reward'; three has episode/reward"):
        compare([three, two], patterns=["reward"])
    with pytest.raises(ConfigError, match="named twice"):
        compare([one, one])
    words = [str(one), str(two)]
    for wrong in (
        [str(one)],
        [*words, "--last", "0"],
        [*words, "--out", "picture.gif"],
        [*words, "--over", "years"],
        ["--against", str(two)],
        [*words, "--frob"],
    ):
        assert main(["compare", *wrong]) == 64


def test_the_command_prints_json_and_draws_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    one = a_run(tmp_path / "one$x^_", metrics=noisy(0.5, seed=1))
    two = a_run(tmp_path / "_two", metrics=noisy(0.6, seed=2, steps=3))
    out = tmp_path / "picture.png"
    words = ["compare", str(one), str(two), "--metric", "episode/*", "--out", str(out), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["metrics"][0]["name"] == REWARD
    assert out.read_bytes().startswith(b"\x89PNG")
