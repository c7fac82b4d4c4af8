"""Two evaluations of the same tasks: what pairing them says, and when it says nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradus.cli.main import main
from gradus.config import EvalConfig
from gradus.errors import ConfigError
from gradus.files import write_json
from gradus.report.paired import compare_pairs, pair_lines

Rewards = Mapping[str, Sequence[Sequence[float | None]]]


def an_evaluation(root: Path, rewards: Rewards, *, model: str = "tiny", **data: Any) -> Path:
    """Source → for each task the reward of each of its episodes."""
    config = {"model": {"name": model}, "env": [{"id": name} for name in rewards]}
    dumped = EvalConfig.model_validate(config).model_dump(mode="json")
    (root / "config").mkdir(parents=True)
    write_json(root / ".gradus-run", {"run_id": root.name, "kind": "eval", "format": 3})
    write_json(root / "config" / "launched.json", {"kind": "eval", "config": dumped})
    path = root / "episodes" / "step_0" / "eval.jsonl"
    path.parent.mkdir(parents=True)
    lines = []
    for source, tasks in rewards.items():
        for number, of_task in enumerate(tasks):
            for reward in of_task:
                # The key differs where the reward lies elsewhere; the row is the same.
                task = {"key": f"{root.name}-{number}", "index": number}
                gradus = {"source": source, "task": task, "reward": reward}
                row = {"prompt": f"{source} {number}", **data}
                lines.append({"task": {"data": {"row": row}}, "ok": True, "gradus": gradus})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def hard_and_easy(change: float, *, seed: int) -> list[list[float]]:
    """Tasks that differ a lot from each other, and a little from one model to another."""
    draw, own = random.Random(0), random.Random(seed)
    return [[draw.random() + change + own.gauss(0, 0.02)] for _ in range(40)]


def test_a_small_difference_is_seen_through_tasks_that_differ_much(tmp_path: Path) -> None:
    a = an_evaluation(tmp_path / "a", {"words": hard_and_easy(0.0, seed=1)})
    b = an_evaluation(tmp_path / "b", {"words": hard_and_easy(0.05, seed=2)}, model="tuned")
    pairs = compare_pairs(a, b)
    assert pairs.overall.difference.value == pytest.approx(0.05, abs=0.01)
    assert pairs.overall.difference.is_clear
    text = "\n".join(pair_lines(pairs))
    assert "B is better than A by 0.0" in text
    assert "model.name: 'tiny' -> 'tuned'" in text


def test_equal_models_differ_by_noise(tmp_path: Path) -> None:
    a = an_evaluation(tmp_path / "a", {"words": hard_and_easy(0.0, seed=1)})
    b = an_evaluation(tmp_path / "b", {"words": hard_and_easy(0.0, seed=3)})
    assert "noise: the interval holds 0" in "\n".join(pair_lines(compare_pairs(a, b)))


def test_tasks_are_counted_by_what_became_of_them_in_each_source_and_in_all(tmp_path: Path) -> None:
    first = {"words": [[0, 1], [0, 0], [1, 1], [None]], "sums": [[0.5], [0.5]]}
    second = {"words": [[1, 1], [0, 0], [0, 1], [1]], "sums": [[0.75], [1.0]]}
    pairs = compare_pairs(
        an_evaluation(tmp_path / "a", first), an_evaluation(tmp_path / "b", second)
    )
    words, sums, overall = pairs.sources
    assert (words.num_tasks, words.better, words.worse) == (3, 1, 1)
    assert (words.first, words.second) == (0.5, 0.5)
    assert (sums.better, sums.difference.value) == (2, 0.375)
    assert (overall.num_tasks, overall.difference.value) == (5, 0.1875)
    assert pairs.only == (0, 1)


def test_the_same_rewards_are_no_difference(tmp_path: Path) -> None:
    a, b = (an_evaluation(tmp_path / name, {"words": [[1.0], [0.5]]}) for name in "ab")
    assert "no difference: each task earned the same in both" in pair_lines(compare_pairs(a, b))


def test_a_few_tasks_that_changed_alike_prove_nothing(tmp_path: Path) -> None:
    a = an_evaluation(tmp_path / "a", {"words": [[0], [0]]})
    b = an_evaluation(tmp_path / "b", {"words": [[1], [1]]})
    text = "\n".join(pair_lines(compare_pairs(a, b)))
    assert "unknown: 2 tasks that changed alike say nothing about others" in text


def test_a_source_with_one_task_in_common_is_named(tmp_path: Path) -> None:
    first = {"words": [[0, 1], [0, 0], [1, 1]], "sums": [[0.5]]}
    second = {"words": [[1, 1], [0, 0], [0, 1]], "sums": [[0.75]]}
    pairs = compare_pairs(
        an_evaluation(tmp_path / "a", first), an_evaluation(tmp_path / "b", second)
    )
    assert "unknown: one task of 'sums' says nothing" in "\n".join(pair_lines(pairs))


def test_evaluations_of_other_rows_are_refused(tmp_path: Path) -> None:
    a = an_evaluation(tmp_path / "a", {"words": [[1.0]]})
    b = an_evaluation(tmp_path / "b", {"words": [[1.0]]}, version=2)
    with pytest.raises(ConfigError, match="no task in common"):
        compare_pairs(a, b)


def test_the_command_pairs_two_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    a = an_evaluation(tmp_path / "a", {"words": hard_and_easy(0.0, seed=1)})
    b = an_evaluation(tmp_path / "b", {"words": hard_and_easy(-0.2, seed=2)})
    assert main(["compare", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_clear"] is True
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "a", "b"]) == 0
    printed = capsys.readouterr().out
    assert "B is worse than A by 0.2" in printed
    assert max(map(len, printed.splitlines())) <= 80
