"""bfloat16 is tried by children; here they are short programs that die, hang, or agree."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradus.plan.precision import Trial, bfloat16_fault, cache_folder

FLAGS = frozenset({"avx512f", "avx512_bf16"})
DIES = "import os, signal; os.kill(os.getpid(), signal.{})"
HANGS = "import threading; threading.Event().wait()"
DIFFERS = "from gradus.plan.precision import end_trial; end_trial('computed other numbers: 0.9')"


def trial(program: str, **variables: str) -> Trial:
    return Trial("engine", (sys.executable, "-c", program), variables)


def counting(marks: Path, then: str = "") -> str:
    """A program that leaves a mark each time it runs."""
    return f"open({str(marks)!r}, 'a').write('x'); {then}"


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        (DIES.format("SIGILL"), "the engine was killed by SIGILL"),
        (DIES.format("SIGSEGV"), "the engine was killed by SIGSEGV"),
        (DIES.format("SIGKILL"), "the engine was killed by SIGKILL"),
        (DIFFERS, "the engine computed other numbers: 0.9"),
        ("raise SystemExit(3)", "the engine ended with exit code 3"),
        (
            "import no_such_kernel",
            "the engine ended with exit code 1: ModuleNotFoundError: No module",
        ),
        ("pass", ""),
    ],
)
def test_a_trial_that_fails_is_told_in_one_line(tmp_path: Path, program: str, fault: str) -> None:
    found = bfloat16_fault([trial(program)], FLAGS, tmp_path)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)
    assert "\n" not in found


def test_a_trial_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    before = time.monotonic()
    found = bfloat16_fault([trial(HANGS)], FLAGS, tmp_path, deadline_seconds=0.3)
    assert found == "the engine did not answer within 0.3 s"
    assert time.monotonic() - before < 30


@pytest.mark.parametrize(
    "then", ["", DIES.format("SIGILL"), DIFFERS], ids=["agrees", "dies", "differs"]
)
def test_a_trial_runs_once_and_its_outcome_is_kept(tmp_path: Path, then: str) -> None:
    tried = [trial(counting(tmp_path / "marks", then))]
    first, second = (bfloat16_fault(tried, FLAGS, tmp_path / "cache") for _ in range(2))
    assert first == second
    assert (tmp_path / "marks").read_text() == "x"
    [kept] = (tmp_path / "cache").iterdir()
    assert (str(kept) in first) == bool(then)
    kept.unlink()
    bfloat16_fault(tried, FLAGS, tmp_path / "cache")
    assert (tmp_path / "marks").read_text() == "xx"


def test_starts_at_one_time_try_once(tmp_path: Path) -> None:
    tried = [trial(counting(tmp_path / "marks", DIES.format("SIGILL")))]
    with ThreadPoolExecutor(4) as starts:
        found = {*starts.map(lambda _: bfloat16_fault(tried, FLAGS, tmp_path / "cache"), range(4))}
    assert (tmp_path / "marks").read_text() == "x"
    assert len(found) == 1


def test_a_start_waits_no_longer_for_another_than_for_its_own_trial(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    found = bfloat16_fault([trial(HANGS)], FLAGS, tmp_path, deadline_seconds=0.2)
    os.close(folder)
    assert found == "the engine did not answer within 0.2 s"


def test_only_a_start_that_waits_for_a_trial_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bfloat16_fault([trial("pass")], FLAGS, tmp_path, may_start=False)
    assert capsys.readouterr().err == ""
    bfloat16_fault([trial("pass")], FLAGS, tmp_path)
    assert capsys.readouterr().err.startswith("trying bfloat16 on this processor")
    bfloat16_fault([trial("pass")], FLAGS, tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("then", [DIES.format("SIGKILL"), "raise SystemExit(1)"])
def test_what_another_start_may_not_meet_is_tried_again(tmp_path: Path, then: str) -> None:
    tried = [trial(counting(tmp_path / "marks", then))]
    assert all(bfloat16_fault(tried, FLAGS, tmp_path / "cache") for _ in range(2))
    assert (tmp_path / "marks").read_text() == "xx"


def test_other_flags_settings_or_programs_are_tried_anew() -> None:
    plain = trial("pass", HOME="/home/a")
    assert plain.key(FLAGS) == trial("pass", HOME="/home/b").key(FLAGS)
    others = [
        plain.key(FLAGS | {"amx_tile"}),
        trial("pass", ONEDNN_MAX_CPU_ISA="AVX2").key(FLAGS),
        trial("0").key(FLAGS),
    ]
    assert len({plain.key(FLAGS), *others}) == 4


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    tried = [trial(counting(tmp_path / "marks"))]
    file = tmp_path / "file"
    file.write_text("no folder")
    damaged = tmp_path / "cache" / tried[0].key(FLAGS)
    damaged.parent.mkdir()
    for content in ("{", "[]", '{"fault": 3}'):
        damaged.write_text(content)
        assert bfloat16_fault(tried, FLAGS, damaged.parent) == ""
    for cache in (file, file / "below", None):
        assert bfloat16_fault(tried, FLAGS, cache) == ""
    assert (tmp_path / "marks").read_text() == "x" * 6


def test_only_what_is_known_is_said_where_no_child_may_start(tmp_path: Path) -> None:
    tried = [trial(counting(tmp_path / "marks", DIES.format("SIGILL")))]
    assert bfloat16_fault(tried, FLAGS, tmp_path / "cache", may_start=False) == ""
    found = bfloat16_fault(tried, FLAGS, tmp_path / "cache")
    assert bfloat16_fault(tried, FLAGS, tmp_path / "cache", may_start=False) == found != ""
    assert (tmp_path / "marks").read_text() == "x"


def test_outcomes_are_kept_where_the_user_keeps_what_can_be_made_again() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/tmp/c", "HOME": "/h"}) == Path("/tmp/c/gradus")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/gradus")
    assert cache_folder({}) is None
