"""Replies that are made up for a reward, and what is said when it fails or tells none apart."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from gradus.environments.harness.reward_trial import try_reward
from gradus.errors import ConfigError
from gradus_jsonl.taskset import JsonlConfig, JsonlTask, JsonlTaskset

REWARDS = """
def right(reply, row):
    return float(reply == row["answer"])

def raising(reply):
    return deep(reply)

def deep(reply):
    return 1 / 0

def number(reply):
    return float(reply)

def flat(trace):
    return 0.5

def slow(reply):
    import time
    time.sleep(0.3)
    return 1.0

def leaving(reply):
    raise SystemExit(3)
"""


def tasks(folder: Path, function: str) -> list[JsonlTask]:
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARDS)
    reward = f"{folder / 'mine.py'}:{function}"
    config = JsonlConfig(id="gradus-jsonl", path=folder / "rows.jsonl", reward=reward)
    return list(JsonlTaskset(config))


def test_a_reward_that_tells_replies_apart_needs_no_word(tmp_path: Path) -> None:
    assert try_reward(tasks(tmp_path, "right")) == []


def test_a_reward_that_always_raises_is_refused_with_the_users_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ZeroDivisionError") as caught:
        try_reward(tasks(tmp_path, "raising"))
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        f'File "{tmp_path / "mine.py"}", line 6, in raising',
        "return deep(reply)",
        f'File "{tmp_path / "mine.py"}", line 9, in deep',
        "return 1 / 0",
    ]


def test_a_reward_that_exits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exits \(3\), for the reply '1' and every reply"):
        try_reward(tasks(tmp_path, "leaving"))


def test_a_reward_that_raises_for_some_replies_works_with_a_warning(tmp_path: Path) -> None:
    (text,) = try_reward(tasks(tmp_path, "number"))
    assert "'number' failed: ValueError" in text
    assert "for the reply '' and 12 of 16" in text


def test_a_reward_that_is_always_the_same_works_with_a_warning(tmp_path: Path) -> None:
    (text,) = try_reward(tasks(tmp_path, "flat"))
    assert text.startswith("its reward is 0.5 for each of 16 replies")


def test_a_reward_of_tasks_with_a_tool_is_not_called_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [{"tool": "look", "arguments": {}}, "go"]
    monkeypatch.setattr(JsonlTask, "gold_replies", lambda _: calls)
    assert try_reward(tasks(tmp_path, "flat")) == []


def test_a_slow_reward_is_not_waited_for(tmp_path: Path) -> None:
    (text,) = try_reward(tasks(tmp_path, "slow"), seconds=0.1)
    assert "rated 0 replies in 0.1 s" in text
    (thread,) = [it for it in threading.enumerate() if it.name == "reward trial"]
    thread.join()  # ends after the reply that it rates
