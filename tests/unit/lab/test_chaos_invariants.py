"""Each rule is broken by hand in a folder of a run, and found by its number."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import commit
from run_folders import a_run

from gradus.cli.main import main
from gradus.errors import ExitCode
from gradus.files import read_json, write_json
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.processes.child import LAUNCH_VARIABLE
from gradus.run.checkpoints import CheckpointStore
from gradus.run.growing_files import audit
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory
from gradus_lab.chaos.invariants import RULES, Broken, _held, _secrets, check_run

STEPS = [{"episode/reward/mean": 0.1}, {"episode/reward/mean": 0.2}]


def sound_run(root: Path) -> RunDirectory:
    """A run of two steps that ended well, with a checkpoint and a journal."""
    run_dir = RunDirectory(a_run(root, metrics=STEPS))
    with Journal(run_dir.journal, term=1, now=lambda: 0.0) as journal:
        journal.write(JournalEvent.RUN_STARTED, version=0)
        for step in range(2):
            journal.write(JournalEvent.POLICY_APPLIED, version=step, weights=None)
            journal.write(JournalEvent.STEP_FINISHED, step=step)
        journal.write(JournalEvent.CHECKPOINT_COMMITTED, step=1)
    run_dir.model.mkdir()
    write_json(run_dir.summary, read_json(run_dir.summary) | {"steps": 2})
    run_dir.checkpoints.mkdir(exist_ok=True)
    commit(CheckpointStore(run_dir, term=1), 1)
    return run_dir


def add_to_journal(
    run_dir: RunDirectory, event: JournalEvent, term: int = 1, **fields: Any
) -> None:
    with Journal(run_dir.journal, term=term, now=lambda: 0.0) as journal:
        journal.write(event, **fields)


def train_twice(run_dir: RunDirectory) -> None:
    opened = {"source": "words", "index": 0, "key": "0", "pass_number": 0, "attempt": 0}
    add_to_journal(run_dir, JournalEvent.GROUP_OPENED, group="g", **opened)
    add_to_journal(run_dir, JournalEvent.EPISODE_STARTED, group="g", episode="g.0", version=0)
    ended = {"episode": "g.0", "version": 0, "outcome": "finished"}
    add_to_journal(run_dir, JournalEvent.EPISODE_ENDED, group="g", **ended)
    for step in range(2):
        shipped = {"groups": ["g"][step:], "samples": ["g.0/0"], "digests": {}}
        add_to_journal(run_dir, JournalEvent.BATCH_SHIPPED, step=step, **shipped)


def lose_an_episode(run_dir: RunDirectory) -> None:
    add_to_journal(run_dir, JournalEvent.EPISODE_STARTED, group="g", episode="g.0", version=0)
    add_to_journal(run_dir, JournalEvent.RUN_ENDED)


def damage_checkpoint(run_dir: RunDirectory) -> None:
    path = next(it for it in run_dir.checkpoints.rglob("*") if it.is_file() and it.stat().st_size)
    path.write_bytes(b"\0" + path.read_bytes()[1:])


def repeat_a_step(run_dir: RunDirectory) -> None:
    lines = run_dir.metrics.read_text().splitlines(keepends=True)
    run_dir.metrics.write_text("".join([*lines, lines[-1]]))


def leave_a_folder(run_dir: RunDirectory) -> None:
    left = run_dir.root / "gradus-left"
    left.mkdir()
    write_json(run_dir.processes, {"launch": "1.1", "processes": [], "temporary_folder": str(left)})


def lose_a_step(run_dir: RunDirectory) -> None:
    lines = run_dir.journal.read_text().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if "step_finished" in line)
    run_dir.journal.write_text("".join(lines[:first] + lines[first + 1 :]))


def lose_a_record(run_dir: RunDirectory) -> None:
    lines = run_dir.metrics.read_text().splitlines(keepends=True)
    run_dir.metrics.write_text("".join(lines[:-1]))


def train_an_old_sample(run_dir: RunDirectory) -> None:
    launched = read_json(run_dir.launched)
    launched["config"]["orchestrator"]["max_staleness"] = 0
    write_json(run_dir.launched, launched)
    train_twice(run_dir)
    text = run_dir.journal.read_text()
    run_dir.journal.write_text(text.replace('["g.0/0"]', "[]", 1))


def serve_other_weights(run_dir: RunDirectory) -> None:
    audit(run_dir, "published", term=1, version=2, weights="a")
    add_to_journal(run_dir, JournalEvent.POLICY_APPLIED, version=2, weights="b")


BREAKS: dict[str, tuple[str, Callable[[RunDirectory], None]]] = {
    "an episode without an end": ("I1", lose_an_episode),
    "a sample in two batches": ("I2", train_twice),
    "a step in two records": ("I2", repeat_a_step),
    "no journal": ("I1", lambda it: it.journal.unlink()),
    "a step that is finished twice": (
        "I2",
        lambda it: add_to_journal(it, JournalEvent.STEP_FINISHED, step=1),
    ),
    "a step that was never finished": ("I2", lose_a_step),
    "an end before its last step": (
        "I2",
        lambda it: add_to_journal(it, JournalEvent.RUN_ENDED, step=2),
    ),
    "a last record that is gone": ("I2", lose_a_record),
    "no checkpoint of those committed": ("I4", lambda it: shutil.rmtree(it.checkpoints)),
    "a model that is gone": ("I8", lambda it: it.model.rmdir()),
    "a version that goes back": (
        "I3",
        lambda it: add_to_journal(it, JournalEvent.POLICY_APPLIED, version=0, weights=None),
    ),
    "a sample older than it may be": ("I2", train_an_old_sample),
    "weights that nobody published": ("I3", serve_other_weights),
    "a damaged checkpoint": ("I4", damage_checkpoint),
    "a journal of a later term": (
        "I6",
        lambda it: add_to_journal(it, JournalEvent.RUN_STARTED, term=2, version=0),
    ),
    "a temporary folder": ("I7", leave_a_folder),
    "no summary": ("I8", lambda it: it.summary.unlink()),
    "no cause": (
        "I8",
        lambda it: write_json(it.summary, read_json(it.summary) | {"outcome": "failed"}),
    ),
}


def test_a_sound_run_breaks_no_rule(tmp_path: Path) -> None:
    assert check_run(sound_run(tmp_path / "demo"), secrets=[b"of the house"]) == []


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_found_under_its_rule(name: str, tmp_path: Path) -> None:
    rule, damage = BREAKS[name]
    run_dir = sound_run(tmp_path / "demo")
    damage(run_dir)
    assert [it.rule for it in check_run(run_dir)] == [rule]


def test_every_rule_is_broken_by_some_test() -> None:
    assert {rule for rule, _ in BREAKS.values()} | {"I9"} == RULES.keys()


@pytest.mark.parametrize("place", [0, (1 << 20) - 3])
def test_a_secret_is_found_wherever_it_lies(place: int, tmp_path: Path) -> None:
    run_dir = sound_run(tmp_path / "demo")
    run_dir.logs.mkdir()
    (run_dir.logs / "role.log").write_bytes(b"." * place + b"of the house")
    (found,) = check_run(run_dir, secrets=[b"of the house", b"another"])
    assert found == Broken("I9", "logs/role.log holds b'of t'…")


def test_what_a_run_deletes_while_it_is_looked_at_is_passed_over(tmp_path: Path) -> None:
    run_dir = sound_run(tmp_path / "demo")
    for name in ("one", "two"):
        (run_dir.root / name).mkdir()
        (run_dir.root / name / "file").write_bytes(b"of the house")
    looking = _secrets(run_dir, [b"of the house"])
    (first,) = [next(looking).what.partition("/")[0]]
    shutil.rmtree(run_dir.root / {"one": "two", "two": "one"}[first])
    assert list(looking) == []
    assert _held(run_dir.root / "gone", [b"of the house"]) == set()


def test_the_tokens_of_the_run_are_secrets(tmp_path: Path) -> None:
    run_dir = sound_run(tmp_path / "demo")
    run_dir.secrets.mkdir(mode=0o700)
    run_dir.admin_token.write_text("f00d" * 16)
    assert check_run(run_dir) == []
    (run_dir.root / "notices.log").write_text("asked with " + "f00d" * 16)
    (found,) = check_run(run_dir)
    assert (found.rule, found.what.split()[0]) == ("I9", "notices.log")


def test_a_process_that_is_left_is_found_by_its_mark(tmp_path: Path) -> None:
    run_dir = sound_run(tmp_path / "demo")
    write_json(run_dir.processes, {"launch": "9.9", "processes": [], "temporary_folder": None})
    left = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
        env={**os.environ, LAUNCH_VARIABLE: "9.9"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with left:
        assert left.stdout is not None
        left.stdout.readline()
        assert check_run(run_dir) == [Broken("I7", f"process {left.pid} is left")]
        left.kill()


def test_the_command_names_what_is_broken_and_what_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = sound_run(tmp_path / "demo")
    assert main(["lab", "chaos", "--check", str(run_dir.root)]) == ExitCode.DONE
    assert capsys.readouterr().out == "I1, I2, I3, I4, I6, I7, I8, I9 hold\n"
    run_dir.summary.unlink()
    assert main(["lab", "chaos", "--check", str(run_dir.root)]) == ExitCode.INTERNAL
    first, held = capsys.readouterr().out.splitlines()
    assert first == "BROKEN I8 there is no summary.json"
    assert "I8" not in held


def test_an_evaluation_says_by_its_results_that_it_is_over(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "measured")
    run_dir.root.mkdir()
    mark_run(run_dir, "eval")
    assert check_run(run_dir) == [Broken("I8", "there is no results.json")]
    (run_dir.root / "results.json").write_text("{}")
    assert check_run(run_dir) == []


def test_what_was_not_asked_of_a_run_that_goes_on_is_not_said_to_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = sound_run(tmp_path / "demo")
    for module in ("gradus_lab.chaos.command", "gradus_lab.chaos.invariants"):
        monkeypatch.setattr(f"{module}.is_in_use", lambda _: True)
    assert main(["lab", "chaos", "--check", str(run_dir.root)]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert said == "I1, I2, I3, I4, I6, I9 hold; I7 and I8 are about a run that is over\n"


def serve(run_dir: RunDirectory, *digests: str) -> RunDirectory:
    for version, digest in enumerate(digests, 2):
        add_to_journal(run_dir, JournalEvent.POLICY_APPLIED, version=version, weights=digest)
    return run_dir


@pytest.mark.shows("I5")
def test_runs_with_other_weights_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = serve(sound_run(tmp_path / "ours"), "a", "b", "c")
    same = serve(sound_run(tmp_path / "same"), "a", "b")
    other = serve(sound_run(tmp_path / "other"), "a", "x", "y")
    assert main(["lab", "chaos", "--check", str(ours.root), "--against", str(same.root)]) == 0
    assert capsys.readouterr().out.endswith("I9, I5 hold\n")
    assert main(["lab", "chaos", "--check", str(ours.root), "--against", str(other.root)]) == 70
    assert f"BROKEN I5 version 3 is another in {other.root}" in capsys.readouterr().out
    silent = sound_run(tmp_path / "silent")
    assert main(["lab", "chaos", "--check", str(ours.root), "--against", str(silent.root)]) == 64
    assert "no version of weights in common" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = sound_run(tmp_path / "demo")
    for words in (["--check", str(tmp_path)], ["--check", str(run_dir.root), "--against", "x"]):
        assert main(["lab", "chaos", *words]) == ExitCode.CONFIG
        assert "is not a folder of a run" in capsys.readouterr().err
