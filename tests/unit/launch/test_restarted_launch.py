"""A launch that continues by itself after one of its small real processes failed."""

from __future__ import annotations

import errno
import io
import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_launch import PLAY, build_job, start_launcher, tell_when_all_are_ready

from gradus.errors import CorruptStateError, ExitCode, FencedError, StorageError
from gradus.files import read_json
from gradus.launch.job import Job
from gradus.launch.launch import launch
from gradus.launch.restarts import RestartsUsedUp
from gradus.launch.steps import Steps
from gradus.monitor import RL_COLUMNS
from gradus.processes.started import ChildFailed
from gradus.run.lease import RunKind, RunLease, is_in_use, open_run
from gradus.run.paths import RunDirectory
from gradus.run.ready import started_replicas

pytestmark = pytest.mark.slow

# Each attempt adds a line to `attempts`; the first so many fail after a step more each.
FAILS = """
attempts = run_dir.parent / "attempts"
with open(attempts, "a") as file:
    file.write("begun\\n")
number = len(attempts.read_text().splitlines())
ready()
def fail():
    until(f"following_{{number}}")
    {how}
if number <= {times}:
    for step in range({steps}):
        record(step, **{{"episode/reward/mean": 0.5}})
    fail()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradus.launch.restarts.FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("gradus.processes.supervisor._BLAME_SECONDS", 0.1)
    tell_when_all_are_ready(monkeypatch.setattr)


def fails(times: int, how: str = KILL, steps: str = "number") -> str:
    """An orchestrator that fails so often, and plays to the end then."""
    return FAILS.format(times=times, how=how, steps=steps) + PLAY


def saving(tmp_path: Path, program: str, *, num_restarts: int = 5, **others: str) -> Job:
    programs = {"orchestrator": program, **others}
    return replace(build_job(tmp_path, programs, num_restarts=num_restarts), saves=True)


def attempts(tmp_path: Path) -> int:
    return len((tmp_path / "attempts").read_text().splitlines())


@pytest.mark.shows("F05")
def test_a_killed_process_is_followed_by_another_attempt_and_one_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    assert launch(saving(tmp_path, fails(1)), stream) == 0
    printed = stream.getvalue()
    (line,) = [line for line in printed.splitlines() if "restart 1 of 5" in line]
    assert line.startswith("orchestrator was killed by SIGKILL")
    assert line.endswith("s from step 1, 1 step is done again")
    assert "resume   " not in printed
    assert printed.count("step 1/3") == 2
    summary = read_json(tmp_path / "demo" / "summary.json")
    assert (summary["outcome"], summary["steps"], summary["term"]) == ("done", 3, 2)
    assert len(summary["restarts"]) == 1
    audit = [json.loads(it) for it in (tmp_path / "demo" / "audit.jsonl").read_text().splitlines()]
    assert [it["event"] for it in audit] == ["restarted", "ended"]
    assert (audit[0]["term"], audit[1]["outcome"]) == (2, "done")
    assert read_json(tmp_path / "demo" / "lease.json")["owner"] is None
    assert read_json(tmp_path / "demo" / "pids.json")["processes"] == []


def test_an_error_of_the_launchers_disk_is_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, check = [errno.EIO], RunLease.check

    def check_badly(lease: RunLease) -> None:
        if errors:
            raise OSError(errors.pop(), "Input/output error")
        check(lease)

    monkeypatch.setattr(RunLease, "check", check_badly)
    monkeypatch.setattr("gradus.launch.launch._LEASE_SECONDS", 0.0)
    with pytest.raises(StorageError, match="Input/output error"):
        launch(saving(tmp_path, PLAY), io.StringIO())
    assert read_json(tmp_path / "demo" / "summary.json")["outcome"] == "failed"


@pytest.mark.parametrize(
    ("checkpoint", "told"),
    [
        (0, "from step 1, 3 steps are done again"),
        (1, "from checkpoint 1, 2 steps are done again"),
        (2, "from checkpoint 2, 1 step is done again"),
        (3, "from checkpoint 3, no steps are done again"),
        (4, "from checkpoint 4, no steps are done again"),
    ],
)
def test_the_line_counts_what_is_done_again(tmp_path: Path, checkpoint: int, told: str) -> None:
    lease = open_run(tmp_path, "demo", kind="rl")
    rows = [json.dumps({"step": step, "time": 0.0}) for step in range(3)]
    lease.run_dir.metrics.write_text("\n".join(rows) + "\n")
    view = Steps("rl", 9, RL_COLUMNS).view(io.StringIO(), lease)
    lease.release()
    assert view.continued(checkpoint) == told


def test_the_lease_is_held_between_two_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    renew = RunLease.renew

    def watched(lease: RunLease) -> None:
        held.append(is_in_use(lease.run_dir))
        renew(lease)
        held.append(is_in_use(lease.run_dir))

    monkeypatch.setattr(RunLease, "renew", watched)
    launch(saving(tmp_path, fails(1)), io.StringIO())
    assert held == [True, True]


@pytest.mark.parametrize("kind", ["bench", "rl"])
def test_what_saves_nothing_is_not_continued(tmp_path: Path, kind: RunKind) -> None:
    job = replace(saving(tmp_path, fails(1)), kind=kind, saves=False)
    with pytest.raises(ChildFailed, match="killed by SIGKILL"):
        launch(job, io.StringIO())
    assert attempts(tmp_path) == 1


KILLED_AT_ITS_START = """
attempts = run_dir.parent / "attempts"
with open(attempts, "a") as file:
    file.write("begun\\n")
if len(attempts.read_text().splitlines()) < 3:
    os.kill(os.getpid(), signal.SIGKILL)
ready()
"""


@pytest.mark.shows("F80")
def test_a_kill_while_a_run_starts_ends_it_and_while_it_is_resumed_does_not(tmp_path: Path) -> None:
    job = saving(tmp_path, KILLED_AT_ITS_START + PLAY)
    with pytest.raises(ChildFailed, match="killed by SIGKILL"):
        launch(job, io.StringIO())
    stream = io.StringIO()
    assert launch(job, stream, resume=True) == 0
    assert stream.getvalue().count("restart 1 of 5") == 1
    assert attempts(tmp_path) == 3


@pytest.mark.shows("F13")
def test_the_same_failure_twice_at_one_step_ends_with_its_own_message(tmp_path: Path) -> None:
    stream = io.StringIO()
    how = "sys.exit(print('gradus orchestrator: no reward') or 70)"
    with pytest.raises(ChildFailed, match="ended with exit code 70") as caught:
        launch(saving(tmp_path, fails(9, how, steps="1")), stream)
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert attempts(tmp_path) == 2
    assert "no restart would help" in stream.getvalue()
    assert "--resume starts again at step 1" in stream.getvalue()
    assert read_json(tmp_path / "demo" / "summary.json")["outcome"] == "failed"


@pytest.mark.shows("F13")
def test_used_up_restarts_end_it_with_75_and_all_causes(tmp_path: Path) -> None:
    with pytest.raises(RestartsUsedUp) as caught:
        launch(saving(tmp_path, fails(9), num_restarts=1), io.StringIO())
    assert str(caught.value).count("orchestrator was killed by SIGKILL") == 2
    summary = read_json(tmp_path / "demo" / "summary.json")
    assert summary["cause"] == str(caught.value)


@pytest.mark.shows("F80")
def test_a_signal_during_the_wait_ends_it_at_once(tmp_path: Path) -> None:
    launcher = start_launcher(
        tmp_path, {"orchestrator": fails(9, steps="1")}, how="saves", wait_seconds=60.0
    )
    assert launcher.stdout is not None
    next(line for line in launcher.stdout if "restart 1 of 5 in 60 s" in line)
    begun = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert launcher.returncode == 130
    assert "interrupted 1 of 3 steps" in output
    assert "restarts  " not in output
    assert "--resume starts again at step 1" in output


ASKS_TO_END = """
def ask(*_):
    os.kill(os.getppid(), signal.SIGTERM)
    sys.exit(0)
signal.signal(signal.SIGTERM, ask)
ready()
signal.pause()
"""


@pytest.mark.shows("F69")
def test_a_signal_that_others_had_first_is_no_failure(tmp_path: Path) -> None:
    """As where a scheduler takes a job back, and ends the processes of other nodes before these."""
    launcher = start_launcher(
        tmp_path, {"trainer": ASKS_TO_END, "orchestrator": "ready()\nsys.exit(64)"}
    )
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 75
    assert "interrupted 0 of 3 steps" in output
    assert read_json(tmp_path / "demo" / "summary.json")["cause"] == "stopped by SIGTERM"


@pytest.mark.shows("F02")
def test_a_stopped_process_is_killed_and_all_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.processes.liveness._LOOK_SECONDS", 0.1)
    stream, job = io.StringIO(), saving(tmp_path, fails(1, "os.kill(os.getpid(), signal.SIGSTOP)"))
    limits = {"hang_seconds": 0.3, "stop_timeout_seconds": 0.2}
    assert launch(replace(job, launch=job.launch.model_copy(update=limits)), stream) == 0
    (line,) = [line for line in stream.getvalue().splitlines() if "restart 1 of 5" in line]
    assert line.startswith("orchestrator (pid ")
    assert attempts(tmp_path) == 2


@pytest.mark.shows("F32")
def test_a_launch_that_lost_its_lease_does_not_try_again(tmp_path: Path) -> None:
    take_over = "(run_dir / 'lease.json').write_text(json.dumps({'term': 9, 'owner': None})); "
    stream = io.StringIO()
    with pytest.raises(FencedError, match="taken over with term 9"):
        launch(saving(tmp_path, fails(1, take_over + KILL)), stream)
    assert attempts(tmp_path) == 1
    assert "restart" not in stream.getvalue()


@pytest.mark.shows("F80")
def test_a_state_that_does_not_continue_ends_it_with_both_reasons(tmp_path: Path) -> None:
    stream = io.StringIO()
    damage = "(run_dir / 'checkpoints' / 'step_00000001').mkdir(parents=True); "
    with pytest.raises(CorruptStateError):
        launch(saving(tmp_path, fails(1, damage + KILL)), stream)
    assert "orchestrator was killed by SIGKILL" in stream.getvalue()


@pytest.mark.shows("F80")
def test_a_disk_in_the_way_of_a_restart_ends_it_with_a_summary(tmp_path: Path) -> None:
    stream = io.StringIO()
    in_the_way = "(run_dir / 'cuts.jsonl').mkdir(); "
    with pytest.raises(StorageError, match="Is a directory"):
        launch(saving(tmp_path, fails(1, in_the_way + KILL)), stream)
    assert read_json(tmp_path / "demo" / "summary.json")["outcome"] == "failed"


def test_trackers_end_before_the_records_are_cut_and_begin_again(tmp_path: Path) -> None:
    tell = """
def told(*_):
    with open(run_dir.parent / "told", "a") as file:
        file.write(str(len(open(run_dir / "metrics.jsonl").readlines())) + "\\n")
    (run_dir / "followed").unlink()
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
(run_dir / "followed").touch()
signal.pause()
"""
    assert (
        launch(saving(tmp_path, "until('followed')\n" + fails(1), tracker=tell), io.StringIO()) == 0
    )
    assert (tmp_path / "told").read_text().split() == ["1", "3"]


# A server that notes its starts in `served`; `{how}` may use their `number`.
SERVES = """
served = run_dir.parent / "served"
with open(served, "a") as file:
    file.write("begun\\n")
number = len(served.read_text().splitlines())
def all_ready():
    while len(list((run_dir / "ready").glob("*.json"))) < 3:
        time.sleep(0.01)
    until("following_1")
{how}
ready()
signal.pause()
"""
DIES_ONCE = """
if number == 1:
    ready()
    all_ready()
    {how}
"""
# Plays to the end once a second server is ready.
PLAYS_WITH_ANOTHER = """
(run_dir.parent / "played").open("a").write("begun\\n")
ready()
served = run_dir.parent / "served"
while len(served.read_text().splitlines()) < {servers} or len(
    list((run_dir / "ready").glob("*.json"))
) < 3:
    time.sleep(0.01)
"""


def serves(how: str) -> str:
    return SERVES.format(how=how)


def plays_with(servers: int) -> str:
    return PLAYS_WITH_ANOTHER.format(servers=servers) + PLAY


def played(tmp_path: Path) -> int:
    return len((tmp_path / "played").read_text().splitlines())


@pytest.mark.shows("F09")
@pytest.mark.parametrize(
    "how",
    [KILL, "sys.exit(0)", "sys.exit(1)", "os.kill(os.getpid(), signal.SIGSTOP)"],
    ids=["killed", "exit 0", "exit 1", "stopped"],
)
def test_a_replaceable_process_starts_again_alone(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.processes.liveness._LOOK_SECONDS", 0.1)
    how = "record(0, **{'episode/reward/mean': 0.5}); " + how
    server = serves(DIES_ONCE.format(how=how))
    stream, job = io.StringIO(), saving(tmp_path, plays_with(2), inference=server)
    limits = {"hang_seconds": 0.3, "stop_timeout_seconds": 0.2}
    assert launch(replace(job, launch=job.launch.model_copy(update=limits)), stream) == 0
    (line,) = [line for line in stream.getvalue().splitlines() if "restart 1 of 5" in line]
    assert line.startswith("inference ")
    assert line.endswith("in 0.01 s, of inference alone")
    assert played(tmp_path) == 1
    summary = read_json(tmp_path / "demo" / "summary.json")
    assert (summary["outcome"], summary["term"]) == ("done", 1)
    (cause,) = summary["restarts"]
    assert line.startswith(cause)


TRAINS = """
with open(run_dir.parent / "trained", "a") as file:
    file.write("begun\\n")
if len((run_dir.parent / "trained").read_text().splitlines()) > 1:
    ready(done=True)
    sys.exit()
ready()
until("following_1")
(run_dir / "spool" / "batch_{batch:08d}").mkdir(parents=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
FOLLOWS = """
ready()
until("following_1")
while len((run_dir.parent / "trained").read_text().splitlines()) < 2:
    time.sleep(0.01)
"""


@pytest.mark.shows("F19")
@pytest.mark.parametrize(("batch", "is_alone"), [(0, True), (1, False)])
def test_a_trainer_starts_again_alone_only_where_its_next_batch_may_come(
    tmp_path: Path, batch: int, is_alone: bool
) -> None:
    stream = io.StringIO()
    job = saving(tmp_path, FOLLOWS + PLAY, trainer=TRAINS.format(batch=batch))
    assert launch(job, stream) == 0
    (line,) = [line for line in stream.getvalue().splitlines() if "restart 1 of 5" in line]
    assert line.startswith("trainer was killed by SIGKILL")
    assert ("of trainer alone" in line) == is_alone
    assert read_json(tmp_path / "demo" / "summary.json")["term"] == (1 if is_alone else 2)


@pytest.mark.shows("F19")
def test_a_trainer_whose_checkpoint_is_damaged_is_told_before_the_damage(tmp_path: Path) -> None:
    stream = io.StringIO()
    damage = "(run_dir / 'checkpoints' / 'step_00000001').mkdir(parents=True)\nos.kill("
    trainer = TRAINS.format(batch=0).replace("os.kill(", damage)
    with pytest.raises(CorruptStateError):
        launch(saving(tmp_path, FOLLOWS + PLAY, trainer=trainer), stream)
    assert "trainer was killed by SIGKILL" in stream.getvalue()


@pytest.mark.shows("F80")
@pytest.mark.parametrize(
    "again",
    ["sys.exit(3)", "time.sleep(60)", "ready(); all_ready(); sys.exit(3)"],
    ids=["ends before it is ready", "is not ready in time", "ends by itself at the same step"],
)
def test_a_replacement_that_does_not_help_is_followed_by_all(tmp_path: Path, again: str) -> None:
    how = DIES_ONCE.format(how=KILL) + f"\nif number == 2:\n    {again}\n"
    stream, job = io.StringIO(), saving(tmp_path, plays_with(3), inference=serves(how))
    limits = {"ready_timeout_seconds": 2.0 if "sleep" in again else 60.0}
    # Before a first step only what comes from outside is a fault.
    first = "record(0, **{'episode/reward/mean': 0.5})\n"
    job = saving(tmp_path, first + plays_with(3), inference=serves(how))
    assert launch(replace(job, launch=job.launch.model_copy(update=limits)), stream) == 0
    lines = [line for line in stream.getvalue().splitlines() if " of 5 in " in line]
    assert [line.endswith("of inference alone") for line in lines] == [True, False]
    assert (played(tmp_path), len(read_json(tmp_path / "demo" / "summary.json")["restarts"])) == (
        2,
        2,
    )


@pytest.mark.shows("F80")
def test_another_failure_meanwhile_starts_all_again(tmp_path: Path) -> None:
    how = DIES_ONCE.format(how=KILL) + "\nif number == 2:\n    time.sleep(60)\n"
    fails_once = """
if len((run_dir.parent / "played").read_text().splitlines()) == 1:
    while len((run_dir.parent / "served").read_text().splitlines()) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    player = plays_with(3).replace("ready()\n", "ready()\n" + fails_once, 1)
    stream = io.StringIO()
    assert launch(saving(tmp_path, player, inference=serves(how)), stream) == 0
    lines = [line for line in stream.getvalue().splitlines() if " of 5 in " in line]
    assert [line.split()[0] for line in lines] == ["inference", "orchestrator"]
    assert lines[1].endswith("from step 1, no steps are done again")


@pytest.mark.shows("F13")
def test_a_process_that_fails_alike_after_it_was_replaced_ends_the_launch(tmp_path: Path) -> None:
    how = "record(0, **{'episode/reward/mean': 0.5}); ready(); all_ready(); sys.exit(7)"
    with pytest.raises(ChildFailed, match="inference ended with exit code 7"):
        launch(saving(tmp_path, plays_with(9), inference=serves(how)), io.StringIO())
    assert len((tmp_path / "served").read_text().splitlines()) == 2


# A replica that dies with `{code}` once the launcher follows, and is not `first` to be ready again.
DIES = """
import socket
with open(run_dir.parent / "served", "a") as file:
    file.write("begun\\n")
{first}
listener = socket.socket(fileno=int(os.environ["GRADUS_LISTENER"]))
(run_dir / "port").write_text(str(listener.getsockname()[1]))
ready()
while not (run_dir / "following_1").exists():
    time.sleep(0.01)
sys.exit({code})
"""
# Waits until nothing listens where it served: the launcher gave it up.
ALONE = """
import socket
with open(run_dir.parent / "played", "a") as file:
    file.write("begun\\n")
ready()
def is_refused():
    port = (run_dir / "port").read_text()  # empty while another writes it
    with socket.socket() as asking:
        return port != "" and asking.connect_ex(("127.0.0.1", int(port))) != 0
while not (run_dir / "following_1").exists() or not is_refused():
    time.sleep(0.01)
"""
STAYS = "ready(); signal.pause()"


def served(tmp_path: Path) -> int:
    return len((tmp_path / "served").read_text().splitlines())


@pytest.mark.shows("F09")
@pytest.mark.parametrize(
    "first",
    ["", "if (run_dir / 'port').exists(): sys.exit(7)"],
    ids=["after it was ready", "before it is ready again"],
)
def test_a_replica_that_keeps_dying_stays_out_and_the_run_goes_on(
    tmp_path: Path, first: str
) -> None:
    stream, dies = io.StringIO(), DIES.format(code=7, first=first)
    job = saving(tmp_path, ALONE + PLAY, num_restarts=2, inference_0=STAYS, inference_1=dies)
    assert launch(job, stream) == 0
    lines = [it for it in stream.getvalue().splitlines() if it.startswith("inference_1 ended")]
    assert [line.partition("; ")[2].partition(" in ")[0] for line in lines] == [
        "restart 1 of 2",
        "restart 2 of 2",
        "inference_1 stays out, because launch.restarts allows 2",
    ]
    assert lines[2].endswith("; the run continues with 1 of 2 replicas")
    assert (played(tmp_path), served(tmp_path)) == (1, 3)
    assert len(read_json(tmp_path / "demo" / "summary.json")["restarts"]) == 3


@pytest.mark.shows("F09")
def test_another_attempt_starts_without_a_replica_that_stays_out(tmp_path: Path) -> None:
    fails_once = f"if len(open(run_dir.parent / 'played').readlines()) == 1: {KILL}\n"
    job = saving(
        tmp_path,
        ALONE + fails_once + PLAY,
        inference_0=STAYS,
        inference_1=DIES.format(code=64, first=""),
    )
    stream = io.StringIO()
    assert launch(job, stream) == 0
    assert "inference_1 stays out, because it would end so again" in stream.getvalue()
    # Where the orchestrator looks before it waits for a replica.
    run_dir = RunDirectory(tmp_path / "demo")
    assert started_replicas(run_dir, ["inference_0", "inference_1"]) == ["inference_0"]
    assert (played(tmp_path), served(tmp_path)) == (2, 1)


@pytest.mark.shows("F09")
def test_the_last_replica_that_serves_is_no_exception(tmp_path: Path) -> None:
    dies = DIES.format(code=64, first="")
    job = saving(tmp_path, STAYS, inference_0=ALONE + "sys.exit(7)", inference_1=dies)
    # Before a first step, what ends by itself is most likely a bug.
    with pytest.raises(ChildFailed, match="inference_0 ended with exit code 7"):
        launch(job, io.StringIO())


@pytest.mark.shows("F80")
def test_a_signal_while_a_process_is_replaced_ends_it_at_once(tmp_path: Path) -> None:
    launcher = start_launcher(
        tmp_path,
        {"inference": serves(DIES_ONCE.format(how=KILL)), "orchestrator": plays_with(2)},
        how="saves",
        wait_seconds=60.0,
    )
    assert launcher.stdout is not None
    next(line for line in launcher.stdout if "in 60 s, of inference alone" in line)
    begun = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, time.monotonic() - begun < 30) == (130, True)
    assert "interrupted 0 of 3 steps" in output


DIES_WHEN = """
ready()
while not {when}:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
FOLLOWED = "(run_dir / 'metrics.jsonl').exists()"
ASKED = "(run_dir / 'control' / 'save').exists()"


@pytest.mark.shows("F69")
@pytest.mark.parametrize(
    ("dies", "trainer_dies", "why"),
    [
        ("trainer", FOLLOWED, "while trainer starts again"),
        ("inference", ASKED, "because trainer was killed by SIGKILL"),
    ],
)
def test_a_checkpoint_that_cannot_come_is_not_waited_for(
    tmp_path: Path, dies: str, trainer_dies: str, why: str
) -> None:
    plays = """
ready()
while not (run_dir / "following").exists():
    time.sleep(0.01)
record(0, **{"episode/reward/mean": 0.5})
signal.pause()
"""
    programs = {
        "inference": DIES_WHEN.format(when=FOLLOWED if dies == "inference" else False),
        "trainer": DIES_WHEN.format(when=trainer_dies),
        "orchestrator": plays,
    }
    launcher = start_launcher(tmp_path, programs, how="saves", wait_seconds=600.0)
    assert launcher.stdout is not None
    next(line for line in launcher.stdout if f", of {dies} alone" in line)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=60)  # launch.save_timeout_seconds is 120
    assert launcher.returncode == ExitCode.TRY_AGAIN
    assert f"no checkpoint was saved {why}" in output
    assert "--resume starts again at step 1" in output
