"""One step of the trainer by itself, against a plain forward, and one rank alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

from gradus.cli.check.child import Request
from gradus.cli.check.engine import PlainModel
from gradus.cli.check.findings import CheckVerdict, Finding
from gradus.config import BenchConfig, TrainerConfig
from gradus.errors import ConfigError, ProtocolError
from gradus.run.model_files import model_folder

SLOW_START = 180.0
_HELD = "throughput/peak_memory_gib"
_COMPARED = {
    "loss": "loss/total/mean",
    "entropy": "loss/entropy/mean",
    "gradient": "optimizer/grad_norm",
}
_FAR = {
    "float32": {"loss": 2e-3, "entropy": 2e-3, "gradient": 0.02},
    "bfloat16": {"loss": 0.03, "entropy": 0.05, "gradient": 0.15},
    "float8": {"loss": 0.1, "entropy": 0.15, "gradient": 0.3},
}
"""Nats of loss and entropy, and a share of the gradient, that rounding and packing explain; those
of float8, whose gradients are 0.994 alike in a tiny model, are chosen and not measured."""
_LARGEST_BYTES = 8 << 30
_LARGEST_WORK = 4e13
"""Floating-point operations of a plain forward and backward: a minute or two of a few cores."""


def trainer_line(metrics: Mapping[str, float], num_tokens: int, seconds: float) -> Finding:
    """What a step of the largest micro batch says."""
    tell = partial(Finding, "trainer steps", seconds=seconds)
    norm, loss = (metrics.get(_COMPARED[name], math.nan) for name in ("gradient", "loss"))
    seen = f"a micro batch of {num_tokens:,} tokens: loss {loss:.3g}, gradient {norm:.3g}"
    held = metrics.get(_HELD, 0.0)
    if held:
        seen += f", {held:.1f} GiB held at most"
    if not (math.isfinite(norm) and math.isfinite(loss)):
        advice = 'try trainer.compute_dtype = "float32"; if it stays, the weights hold NaN'
        return tell(CheckVerdict.FAILS, f"{seen}: not finite", advice)
    if norm == 0.0:
        advice = "look at trainer.lora, and at what is frozen"
        return tell(CheckVerdict.FAILS, f"{seen}: nothing learns", advice)
    verdict = CheckVerdict.SLOW if seconds > SLOW_START else CheckVerdict.OK
    return tell(verdict, seen, values=dict(metrics))


def ranks_line(
    many: Mapping[str, float], one: Mapping[str, float], num_ranks: int, dtype: str, seconds: float
) -> Finding:
    """The same samples on all ranks and on one: splitting must change nothing."""
    tell = partial(Finding, "trainer's ranks", seconds=seconds)
    if apart := list(_apart(many, one, dtype)):
        seen = f"{num_ranks} ranks say {'; '.join(apart)} as one rank alone says"
        advice = "try trainer.parallel with its defaults, then each of its keys by itself"
        return tell(CheckVerdict.FAILS, seen, advice)
    return tell(CheckVerdict.OK, f"{num_ranks} ranks say {_told(many)}, and so does one")


def precision(trainer: TrainerConfig) -> str:
    """How the trainer rounds, by which it is judged."""
    return "float8" if trainer.parallel.float8 else str(trainer.compute_dtype)


def _apart(found: Mapping[str, float], expected: Mapping[str, float], dtype: str) -> Iterator[str]:
    for name, metric in _COMPARED.items():
        if metric not in found or metric not in expected:
            continue
        one, other = found[metric], expected[metric]
        scale = abs(other) if name == "gradient" else max(1.0, abs(other))
        if not abs(one - other) <= _FAR[dtype][name] * scale:
            yield f"{name} {one:.4g}, not {other:.4g}"


def _told(metrics: Mapping[str, float]) -> str:
    named = {name: metrics[it] for name, it in _COMPARED.items() if it in metrics}
    return ", ".join(f"{name} {value:.4g}" for name, value in named.items())


def probe_step(request: Request) -> str:
    """The same samples through transformers in float32, one by one, with the run's own loss."""
    folder = model_folder(request["model"])
    if folder is None:
        raise ConfigError(f"{request['model']} is not on this machine; fetch it first")
    trainer = TrainerConfig.model_validate(request["trainer"])
    bench = BenchConfig.model_validate(request["bench"])
    longest = bench.sample_tokens or 0
    size = sum(it.stat().st_size for it in folder.glob("*.safetensors"))
    if 3 * size * bench.samples_per_step * longest > _LARGEST_WORK or 4 * size > _LARGEST_BYTES:
        return "not compared: the model is too large for a plain forward on this CPU"
    expected = plain_step(PlainModel(folder, trainer.lora), trainer, bench)
    found = {name: float(value) for name, value in request["found"].items()}
    if apart := list(_apart(found, expected, request["dtype"])):
        raise ProtocolError(
            f"the trainer says {'; '.join(apart)} as a plain float32 forward says: its step is "
            "not that of this model; try trainer.parallel.compile = false, then "
            'trainer.compute_dtype = "float32"'
        )
    return f"{_told(found)}, and so says a plain float32 forward"


def plain_step(plain: PlainModel, trainer: TrainerConfig, bench: BenchConfig) -> dict[str, float]:
    """Loss, entropy and gradient of the first made-up batch; no gradient where adapters, which
    begin with numbers that the trainer draws, are all that learns."""
    import torch

    from gradus.trainer.entry.bench import fake_samples
    from gradus.trainer.losses import LossInputs, build_loss
    from gradus.trainer.model.policy_model import vocabulary_size

    loss, longest = build_loss(trainer.loss), bench.sample_tokens or 0
    samples = fake_samples(bench, longest=longest, vocabulary=vocabulary_size(plain.model), seed=0)
    count, total, entropy = sum(len(it) - 1 for it in samples), 0.0, 0.0
    plain.model.train()
    for sample in samples:
        arrays = sample.arrays
        ids = torch.tensor(arrays.token_ids).long()
        logs = plain.model(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = logs.gather(1, ids[1:, None])[:, 0]
        entropies = -(logs.exp() * logs).sum(-1)
        told = [arrays.sampling_logprobs, arrays.advantages]
        sampling, advantages = (torch.tensor(it[1:]).float() for it in told)
        inputs = LossInputs(
            policy_logprobs=chosen,
            sampling_logprobs=sampling,
            # Before the first step the reference model is the policy.
            reference_logprobs=chosen.detach(),
            advantages=advantages,
            entropies=entropies,
            mask=torch.ones_like(chosen, dtype=torch.bool),
            sample_index=torch.zeros_like(chosen, dtype=torch.long),
            is_scored=torch.ones_like(chosen, dtype=torch.bool),
        )
        share = loss(inputs).per_token.sum() / count
        total += float(share.detach())
        entropy += float(entropies.detach().sum()) / count
        if trainer.lora is None:
            share.backward()  # type: ignore[no-untyped-call]
    found = {_COMPARED["loss"]: total, _COMPARED["entropy"]: entropy}
    if trainer.lora is None:
        of_each = [it.grad.norm() for it in plain.model.parameters() if it.grad is not None]
        found[_COMPARED["gradient"]] = float(torch.stack(of_each).norm())
    return found
