"""A tiny model, worlds of one and two, and a slow, plain second opinion on every loss."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from builders import build_sample
from hypothesis import reject
from plain_losses import PlainToken, plain_loss
from transformers import AutoModelForCausalLM

from gradus.config import ModelConfig, RunProcessConfig, learning
from gradus.testing.tiny_model import build_tiny_model
from gradus.trainer.distributed import CPU, World, join_world
from gradus.trainer.losses import Dppo
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.step import GradientStep
from gradus.wire.codec import encode
from gradus.wire.micro_batch import MicroBatch, RankBatch
from gradus.wire.packing import build_dummy, pack
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

Gradients = dict[str, np.ndarray]

# A trainer's own entry takes a GPU that it sees; the bounds here are those of a CPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
LEAST_MARGIN = 1e-5
"""Nearer to a threshold, float32 may decide otherwise than float64."""
NUM_RANKS = 2
SUPPORT = Path(__file__).parents[2] / "support"
WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they bring on tensors of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, three query heads that share one key head, float32."""
    return build_tiny_model(
        tmp_path_factory.mktemp("model") / "tiny",
        hidden_size=96,
        num_layers=2,
        dtype=torch.float32,
    )


@pytest.fixture
def world() -> Iterator[World]:
    with join_world(CPU) as world:
        yield world


@pytest.fixture
def build_policy(tiny_model: Path, world: World) -> Callable[[torch.dtype], PolicyModel]:
    """Builds the sharded tiny policy, computing in the dtype given."""

    def build(compute_dtype: torch.dtype = torch.float32) -> PolicyModel:
        model = load_model(ModelConfig(name=str(tiny_model)), world.device)
        return shard_model(PolicyModel(model), world.mesh, compute_dtype)

    return build


@dataclass(frozen=True)
class Bench:
    """A policy, its gradient step, and ways to look at the gradients."""

    policy: PolicyModel
    step: GradientStep

    def take_gradients(self) -> Gradients:
        """The gradients by parameter name, taken out of the model."""
        found = {}
        for name, parameter in self.policy.model.named_parameters():
            assert parameter.grad is not None, name
            found[name] = parameter.grad.full_tensor().numpy().copy()
            parameter.grad = None
        return found

    @staticmethod
    def distance(first: Gradients, second: Gradients) -> float:
        """Largest difference of any gradient, relative to the norm of all of them."""
        assert first.keys() == second.keys()
        norm = sum(float((g.astype(np.float64) ** 2).sum()) for g in second.values()) ** 0.5
        return max(float(np.abs(first[k] - second[k]).max()) for k in first) / max(norm, 1e-12)


@pytest.fixture
def build_bench(
    build_policy: Callable[[torch.dtype], PolicyModel], world: World
) -> Callable[[torch.dtype], Bench]:
    """Builds a bench that computes in the dtype given."""

    def build(compute_dtype: torch.dtype = torch.float32) -> Bench:
        policy = build_policy(compute_dtype)
        return Bench(policy, GradientStep(policy, Dppo(learning.DppoConfig()), world))

    return build


@pytest.fixture
def bench(build_bench: Callable[[], Bench]) -> Bench:
    return build_bench()


@pytest.fixture(scope="session")
def ragged_samples() -> Callable[..., list[Sample]]:
    return _ragged_samples


def _ragged_samples(lengths: Sequence[int], *, seed: int = 0) -> list[Sample]:
    """Samples with all three components, mixed temperatures and logprobs near the model's."""
    random = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        sample = build_sample(
            length,
            prompt_length=min(2, length - 1),
            seed=seed * 1000 + number,
            id=f"s{number}",
            advantage=float(random.normal()),
            vocabulary=100,
        )
        sampled = sample.arrays.loss_mask
        sample.arrays.sampling_logprobs[sampled] = random.uniform(-5.2, -4.0, int(sampled.sum()))
        sample.arrays.temperatures[sampled] = random.uniform(0.5, 1.5, int(sampled.sum()))
        sample.arrays.reference_logprobs[sampled] = random.uniform(-5.0, -4.0, int(sampled.sum()))
        for name in ("rl", "ce", "ref_kl"):
            weights = random.choice([0.0, 0.5, 1.0], length).astype(np.float32)
            sample.arrays.loss_weights[name] = np.where(sampled, weights, 0.0).astype(np.float32)
        samples.append(sample)
    return samples


class PlainReference:
    """The total loss written down once more: float64, eager attention, sample by sample."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager"
        )

    def loss(
        self, samples: Sequence[Sample], rl_loss: str = "dppo", **options: Any
    ) -> tuple[float, Gradients]:
        """L and its gradients, with any registered loss of the rl component.

        Skips the example when float32 may take another decision at some threshold.
        """
        sums = {name: torch.zeros((), dtype=torch.float64) for name in ("rl", "ce", "ref_kl")}
        counts = dict.fromkeys(sums, 0)
        for sample in samples:
            logprobs, entropies = self._scores(sample)
            for name, weights in sample.arrays.loss_weights.items():
                members = [t for t in range(1, len(sample)) if weights[t] != 0]
                counts[name] += len(members)
                if name == "rl":
                    values = _rl_losses(rl_loss, options, sample, members, logprobs, entropies)
                else:
                    values = [_token_loss(name, logprobs[t - 1], sample, t) for t in members]
                for t, value in zip(members, values, strict=True):
                    sums[name] = sums[name] + float(weights[t]) * value
        total = torch.stack([sums[name] / max(1, counts[name]) for name in sums]).sum()
        self.model.zero_grad()
        if total.requires_grad:
            total.backward()
        gradients = {
            name: np.zeros(p.shape) if p.grad is None else p.grad.numpy().copy()
            for name, p in self.model.named_parameters()
        }
        return float(total.detach()), gradients

    def _scores(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob of every token but the first, and the entropy that it was chosen with."""
        token_ids = torch.tensor(sample.arrays.token_ids.astype(np.int64))[None]
        logits = self.model(input_ids=token_ids, use_cache=False).logits[0, :-1]
        temperatures = torch.tensor(sample.arrays.temperatures[1:].astype(np.float64))
        log_p = torch.log_softmax(logits / temperatures[:, None], dim=-1)
        logprobs = log_p.gather(1, token_ids[0, 1:, None]).squeeze(1)
        return logprobs, -(log_p.exp() * log_p).sum(-1)


def _rl_losses(
    rl_loss: str,
    options: dict[str, Any],
    sample: Sample,
    members: Sequence[int],
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
) -> list[torch.Tensor]:
    """The plain loss of each member; its derivatives are written down, not found by torch."""
    if not members:
        return []
    policy, entropy = logprobs.detach().tolist(), entropies.detach().tolist()
    tokens = [
        PlainToken(
            policy=policy[t - 1],
            sampling=float(sample.arrays.sampling_logprobs[t]),
            advantage=float(sample.arrays.advantages[t]),
            reference=float(sample.arrays.reference_logprobs[t]),
            entropy=entropy[t - 1],
        )
        for t in members
    ]
    plain = plain_loss(rl_loss, tokens, **options)
    if plain.margin <= LEAST_MARGIN:
        reject()
    return [
        plain.values[i]
        + plain.by_logprob[i] * (logprobs[t - 1] - logprobs[t - 1].detach())
        + plain.by_entropy[i] * (entropies[t - 1] - entropies[t - 1].detach())
        for i, t in enumerate(members)
    ]


def _token_loss(name: str, lp: torch.Tensor, sample: Sample, t: int) -> torch.Tensor:
    if name == "ce":
        return -lp
    ls, lr = float(sample.arrays.sampling_logprobs[t]), float(sample.arrays.reference_logprobs[t])
    ratio, delta = torch.exp(lp - ls), float(torch.exp(lp.detach())) - float(np.exp(ls))
    gain = (lr - lp.detach()) * ratio if delta >= -0.2 else 0.0
    return -gain + 1e-3 * (lp - ls) ** 2


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> PlainReference:
    return PlainReference(tiny_model)


@pytest.fixture(scope="session")
def build_reference() -> Callable[[Path], PlainReference]:
    """Builds the second opinion about another model."""
    return PlainReference


class RankForks:
    """A process that has imported the trainer and forks ranks; see fork_ranks.py."""

    def __init__(self) -> None:
        self.process = self.open()
        self.answer()

    def open(self) -> subprocess.Popen[str]:
        """In a session of its own: a signal to the group of a worker of pytest is not for it."""
        program = Path(__file__).with_name("fork_ranks.py")
        return subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that forks ranks ended; its message is above"
        return json.loads(line)

    def start(
        self, output: Path, *words: object, num_ranks: int = NUM_RANKS, waits: bool = False
    ) -> list[int]:
        """Start a program with arguments on every rank; `waits` for the ranks' exit codes."""
        argv = [str(word) for word in words]
        command = {"argv": argv, "num_ranks": num_ranks, "output": str(output), "waits": waits}
        if (code := self.process.poll()) is not None:
            sys.stderr.write(f"what forks ranks had ended with {code}; it is started again\n")
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            self.process = self.open()
            self.answer()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        codes: list[int] = self.answer()
        return codes

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[RankForks]:
    """Started by the first test that asks."""
    forks = RankForks()
    try:
        yield forks
    finally:
        forks.stop()


@pytest.fixture
def run_ranks(forks: RankForks, tmp_path: Path) -> Callable[..., str]:
    """Runs a program on every rank of a world, to its end; what all of them wrote."""
    output = tmp_path / "ranks.log"

    def run(program: Path, *words: object, num_ranks: int = NUM_RANKS) -> str:
        codes = forks.start(output, program, *words, num_ranks=num_ranks, waits=True)
        written = output.read_text()
        assert codes == [0] * num_ranks, written[-2000:]
        return written

    return run


@dataclass
class RankPool:
    """Two trainer ranks that stay alive over many tests and answer commands; see rank_worker.py."""

    forks: RankForks
    model: Path
    folder: Path
    pipes: list[tuple[TextIO, TextIO]] = field(default_factory=list)
    num_commands: int = 0

    def start(self) -> None:
        names = [
            self.folder / f"{way}_{rank}" for rank in range(NUM_RANKS) for way in ("in", "out")
        ]
        for name in names:
            os.mkfifo(name)
        self.forks.start(self.folder / "log", WORKER, self.folder)
        for rank in range(NUM_RANKS):
            commands = (self.folder / f"in_{rank}").open("w")
            self.pipes.append((commands, (self.folder / f"out_{rank}").open()))
        for _, answers in self.pipes:
            assert "ready" in self.answer_of(answers)

    def answer_of(self, answers: TextIO) -> dict[str, Any]:
        line = answers.readline()
        assert line, (self.folder / "log").read_text()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(
        self,
        steps: Sequence[Sequence[Sample]],
        *,
        lr: float | None = None,
        rule: str = "adamw",
        max_tokens: int = 64,
        is_packed: bool = True,
        model: Path | None = None,
        loss: dict[str, Any] | None = None,
        on_gpu_path: bool = False,
        moved: float = 1.0,
        router_replay: str = "off",
        train_vision: bool = False,
        **parallel: Any,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The answer of rank 0, and gradients, or with `lr` the weights after all steps."""
        self.num_commands += 1
        self.last = folder = self.folder / str(self.num_commands)
        folder.mkdir()
        num_ranks = NUM_RANKS // parallel.get("context_parallel_size", 1)
        for number, samples in enumerate(steps):
            ranks = _share(samples, num_ranks, max_tokens if is_packed else None)
            for rank, micro_batches in enumerate(ranks):
                batch = RankBatch(number, 0, rank, VersionSpan(0, 0), micro_batches)
                (folder / f"step_{number}_rank_{rank}.msgpack").write_bytes(encode(batch))
        command = {
            "model": str(model or self.model),
            "folder": str(folder),
            "steps": len(steps),
            "lr": lr,
            "rule": rule,
            "loss": loss or {},
            "parallel": parallel,
            "on_gpu_path": on_gpu_path,
            "moved": moved,
            "router_replay": router_replay,
            "train_vision": train_vision,
        }
        for commands, _ in self.pipes:
            commands.write(json.dumps(command) + "\n")
            commands.flush()
        answers = [self.answer_of(answers) for _, answers in self.pipes]
        assert answers[0] == answers[1], "all ranks must know the same numbers"
        if "error" in answers[0]:
            return answers[0], {}
        with np.load(folder / "arrays.npz") as arrays:
            return answers[0], dict(arrays)

    def stop(self) -> None:
        """Ranks end with their commands."""
        for commands, answers in self.pipes:
            commands.close()
            assert answers.read() == ""
            answers.close()


def _share(
    samples: Sequence[Sample], num_ranks: int, max_tokens: int | None
) -> list[list[MicroBatch]]:
    """The micro batches of each rank; without `max_tokens` each sample is one by itself."""
    if max_tokens is not None:
        return pack(samples, max_tokens=max_tokens, num_ranks=num_ranks)
    micro_batches = [MicroBatch.join([sample]) for sample in samples]
    while len(micro_batches) % num_ranks:
        micro_batches.append(build_dummy(samples[0]))
    return [micro_batches[rank::num_ranks] for rank in range(num_ranks)]


@pytest.fixture(scope="session")
def ranks(
    forks: RankForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankPool]:
    """Started by the first test that asks."""
    pool = RankPool(forks, tiny_model, tmp_path_factory.mktemp("ranks"))
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


TRAINER_PROGRAM = """
import json
import sys
from pathlib import Path

from gradus.config.processes import RunProcessConfig
from gradus.trainer.entry.rl import run

config = RunProcessConfig.model_validate_json(Path(sys.argv[1]).read_text())
run(config.model_copy(update={"resume_step": json.loads(sys.argv[2])}))
"""


@pytest.fixture
def run_two_ranks(
    tmp_path: Path, run_ranks: Callable[..., str]
) -> Callable[[RunProcessConfig], None]:
    """Runs a whole trainer on two ranks, to its end."""
    script, file = tmp_path / "program.py", tmp_path / "trainer.json"
    script.write_text(TRAINER_PROGRAM)

    def run(config: RunProcessConfig) -> None:
        file.write_text(config.model_dump_json())
        # No config file says where to continue: each start is told.
        run_ranks(script, file, json.dumps(config.resume_step))

    return run
