"""What is kept of each trained token is what the step computed, whichever way it was packed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import build_sample
from configs import build_loss_config
from msgspec import structs

from gradus.config import learning
from gradus.monitor.token_record import TokenRecord, read_records, record_file
from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import World
from gradus.trainer.entry import token_recorder
from gradus.trainer.entry.token_recorder import SourceNumbers, TokenRecorder
from gradus.trainer.losses import Dppo, build_loss
from gradus.trainer.step import GradientStep
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.packing import build_dummy, pack
from gradus.wire.sample import Sample

pytestmark = pytest.mark.torch


def samples_of(num_groups: int = 3, *, length: int = 9) -> list[Sample]:
    """Two episodes of each group, with the advantages 2 and -1."""
    return [
        build_sample(
            length + group,
            seed=2 * group + number,
            advantage=[2.0, -1.0][number],
            id=f"g{group}.{number}/0/0",
        )
        for group in range(num_groups)
        for number in range(2)
    ]


def learn(
    bench: Any,
    world: World,
    root: Path,
    rows: Sequence[MicroBatch],
    share: float = 1.0,
    loss: Any = None,
) -> dict[str, TokenRecord]:
    """What is kept of one step, by the id of the sample."""
    recorder = TokenRecorder(RunDirectory(root), share=share, term=1, world=world)
    step = GradientStep(bench.policy, loss or Dppo(learning.DppoConfig()), world)
    step.observed_by(recorder.observe).run(rows)
    recorder.write(7)
    recorder.close()
    return kept(root)


def kept(root: Path) -> dict[str, TokenRecord]:
    episodes = [f"g{group}.{number}" for group in range(9) for number in range(2)]
    found = (it for episode in episodes for it in read_records(RunDirectory(root), 7, episode))
    return {it.sample_id: it for it in found}


def test_what_the_reference_said_is_kept_where_it_scored(
    bench: Any, world: World, tmp_path: Path
) -> None:
    scored, other = samples_of(1)
    said = np.full(len(scored.arrays.token_ids), np.nan, np.float32)
    said[3:] = -0.25
    rows = [scored.with_arrays(reference_logprobs=said), other]
    found = learn(bench, world, tmp_path, pack(rows, max_tokens=999, num_ranks=1)[0])
    references = found[scored.id].reference_logprobs
    assert references is not None
    expected = said[found[scored.id].is_trained]
    assert np.array_equal(references, expected, equal_nan=True)
    assert np.isnan(references).any()
    assert found[other.id].reference_logprobs is None


def as_the_trainer_says(samples: Sequence[Sample], said: dict[str, TokenRecord]) -> list[Sample]:
    """The samples with the trainer's own logprobs in the place of the engine's."""
    changed = []
    for sample in samples:
        logprobs = sample.arrays.sampling_logprobs.copy()
        logprobs[said[sample.id].is_trained] = said[sample.id].policy_logprobs
        changed.append(sample.with_arrays(sampling_logprobs=logprobs))
    return changed


def test_nothing_that_is_learned_changes(bench: Any, world: World, tmp_path: Path) -> None:
    rows = pack(samples_of(), max_tokens=40, num_ranks=1)[0]
    plain = GradientStep(bench.policy, Dppo(learning.DppoConfig()), world).run(rows)
    expected = bench.take_gradients()
    learn(bench, world, tmp_path, rows)
    found = bench.take_gradients()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    again = GradientStep(bench.policy, Dppo(learning.DppoConfig()), world)
    observed = again.observed_by(lambda *_: None).run(rows)
    assert observed == plain


def test_every_sample_is_kept_with_its_own_tokens_however_it_is_packed(
    bench: Any, world: World, tmp_path: Path
) -> None:
    samples = samples_of()
    versions = [(-1, 2), (4, 3), (5, len(samples[0]) - 5)]
    samples[0] = structs.replace(samples[0], token_versions=versions)
    (one_row,) = pack(samples, max_tokens=999, num_ranks=1)
    rows = pack(samples, max_tokens=21, num_ranks=1)[0]
    assert len(rows) > 2
    alone = learn(bench, world, tmp_path / "one", one_row)
    apart = learn(bench, world, tmp_path / "many", [*rows, build_dummy(samples[0])])
    assert alone.keys() == apart.keys() == {sample.id for sample in samples}
    for sample in samples:
        found, other = alone[sample.id], apart[sample.id]
        assert found.token_ids.tolist() == sample.arrays.token_ids.tolist()
        assert found.is_trained.tolist() == sample.arrays.loss_mask.tolist()
        chosen = found.is_trained
        assert found.sampling_logprobs.tolist() == sample.arrays.sampling_logprobs[chosen].tolist()
        assert found.advantages.tolist() == sample.arrays.advantages[chosen].tolist()
        assert found.versions == sample.token_versions
        assert found.reference_logprobs is None
        for name in ("policy_logprobs", "entropies", "pushes"):
            assert getattr(found, name) == pytest.approx(getattr(other, name), abs=1e-4), name


def test_the_push_is_advantage_times_weight_and_zero_where_the_loss_drops_the_token(
    bench: Any, world: World, tmp_path: Path
) -> None:
    samples = samples_of()
    rows = pack(samples, max_tokens=40, num_ranks=1)[0]
    samples = as_the_trainer_says(samples, learn(bench, world, tmp_path / "first", rows))
    # Of the first sample, the engine says that two tokens were far less likely.
    first = samples[0].arrays
    first.sampling_logprobs[[3, 4]] -= 2.0
    first.loss_weights["rl"][5] = 0.5
    plain = {"kl_coefficient": 0.0, "importance_sampling": "off"}
    loss = build_loss(build_loss_config("ppo_clip", **plain))
    rows = pack(samples, max_tokens=40, num_ranks=1)[0]
    found = learn(bench, world, tmp_path / "second", rows, loss=loss)
    expected = [0.0 if n in (3, 4) else 1.0 if n == 5 else 2.0 for n in range(2, len(samples[0]))]
    assert found[samples[0].id].pushes == pytest.approx(expected, abs=1e-3)
    assert found[samples[1].id].pushes == pytest.approx(found[samples[1].id].advantages, abs=1e-3)


def test_a_wrong_temperature_of_the_trainer_stands_in_the_difference_to_the_engine(
    bench: Any, world: World, tmp_path: Path
) -> None:
    samples = samples_of()
    rows = pack(samples, max_tokens=40, num_ranks=1)[0]
    samples = as_the_trainer_says(samples, learn(bench, world, tmp_path / "engine", rows))

    def difference(temperature: float) -> float:
        """Largest of all tokens, trainer - engine."""
        heated = [
            it.with_arrays(temperatures=np.full(len(it), temperature, np.float32)) for it in samples
        ]
        rows = pack(heated, max_tokens=40, num_ranks=1)[0]
        found = learn(bench, world, tmp_path / f"{temperature}", rows).values()
        return max(float(abs(it.policy_logprobs - it.sampling_logprobs).max()) for it in found)

    assert difference(1.0) < 1e-4
    assert difference(0.5) > 0.05


def test_a_share_keeps_whole_groups_and_the_same_ones_each_time(
    bench: Any, world: World, tmp_path: Path
) -> None:
    rows = pack(samples_of(8), max_tokens=60, num_ranks=1)[0]
    found = [set(learn(bench, world, tmp_path / str(n), rows, share=0.5)) for n in range(2)]
    assert found[0] == found[1]
    groups = {sample_id.partition(".")[0] for sample_id in found[0]}
    assert 0 < len(groups) < 8
    assert found[0] == {f"{group}.{number}/0/0" for group in groups for number in range(2)}
    assert learn(bench, world, tmp_path / "none", rows, share=0.0) == {}
    assert not RunDirectory(tmp_path / "none").tokens.exists()


def test_a_step_takes_no_more_than_its_room(
    bench: Any, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pack(samples_of(6, length=40), max_tokens=200, num_ranks=1)[0]
    whole = learn(bench, world, tmp_path / "whole", rows)
    size = record_file(RunDirectory(tmp_path / "whole"), 7, 0).stat().st_size
    monkeypatch.setattr(token_recorder, "MAX_BYTES", size // 2)
    part = learn(bench, world, tmp_path / "part", rows)
    assert 0 < len(part) < len(whole) == 12
    assert record_file(RunDirectory(tmp_path / "part"), 7, 0).stat().st_size <= size // 2


def test_a_step_that_is_trained_again_has_one_record(
    bench: Any, world: World, tmp_path: Path
) -> None:
    """With fewer ranks than before, and with nothing to keep."""
    run_dir, samples = RunDirectory(tmp_path), samples_of()
    learn(bench, world, tmp_path, pack(samples, max_tokens=40, num_ranks=1)[0])
    record_file(run_dir, 7, 0).rename(record_file(run_dir, 7, 3))
    again = learn(bench, world, tmp_path, pack(samples[:2], max_tokens=40, num_ranks=1)[0])
    assert list(again) == ["g0.0/0/0", "g0.1/0/0"]
    assert learn(bench, world, tmp_path, [build_dummy(samples[0])]) == {}


def test_a_full_disk_loses_the_record_and_nothing_else(
    bench: Any, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pack(samples_of(), max_tokens=40, num_ranks=1)[0]
    learn(bench, world, tmp_path, rows)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_recorder, "write_atomically", full)
    assert learn(bench, world, tmp_path, rows) == {}


def test_entropy_and_mismatch_of_each_source_are_those_of_its_tokens(
    bench: Any, world: World, tmp_path: Path
) -> None:
    samples = samples_of()
    mixed = [
        structs.replace(it, environment=["words", "sums"][number % 2])
        for number, it in enumerate(samples)
    ]
    numbers, alone = SourceNumbers(["words", "sums", "idle"], world), SourceNumbers(["a"], world)
    for rows in (pack(mixed, max_tokens=40, num_ranks=1)[0], [build_dummy(mixed[0])]):
        step = GradientStep(bench.policy, Dppo(learning.DppoConfig()), world)
        for observer in (numbers.observe, alone.observe):
            step.observed_by(observer).run(rows)
    said = learn(bench, world, tmp_path, pack(mixed, max_tokens=40, num_ranks=1)[0])
    expected = {}
    for source in ("words", "sums"):
        records = [said[it.id] for it in mixed if it.environment == source]
        drift = np.concatenate([it.policy_logprobs - it.sampling_logprobs for it in records])
        entropies = np.concatenate([it.entropies for it in records])
        expected[f"loss/{source}/entropy/mean"] = entropies.mean()
        expected[f"loss/{source}/mismatch_kl/mean"] = (np.exp(drift) - drift - 1).mean()
    assert numbers.take() == pytest.approx(expected, rel=1e-4)
    assert (numbers.take(), alone.take()) == ({}, {})
