"""One version measured by itself: the numbers so far, and a disk that takes no record."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import ScriptedEnvironment

from gradus.files import read_json
from gradus.orchestrator.evaluation import evaluator as evaluator_module
from gradus.orchestrator.evaluation.episodes import EvaluationSource
from gradus.orchestrator.evaluation.evaluator import Evaluator
from gradus.orchestrator.evaluation.file import EvaluationFile
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode


def build_evaluator(
    root: Path, environment: ScriptedEnvironment, *, progress: Path | None
) -> Evaluator:
    source = EvaluationSource("words", 2, 2, environment)
    return Evaluator([source], RunDirectory(root), max_in_flight=1, progress=progress)


async def test_the_numbers_so_far_are_on_disk_after_every_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator_module, "PROGRESS_SECONDS", 0.0)
    progress = tmp_path / "progress.json"
    seen: list[int] = []

    async def look(_: int) -> None:
        seen.append(read_json(progress)["overall"]["num_episodes"])

    # Two tasks that are solved differently, since those alike have no interval.
    unlike = ScriptedEnvironment(play=lambda n: build_episode(reward=float(n == 0)), wait=look)
    evaluator = build_evaluator(tmp_path, unlike, progress=progress)
    measured = await evaluator.measure(0)
    assert seen == [0, 1, 2, 3]
    overall = measured.table()["overall"]
    assert overall["planned_episodes"] == 4
    assert overall["low"] <= overall["avg"] <= overall["high"]
    assert measured.metrics()["eval/words/episodes/sum"] == 4.0


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_beside_a_training_a_full_disk_costs_only_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EvaluationFile, "append", refuse)
    evaluator = build_evaluator(tmp_path, ScriptedEnvironment(), progress=None)
    measured = await evaluator.measure(0)
    assert measured.metrics()["eval/words/episodes/sum"] == 4.0
    assert "episode words/0/0 of the evaluation is not recorded" in caplog.text


async def test_a_full_disk_ends_an_evaluation_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EvaluationFile, "append", refuse)
    progress = tmp_path / "progress.json"
    evaluator = build_evaluator(tmp_path, ScriptedEnvironment(), progress=progress)
    with pytest.RaisesGroup(OSError):
        await evaluator.measure(0)
