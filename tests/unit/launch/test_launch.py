"""A whole launch with small real processes: start, follow, stop, and what is left behind."""

from __future__ import annotations

import io
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from commands import wait_until
from small_launch import (
    PLAY,
    TRAIN,
    WAIT,
    Told,
    build_job,
    build_plan,
    living,
    registered,
    start_launcher,
    tell_when_all_are_ready,
)

from gradus.config import LaunchConfig
from gradus.errors import ConfigError, DeadlineError, ExitCode, RunDirectoryError
from gradus.files import read_json, write_json
from gradus.launch.launch import launch
from gradus.plan.processes import LaunchPlan, config_file
from gradus.processes.started import ChildFailed, ChildNotReady
from gradus.run.lease import open_run
from gradus.run.paths import RunDirectory

pytestmark = pytest.mark.slow


def test_a_full_disk_is_told_once(small_disk: Path) -> None:
    fill = "(run_dir.parent / 'ballast').write_bytes(bytes(3 << 20))\n"
    fill += "ready(done=True)\ntime.sleep(2.5)"
    stream = io.StringIO()
    assert launch(build_job(small_disk, {"orchestrator": fill}), stream) == 0
    assert stream.getvalue().count("is full: make room, the run waits for it") == 1


def test_lines_for_the_person_appear_among_the_steps(tmp_path: Path) -> None:
    tell = "(run_dir / 'notices.log').write_text(\"first TaskError in 'words'\\n\")\n"
    stream = io.StringIO()
    programs = {"trainer": TRAIN, "orchestrator": tell + PLAY}
    assert launch(build_job(tmp_path, programs), stream) == 0
    assert stream.getvalue().count("first TaskError in 'words'\n") == 1


def test_a_run_starts_shows_its_steps_and_ends(tmp_path: Path) -> None:
    stream = io.StringIO()
    assert launch(build_job(tmp_path), stream) == 0
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["run", str(tmp_path / "demo")]
    assert lines[1].startswith("inference         starting … ready in ")
    assert lines[1].endswith("http://127.0.0.1:1")
    # On a busy machine one of the two is a step ahead before the other is ready.
    assert {line.split()[0] for line in lines[2:7]} == {"trainer", "orchestrator", "step"}
    steps = [line[:8] for line in lines[2:7] if line.startswith("step")]
    assert steps == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[7].startswith("done        3 of 3 steps in ")
    assert "0.250 at the first step, 0.500 at the end" in lines[8]
    assert lines[-1] == f"results     {tmp_path / 'demo'}"


def test_a_finished_run_leaves_a_summary_and_no_process(tmp_path: Path) -> None:
    launch(build_job(tmp_path), io.StringIO())
    summary = read_json(tmp_path / "demo" / "summary.json")
    assert (summary["outcome"], summary["steps"], summary["reward_last"]) == ("done", 3, 0.5)
    assert read_json(tmp_path / "demo" / "pids.json")["processes"] == []
    assert read_json(tmp_path / "demo" / "lease.json")["owner"] is None


@pytest.mark.parametrize("outcome", ["solved", "stalled"])
def test_a_run_that_need_not_train_on_says_so_and_ends_well(tmp_path: Path, outcome: str) -> None:
    stream, reason = io.StringIO(), "every episode of the last 200 groups earned 1"
    note = "(run_dir / 'control').mkdir()\n"
    note += f"(run_dir / 'control' / '{outcome}.txt').write_text({reason + chr(10)!r})\n"
    assert launch(build_job(tmp_path, {"orchestrator": note + PLAY}), stream) == 0
    summary = read_json(tmp_path / "demo" / "summary.json")
    assert (summary["outcome"], summary["cause"]) == (outcome, reason)
    assert f"{reason}\n{outcome:<12}3 of 3 steps" in stream.getvalue()


def test_a_run_that_found_nothing_to_train_is_no_success_and_is_not_started_again(
    tmp_path: Path,
) -> None:
    note = "(run_dir / 'control').mkdir()\n"
    note += "(run_dir / 'control' / 'stalled.txt').write_text('all equal')\n"
    note += "ready(done=True)"
    assert launch(build_job(tmp_path, {"orchestrator": note}), io.StringIO()) == ExitCode.UNFIT
    assert read_json(tmp_path / "demo" / "summary.json")["outcome"] == "stalled"


@pytest.mark.shows("SEC1", "SEC2")
def test_the_tokens_of_the_run_are_private_and_different(tmp_path: Path) -> None:
    launch(build_job(tmp_path), io.StringIO())
    run_dir = RunDirectory(tmp_path / "demo")
    assert run_dir.secrets.stat().st_mode & 0o777 == 0o700
    tokens = [path.read_text() for path in (run_dir.admin_token, run_dir.inference_token)]
    assert [len(bytes.fromhex(token)) for token in tokens] == [32, 32]
    assert tokens[0] != tokens[1]
    assert run_dir.admin_token.stat().st_mode & 0o777 == 0o600


def test_who_still_evaluates_after_training_is_named(tmp_path: Path) -> None:
    stream = Told("training is done; orchestrator still evaluates", tmp_path)
    evaluating = {"orchestrator": PLAY + "until('told')"}
    launch(replace(build_job(tmp_path, evaluating), evaluation_seconds=60.0), stream)
    assert (tmp_path / "demo" / "told").exists()


def test_a_run_that_serves_nothing_has_no_tokens(tmp_path: Path) -> None:
    job = replace(
        build_job(tmp_path),
        kind="sft",
        plan=lambda run_dir, term, resume_step: build_plan(run_dir, {"trainer": PLAY}),
    )
    launch(job, io.StringIO())
    assert not (tmp_path / "demo" / "secrets").exists()


@pytest.mark.shows("SEC3", "SEC13")
def test_each_process_is_told_its_run_directory_only(tmp_path: Path) -> None:
    tell = "ready(done=True); print(sorted(os.environ), os.umask(0), flush=True)"
    launch(build_job(tmp_path, {"trainer": tell}), io.StringIO())
    log = (tmp_path / "demo" / "logs" / "trainer.log").read_text()
    assert log.endswith(f" {0o077}\n"), "what a process writes is for this user alone"
    assert "GRADUS_DEATH_PIPE" in log
    token = (tmp_path / "demo" / "secrets" / "admin_token").read_text()
    files = [path for path in (tmp_path / "demo").rglob("*") if path.is_file()]
    holders = [path.name for path in files if token in path.read_text(errors="replace")]
    assert holders == ["admin_token"]


def test_the_first_failure_wins_over_those_it_causes(tmp_path: Path) -> None:
    # The orchestrator ends as soon as it notices that inference is gone.
    die = "ready(); os.kill(os.getpid(), signal.SIGKILL)"
    follow = "ready(); sys.exit(75)"
    job = build_job(tmp_path, {"inference": die, "orchestrator": follow, "trainer": WAIT})
    with pytest.raises(ChildFailed, match="inference was killed by SIGKILL"):
        launch(job, io.StringIO())


def test_steps_written_just_before_the_end_are_shown(tmp_path: Path) -> None:
    stream = io.StringIO()
    late = PLAY + "record(3, **{'episode/reward/mean': 1.0})"
    launch(build_job(tmp_path, {"orchestrator": late}), stream)
    assert "step 4/3" in stream.getvalue()
    assert read_json(tmp_path / "demo" / "summary.json")["steps"] == 4


def test_a_summary_that_cannot_be_written_does_not_hide_the_result(tmp_path: Path) -> None:
    stream = io.StringIO()
    block = "(run_dir / 'summary.json').mkdir(); " + TRAIN
    assert launch(build_job(tmp_path, {"trainer": block}), stream) == 0
    lines = stream.getvalue().splitlines()
    assert lines[-1].endswith("summary.json cannot be written: Is a directory")
    assert any(line.startswith("done        3 of 3 steps") for line in lines)


@pytest.mark.shows("I8")
def test_a_process_that_fails_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    stream = io.StringIO()
    fail = "ready(); print('reading\\ngradus trainer: shard 3 is damaged'); sys.exit(78)"
    job = build_job(tmp_path, {"trainer": fail, "orchestrator": WAIT})
    with pytest.raises(ChildFailed, match="trainer ended with exit code 78") as caught:
        launch(job, stream)
    assert "shard 3 is damaged" in str(caught.value)
    assert caught.value.exit_code is ExitCode.CORRUPT_STATE
    assert "  gradus trainer: shard 3 is damaged" in stream.getvalue().splitlines()
    summary = read_json(tmp_path / "demo" / "summary.json")
    assert summary["outcome"] == "failed"
    assert summary["cause"] == str(caught.value)
    assert read_json(tmp_path / "demo" / "pids.json")["processes"] == []


def test_a_run_that_fails_after_its_start_says_where_a_resume_begins(tmp_path: Path) -> None:
    stream, go = io.StringIO(), tmp_path / "go"
    fail = PLAY + f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nsys.exit(70)"
    programs = {"orchestrator": fail, "trainer": WAIT}
    job = replace(build_job(tmp_path, programs, num_restarts=0), saves=True)

    def fail_once_steps_are_shown() -> None:
        try:
            wait_until(lambda: "step 3/3" in stream.getvalue(), timeout_seconds=60)
        finally:
            go.touch()

    with ThreadPoolExecutor(1) as other:
        other.submit(fail_once_steps_are_shown)
        with pytest.raises(ChildFailed, match="orchestrator ended with exit code 70"):
            launch(job, stream)
    assert "no checkpoint was saved yet; --resume starts again at step 1" in stream.getvalue()


def test_a_run_that_fails_without_a_checkpoint_names_its_newest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_when_all_are_ready(monkeypatch.setattr)
    stream, newest = io.StringIO(), tmp_path / "demo" / "weights" / "version_00000067"
    leave = "folder = run_dir / 'weights' / 'version_00000067'\nfolder.mkdir(parents=True)\n"
    leave += "(folder / 'config.json').touch(); (folder / 'model.safetensors').touch()\n"
    fail = leave + "ready(); until('following_1'); sys.exit(70)"
    job = replace(build_job(tmp_path, {"orchestrator": fail, "trainer": WAIT}), saves=True)
    with pytest.raises(ChildFailed):
        launch(job, stream)
    assert f"the weights after 67 steps lie in {newest}; gradus export" in stream.getvalue()


def test_a_run_that_fails_while_it_starts_says_nothing_of_a_resume(tmp_path: Path) -> None:
    stream = io.StringIO()
    job = replace(build_job(tmp_path, {"inference": "sys.exit(70)"}), saves=True)
    with pytest.raises(ChildFailed, match="inference ended with exit code 70"):
        launch(job, stream)
    assert "--resume" not in stream.getvalue()


def test_a_server_that_ends_by_itself_fails_the_run(tmp_path: Path) -> None:
    job = build_job(tmp_path, {"inference": "ready()", "orchestrator": WAIT})
    with pytest.raises(ChildFailed, match="inference ended with exit code 0"):
        launch(job, io.StringIO())


@pytest.mark.shows("I8")
def test_a_process_that_is_never_ready_fails_the_run_with_its_log(tmp_path: Path) -> None:
    job = build_job(tmp_path, {"inference": "print('loading', flush=True); signal.pause()"})
    impatient = replace(
        job, launch=LaunchConfig(ready_timeout_seconds=0.5, stop_timeout_seconds=2.0)
    )
    stream = io.StringIO()
    with pytest.raises(ChildNotReady, match=r"inference is not ready after 0\.5 s"):
        launch(impatient, stream)
    assert not (tmp_path / "demo" / "ready" / "trainer.json").exists()


@pytest.mark.shows("I8")
def test_a_process_that_never_finishes_after_the_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.launch.launch.FINISH_SECONDS", 0.1)
    with pytest.raises(DeadlineError, match=r"orchestrator still runs 0\.1 s after the others"):
        launch(build_job(tmp_path, {"orchestrator": WAIT}), io.StringIO())


def test_a_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    assert launch(build_job(tmp_path), stream, dry_run=True) == 0
    assert "stage 1, started together:" in stream.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_what_a_launch_left_that_never_began_is_no_run(tmp_path: Path) -> None:
    lease = open_run(tmp_path, "demo", kind="rl")
    write_json(config_file(lease.run_dir, "old"), {})
    lease.release()
    assert launch(build_job(tmp_path), io.StringIO()) == 0
    assert not config_file(lease.run_dir, "old").exists()


def test_a_dry_run_never_deletes_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--clean deletes a run and --dry-run changes none"):
        launch(build_job(tmp_path), io.StringIO(), clean=True, dry_run=True)


def test_clean_deletes_nothing_for_a_run_that_cannot_be_planned(tmp_path: Path) -> None:
    job = build_job(tmp_path)
    launch(job, io.StringIO())

    def refuse(*_: object) -> LaunchPlan:
        raise ConfigError("does not fit")

    with pytest.raises(ConfigError, match="does not fit"):
        launch(replace(job, plan=refuse), io.StringIO(), clean=True)
    assert (tmp_path / "demo" / "summary.json").is_file()


def test_a_second_run_of_the_same_name_needs_clean(tmp_path: Path) -> None:
    launch(build_job(tmp_path), io.StringIO())
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        launch(build_job(tmp_path), io.StringIO())
    assert launch(build_job(tmp_path), io.StringIO(), clean=True) == 0
    assert read_json(tmp_path / "demo" / "summary.json")["term"] > 1


@pytest.mark.shows("F32")
def test_a_run_whose_directory_is_in_use_starts_nothing(tmp_path: Path) -> None:
    lease = open_run(tmp_path, "demo", kind="rl")
    with pytest.raises(RunDirectoryError, match=f"in use by pid {os.getpid()}"):
        launch(build_job(tmp_path), io.StringIO(), clean=True)
    lease.release()
    assert not (tmp_path / "demo" / "pids.json").exists()


@pytest.mark.shows("F32", "I6")
def test_a_launch_that_lost_its_lease_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.launch.launch._LEASE_SECONDS", 0.0)
    take_over = (
        "(run_dir / 'summary.json').write_text('of the next'); "
        "(run_dir / 'pids.json').write_text(json.dumps({'launch': 'next', 'processes': []})); "
        "(run_dir / 'next').write_text(json.dumps({'term': 9, 'owner': None})); "
        "(run_dir / 'next').replace(run_dir / 'lease.json'); "
        "ready(); signal.pause()"
    )
    job = build_job(tmp_path, {"orchestrator": take_over, "trainer": WAIT})
    with pytest.raises(RunDirectoryError, match="taken over with term 9") as caught:
        launch(job, io.StringIO())
    assert caught.value.exit_code is ExitCode.TRY_AGAIN
    run_dir = tmp_path / "demo"
    assert (run_dir / "summary.json").read_text() == "of the next"
    assert read_json(run_dir / "pids.json")["launch"] == "next"


@pytest.mark.shows("F69", "I7")
@pytest.mark.parametrize(
    ("number", "exit_code", "word"),
    [
        (signal.SIGINT, 130, "Ctrl-C"),
        (signal.SIGTERM, 75, "SIGTERM"),
        (signal.SIGHUP, 75, "SIGHUP"),
    ],
)
def test_a_signal_ends_everything(
    tmp_path: Path, number: signal.Signals, exit_code: int, word: str
) -> None:
    launcher = start_launcher(tmp_path, {"trainer": WAIT, "orchestrator": WAIT})
    pids = registered(tmp_path, 3)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == exit_code
    assert "interrupted 0 of 3 steps" in output
    assert living(pids) == []
    assert read_json(tmp_path / "demo" / "summary.json")["cause"] == f"stopped by {word}"


def test_ctrl_c_says_where_a_resume_begins(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, {"trainer": WAIT, "orchestrator": WAIT}, how="saves")
    registered(tmp_path, 3)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert "no checkpoint was saved yet; --resume starts again at step 1" in output


@pytest.mark.shows("F69")
def test_ctrl_c_waits_for_a_checkpoint_where_the_job_says_so(tmp_path: Path) -> None:
    saves = """
ready()
while not (run_dir / "control" / "save").exists():
    time.sleep(0.01)
(run_dir / "asked").touch()
signal.pause()
"""
    how = "saves saves_when_interrupted"
    plays = "ready(); until('following_1'); record(0, **{'time/step_seconds': 0.5}); signal.pause()"
    launcher = start_launcher(tmp_path, {"trainer": saves, "orchestrator": plays}, how=how)
    assert launcher.stdout is not None
    next(line for line in launcher.stdout if "step 1/3" in line)
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: (tmp_path / "demo" / "asked").exists())
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "at most for a checkpoint; a second signal ends it" in output


@pytest.mark.shows("F69")
def test_a_signal_while_starting_ends_everything(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, {"trainer": "signal.pause()"})
    pids = registered(tmp_path, 2)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert living(pids) == []


@pytest.mark.shows("F70", "I7")
def test_a_second_signal_does_not_wait_for_stubborn_processes(tmp_path: Path) -> None:
    stubborn = "signal.signal(15, signal.SIG_IGN); ready(); time.sleep(600)"
    launcher = start_launcher(tmp_path, {"trainer": stubborn, "orchestrator": WAIT})
    pids = registered(tmp_path, 3)
    started = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: len(living(pids)) == 1)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert (launcher.returncode, living(pids)) == (130, [])
    assert time.monotonic() - started < 60


@pytest.mark.shows("F04", "I7")
def test_kill_of_the_launcher_leaves_no_process_and_the_next_run_starts(tmp_path: Path) -> None:
    watch = "from gradus.processes.child import watch_death_pipe; watch_death_pipe(); " + WAIT
    programs = dict.fromkeys(("inference", "trainer", "orchestrator"), watch)
    launcher = start_launcher(tmp_path, programs)
    pids = registered(tmp_path, 3)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: living(pids) == [], what="the end of the roles")
    assert launch(build_job(tmp_path), io.StringIO(), clean=True) == 0
    assert read_json(tmp_path / "demo" / "lease.json")["term"] == 2


@pytest.mark.shows("F15")
def test_clean_ends_what_a_killed_launcher_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.run.lease.LEFTOVERS_SECONDS", 0.1)
    # These processes do not watch the death pipe, so they survive the launcher.
    launcher = start_launcher(tmp_path, {"trainer": WAIT, "orchestrator": WAIT})
    pids = registered(tmp_path, 3)
    launcher.kill()
    launcher.communicate()
    assert len(living(pids)) == 3
    assert launch(build_job(tmp_path), io.StringIO(), clean=True) == 0
    assert living(pids) == []


AFTER_THE_END = """
def told(*_):
    names = {p["name"] for p in json.loads((run_dir / "pids.json").read_text())["processes"]}
    outcome = json.loads((run_dir / "summary.json").read_text())["outcome"]
    with open(run_dir / "notices.log", "a") as file:
        file.write(f"left {sorted(names)}, outcome {outcome}\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
(run_dir / "listens").touch()
signal.pause()
"""


def test_the_tracker_is_told_when_all_others_have_ended(tmp_path: Path) -> None:
    stream = io.StringIO()
    programs = {"tracker": AFTER_THE_END, "orchestrator": "until('listens')" + PLAY}
    assert launch(build_job(tmp_path, programs), stream) == 0
    assert "left ['tracker'], outcome done" in stream.getvalue()
    assert read_json(tmp_path / "demo" / "pids.json")["processes"] == []


def test_the_tracker_of_a_failed_run_is_told_so(tmp_path: Path) -> None:
    stream = io.StringIO()
    fails = "ready(); until('listens'); sys.exit(70)"
    programs = {"tracker": AFTER_THE_END, "orchestrator": fails}
    with pytest.raises(ChildFailed):
        launch(build_job(tmp_path, programs), stream)
    assert "left ['tracker'], outcome failed" in stream.getvalue()


@pytest.mark.shows("F75")
def test_a_run_goes_on_without_its_tracker(tmp_path: Path) -> None:
    stream = Told("continues without it", tmp_path)
    later = PLAY.replace("ready()\n", "ready()\nuntil('told')\n", 1)
    programs = {"tracker": "sys.exit('no module named tensorboard')", "orchestrator": later}
    assert launch(build_job(tmp_path, programs), stream) == 0
    assert stream.getvalue().count("continues without it") == 1
    assert "no module named tensorboard" in stream.getvalue()
    assert "step 3/3" in stream.getvalue()


@pytest.mark.shows("F75")
def test_a_tracker_that_does_not_end_is_killed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.plan.processes._CLOSE_SECONDS", -1.5)
    stream = io.StringIO()
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(run_dir / 'listens').touch()\n"
    programs = {"tracker": deaf + "time.sleep(600)", "orchestrator": "until('listens')" + PLAY}
    assert launch(build_job(tmp_path, programs), stream) == 0
    assert "tracker did not finish in 0.5 s" in stream.getvalue()
    assert f"gradus view {tmp_path / 'demo'} --to TRACKER" in stream.getvalue()
    assert read_json(tmp_path / "demo" / "pids.json")["processes"] == []
