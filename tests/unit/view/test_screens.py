"""Evaluations, time, settings and logs say what the files say, and refuse what is not there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from run_folders import a_run, add_episode

from gradus.monitor.statistics import mean_of
from gradus.run.paths import RunDirectory
from gradus.view import groups
from gradus.view.screens.evaluations import sign_test
from gradus.view.screens.timeline import events_on_curves
from gradus.view.server import Viewer
from gradus.view.shelf import open_shelf


async def asked(address: str, *roots: Path) -> tuple[int, Any]:
    viewer = Viewer(open_shelf(roots), token="t")
    async with TestClient(TestServer(viewer.app(), host="127.0.0.1")) as client:
        (await client.get("/?token=t")).close()
        answer = await client.get(f"/api/runs/{address}")
        return answer.status, await answer.json()


def an_evaluation(root: Path, version: int, rewards: dict[str, list[float | None]]) -> None:
    """The episodes of one version: task → a reward of each, None for one that failed."""
    for task, values in rewards.items():
        for value in values:
            own: dict[str, Any] = {"task": {"key": task}}
            if value is None:
                own["error"] = {"type": "TaskError", "message": "no"}
            add_episode(root, step=version, reward=value or 0.0, reply="r", **own)
    train = root / f"episodes/step_{version}/train.jsonl"
    train.rename(train.with_name("eval.jsonl"))


FIRST = {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [1.0, None], "gone": [0.5]}
SECOND = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [1.0, 1.0], "new": [0.0]}


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    root = a_run(tmp_path / "run", metrics=[{"eval/version": 0.0, "eval/words/pass@2": 0.25}])
    an_evaluation(root, 0, FIRST)
    an_evaluation(root, 5, SECOND)
    return root


async def test_a_cell_is_the_mean_over_tasks_with_its_interval(evaluated: Path) -> None:
    _, page = await asked("run/evaluations", evaluated)
    first, second = page["cells"]
    assert page["versions"] == [0, 5]
    assert first["mean"] == fmean([0.0, 0.5, 1.0, 0.5])
    assert (first["tasks"], first["episodes"], first["failed"]) == (4, 7, 1)
    assert first["low"] < first["mean"] < first["high"]
    # Of the tasks with two episodes that have a reward, one of two is solved.
    around = mean_of([[0.0, 1.0]])
    assert first["told"] == {"pass@2": [0.25, around.low, around.high]}
    assert second["mean"] == fmean([0.5, 1.0, 1.0, 0.0])


async def test_two_versions_are_compared_on_the_tasks_of_both(evaluated: Path) -> None:
    _, page = await asked("run/evaluations?source=words&first=0&second=5", evaluated)
    assert [(it["task"], it["change"]) for it in page["tasks"]] == [
        ("a", 0.5), ("b", 0.5), ("c", 0.0),
    ]  # fmt: skip
    assert (page["better"], page["worse"], page["only"]) == (2, 0, [1, 1])
    assert page["change"] == pytest.approx(1 / 3)
    assert page["chance"] == 0.5
    _, group = await asked(f"run/groups/{page['tasks'][0]['keys'][1]}", evaluated)
    assert sorted(it["reward"] for it in group["replies"]) == [0.0, 1.0]
    status, refusal = await asked("run/evaluations?source=words&first=0&second=4", evaluated)
    assert (status, "no task of 'words' in common" in refusal["error"]) == (404, True)


@pytest.mark.parametrize(
    ("better", "worse", "chance"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (8, 2, 112 / 1024), (3, 3, 1.0), (2000, 0, 0.0)],
)
def test_the_sign_test_is_exact(better: int, worse: int, chance: float) -> None:
    assert sign_test(better, worse) == pytest.approx(chance)
    assert sign_test(worse, better) == sign_test(better, worse)


def journal(root: Path, *events: tuple[float, str, dict[str, Any]]) -> None:
    lines = [
        json.dumps({"event": name, "time": at, "term": 1, **more}) for at, name, more in events
    ]
    with RunDirectory(root).journal.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def records(root: Path, *steps: tuple[float, dict[str, float]]) -> None:
    lines = [{"step": step, "time": at, **more} for step, (at, more) in enumerate(steps)]
    RunDirectory(root).metrics.write_text("".join(f"{json.dumps(it)}\n" for it in lines))


async def test_what_ran_in_a_step_is_drawn_from_the_journal(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    parts = {"time/receive_seconds": 4.0, "time/forward_backward_seconds": 5.0}
    records(root, (1000.0, {}), (1010.0, {"time/step_seconds": 10.0, **parts}), (1020.0, {}))
    journal(
        root,
        (10.0, "episode_started", {"episode": "old.0"}),
        (20.0, "run_resumed", {}),
        (990.0, "group_opened", {"group": "g1", "source": "words"}),
        (995.0, "episode_started", {"episode": "g1.0"}),
        (1001.0, "batch_cut", {"step": 1}),
        (1006.0, "episode_ended", {"episode": "g1.0", "outcome": "finished"}),
        (1009.0, "step_finished", {"step": 1}),
        (1009.5, "policy_applied", {"version": 2}),
        (1011.5, "policy_applied", {"version": 3}),
    )
    with RunDirectory(root).journal.open("a") as file:
        file.write('{"event": "episode_started", "time": 99')
    _, page = await asked("run/time?step=1&count=1", root)
    spans = {it["name"]: it["spans"] for it in page["lanes"]}
    assert (page["begin"], page["end"], page["is_whole"]) == (1000.0, 1010.0, True)
    assert spans["trainer"][-1] == [1000.0, 1004.0, "waits for a batch", 1]
    assert spans["trainer"][-2] == [1004.0, 1009.0, "learns", 1]
    assert spans["batches"] == [[1001.0, 1009.0, "waits for the trainer, and trains", 1]]
    assert spans["longest episodes"] == [[995.0, 1006.0, "words g1.0: finished", "g1.0"]]
    assert page["marks"] == [{"time": 1009.5, "what": "policy_applied", "number": 2}]
    assert page["shares"][0] == {
        "said": "the trainer waited for a batch", "seconds": 4.0, "share": 0.4,
    }  # fmt: skip
    # One ran for 60 % of the window; what ran before a resume ended with it.
    assert sum(page["playing"]) / len(page["playing"]) == pytest.approx(0.6, abs=0.01)


async def test_the_trainer_does_one_thing_at_a_time_where_a_step_is_noted_late(
    tmp_path: Path,
) -> None:
    root = a_run(tmp_path / "run")
    parts = {"time/receive_seconds": 3.0, "time/forward_backward_seconds": 2.0}
    records(root, (100.0, parts), (109.0, parts), (110.0, parts))
    journal(root, (109.0, "step_finished", {"step": 1}), (110.0, "step_finished", {"step": 2}))
    _, page = await asked("run/time?count=2", root)
    spans = sorted(span for it in page["lanes"] if it["name"] == "trainer" for span in it["spans"])
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    assert spans[-1][:2] == [108.0, 110.0]
    assert sum(end - start for start, end, *_ in spans) == 10.0


async def test_a_window_of_a_long_journal_is_found_by_its_time(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    records(root, *((float(at), {"time/step_seconds": 100.0}) for at in range(100, 10_100, 100)))
    events = [
        (at / 2, name, {"episode": f"g{at}.0", "outcome": "finished"})
        for at in range(20_000)
        for name in ("episode_started", "episode_ended")
    ]
    journal(root, *events)
    assert RunDirectory(root).journal.stat().st_size > 1 << 20
    _, page = await asked("run/time?step=49&count=1", root)
    names = {it["spans"][0][3] for it in page["lanes"] if len(it["spans"][0]) == 4}
    ends = [int(str(name)[1:-2]) / 2 for name in names if str(name).startswith("g")]
    assert len(ends) == 12
    assert all(4_900 <= end <= 5_001 for end in ends)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("run/time", "journal.jsonl is not there"),
        ("run/time?step=7", "step 8 has no record; the last is step 1"),
        ("run/time?step=x", "no whole number"),
        ("run/evaluations?source=x", "no task of 'x'"),
        ("run/settings?with=other", "no run 'other'"),
    ],
)
async def test_what_is_not_there_is_refused(tmp_path: Path, address: str, says: str) -> None:
    root = a_run(tmp_path / "run", metrics=[{"a": 1.0}])
    if "step" in address:
        journal(root, (1.0, "run_started", {}))
    status, refusal = await asked(address, root)
    assert status == 404
    assert says in refusal["error"]
    empty = a_run(tmp_path / "empty")
    status, refusal = await asked("empty/time", empty)
    assert (status, "no step has ended" in refusal["error"]) == (404, True)


async def test_marks_on_the_axis_are_where_the_journal_and_the_alarms_say(tmp_path: Path) -> None:
    on = [0, 0, 1, 1, 0]
    metrics = [{"alarm/entropy_low": float(it), "alarm/entropy_low/value": 0.5} for it in on]
    root = a_run(tmp_path / "run", metrics=metrics)
    journal(
        root,
        (1.0, "checkpoint_committed", {"step": 3}),
        (2.0, "run_resumed", {"step": 3, "lines": 1, "reopened": [], "cut_off": []}),
        (3.0, "evaluation_ended", {"version": 4}),
        (4.0, "batch_cut", {"step": 4, "groups": ["checkpoint_committed"]}),
    )
    _, page = await asked("run/marks", root)
    assert page["events"] == {
        "checkpoint_committed": [3], "run_resumed": [3], "evaluation_ended": [4],
    }  # fmt: skip
    assert page["alarms"] == [[3, "entropy_low", True], [5, "entropy_low", False]]
    assert list(events_on_curves(tmp_path / "none")) == []


async def test_a_built_in_alarm_has_its_limit(tmp_path: Path) -> None:
    names = ("alarm/mismatch_kl", "alarm/words/truncated", "alarm/no_such")
    metrics = [{it: 0.0 for name in names for it in (name, f"{name}/value")}]
    root = a_run(tmp_path / "run", metrics=metrics)
    _, page = await asked("run/marks", root)
    assert page["limits"] == {"alarm/mismatch_kl/value": 0.1, "alarm/words/truncated/value": 0.5}


async def test_a_text_is_found_in_prompts_and_replies_as_a_plain_loop_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = a_run(tmp_path / "run")
    for step in range(3):
        for number in range(4):
            add_episode(root, step=step, reward=number / 4, reply=f"Ünïcode {step}.{number}")
    for words, found in {
        "text=ÜNÏ": 12, "text=code 1.": 4, "text=1.2": 1, "text=ask": 12, "text=k1": 0,
        "text=code&where=reward > 0.4": 6, "text=code&step=1": 4, "text=code&from=10": 2,
    }.items():  # fmt: skip
        _, page = await asked(f"run/search?{words}", root)
        assert (len(page["rows"]), page["next"]) == (found, page["of"]), words
    monkeypatch.setattr(groups, "_SEARCH_SECONDS", 0.0)
    _, page = await asked("run/search?text=code&sort=reward&from=3", root)
    assert [(it["reward"], page["next"], page["of"]) for it in page["rows"]] == [(0.25, 4, 12)]
    status, refusal = await asked("run/search?text=x", root)
    assert (status, "2 to 200" in refusal["error"]) == (404, True)


async def test_settings_say_what_was_chosen_and_hide_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value-of-a-key")
    one = a_run(tmp_path / "one")
    two = a_run(tmp_path / "two", changes={"max_steps": 7})
    audit = {"time": 1.0, "event": "started", "command": ["gradus", "--key=s3cr3t-value-of-a-key"]}
    (one / "audit.jsonl").write_text(json.dumps(audit) + "\nbroken\n")
    _, page = await asked("one/settings?with=two", one, two)
    keys = {it["key"]: it for it in page["keys"]}
    assert (keys["max_steps"]["value"], keys["max_steps"]["chosen"]) == ("9", True)
    assert not keys["trainer.optimizer.lr"]["chosen"]
    assert {"key": "max_steps", "values": ["9", "7"]} in page["differing"]
    assert {"name": "torch", "values": ["2.13.0", "2.13.0"]} in page["versions"]
    assert page["history"][0]["event"] == "started"
    assert "s3cr3t" not in json.dumps(page)


async def test_a_checkpoint_leads_to_the_samples_that_it_was_trained_on(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for name in ("step_4", "step_2", ".step_6-3"):
        (root / "checkpoints" / name).mkdir(parents=True)
    shipped = [
        *((0, ["g0.0/0/0"]), (1, ["g1.0/0/0", "g1.1/0/0"]), (2, ["g2.0/0/0"])),
        *((1, ["g9.0/0/0"]), (4, ["g4.0/0/0"])),  # Step 1 was shipped again after a resume.
    ]
    lines = [
        json.dumps({"event": "batch_shipped", "term": 1, "step": step, "samples": samples})
        for step, samples in shipped
    ]
    told = '{"event":"group_opened","group":"\\"batch_shipped\\""}'
    wrong = '{"event":"batch_shipped","step":"x","samples":[]}'
    (root / "journal.jsonl").write_text(
        "\n".join([*lines, told, wrong, '{"event":"batch_shipped"'])
    )
    _, page = await asked("run/settings", root)
    assert page["checkpoints"] == [2, 4]
    for version, expected in {
        0: [],
        2: [[0, ["g0.0/0/0"]], [1, ["g9.0/0/0"]]],
        4: [[0, ["g0.0/0/0"]], [1, ["g9.0/0/0"]], [2, ["g2.0/0/0"]]],
    }.items():
        _, found = await asked(f"run/samples?version={version}", root)
        assert found == {"version": version, "batches": expected}
    (root / "journal.jsonl").unlink()
    assert (await asked("run/samples?version=2", root))[1]["batches"] == []


LOG = """\
2026-11-26T10:54:08.307Z INFO rl trainer gradus.a: one: two
2026-11-26T10:54:10.000Z ERROR rl trainer step=3 gradus.b: failed
  | Traceback (most recent call last):
  |   ValueError: no
no form at all
"""
JSON_LOG = {
    "time": "2026-11-26T10:54:09.000Z", "level": "WARNING", "run": "rl", "process": "env",
    "step": 2, "logger": "gradus.c", "message": "slow", "exception": "Traceback\nTypeError: x",
}  # fmt: skip


async def test_logs_stand_in_the_order_of_their_times_with_tracebacks_folded(
    tmp_path: Path,
) -> None:
    root = a_run(tmp_path / "run")
    (root / "logs/envs/train").mkdir(parents=True)
    (root / "logs/trainer.log").write_text(LOG)
    (root / "logs/envs/train/words.log").write_text(json.dumps(JSON_LOG) + "\n")
    (root / "logs/old.log").write_bytes(b"x" * (3 << 20) + b"\n\xff\x1b[2J the end\n")
    _, page = await asked("run/logs", root)
    shown = [(it["process"], it["level"], it["step"], it["said"]) for it in page["lines"]]
    assert shown == [
        ("old", "INFO", None, "\ufffd\x1b[2J the end"),
        ("trainer", "INFO", None, "gradus.a: one: two"),
        ("envs/train/words", "WARNING", 2, "gradus.c: slow"),
        ("trainer", "ERROR", 3, "gradus.b: failed"),
    ]
    assert page["lines"][3]["more"][1:] == ["  ValueError: no", "no form at all"]
    assert page["cut"] == ["old"]
    for words, expected in {
        "process=trainer": 2,
        "level=WARNING": 2,
        "step=3": 1,
        "text=valueERROR": 1,
        "level=WARNING&process=old": 0,
    }.items():
        assert (await asked(f"run/logs?{words}", root))[1]["count"] == expected, words


async def test_what_a_restart_took_is_part_of_the_time_of_a_step(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    records(root, (1000.0, {}), (1030.0, {"time/step_seconds": 10.0, "time/receive_seconds": 12.0}))
    journal(root, (1001.0, "run_resumed", {"version": 1}))
    _, page = await asked("run/time?count=1", root)
    assert [it["share"] for it in page["shares"]] == [12.0 / 30.0]
