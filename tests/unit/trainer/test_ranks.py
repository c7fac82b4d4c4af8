"""Ranks, copies and context parallelism change neither loss nor gradient nor weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from tiny_experts import build_tiny_moe_model

from gradus.monitor.token_record import TokenRecord, read_records
from gradus.run.paths import RunDirectory
from gradus.testing.tiny_model import build_tiny_model
from gradus.wire.sample import Sample
from gradus.wire.tokens import NOT_CHOSEN

pytestmark = pytest.mark.torch

GRADIENT_TOLERANCE = 2e-5
"""Float32 against a float64 reference, relative to the norm of all gradients."""
WEIGHT_TOLERANCE = 1e-5
"""Float32 weights of the same training by other ranks, absolute; each step moves them by 1e-3."""


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest difference, relative to the norm of all that is expected."""
    assert found.keys() == expected.keys()
    norm = sum(float((e.astype(np.float64) ** 2).sum()) for e in expected.values()) ** 0.5
    return max(float(np.abs(found[k] - expected[k]).max()) for k in found) / max(norm, 1e-12)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=7),
    seed=st.integers(0, 99),
    max_tokens=st.integers(20, 70),
    parallel=st.sampled_from(
        [
            {},
            {"gradient_sync": "each"},
            {"replicate_size": 2},
            {"replicate_size": 2, "gradient_sync": "each", "reshard_after_forward": False},
        ]
    ),
)
def test_any_split_over_two_ranks_gives_the_plain_loss_and_gradient(
    ranks: Any,
    ragged_samples: Any,
    reference: Any,
    lengths: list[int],
    seed: int,
    max_tokens: int,
    parallel: dict[str, Any],
) -> None:
    samples = ragged_samples(lengths, seed=seed)
    answer, gradients = ranks.run([samples], max_tokens=max_tokens, **parallel)
    total, expected = reference.loss(samples)
    assert answer["total"] == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert distance(gradients, expected) < GRADIENT_TOLERANCE


@pytest.fixture(scope="module")
def paired_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, four query heads that share one key head: each of two ranks needs a copy."""
    folder = tmp_path_factory.mktemp("model") / "paired"
    return build_tiny_model(folder, hidden_size=128, num_layers=2, dtype=torch.float32)


@pytest.fixture(scope="module")
def paired_reference(build_reference: Any, paired_model: Path) -> Any:
    return build_reference(paired_model)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    seed=st.integers(0, 99),
    max_tokens=st.integers(20, 70),
    way=st.sampled_from(
        [
            {},
            {"context_parallel_style": "ring"},
            {"context_parallel_style": "ring", "activation_checkpointing": "selective"},
        ]
    ),
)
def test_two_ranks_that_share_a_context_give_the_plain_loss_and_gradient(
    ranks: Any,
    paired_model: Path,
    paired_reference: Any,
    ragged_samples: Any,
    lengths: list[int],
    seed: int,
    max_tokens: int,
    way: dict[str, str],
) -> None:
    samples = ragged_samples(lengths, seed=seed)
    answer, gradients = ranks.run(
        [samples], max_tokens=max_tokens, model=paired_model, context_parallel_size=2, **way
    )
    total, expected = paired_reference.loss(samples)
    assert answer["total"] == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert distance(gradients, expected) < GRADIENT_TOLERANCE


rl_losses = st.sampled_from(
    [
        {"type": "dppo", "options": {"threshold": 0.004}},
        {"type": "ipo", "options": {"threshold": 0.004}},
        {"type": "ppo_clip", "options": {"entropy_coefficient": 0.1}},
        {"type": "dapo", "options": {"reference_kl_coefficient": 0.1}},
        {"type": "cispo", "options": {"ratio_cap": 1.1}},
        {"type": "gspo", "options": {"clip_low": 0.05, "clip_high": 0.05}},
        {
            "type": "dppo",
            "options": {
                "importance_sampling": "truncated",
                "importance_level": "sequence",
                "importance_cap": 1.5,
            },
        },
        {
            "type": "ppo_clip",
            "options": {
                "importance_sampling": "masked",
                "importance_level": "sequence_mean",
                "importance_cap": 1.2,
            },
        },
    ]
)


@settings(
    max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    loss=rl_losses,
    lengths=st.lists(st.integers(1, 16), min_size=2, max_size=6),
    seed=st.integers(0, 99),
    max_tokens=st.integers(16, 60),
    is_packed=st.booleans(),
    context_parallel_size=st.sampled_from([1, 2]),
)
def test_every_loss_is_the_plain_one_over_data_and_context_ranks(
    ranks: Any,
    paired_model: Path,
    paired_reference: Any,
    ragged_samples: Any,
    loss: dict[str, Any],
    lengths: list[int],
    seed: int,
    max_tokens: int,
    is_packed: bool,
    context_parallel_size: int,
) -> None:
    samples = ragged_samples(lengths, seed=seed)
    total, expected = paired_reference.loss(samples, loss["type"], **loss["options"])
    answer, gradients = ranks.run(
        [samples],
        max_tokens=max_tokens,
        is_packed=is_packed,
        model=paired_model,
        loss=loss,
        context_parallel_size=context_parallel_size,
    )
    assert answer["total"] == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert distance(gradients, expected) < GRADIENT_TOLERANCE


def training(ragged_samples: Any) -> list[list[Sample]]:
    return [ragged_samples([9, 17, 4, 12, 20, 3], seed=step) for step in range(3)]


@pytest.fixture(scope="module")
def plain_weights(ranks: Any, paired_model: Path, ragged_samples: Any) -> dict[str, np.ndarray]:
    return ranks.run(training(ragged_samples), lr=1e-3, model=paired_model)[1]


@pytest.mark.parametrize(
    "parallel",
    [
        {"replicate_size": 2},
        {"gradient_sync": "each"},
        {"context_parallel_size": 2},
        {"context_parallel_size": 2, "activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "reshard_after_forward": False},
        {"context_parallel_size": 2, "activation_checkpointing": "selective"},
    ],
)
def test_training_moves_the_weights_to_the_same_place(
    ranks: Any,
    plain_weights: dict[str, np.ndarray],
    paired_model: Path,
    ragged_samples: Any,
    parallel: dict[str, Any],
) -> None:
    steps = training(ragged_samples)
    _, weights = ranks.run(steps, lr=1e-3, model=paired_model, **parallel)
    worst = max(float(np.abs(weights[k] - plain_weights[k]).max()) for k in weights)
    assert worst < WEIGHT_TOLERANCE


def test_a_ring_moves_the_weights_to_the_same_place_by_gradient_descent(
    ranks: Any, paired_model: Path, ragged_samples: Any
) -> None:
    """By AdamW three numbers are up to 2.8e-5 apart: those with a gradient of 4e-10 to 2e-8 of its
    norm, where a ring rounds to another, of which AdamW makes a whole step all the same."""
    steps, options = training(ragged_samples), {"lr": 0.1, "rule": "sgd", "model": paired_model}
    ring = {"context_parallel_size": 2, "context_parallel_style": "ring"}
    _, plain = ranks.run(steps, **options)
    _, first = ranks.run(steps[:1], **{**options, "lr": 1e-12})
    _, found = ranks.run(steps, **options, **ring, activation_checkpointing="selective")
    assert max(float(np.abs(found[k] - plain[k]).max()) for k in plain) < WEIGHT_TOLERANCE
    assert max(float(np.abs(first[k] - plain[k]).max()) for k in plain) > 1e-3


@pytest.mark.parametrize("parallel", [{}, {"context_parallel_size": 2}, {"replicate_size": 2}])
def test_training_on_two_ranks_repeats_bit_by_bit(
    ranks: Any, paired_model: Path, ragged_samples: Any, parallel: dict[str, Any]
) -> None:
    steps = training(ragged_samples)
    first, second = (ranks.run(steps, lr=1e-3, model=paired_model, **parallel) for _ in range(2))
    assert first[0] == second[0]
    assert all(np.array_equal(first[1][name], second[1][name]) for name in first[1])


def test_heads_that_cannot_be_shared_are_refused_on_every_rank(
    ranks: Any, ragged_samples: Any
) -> None:
    answer, _ = ranks.run([ragged_samples([5])], context_parallel_size=2)
    assert "3 attention heads cannot be shared by 2 processes" in answer["error"]


def test_copies_that_do_not_divide_the_ranks_are_refused(ranks: Any, ragged_samples: Any) -> None:
    answer, _ = ranks.run([ragged_samples([5])], replicate_size=3)
    assert "3 does not divide the 2 processes" in answer["error"]


@pytest.mark.parametrize("aggregation", ["sequence_mean", "trace_mean"])
@pytest.mark.parametrize("parallel", [{}, {"context_parallel_size": 2}])
def test_sequence_mean_is_the_same_over_data_and_context_ranks(
    ranks: Any,
    paired_model: Path,
    ragged_samples: Any,
    parallel: dict[str, int],
    aggregation: str,
) -> None:
    """Two data ranks in short rows against all samples in one row, three of them of one trace."""
    samples = [
        structs.replace(sample, id=f"e{max(0, number - 2)}/0/{number}")
        for number, sample in enumerate(ragged_samples([14, 9, 22, 5, 17], seed=3))
    ]
    loss = {"aggregation": aggregation}
    options = {"model": paired_model, "loss": loss}
    plain, expected = ranks.run([samples], max_tokens=23, **options)
    answer, gradients = ranks.run([samples], max_tokens=70, **options, **parallel)
    assert answer["total"] == pytest.approx(plain["total"], rel=1e-5)
    assert distance(gradients, expected) < GRADIENT_TOLERANCE
    by_token, _ = ranks.run([samples], model=paired_model)
    assert by_token["total"] != pytest.approx(plain["total"], rel=1e-3)


@pytest.mark.parametrize(
    "parallel", [{}, {"gradient_sync": "each"}, {"replicate_size": 2}, {"context_parallel_size": 2}]
)
def test_two_ranks_on_the_path_of_gpus_give_the_same_gradient(
    ranks: Any, paired_model: Path, ragged_samples: Any, parallel: dict[str, Any]
) -> None:
    """Attention over samples of any length, blocks and unfused layers as on CUDA."""
    samples = ragged_samples([12, 5, 9, 17, 3, 20])
    choice = {"model": paired_model, "max_tokens": 24, "compile": False, **parallel}
    answer, gradients = ranks.run([samples], **choice, on_gpu_path=True)
    expected_answer, expected = ranks.run([samples], **choice)
    assert answer["total"] == pytest.approx(expected_answer["total"], rel=1e-5, abs=1e-6)
    assert distance(gradients, expected) < GRADIENT_TOLERANCE


def records_of(ranks: Any, samples: list[Sample], **options: Any) -> dict[str, TokenRecord]:
    """What all ranks kept of the tokens of one step."""
    ranks.run([samples], **options)
    run_dir = RunDirectory(ranks.last)
    found = (it for s in samples for it in read_records(run_dir, 0, s.id.partition("/")[0]))
    return {it.sample_id: it for it in found}


@pytest.mark.parametrize("parallel", [{"context_parallel_size": 2}, {"replicate_size": 2}])
def test_the_numbers_of_each_token_are_kept_once_whatever_the_ranks_share(
    ranks: Any, paired_model: Path, ragged_samples: Any, parallel: dict[str, int]
) -> None:
    samples = [
        structs.replace(sample, id=f"g{number}.0/0/0")
        for number, sample in enumerate(ragged_samples([14, 9, 22, 5, 17], seed=3))
    ]
    plain = records_of(ranks, samples, model=paired_model, max_tokens=23)
    found = records_of(ranks, samples, model=paired_model, max_tokens=70, **parallel)
    files = {path.name for path in (ranks.last / "tokens/step_0").iterdir()}
    assert files == (
        {"rank_0.bin"} if "context_parallel_size" in parallel else {"rank_0.bin", "rank_1.bin"}
    )
    assert plain.keys() == found.keys() == {sample.id for sample in samples}
    for name, expected in plain.items():
        for field in ("policy_logprobs", "entropies", "pushes"):
            numbers = getattr(found[name], field)
            assert numbers == pytest.approx(getattr(expected, field), abs=1e-4), (name, field)


def test_ranks_that_share_a_context_take_the_engines_experts_of_their_own_tokens(
    ranks: Any, ragged_samples: Any, tmp_path: Path
) -> None:
    model = build_tiny_moe_model(tmp_path / "moe", dtype=torch.float32)
    random = np.random.default_rng(5)

    def told(sample: Sample) -> Sample:
        """Two of four experts for each token and layer, for some tokens none."""
        chosen = random.permuted(np.tile(np.arange(4), (len(sample), 2, 1)), axis=-1)[..., :2]
        chosen[random.random(len(sample)) < 0.2] = NOT_CHOSEN
        return sample.with_arrays(experts=chosen.astype(np.int16))

    # 38 tokens in one row and 17, which two ranks do not divide, in the other.
    samples = [told(sample) for sample in ragged_samples([9, 20, 17, 9], seed=3)]
    run = partial(ranks.run, [samples], max_tokens=40, model=model)
    alone, expected = run(router_replay="engine")
    for style in ("heads", "ring"):
        found, gradients = run(
            router_replay="engine", context_parallel_size=2, context_parallel_style=style
        )
        assert found["total"] == pytest.approx(alone["total"], rel=1e-4, abs=1e-5)
        assert distance(gradients, expected) < GRADIENT_TOLERANCE
    _, routed = run(context_parallel_size=2)
    assert distance(routed, expected) > 100 * GRADIENT_TOLERANCE
