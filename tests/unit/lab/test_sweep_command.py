"""A grid of runs in one folder: every cell once, in order, and again only what is missing."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_folders import a_run

from gradus.cli.main import main
from gradus.errors import ExitCode
from gradus_lab import sweep
from gradus_lab.sweep import GridCell, read_sweep

CONFIG = """\
max_steps = 2
output_dir = "runs"
seed = 5
[model]
name = "someone/tiny"
[[orchestrator.train.env]]
id = "gradus-reverse-text"
"""
LR = "--set=trainer.optimizer.lr=1e-4,3e-4"

CELL = """
import json, sys, pathlib
words = sys.argv[1:]
at = lambda key: words[words.index(key) + 1]
folder = pathlib.Path(at("--output-dir")) / at("--name")
with (folder.parent / "started").open("a") as file:
    file.write(json.dumps(words) + "\\n")
folder.mkdir(exist_ok=True)
(folder / ".gradus-run").touch()
fails = (folder.parent.parent / "fails").exists() and at("--seed") == "6"
(folder / "summary.json").write_text(json.dumps({"outcome": "failed" if fails else "done"}))
sys.exit(70 if fails else 0)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "cell.py").write_text(CELL)
    monkeypatch.chdir(tmp_path)

    def started(argv: Sequence[str]) -> list[str]:
        assert list(argv[:4]) == [sys.executable, "-P", "-m", "gradus.cli.main"]
        return [sys.executable, str(tmp_path / "cell.py"), *argv[4:]]

    monkeypatch.setattr(sweep, "dying_with_parent", started)
    monkeypatch.setattr(sweep, "compare", lambda _: None)
    return tmp_path


def started(place: Path) -> list[list[str]]:
    lines = (place / "runs" / "grid" / "started").read_text().splitlines()
    return [json.loads(line) for line in lines]


def play(*more: str) -> int:
    return main(["lab", "sweep", "@", "run.toml", LR, "--seeds", "2", "--name", "grid", *more])


def test_every_cell_runs_once_and_the_same_command_runs_none_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play() == 0
    names = [words[words.index("--name") + 1] for words in started(place)]
    assert names == ["lr-1e-4_seed-5", "lr-1e-4_seed-6", "lr-3e-4_seed-5", "lr-3e-4_seed-6"]
    assert all(words[0] == "rl" and "--resume" not in words for words in started(place))
    assert play() == 0
    assert len(started(place)) == 4
    assert (
        capsys.readouterr().out.rstrip().splitlines()[-1]
        == "cell 4/4  lr-3e-4_seed-6  done already"
    )


def test_a_cell_that_failed_is_named_and_continued_by_the_same_command(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "runs").mkdir()
    (place / "runs" / "fails").touch()
    assert play("--parallel", "4") == ExitCode.INTERNAL
    assert capsys.readouterr().out.count("failed: see runs/grid/lr-") == 2
    (place / "runs" / "fails").unlink()
    assert play() == 0
    again = started(place)[4:]
    assert [words[-1] for words in again] == ["--resume"] * 2


def test_a_cell_that_was_ended_before_it_was_a_run_starts_anew(place: Path) -> None:
    assert play() == 0
    for cell in (place / "runs" / "grid").glob("lr-*/"):
        shutil.rmtree(cell)
        cell.mkdir()  # The first that a launch does: its lock follows, then its marker.
    assert play() == 0
    assert len(started(place)) == 8
    assert not any("--resume" in words for words in started(place))


@pytest.mark.parametrize(
    "content", ["", "[1]", "{}", '{"cells": 3}', '{"cells": ["../../x"]}', '{"cells": [null]}']
)
@pytest.mark.parametrize("words", [["compare", "runs/grid"], ["lab", "sweep", "@", "run.toml", LR]])
def test_a_damaged_list_of_cells_is_told(
    place: Path, content: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "runs" / "grid").mkdir(parents=True)
    (place / "runs" / "grid" / "sweep.json").write_text(content)
    words = [*words, *(["--seeds", "2", "--name", "grid"] if words[0] == "lab" else [])]
    assert main(words) == ExitCode.CORRUPT_STATE
    assert "sweep.json" in capsys.readouterr().err.splitlines()[0]


def test_a_damaged_summary_of_a_cell_is_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play() == 0
    (place / "runs" / "grid" / "lr-1e-4_seed-5" / "summary.json").write_text("[]")
    assert play() == ExitCode.CORRUPT_STATE
    assert "lr-1e-4_seed-5/summary.json does not say" in capsys.readouterr().err


def test_another_sweep_and_another_folder_are_not_mixed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play() == 0
    words = ["lab", "sweep", "@", "run.toml", "--seeds"]
    assert main([*words, "9", "--name", "grid"]) == ExitCode.CONFIG
    assert "holds another sweep (cells differ)" in capsys.readouterr().err
    (place / "runs" / "other").mkdir()
    (place / "runs" / "other" / "mine.txt").touch()
    assert main([*words, "2", "--name", "other"]) == ExitCode.CONFIG
    assert "is there already and no sweep" in capsys.readouterr().err


def test_a_file_that_says_something_else_now_is_another_sweep(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play() == 0
    (place / "run.toml").write_text(f"# A note.\n{CONFIG}")
    assert play() == 0
    (place / "run.toml").write_text(CONFIG.replace("max_steps = 2", "max_steps = 3"))
    assert play() == ExitCode.CONFIG
    assert "holds another sweep (config differ)" in capsys.readouterr().err
    assert len(started(place)) == 4


def test_the_file_of_a_sweep_holds_no_variable_of_a_process(place: Path) -> None:
    for _ in range(2):
        assert play("--trainer.env-vars.SITE", "hidden") == 0
    assert "hidden" not in (place / "runs" / "grid" / "sweep.json").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cell_is_asked_once_to_save_and_end(place: Path, number: int) -> None:
    (place / "cell.py").write_text(STUBBORN)
    (place / "number").write_text(f"{number:d}")
    before = {it: signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    # A shell starts what runs in its background without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert play() == 130
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    assert (place / "got").read_text() == "15 "


STUBBORN = """
import os, pathlib, signal, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda it, _: got.append(it))
assert os.getpgid(0) == os.getpid()
os.kill(os.getppid(), int(pathlib.Path("number").read_text()))
while not got:
    time.sleep(0.01)
time.sleep(0.2)
pathlib.Path("got").write_text("".join(f"{it} " for it in got))
"""


def test_a_dry_run_lists_and_starts_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play("--dry-run") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing varies"),
        (["--set", "trainer.optimizer.lr"], "write KEY=A,B"),
        (["--set", "trainer.optimizer.lr=1e-4,"], "write KEY=A,B"),
        (["--set", "max_steps=1,1"], "given twice"),
        (["--set", "max_steps=1", "--set", "max_steps=2"], "is given twice"),
        (["--set", "seed=1,2"], "use --seeds"),
        (["--seeds", "0"], "--seeds 0: give a whole number"),
        (["--seeds", "2000"], "more than 1,000"),
        (["--seeds", "2", "--parallel", "x"], "--parallel x"),
        (["--set", "trainer.optimizer.lrr=1,2"], "lrr"),
        (["--set", "max_steps=2,-1"], "max_steps"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_anything_starts(
    place: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "sweep", "@", "run.toml", *words]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err
    assert not (place / "runs").exists()


@pytest.mark.usefixtures("place")
def test_commas_inside_brackets_and_quotes_part_nothing() -> None:
    words = ["@", "run.toml", "--set", 'launch.plugins=["a","b"],["c"]']
    assert [cell.settings[0][1] for cell in read_sweep(words).cells] == ['["a","b"]', '["c"]']


@pytest.mark.usefixtures("place")
def test_the_same_words_have_the_same_folder_and_others_another() -> None:
    one, same, other = (
        read_sweep(["@", "run.toml", "--set", f"max_steps={it}"]).folder
        for it in ("2,3", "2,3", "2,4")
    )
    assert one == same != other


def test_names_of_cells_are_names_of_runs() -> None:
    cell = GridCell((("a.b", "[1, 2]"), ("c" * 80, "x/y")), 3)
    assert len(cell.name) <= 64
    assert "/" not in cell.name
    assert cell.name != GridCell((("a.b", "[1, 3]"), ("c" * 80, "x/y")), 3).name


def test_compare_reads_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["one", "two", "not_begun"]
    for number, name in enumerate(names[:2]):
        a_run(tmp_path / name, metrics=[{"loss/total/mean": 0.1 * number}] * 3)
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": names}))
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "one" in shown
    assert "two" in shown
    assert "not_begun" not in shown


def test_a_command_that_plays_nothing_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "sweep", "eval", "--seeds", "2"]) == ExitCode.CONFIG
    del place
    assert capsys.readouterr().err
