"""Alarms begin on sick numbers, stay silent on healthy ones, and outlive a restart."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_peers import ScriptedEnvironment

from gradus.config import AlarmConfig
from gradus.monitor import JsonlMonitor
from gradus.monitor.catalogue import describe_metric
from gradus.orchestrator.records.health import (
    ALARMS,
    BEGINNING_STEPS,
    MAX_PARTS,
    Alarms,
    DominantPart,
)
from gradus.orchestrator.records.journal import Journal, JournalEvent, last_end
from gradus.run.paths import RunDirectory
from gradus.run.records import EVALUATION, read_records
from gradus.run.records import Record as RunRecord
from gradus.run.settings import ALARM_THRESHOLDS
from gradus.testing.episodes import build_episode

ROOT = Path(__file__).resolve().parents[4]
Record = dict[str, float]
NUM_STEPS = 60


def healthy(step: int) -> Record:
    """A run that learns: the reward rises, entropy halves, episodes grow by half."""
    noise = random.Random(step).uniform(-1, 1)
    progress = min(1.0, step / NUM_STEPS)
    return {
        "loss/entropy/mean": 0.3 * (1 - 0.5 * progress) + 0.02 * noise,
        "loss/mismatch_kl/mean": 0.002 + 0.001 * noise,
        "episode/words/reward/mean": 0.2 + 0.6 * progress,
        "episode/words/reward/goal/mean": 0.1 + 0.6 * progress + 0.02 * noise,
        "episode/words/reward/format/mean": 0.1,
        "episode/words/reward/goal/variance_share": 0.97,
        "episode/words/reward/format/variance_share": 0.03,
        "episode/words/length_tokens/mean": 100 * (1 + 0.5 * progress) + 10 * noise,
        "episode/words/turns/mean": 2.0,
        "episode/words/quarantined/share": 0.01,
        "episode/words/metric/turns/mean": 2.0,
        "episode/words/metric/parse_errors/mean": 0.05,
        "episode/words/metric/episode/judge_flipped/mean": 0.1 + 0.1 * noise,
        "episode/words/flat/share": 0.4 + 0.3 * noise,
        "episode/words/error/share": 0.02,
        "episode/words/truncated/share": 0.1 + 0.1 * noise,
        "episode/words/slow_bias": 0.05,
        "group/words/echo_tokens/mean": 40.0 + 10 * noise,
        "episode/words/dropped/share": 0.2,
        "optimizer/grad_norm": 0.4 + 0.1 * noise,
        "loss/ratio/p95": 1.2,
    }


def late(step: int, value: float, before: float) -> float:
    """`value` from the step on at which the beginning is over."""
    return value if step >= BEGINNING_STEPS else before


SICK: dict[str, Callable[[int], Record]] = {
    "reward_part": lambda step: {
        "episode/words/reward/goal/mean": late(step, 0.1, 0.4),
        "episode/words/reward/format/variance_share": 0.95,
        "episode/words/reward/goal/variance_share": 0.05,
    },
    "length_drift": lambda step: {"episode/words/length_tokens/mean": late(step, 900.0, 100.0)},
    "entropy_collapse": lambda step: {"loss/entropy/mean": late(step, 0.01, 0.4)},
    "judge_flips": lambda _: {"episode/words/metric/episode/judge_flipped/mean": 0.5},
    "unreadable": lambda _: {"episode/words/metric/parse_errors/mean": 1.6},
    "mismatch_kl": lambda _: {"loss/mismatch_kl/mean": 0.4},
    "flat_groups": lambda _: {"episode/words/flat/share": 1.0},
    "failing_episodes": lambda _: {"episode/words/error/share": 0.8},
    "truncated": lambda _: {"episode/words/truncated/share": 0.9},
    "reward_drop": lambda step: {"episode/words/reward/mean": late(step, 0.0, 0.8)},
    "gradient_jump": lambda step: {"optimizer/grad_norm": late(step, 400.0, 0.4)},
    "dropped_episodes": lambda _: {"episode/words/dropped/share": 0.97},
    "large_ratios": lambda _: {"loss/ratio/p95": 50.0},
    "slow_tasks": lambda _: {"episode/words/slow_bias": 0.6},
    "echo_tokens": lambda _: {"group/words/echo_tokens/mean": 0.0},
}
"""By alarm, what is different in a run in which it must begin."""
OF_THE_RUN = {alarm.name for alarm in ALARMS if not alarm.is_per_source}


def name_of(alarm: str, source: str = "words") -> str:
    return f"alarm/{alarm}" if alarm in OF_THE_RUN else f"alarm/{source}/{alarm}"


def watch(
    records: Iterable[Record], *, quiet: Sequence[str] = (), sources: Iterable[str] = ("words",)
) -> tuple[list[Record], list[str]]:
    """What the alarms say after each record, and every line that was told."""
    lines: list[str] = []
    alarms = Alarms(sources=list(sources), tell=lines.append, quiet=quiet)
    return [alarms.add(record, step=step) for step, record in enumerate(records)], lines


def sick(alarm: str, num_steps: int = NUM_STEPS) -> Iterator[Record]:
    return (healthy(step) | SICK[alarm](step) for step in range(num_steps))


def test_every_alarm_has_a_threshold_in_the_config_and_a_sick_run_here() -> None:
    names = [alarm.name for alarm in ALARMS]
    assert names == list(ALARM_THRESHOLDS)
    assert set(names) == set(SICK)


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    rows = [
        f"| `{a.name}` | {a.measures} | {ALARM_THRESHOLDS[a.name]:g} | {a.advice} |" for a in ALARMS
    ]
    assert "\n".join(rows) in (ROOT / "docs" / "monitoring.md").read_text()


def rings_at(alarm: str) -> int:
    """The step, counted from 1, of a run that is sick from step 11 on."""
    begins = BEGINNING_STEPS
    records = (
        healthy(step) | (SICK[alarm](step) if step >= begins else {}) for step in range(NUM_STEPS)
    )
    states = [record.get(name_of(alarm)) for record in watch(records)[0]]
    return states.index(1.0) + 1


def test_each_pathology_in_the_docs_rings_where_they_say_or_says_why_not() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    table = text.partition("| what goes wrong in silence |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    rung = {}
    for what, why, step in rows:
        name = re.match(r"`(\w+)`", why)
        if name is None:
            assert (why.startswith("nothing by default"), step) == (True, "-"), what
            continue
        rung[name[1]] = int(step)
    assert len(rows) == 20
    assert rung == {alarm: rings_at(alarm) for alarm in SICK}


def test_the_catalogue_knows_what_is_recorded() -> None:
    names = set().union(*watch(map(healthy, range(NUM_STEPS)))[0])
    found = {name: describe_metric(name) for name in names}
    assert all(found.values())
    assert {it.labels["alarm"] for it in found.values() if it is not None} == set(SICK)


@pytest.mark.shows("F41", "F44")
@pytest.mark.parametrize("alarm", sorted(SICK))
def test_it_begins_on_a_sick_run_and_is_told_once(alarm: str) -> None:
    found, lines = watch(sick(alarm))
    assert found[-1][name_of(alarm)] == 1.0
    assert len(lines) == 1
    assert lines[0].startswith(f"alarm {alarm} ")
    assert ("words" in lines[0]) == (alarm not in OF_THE_RUN)
    advice = next(a.advice for a in ALARMS if a.name == alarm)
    assert lines[0].endswith(advice)


@pytest.mark.parametrize("alarm", sorted(SICK))
def test_nothing_else_begins_on_a_sick_run(alarm: str) -> None:
    on = {name for record in watch(sick(alarm))[0] for name, value in record.items() if value == 1}
    assert {name for name in on if not name.endswith("/value")} == {name_of(alarm)}


@pytest.mark.parametrize("alarm", sorted(SICK))
def test_it_is_over_when_the_run_is_well_again(alarm: str) -> None:
    records = [*sick(alarm), *map(healthy, range(NUM_STEPS, 2 * NUM_STEPS))]
    found, lines = watch(records)
    assert found[-1][name_of(alarm)] == 0.0
    assert [line.split(" is over")[0] != line for line in lines] == [False, True]


@pytest.mark.parametrize("alarm", sorted(SICK))
def test_a_quiet_alarm_measures_nothing(alarm: str) -> None:
    found, lines = watch(sick(alarm), quiet=[alarm])
    assert lines == []
    assert not any(name.startswith(name_of(alarm)) for record in found for name in record)


def test_a_healthy_run_has_every_alarm_in_its_records_and_no_line() -> None:
    found, lines = watch(map(healthy, range(NUM_STEPS)))
    assert lines == []
    assert {name_of(alarm): 0.0 for alarm in SICK}.items() <= found[-1].items()
    assert all(f"{name_of(alarm)}/value" in found[-1] for alarm in SICK)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_say_nothing(value: float) -> None:
    found, lines = watch(dict.fromkeys(healthy(step), value) for step in range(NUM_STEPS))
    assert (found[-1], lines) == ({}, [])


@pytest.mark.parametrize("alarm", sorted(SICK))
def test_gaps_and_nan_between_sick_steps_change_nothing(alarm: str) -> None:
    def torn() -> Iterator[Record]:
        for record in sick(alarm):
            yield record
            yield {}
            yield dict.fromkeys(record, math.nan)

    found, lines = watch(torn())
    assert len(lines) == 1
    assert found[-1] == watch(sick(alarm))[0][-1]


@pytest.mark.shows("F41")
@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40))
def test_no_number_stops_a_run(values: list[float]) -> None:
    """Whatever an environment measures: what is recorded and kept is finite."""
    health = Alarms(sources=["words"], tell=lambda _: None)
    for step, value in enumerate([*values, *values, *values]):
        found = health.add(dict.fromkeys(healthy(step), value), step=step)
        assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324])
def test_numbers_at_the_ends_of_what_a_float_holds_do_not_stop_a_run(value: float) -> None:
    watch(dict.fromkeys(healthy(step), value) for step in range(NUM_STEPS))


def test_records_without_any_metric_are_silent() -> None:
    assert watch({} for _ in range(NUM_STEPS)) == ([{}] * NUM_STEPS, [])


def test_constant_numbers_are_silent() -> None:
    record = healthy(0) | {"episode/words/reward/goal/mean": 0.0}
    del record["episode/words/reward/goal/variance_share"]
    del record["episode/words/reward/format/variance_share"]
    assert watch([record] * NUM_STEPS)[1] == []


def test_numbers_that_are_always_zero_are_silent() -> None:
    """But for what is learned of observations: that there is none is the alarm."""
    silent = dict.fromkeys(set(healthy(0)) - {"group/words/echo_tokens/mean"}, 0.0)
    assert watch(silent for _ in range(NUM_STEPS))[1] == []


def test_one_healthy_episode_per_step_is_silent() -> None:
    """Every share is 0 or 1, and lengths jump."""

    def single(step: int) -> Record:
        draw = random.Random(f"one/{step}")
        shares = {
            name: float(draw.random() < 0.05)
            for name in healthy(step)
            if name.endswith(("share", "judge_flipped/mean")) and "variance" not in name
        }
        length = {"episode/words/length_tokens/mean": draw.choice([20.0, 80.0, 200.0])}
        return healthy(step) | shares | length

    assert watch(single(step) for step in range(1_000))[1] == []


def test_a_source_that_appears_late_is_measured_against_its_own_beginning() -> None:
    def second(step: int) -> Record:
        if step < 30:
            return {}
        named = {name.replace("/words/", "/sums/"): v for name, v in healthy(step).items()}
        return named | {"episode/sums/length_tokens/mean": 5_000.0}

    records = [healthy(step) | second(step) for step in range(NUM_STEPS)]
    found, lines = watch(records, sources=("words", "sums"))
    assert lines == []
    assert "alarm/sums/length_drift" not in found[45]
    assert found[-1]["alarm/sums/length_drift/value"] == pytest.approx(1.0)


def test_the_sick_one_of_two_sources_is_named() -> None:
    records = [
        {name.replace("/words/", "/sums/"): v for name, v in healthy(step).items()}
        | healthy(step)
        | SICK["truncated"](step)
        for step in range(NUM_STEPS)
    ]
    found, lines = watch(records, sources=("sums", "words"))
    assert (found[-1]["alarm/sums/truncated"], found[-1]["alarm/words/truncated"]) == (0.0, 1.0)
    assert [line.split(" at ")[0] for line in lines] == ["alarm truncated of source 'words'"]


def test_episodes_that_shrink_are_a_drift_too() -> None:
    shrunk = [{"episode/words/length_tokens/mean": late(step, 10.0, 100.0)} for step in range(20)]
    assert watch(shrunk)[0][-1]["alarm/words/length_drift/value"] == pytest.approx(10.0)


def test_a_goal_that_makes_all_differences_is_no_alarm_while_no_other_part_falls() -> None:
    records = (healthy(s) | {"episode/words/reward/goal/variance_share": 1.2} for s in range(60))
    assert watch(records)[0][-1]["alarm/words/reward_part/value"] == 0.0


def test_an_alarm_at_its_threshold_does_not_flicker() -> None:
    shares = [0.3 if step % 2 else 0.26 for step in range(NUM_STEPS)]
    found, lines = watch({"episode/words/slow_bias": share - 0.02} for share in shares)
    assert len(lines) == 1
    assert [record["alarm/words/slow_tasks"] for record in found] == [0.0] + [1.0] * 59


def test_a_step_is_named_as_the_terminal_counts_it() -> None:
    lines = watch([{"episode/words/slow_bias": 0.5}])[1]
    assert lines[0].startswith("alarm slow_tasks of source 'words' at step 1: 0.5, threshold 0.25 ")


@pytest.mark.parametrize("alarm", sorted(SICK))
def test_a_restart_at_any_step_changes_nothing(alarm: str, tmp_path: Path) -> None:
    records = [*sick(alarm, 40), *map(healthy, range(40))]
    straight, told = watch(records)
    file = JsonlMonitor(tmp_path / "metrics.jsonl")
    lines: list[str] = []
    first = Alarms(sources=["words"], tell=lines.append)
    before: list[dict[str, float]] = []
    for cut in range(len(records)):
        if cut % 3 == 0:
            again = list(lines)
            second = Alarms(sources=["words"], tell=again.append)
            second.catch_up(read_records(tmp_path / "metrics.jsonl"))
            after = [second.add(record, step=cut + n) for n, record in enumerate(records[cut:])]
            assert (before + after, again) == (straight, told)
        before.append(first.add(records[cut], step=cut))
        file.record(records[cut] | before[-1], step=cut)
        # An evaluation of the same step, whose numbers no alarm of training reads.
        file.record(dict.fromkeys(records[cut], 1e9) | {EVALUATION: cut}, step=cut)
    file.close()


def test_numbers_that_are_not_finite_are_read_again_as_absent(tmp_path: Path) -> None:
    with closing(JsonlMonitor(tmp_path / "metrics.jsonl")) as file:
        for step in range(40):
            file.record(dict.fromkeys(healthy(step), math.inf), step=step)
    alarms = Alarms(sources=["words"], tell=print)
    alarms.catch_up(read_records(tmp_path / "metrics.jsonl"))
    assert alarms.add({}, step=40) == {}


def test_an_alarm_that_was_off_before_a_restart_knows_what_came_before() -> None:
    records = [RunRecord(n, 0.0, record) for n, record in enumerate(sick("truncated"))]
    alarms = Alarms(sources=["words"], tell=print)
    alarms.catch_up(records)
    assert alarms.add({}, step=len(records))["alarm/words/truncated"] == 1.0


def test_a_gauge_keeps_few_parts_however_many_a_reward_has() -> None:
    names = [f"episode/words/reward/part{number}" for number in range(200)]
    record = {f"{name}/{kind}": 0.5 for name in names for kind in ("mean", "variance_share")}
    gauge = DominantPart(window=10)
    for _ in range(100):
        gauge.add(record, "episode/words")
    assert len(gauge._first) == len(gauge._last) == len(gauge._shares) == MAX_PARTS
    assert all(len(last) == 10 for last in gauge._last.values())


async def test_alarms_of_a_run_stand_in_its_records_and_in_its_notices(build_rig: Any) -> None:
    half_flat = ScriptedEnvironment(play=lambda n: build_episode(reward=float(n % 4 == 1)))
    mine = {"metric": "episode/words/flat/share", "above": 0.3}
    rig = build_rig(max_steps=25, alarm=[mine], environment=half_flat)
    await rig.play()
    assert rig.monitor.records[-1][1]["alarm/episode.words.flat.share"] == 1.0
    assert "alarm episode.words.flat.share" in RunDirectory(rig.root).notices.read_text()


def test_a_line_names_the_part_the_reason_and_from_what_to_what() -> None:
    source = "episode/words"
    sick = {
        f"{source}/error/share": 0.9,
        f"{source}/error/TaskError/share": 0.7,
        f"{source}/error/timeout/share": 0.2,
        f"{source}/dropped/share": 1.0,
        "sample/words/dropped/stale/share": 1.0,
    }
    _, lines = watch(
        {**healthy(0), **(sick if step > 9 else {}), f"{source}/length_tokens/mean": length}
        for step, length in enumerate([100.0] * 10 + [600.0] * 20)
    )
    said = "\n".join(lines)
    assert "failing_episodes of source 'words' at step" in said
    assert ", most often TaskError, threshold" in said
    assert ", most often stale, threshold" in said
    assert ", from 100 to 600, threshold" in said


def test_echo_without_an_observation_is_told_at_the_first_step_and_after_ten() -> None:
    counts = [0.0, 30.0, *[0.0] * 9, 0.0, 30.0]
    found, lines = watch({"group/words/echo_tokens/mean": count} for count in counts)
    on = [step for step, record in enumerate(found) if record["alarm/words/echo_tokens"]]
    assert on == [0, 11]
    assert [line.split(": ")[0] for line in lines] == [
        "alarm echo_tokens of source 'words' at step 1",
        "alarm echo_tokens of source 'words' at step 2 is over",
        "alarm echo_tokens of source 'words' at step 12",
        "alarm echo_tokens of source 'words' at step 13 is over",
    ]


def test_an_algorithm_that_observes_nothing_has_no_alarm_about_it() -> None:
    found, _ = watch({"episode/words/slow_bias": 0.0} for _ in range(20))
    assert not any("echo" in name for record in found for name in record)


# Alarms of a user.
def own(*, told: list[str], saves: list[int] | None = None, **values: Any) -> Alarms:
    config = AlarmConfig.model_validate({"metric": "x", **values})
    return Alarms(
        sources=["words"],
        tell=told.append,
        own=[config],
        save=lambda: None if saves is None else saves.append(1),
    )


def tens(*numbers: float) -> list[float]:
    """Each number for as many steps as an alarm takes the mean of."""
    return [number for number in numbers for _ in range(BEGINNING_STEPS)]


@pytest.mark.parametrize(
    ("values", "numbers"),
    [({"above": 2.0}, (1.0, 2.0)), ({"below": 0.5}, (0.6, 0.5)), ({"below": -1.0}, (0.0, -1.0))],
)
def test_an_alarm_of_a_user_rings_at_its_threshold(
    values: dict[str, Any], numbers: tuple[float, ...]
) -> None:
    told: list[str] = []
    alarms = own(told=told, **values)
    states = [alarms.add({"x": x}, step=n).get("alarm/x") for n, x in enumerate(tens(*numbers))]
    assert [n for n, state in enumerate(states) if state] == [19]
    assert told[0].startswith("alarm x at step 20: ")


def test_an_alarm_that_saves_asks_once_each_time_it_begins() -> None:
    saves: list[int] = []
    alarms = own(told=[], saves=saves, above=1.0, action="checkpoint")
    for step, x in enumerate(tens(2.0, 2.0, 0.0, 2.0)):
        alarms.add({"x": x}, step=step)
    assert (len(saves), alarms.end) == (2, None)


def test_an_alarm_that_stops_ends_the_run_with_its_line_and_not_again_after_a_resume() -> None:
    told: list[str] = []
    alarms = own(told=told, above=1.0, action="stop")
    for step, x in enumerate(tens(0.0, 1.0)):
        assert alarms.end is None
        alarms.add({"x": x}, step=step)
    assert str(alarms.end) == told[0]
    assert "saves what it has and ends" in told[0]
    again = own(told=told, above=1.0, action="stop")
    again.catch_up([RunRecord(n, 0.0, {"x": x}) for n, x in enumerate(tens(0.0, 1.0))], ended=19)
    again.add({"x": 1.6}, step=20)
    assert (again.end, len(told)) == (None, 1)


@pytest.mark.parametrize(("ended", "stops"), [(-1, True), (18, True), (19, False)])
def test_a_stop_that_a_kill_left_undone_is_not_lost(ended: int, stops: bool) -> None:
    told: list[str] = []
    again = own(told=told, above=1.0, action="stop")
    again.catch_up([RunRecord(n, 0.0, {"x": x}) for n, x in enumerate(tens(0, 1, 0))], ended=ended)
    assert (again.end is not None, told) == (stops, [])
    assert not stops or str(again.end).startswith("alarm x at step 20: ")


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ("", -1),
        ("started", -1),
        ("started ended-4 resumed-5", 4),
        ("started ended-4 resumed-2", 1),
        ("started ended-4 resumed-2 ended-3", 3),
    ],
)
def test_the_last_end_of_a_run_is_that_which_was_not_done_again(
    events: str, last: int, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, term=1, now=lambda: 0.0) as journal:
        for event in events.split():
            name, _, step = event.partition("-")
            journal.write(JournalEvent(f"run_{name}"), **({"step": int(step)} if step else {}))
    assert last_end(path) == last


def test_a_built_in_alarm_gets_an_action_by_its_number() -> None:
    told: list[str] = []
    alarms = own(told=told, metric="alarm/mismatch_kl/value", above=0.2, action="stop")
    for step in range(20):
        alarms.add({"loss/mismatch_kl/mean": 0.3}, step=step)
    assert alarms.end is not None


def test_a_metric_that_never_comes_is_told_once() -> None:
    told: list[str] = []
    alarms = own(told=told, metric="los/total", above=1.0)
    for step in range(30):
        alarms.add({"x": 1.0}, step=step)
    assert len(told) == 1
    assert told[0].startswith("alarm los.total: no record of the first 10 steps has 'los/total'")


def test_a_reward_that_was_never_above_zero_has_not_dropped() -> None:
    alarms = Alarms(sources=["words"], tell=print)
    found = [alarms.add({"episode/words/reward/mean": -0.5 - s / 10}, step=s) for s in range(30)]
    assert "alarm/words/reward_drop" not in found[-1]


def test_an_alarm_at_a_threshold_of_zero_or_less_stays_on_while_the_number_does() -> None:
    told: list[str] = []
    alarms = own(told=told, above=-1.0)
    states = [
        alarms.add({"x": x}, step=n).get("alarm/x")
        for n, x in enumerate(tens(-2.0, -1.0, -1.0, -2.0))
    ]
    assert states[9::10] == [0.0, 1.0, 1.0, 0.0]
