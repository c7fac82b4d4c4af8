"""`gradus agent`: what it refuses, what it plays, and what it shows of an episode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradus.cli.agents import command
from gradus.cli.main import main
from gradus.errors import ConfigError, ExitCode


def test_a_file_outside_this_folder_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert main(["agent", "model", "--task", "x", "--", "python", "../agent.py"]) == 64
    assert "../agent.py is not in this folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "name a model or a run"),
        (["--", "sh"], "name a model or a run"),
        (["--model.renderer", "qwen3", "--", "sh"], "name a model or a run"),
        (["model"], "write it after --"),
        (["model", "--"], "write it after --"),
        (["model", "--task", "--", "sh"], "--task needs a text"),
        (["model", "--name", "a", "--name", "b", "--", "sh"], "--name is given twice"),
    ],
)
def test_what_cannot_be_played_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        command.run(words)


def message(role: str, text: str, *, is_sampled: bool = False) -> dict[str, Any]:
    return {"message": {"role": role, "content": text}, "sampled": is_sampled}


def call(node: int, num_tokens: int) -> dict[str, Any]:
    return {"node": node, "usage": {"prompt_tokens": 9, "completion_tokens": num_tokens}}


RECORD = {
    "traces": [
        {
            "agent": {"name": "agent", "trainable": True},
            "nodes": [
                message("user", "a task"),
                message("assistant", "one\x1b[2J", is_sampled=True),
                message("user", "more"),
                message("assistant", "x" * 2000, is_sampled=True),
            ],
            "calls": [call(1, 5), {"node": None}, call(3, 7)],
            "rewards": {"ended_well": {"score": 1.0, "weight": 1.0}},
            "info": {
                "quarantined_turns": [1],
                "untrained_turns": {"temperature 0": [1], "unread": []},
                "program": {
                    "dialects": {"Messages": 2},
                    "num_streams": 1,
                    "num_refused": 1,
                    "refused": ["`container` is not supported"],
                    "dropped": {"thinking": 2},
                    "lost_reasoning": 1,
                    "exit_code": 3,
                    "stderr": "NameError: no model\n",
                },
            },
        }
    ]
}


def played(
    words: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0
) -> tuple[int, list[str]]:
    """The exit code of a command whose evaluation wrote one record, and what that was told."""
    told: list[str] = []

    def evaluate(given: Sequence[str]) -> int:
        told.extend(given)
        place = Path(given[given.index("--output-dir") + 1]) / given[1] / "episodes" / "step_0"
        place.mkdir(parents=True)
        (place / "eval.jsonl").write_text(json.dumps(RECORD) + "\n")
        return code

    monkeypatch.setattr(command, "evaluate", evaluate)
    monkeypatch.chdir(folder)
    return command.run(words), told


def test_the_conversation_and_what_would_train_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = played(["model", "--task", "x", "--", "sh"], tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert code == ExitCode.DONE
    assert "--- user\na task\n\n--- model\none" in shown
    assert "\x1b" not in shown
    assert "[... 1400 characters ...]" in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "calls 2 by Messages; 1 streamed",
        "refused `container` is not supported",
        "exit code 3",
        "its last words NameError: no model",
        "tokens 12 sampled, 5 would train",
        "1 turn is context: temperature 0",
        'not used {"thinking": 2} (of what it asked for)',
        "reasoning 1 replies came back without theirs",
    ):
        assert line in lines


def test_the_agent_gets_its_files_and_the_rest_is_the_evaluation_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "agent.py").touch()
    words = ["model", "--task", "x", "--sampling-by", "program", "--model.renderer", "qwen3"]
    words += ["--", "python", "tools/agent.py", "--", "--task"]
    _, told = played(words, tmp_path, monkeypatch)
    (source,) = json.loads(told[told.index("--env") + 1])
    taskset = source["taskset"]
    assert taskset["command"] == ["python", "tools/agent.py", "--", "--task"]
    assert (taskset["files"], taskset["sampling"]) == (["tools"], "program")
    assert taskset["tasks"] == [{"prompt": "x"}]
    assert told[-2:] == ["--model.renderer", "qwen3"]


def test_the_code_of_an_evaluation_that_failed_is_the_command_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = played(["model", "--task", "x", "--", "sh"], tmp_path, monkeypatch, code=75)
    assert (code, capsys.readouterr().out) == (75, "")
