"""Models of odd habits, sampled by vLLM and trained on what it sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from odd_models import oddities
from odd_play import patch_as_in_workers, play, samples_of, train_steps
from running import RunningInference

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.wire.events import StepFinished

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SERVED = (
    "an unknown token that ends texts",
    "a first token of all texts",
    "several ends",
    "tied ends",
    "half precision",
)


@pytest.mark.parametrize("name", SERVED)
async def test_a_model_of_odd_habits_gives_the_logprobs_of_the_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = next(odd for odd in oddities() if odd.name == name)
    # vLLM's CPU build has no attention for heads of 16.
    odd = replace(found, config={**found.config, "head_dim": 32})
    folder, root = odd.write(tmp_path / "model"), tmp_path / "run"
    config = InferenceProcessConfig(
        run_dir=str(tmp_path / "served"),
        term=0,
        model=ModelConfig(name=str(folder), max_length_tokens=odd.max_length_tokens),
        seed=0,
        inference=InferenceConfig(dtype="float32", kv_cache_gib=0.1),
    )
    (tmp_path / "served").mkdir()
    with RunningInference(config) as server:
        patch_as_in_workers(monkeypatch, tmp_path, server.data_token)
        samples = samples_of(await play(odd, folder, server.base_url), odd)
    events = await train_steps(odd, root, folder, samples)
    first = next(event for event in events if isinstance(event, StepFinished))
    ratios = [first.metrics[f"loss/ratio/{name}"] for name in ("p5", "max")]
    assert ratios == pytest.approx([1.0, 1.0], abs=1e-5)
