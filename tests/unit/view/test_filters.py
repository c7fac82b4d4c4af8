"""Filters that are written out, and `gradus view --list`, against plain loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import a_branching_episode, a_run, add_episode, trained, write_trained

from gradus import load_run
from gradus.cli.main import main
from gradus.errors import ConfigError
from gradus.run.paths import RunDirectory
from gradus.view.index import EpisodeIndex
from gradus.view.terminal import whole_index

Row = dict[str, Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = a_run(tmp_path / "run")
    for step in range(3):
        for number in range(6):
            own: Row = {"versions": {"oldest": max(0, step - number % 3), "newest": step}}
            if number == 5:
                own |= {"error": {"type": "TaskError", "message": "no"}}
            if number == 4:
                own |= {"dropped": {"s": "too old"}}
            reply = f"{step}.{number}\x1b[2J"
            add_episode(root, step=step, reward=number / 6, reply=reply, **own)
    return root


def matching(index: EpisodeIndex, text: str) -> list[Row]:
    return index.cells({"where": [text]})


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("reward < 0.5", lambda it: it["reward"] is not None and it["reward"] < 0.5),
        ("reward<=0.5", lambda it: it["reward"] is not None and it["reward"] <= 0.5),
        ("reward != 0.5", lambda it: it["reward"] not in (None, 0.5)),
        ("reward is null", lambda it: it["reward"] is None),
        ("reward is not null and step > 1", lambda it: it["reward"] is not None and it["step"] > 0),
        ("step = 3", lambda it: it["step"] == 2),
        ("step == 1 or step > 2", lambda it: it["step"] != 1),
        ("not (step = 1 or step > 2)", lambda it: it["step"] == 1),
        ("step=1 or step=2 and error != ''", lambda it: it["step"] < (2 if it["error"] else 1)),
        ("dropped = 'too old' -- a remark", lambda it: it["dropped"] == "too old"),
        ("dropped ilike '%OLD%'", lambda it: "old" in it["dropped"]),
        ("error = '' AND outcome = 'finished'", lambda it: not it["error"]),
        ('"part:right" > 0.4', lambda it: (it["part:right"] or 0) > 0.4),
        ("source = 'nobody'", lambda it: False),
    ],
)  # fmt: skip
def test_a_filter_leaves_what_a_plain_loop_leaves(
    root: Path, text: str, passes: Callable[[Row], Any]
) -> None:
    index = whole_index(RunDirectory(root))
    every = index.cells({})
    expected = [it for it in every if passes(it)]
    assert matching(index, text) == expected
    assert len(expected) < len(every)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reward <", "not understood"),
        ("reward < high", '"high" not found'),
        ("reward < 'high'", "not understood"),
        ("loss = 1", '"loss" not found'),
        ("reward < 1)", "not understood"),
        ("source = 'words", "not understood"),
        ("true); DROP TABLE episodes; SELECT (1", "more than one"),
        ("exists (select * from read_text('/etc/hostname'))", "disabled"),
        ("(" * 2_000, "not understood"),
        ("reward < 1 and " * 300, "characters"),
    ],
)
def test_what_is_no_filter_is_refused_with_a_sentence(root: Path, text: str, says: str) -> None:
    index = whole_index(RunDirectory(root))
    with pytest.raises(ConfigError) as refused:
        matching(index, text)
    assert says in str(refused.value)
    assert len(index.cells({})) == 18


def test_the_command_lists_what_passes_in_its_order(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--where", "reward > 0.3 and step > 1", "--sort", "-reward"]
    assert main(["view", str(root), "--list", *words, "--limit", "2"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["step", "reward"], ["3", "0.6667"], ["2", "0.6667"],
    ]  # fmt: skip
    assert last == "6 of 18 episodes, 2 shown (--limit)"
    assert main(["view", str(root), "--list", *words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(it["step"], it["reward"]) for it in found] == [
        (step, number / 6) for number in (4, 3, 2) for step in (3, 2)
    ]
    assert main(["view", str(root), "--list", "--where", "step > 9"]) == 0
    assert capsys.readouterr().out == "0 of 18 episodes\n"
    path = root / "episodes" / "step_2" / "train.jsonl"
    hostile = {"\x1b]0;mine\x07": {"score": 1.0, "weight": 1.0}}
    record = json.loads(path.read_text().splitlines()[0])
    record["traces"][0]["rewards"] |= hostile
    path.write_text(f"{path.read_text()}{json.dumps(record)}\n")
    assert main(["view", str(root), "--list"]) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--where", "loss < 1"], '"loss" not found'),
        (["--sort", "size"], "no column 'size'"),
        (["--limit", "0"], "--limit 0"),
        (["--tokens", "colour"], "choose one of engine"),
        (["--tokens", "push", "--json"], "choose one"),
        (["--purpose"], "is not an option here"),
        (["other"], "name the folder of one run"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    root: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(root), "--list", *words]) == 64
    assert says in capsys.readouterr().err


def test_tokens_of_an_episode_that_stand_out_in_a_terminal_and_in_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = a_run(tmp_path / "run")
    add_episode(root, step=0, reward=1.0, reply="ab", episode="g0.0")
    path = root / "episodes/step_0/train.jsonl"
    record = json.loads(path.read_text())
    record["gradus"]["step"] = 0
    path.write_text(json.dumps(record | {"id": "first"}) + "\n")
    assert main(["view", str(root), "--list", "--tokens", "mismatch"]) == 0
    assert "no tokens: replay/ is not there" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no tokens: replay/ is not there"):
        load_run(root).tokens(record)
    a_branching_episode(root)
    assert main(["view", str(root), "--list", "--tokens", "mismatch"]) == 0
    assert "no mismatch: the run keeps none" in capsys.readouterr().out
    write_trained(root, trained("g0.0/1/0", [1, 2, 3, 4, 5, 6], [3, 4, 5], -2.0))
    assert main(["view", str(root), "--list", "--tokens", "mismatch"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # Not a terminal.
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["2", "'<6>'"], ["-1", "'<4>'"], ["0", "'<5>'"],
    ]  # fmt: skip
    run = load_run(root)
    (episode,) = run.episodes(where="reward = 1")
    rows = run.tokens(episode)
    assert [it["token"] for it in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[3] == {
        **{"trace": 1, "message": 1, "token": 4, "text": None, "sampled": True, "engine": -1.0},
        **{"version": 8, "trainer": -2.0, "entropy": -2.0, "advantage": -2.0, "weight": -4.0},
        **{"push": -2.0, "mismatch": -1.0, "reference": -2.5, "drift": 0.5},
    }
    assert main(["view", str(root), "--list", "--tokens", "drift"]) == 0
    assert "0.5  '<4>'" in capsys.readouterr().out
    assert rows[0]["engine"] is None
    assert list(run.episodes(where="reward < 1")) == []


def test_from_python_episodes_are_filtered_and_sorted_as_in_the_table(root: Path) -> None:
    run = load_run(root)
    found = run.episodes(where="reward < 0.4 and step = 2", sort="-reward")
    assert [it["gradus"]["versions"]["oldest"] for it in found] == [0, 0, 1]
    assert len(list(run.episodes(sort="reward", purpose="eval"))) == 0
