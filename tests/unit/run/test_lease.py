"""One writer per run directory; nothing that is not ours is ever touched."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import (
    ConfigError,
    CorruptStateError,
    FencedError,
    GradusError,
    RunDirectoryError,
)
from gradus.files import read_json, write_json
from gradus.processes.table import read_process
from gradus.run.lease import (
    MARKER_FORMAT,
    MARKER_NAME,
    RunLease,
    check_term,
    mark_run,
    open_run,
    preview_run,
    read_marker,
    read_term,
    reopen_run,
    run_path,
)
from gradus.run.paths import RunDirectory

HOLDER = """
import sys, pathlib
from gradus.run.lease import open_run
lease = open_run(pathlib.Path(sys.argv[1]), "demo", kind="rl")
print(lease.term, flush=True)
sys.stdin.read()
"""


def hold_in_other_process(output_dir: Path) -> subprocess.Popen[str]:
    """A process that holds the lease of `output_dir/demo` until its stdin closes."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(output_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "1\n"
    return holder


def close(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


@pytest.mark.shows("SEC13")
def test_a_new_run_gets_a_private_marked_directory(tmp_path: Path) -> None:
    lease = open_run(tmp_path / "runs", "demo", kind="rl")
    root = tmp_path / "runs" / "demo"
    assert root.stat().st_mode & 0o777 == 0o700
    assert read_json(root / MARKER_NAME)["run_id"] == "demo"
    assert (lease.run_dir.root, lease.term) == (root, 1)
    lease.release()


def test_the_lease_names_its_owner(tmp_path: Path) -> None:
    lease = open_run(tmp_path, "demo", kind="rl")
    owner = read_json(lease.run_dir.lease)["owner"]
    me = read_process(os.getpid())
    assert me is not None
    assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())
    assert owner["start_time"] == me.start_time
    lease.release()


@pytest.mark.shows("F32")
def test_a_second_live_run_is_refused_with_owner_and_pid(tmp_path: Path) -> None:
    holder = hold_in_other_process(tmp_path)
    try:
        with pytest.raises(RunDirectoryError, match=rf"in use by pid {holder.pid} on host .*since"):
            open_run(tmp_path, "demo", clean=True, kind="rl")
    finally:
        close(holder)


@pytest.mark.shows("F32", "I6")
def test_the_lease_of_a_killed_owner_is_taken_over_with_a_higher_term(tmp_path: Path) -> None:
    close(hold_in_other_process(tmp_path))
    lease = open_run(tmp_path, "demo", kind="rl")
    assert lease.term == 2
    lease.release()


@pytest.mark.shows("F32")
def test_two_leases_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    lease = RunLease.take(RunDirectory(tmp_path))
    with pytest.raises(RunDirectoryError, match=f"in use by pid {os.getpid()}"):
        RunLease.take(RunDirectory(tmp_path))
    lease.release()
    lease.release()
    again = RunLease.take(RunDirectory(tmp_path))
    assert again.term == 2
    again.release()


def test_a_living_owner_counts_even_when_its_lock_file_was_deleted(tmp_path: Path) -> None:
    holder = hold_in_other_process(tmp_path)
    try:
        (tmp_path / "demo" / "lease.lock").unlink()
        with pytest.raises(RunDirectoryError, match=f"in use by pid {holder.pid}"):
            RunLease.take(RunDirectory(tmp_path / "demo"))
    finally:
        close(holder)


@pytest.mark.shows("F71", "I6")
def test_the_next_start_of_a_job_takes_the_lease_from_the_one_that_the_scheduler_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    holder = hold_in_other_process(tmp_path)
    try:
        for job, starts in (("31", "0"), ("32", "1")):
            monkeypatch.setenv("SLURM_JOB_ID", job)
            monkeypatch.setenv("SLURM_RESTART_COUNT", starts)
            with pytest.raises(RunDirectoryError, match=f"in use by pid {holder.pid}"):
                reopen_run(tmp_path, "demo", kind="rl")
        monkeypatch.setenv("SLURM_JOB_ID", "31")
        lease = reopen_run(tmp_path, "demo", kind="rl")
        lease.claim()
        with pytest.raises(RunDirectoryError, match=f"in use by pid {os.getpid()}"):
            reopen_run(tmp_path, "demo", kind="rl")
        with pytest.raises(FencedError):
            check_term(lease.run_dir, 1)
        lease.release()
    finally:
        close(holder)


def test_a_pod_takes_the_run_over_from_the_one_that_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADUS_POD", "uid-1")
    holder = hold_in_other_process(tmp_path)
    try:
        for pod in ("uid-1", None):
            if pod is None:
                monkeypatch.delenv("GRADUS_POD")
            with pytest.raises(RunDirectoryError, match=f"in use by pid {holder.pid}"):
                reopen_run(tmp_path, "demo", kind="rl")
        monkeypatch.setenv("GRADUS_POD", "uid-2")
        lease = reopen_run(tmp_path, "demo", kind="rl")
        lease.claim()
        with pytest.raises(FencedError):
            check_term(lease.run_dir, lease.term - 1)
        lease.release()
    finally:
        close(holder)


@pytest.mark.shows("SEC17")
def test_a_recycled_pid_is_not_the_owner(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "start_time": 1, "taken_at": 0.0}
    write_json(run_dir.lease, {"term": 4, "owner": owner})
    lease = RunLease.take(run_dir)
    assert lease.term == 5
    lease.release()


@pytest.mark.shows("F32", "F71", "I6")
def test_an_older_term_is_fenced(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    lease = RunLease.take(run_dir)
    lease.check()
    write_json(run_dir.lease, {"term": 2, "owner": None})
    with pytest.raises(FencedError, match=r"taken over with term 2 .*this process has term 1"):
        lease.check()
    lease.release()
    assert read_term(run_dir) == 2, "a fenced owner must not write the lease"


def test_a_renewed_lease_fences_its_own_last_term_and_is_still_held(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    lease = RunLease.take(run_dir)
    lease.renew()
    assert (lease.term, read_term(run_dir)) == (2, 2)
    with pytest.raises(FencedError):
        check_term(run_dir, 1)
    with pytest.raises(RunDirectoryError, match="in use"):
        RunLease.take(run_dir)
    lease.release()
    assert read_json(run_dir.lease) == {"term": 2, "owner": None}


def test_a_fenced_lease_is_not_renewed(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    lease = RunLease.take(run_dir)
    write_json(run_dir.lease, {"term": 2, "owner": None})
    with pytest.raises(FencedError):
        lease.renew()
    lease.release()
    assert read_term(run_dir) == 2


def test_an_error_of_the_disk_that_passes_fences_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = RunLease.take(RunDirectory(tmp_path))
    errors, read = [errno.ESTALE, errno.EIO], Path.read_bytes

    def read_badly(path: Path) -> bytes:
        if errors:
            raise OSError(errors.pop(), "not now")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_badly)
    lease.check()
    assert errors == []
    lease.release()


def test_a_full_disk_keeps_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDirectory(tmp_path)
    lease = RunLease.take(run_dir)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("gradus.run.lease.write_json", refuse)
        lease.release()
    assert not lease.is_held
    RunLease.take(run_dir).release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunDirectoryError, match=r"keeps no locks .*; mount it with flock"):
        RunLease.take(RunDirectory(tmp_path))


def test_without_a_lease_every_term_passes(tmp_path: Path) -> None:
    check_term(RunDirectory(tmp_path), 0)


@pytest.mark.parametrize("content", ["{", "[]", '{"term": 1}', '{"term": 1, "owner": {"a": 1}}'])
def test_a_lease_that_does_not_parse_is_corrupt(tmp_path: Path, content: str) -> None:
    (tmp_path / "lease.json").write_text(content)
    with pytest.raises(CorruptStateError, match="lease"):
        RunLease.take(RunDirectory(tmp_path))


def test_reusing_a_name_is_refused(tmp_path: Path) -> None:
    first = open_run(tmp_path, "demo", kind="rl")
    first.run_dir.metrics.write_text("{}\n")
    first.release()
    with pytest.raises(
        RunDirectoryError,
        match="already holds a run; continue with --resume, delete that run with --clean",
    ):
        open_run(tmp_path, "demo", kind="rl")


def test_clean_deletes_the_old_run_and_raises_the_term(tmp_path: Path) -> None:
    first = open_run(tmp_path, "demo", kind="rl")
    first.run_dir.metrics.write_text("{}\n")
    first.run_dir.config.mkdir()
    (first.run_dir.root / "link").symlink_to(tmp_path)
    first.release()
    second = open_run(tmp_path, "demo", clean=True, kind="rl")
    left = {path.name for path in second.run_dir.root.iterdir()}
    assert left == {MARKER_NAME, "lease.json", "lease.lock"}
    assert second.term == 2
    second.release()


@pytest.mark.shows("SEC15")
def test_clean_never_touches_a_directory_without_our_marker(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirectoryError, match="is not a run of gradus"):
        open_run(tmp_path, "demo", clean=True, kind="rl")
    assert [p.name for p in (tmp_path / "demo").iterdir()] == ["thesis.tex"]


@pytest.mark.shows("SEC15")
def test_clean_never_touches_a_run_with_another_name(tmp_path: Path) -> None:
    run = open_run(tmp_path, "other", kind="rl")
    run.run_dir.metrics.write_text("{}\n")
    run.release()
    run.run_dir.root.rename(tmp_path / "demo")
    with pytest.raises(RunDirectoryError, match="does not carry the marker of this run"):
        open_run(tmp_path, "demo", clean=True, kind="rl")
    assert (tmp_path / "demo" / "metrics.jsonl").exists()


def test_there_is_nothing_to_resume_where_no_run_is(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run to resume"):
        reopen_run(tmp_path, "demo", kind="rl")
    assert not (tmp_path / "demo").exists()


def test_resume_takes_the_next_term_and_leaves_the_content(tmp_path: Path) -> None:
    first = open_run(tmp_path, "demo", kind="rl")
    first.run_dir.metrics.write_text("{}\n")
    first.release()
    second = reopen_run(tmp_path, "demo", kind="rl")
    assert second.term == first.term + 1
    assert read_term(first.run_dir) == first.term, "reserved, not yet taken"
    second.claim()
    assert read_term(first.run_dir) == second.term
    assert second.run_dir.metrics.read_text() == "{}\n"
    second.release()


def test_a_reserved_run_keeps_others_out_and_is_left_as_it_was(tmp_path: Path) -> None:
    open_run(tmp_path, "demo", kind="rl").release()
    before = (tmp_path / "demo" / "lease.json").read_bytes()
    reserved = reopen_run(tmp_path, "demo", kind="rl")
    with pytest.raises(RunDirectoryError, match="is in use by a process that just took it"):
        reopen_run(tmp_path, "demo", kind="rl")
    reserved.release()
    assert (tmp_path / "demo" / "lease.json").read_bytes() == before


def test_a_run_that_is_in_use_cannot_be_resumed(tmp_path: Path) -> None:
    first = open_run(tmp_path, "demo", kind="rl")
    with pytest.raises(RunDirectoryError, match="is in use by"):
        reopen_run(tmp_path, "demo", kind="rl")
    first.release()


def test_a_run_never_lies_inside_another(tmp_path: Path) -> None:
    outer = open_run(tmp_path, "outer", kind="rl")
    outer.release()
    with pytest.raises(RunDirectoryError, match="would lie inside the run"):
        open_run(tmp_path / "outer" / "deep", "inner", kind="rl")
    assert not (tmp_path / "outer" / "deep").exists()


def test_clean_never_deletes_a_run_that_lies_in_the_old_one(tmp_path: Path) -> None:
    inner = open_run(tmp_path / "outer", "inner", kind="rl")
    outer = RunDirectory(tmp_path / "outer")
    mark_run(outer, "rl")
    with pytest.raises(RunDirectoryError, match="another run lies in this one"):
        open_run(tmp_path, "outer", kind="rl", clean=True)
    assert read_marker(inner.run_dir) is not None
    inner.release()


@pytest.mark.shows("F71")
def test_clean_asks_where_the_owner_may_live_on_another_host(tmp_path: Path) -> None:
    run = open_run(tmp_path, "demo", kind="rl")
    run.run_dir.metrics.write_text("{}\n")
    run.release()
    owner = {"host": "elsewhere", "pid": 7, "start_time": 1, "taken_at": 0.0}
    write_json(run.run_dir.lease, {"term": 1, "owner": owner})
    with pytest.raises(RunDirectoryError, match="taken by pid 7 on host elsewhere"):
        open_run(tmp_path, "demo", kind="rl", clean=True)
    assert run.run_dir.metrics.exists()


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        ('{"run_id": "demo", "format": 1}', ConfigError, "another version of gradus"),
        ("[]", CorruptStateError, "does not say which run this is"),
        (f'{{"format": {MARKER_FORMAT}}}', CorruptStateError, "does not say which run this is"),
        ("\xff", CorruptStateError, "gradus leaves this folder alone"),
    ],
)
def test_a_marker_that_cannot_be_read_protects_its_folder(
    tmp_path: Path, content: str, error: type[GradusError], named: str
) -> None:
    run = open_run(tmp_path, "demo", kind="rl")
    run.run_dir.metrics.write_text("{}\n")
    run.release()
    (run.run_dir.root / MARKER_NAME).write_bytes(content.encode("latin-1"))
    for opening in (partial(open_run, clean=True), reopen_run, preview_run):
        with pytest.raises(error, match=named):
            opening(tmp_path, "demo", kind="rl")
    assert run.run_dir.metrics.exists()


def test_a_file_with_the_name_of_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("precious")
    for opening in (open_run, partial(open_run, clean=True), preview_run):
        with pytest.raises(RunDirectoryError, match="cannot be used"):
            opening(tmp_path, "demo", kind="rl")
    assert (tmp_path / "demo").read_text() == "precious"


@pytest.mark.shows("F34", "SEC14")
@pytest.mark.parametrize(
    "name", ["..", ".", "", "../x", "a/b", "/etc", "a\0b", "-x", "x" * 65, "ä"]
)
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not usable as a folder"):
        run_path(tmp_path, name)


@pytest.mark.shows("F34")
@given(name=st.text(max_size=80))
def test_every_accepted_name_stays_inside(name: str) -> None:
    parent = Path("/nowhere/runs")
    try:
        path = run_path(parent, name)
    except ConfigError:
        return
    assert path.parent == parent


@pytest.mark.shows("F34")
def test_a_run_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(tmp_path / "outside")
    with pytest.raises(RunDirectoryError, match="is a link to"):
        open_run(tmp_path / "runs", "demo", kind="rl")


def test_an_output_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(
        RunDirectoryError, match=r"cannot be used .*choose another name or output_dir"
    ):
        open_run(tmp_path / "runs", "demo", kind="rl")
