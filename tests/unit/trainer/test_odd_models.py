"""Honest models of every habit are looked at, play two turns, train two steps and are served."""

from __future__ import annotations

from pathlib import Path

import pytest
from odd_models import Odd, oddities
from odd_play import TOKEN, patch_as_in_workers, play, samples_of, train_steps

from gradus.cli.check.child import probe_model
from gradus.inference.weights_check import WeightsCheck
from gradus.orchestrator.play.renderer import load_policy_tokenizer
from gradus.run.paths import RunDirectory
from gradus.testing.engine import ScriptedEngine
from gradus.wire.events import PolicyPublished

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("odd", oddities(), ids=lambda odd: odd.name)
async def test_an_honest_model_of_any_habit_plays_and_trains(
    odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_as_in_workers(monkeypatch, tmp_path, TOKEN)
    folder, root = odd.write(tmp_path / "model"), tmp_path / "run"
    probe_model({"model": {"name": str(folder)}})
    async with ScriptedEngine(data_token=TOKEN, max_length_tokens=odd.max_length_tokens) as engine:
        samples = samples_of(await play(odd, folder, engine.base_url), odd)
    assert samples
    events = await train_steps(odd, root, folder, samples)
    check = WeightsCheck.of(folder)
    for event in events:
        if isinstance(event, PolicyPublished):
            check(Path(event.directory), event.digest)
    assert load_policy_tokenizer(str(RunDirectory(root).model)).chat_template
