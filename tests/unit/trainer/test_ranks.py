"""Ranks, copies and context parallelism change neither loss nor gradient nor weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus.testing.tiny_model import build_tiny_model
from gradus.wire.codec import encode
from gradus.wire.micro_batch import RankBatch
from gradus.wire.packing import pack
from gradus.wire.policy import VersionSpan
from gradus.wire.sample import Sample

pytestmark = pytest.mark.torch

GRADIENT_TOLERANCE = 2e-5
"""Float32 against a float64 reference, relative to the norm of all gradients."""
WEIGHT_TOLERANCE = 1e-5
"""Float32 weights of the same training by other ranks, absolute; each step moves them by 1e-3."""
NUM_RANKS = 2
WORKER = Path(__file__).with_name("rank_worker.py")


@dataclass
class RankPool:
    """Two ranks that stay alive over all tests of this file."""

    model: Path
    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    num_commands: int = 0

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for rank in range(NUM_RANKS):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(NUM_RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER)],
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for process in self.processes:
            assert "ready" in self.answer_of(process)

    @staticmethod
    def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "a rank ended; its message is above"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(
        self,
        steps: Sequence[Sequence[Sample]],
        *,
        lr: float | None = None,
        max_tokens: int = 64,
        model: Path | None = None,
        loss: dict[str, Any] | None = None,
        **parallel: Any,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The answer of rank 0, and gradients, or with `lr` the weights after all steps."""
        self.num_commands += 1
        folder = self.folder / str(self.num_commands)
        folder.mkdir()
        num_ranks = NUM_RANKS // parallel.get("context_parallel_size", 1)
        for number, samples in enumerate(steps):
            ranks = pack(samples, max_tokens=max_tokens, num_ranks=num_ranks)
            for rank, micro_batches in enumerate(ranks):
                batch = RankBatch(number, 0, rank, VersionSpan(0, 0), micro_batches)
                (folder / f"step_{number}_rank_{rank}.msgpack").write_bytes(encode(batch))
        command = {
            "model": str(model or self.model),
            "folder": str(folder),
            "steps": len(steps),
            "lr": lr,
            "loss": loss or {},
            "parallel": parallel,
        }
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        answers = [self.answer_of(process) for process in self.processes]
        assert answers[0] == answers[1], "all ranks must know the same numbers"
        if "error" in answers[0]:
            return answers[0], {}
        with np.load(folder / "arrays.npz") as arrays:
            return answers[0], dict(arrays)

    def stop(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(timeout=30)
            process.stdout.close()


@pytest.fixture(scope="module")
def ranks(tiny_model: Path) -> Iterator[RankPool]:
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(tiny_model, Path(folder))
        try:
            pool.start()
            yield pool
        finally:
            pool.stop()


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
    ranks: RankPool,
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
)
def test_two_ranks_that_share_a_context_give_the_plain_loss_and_gradient(
    ranks: RankPool,
    paired_model: Path,
    paired_reference: Any,
    ragged_samples: Any,
    lengths: list[int],
    seed: int,
    max_tokens: int,
) -> None:
    samples = ragged_samples(lengths, seed=seed)
    answer, gradients = ranks.run(
        [samples], max_tokens=max_tokens, model=paired_model, context_parallel_size=2
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
    context_parallel_size=st.sampled_from([1, 2]),
)
def test_every_loss_is_the_plain_one_over_data_and_context_ranks(
    ranks: RankPool,
    paired_model: Path,
    paired_reference: Any,
    ragged_samples: Any,
    loss: dict[str, Any],
    lengths: list[int],
    seed: int,
    max_tokens: int,
    context_parallel_size: int,
) -> None:
    samples = ragged_samples(lengths, seed=seed)
    total, expected = paired_reference.loss(samples, loss["type"], **loss["options"])
    answer, gradients = ranks.run(
        [samples],
        max_tokens=max_tokens,
        model=paired_model,
        loss=loss,
        context_parallel_size=context_parallel_size,
    )
    assert answer["total"] == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert distance(gradients, expected) < GRADIENT_TOLERANCE


def training(ragged_samples: Any) -> list[list[Sample]]:
    return [ragged_samples([9, 17, 4, 12, 20, 3], seed=step) for step in range(3)]


@pytest.fixture(scope="module")
def plain_weights(
    ranks: RankPool, paired_model: Path, ragged_samples: Any
) -> dict[str, np.ndarray]:
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
    ranks: RankPool,
    plain_weights: dict[str, np.ndarray],
    paired_model: Path,
    ragged_samples: Any,
    parallel: dict[str, Any],
) -> None:
    steps = training(ragged_samples)
    _, weights = ranks.run(steps, lr=1e-3, model=paired_model, **parallel)
    worst = max(float(np.abs(weights[k] - plain_weights[k]).max()) for k in weights)
    assert worst < WEIGHT_TOLERANCE


def test_heads_that_cannot_be_shared_are_refused_on_every_rank(
    ranks: RankPool, ragged_samples: Any
) -> None:
    answer, _ = ranks.run([ragged_samples([5])], context_parallel_size=2)
    assert "3 attention heads cannot be shared by 2 processes" in answer["error"]


def test_copies_that_do_not_divide_the_ranks_are_refused(
    ranks: RankPool, ragged_samples: Any
) -> None:
    answer, _ = ranks.run([ragged_samples([5])], replicate_size=3)
    assert "3 does not divide the 2 processes" in answer["error"]
