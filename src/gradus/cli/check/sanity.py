"""What ten steps prove before a long run: that units, masks and credit are right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradus.cli.check.findings import CheckVerdict, Finding
from gradus.config import RunConfig
from gradus.monitor.token_record import TokenRecord, all_records
from gradus.run.model_files import weights_digest
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records
from gradus.wire.versions import NOT_SAMPLED

NUM_STEPS = 10
_FAR = 0.1
"""Nats of a token between engine and trainer on the same weights, beyond which they compute two
models."""
_CREDITED = {"rl", "ref_kl"}
"""Components of the loss that only sampled tokens have."""
_AGREES = 0.99
"""Share of all that tokens are pushed that has the sign of their advantage. By size: a penalty on
what moved far from the engine holds some tokens back a little."""


def ten_steps(config: RunConfig) -> dict[str, Any]:
    """Changes by dotted keys: few steps, all tokens recorded, nothing that ends or shows them."""
    return {
        "max_steps": min(NUM_STEPS, config.max_steps),
        "target_reward": None,
        "patience_steps": None,
        "monitor": [],
        "trainer.recorded_share": 1.0,
        "orchestrator.eval": None,
    }


def sanity_lines(run_dir: RunDirectory) -> Iterator[Finding]:
    """Gradients, weights, masks, units and credit of a run that has ended."""
    steps = [it.numbers for it in read_records(run_dir.metrics) if not it.is_evaluation]
    yield gradient_line(steps)
    yield _weights(run_dir)
    records = [(step, it) for step in range(len(steps)) for it in all_records(run_dir, step)]
    if not records:
        yield Finding("tokens", CheckVerdict.FAILS, "no token was recorded as trained")
        return
    yield mask_line([it for _, it in records])
    yield unit_line([it for _, it in records])
    first = [it for step, it in records if step == 0]
    yield agreement_line(first)
    yield credit_line([it for _, it in records])


def gradient_line(steps: Sequence[Mapping[str, float]]) -> Finding:
    """Every step has a finite gradient, and most are not 0."""
    norms = [it.get("optimizer/grad_norm", math.nan) for it in steps]
    finite = [norm for norm in norms if math.isfinite(norm)]
    moving = sum(norm > 0 for norm in finite)
    seen = f"{moving} of {len(norms)} steps have one that is finite and not 0"
    advice = "see `flat` and `dropped` in the lines of the steps: equal rewards teach nothing"
    return Finding.judged("gradients", seen, bool(norms) and moving == len(norms), advice)


def _weights(run_dir: RunDirectory) -> Finding:
    """Two versions in a row differ."""
    found = [weights_digest(path) for path in sorted(run_dir.weights.glob("version_*"))[-2:]]
    if len(found) < 2 or None in found:
        return Finding("weights", CheckVerdict.UNKNOWN, "fewer than two versions lie on the disk")
    advice = "the learning rate may be lost in the rounding of the served dtype; raise it"
    seen = "the last two versions differ" if found[0] != found[1] else "the last two are the same"
    return Finding.judged("weights", seen, found[0] != found[1], advice)


def mask_line(records: Sequence[TokenRecord]) -> Finding:
    """What trained was sampled by a policy, and is never the first token of a sample."""
    trained = sum(int(it.is_trained.sum()) for it in records)
    given = sum(len(it.token_ids) for it in records)
    first = sum(bool(it.is_trained[0]) for it in records)
    foreign = sum(int((_versions(it)[it.is_trained] == NOT_SAMPLED).sum()) for it in records)
    seen = f"{trained:,} of {given:,} tokens train"
    if first or foreign:
        seen += f"; {foreign:,} of them were not sampled, {first:,} are the first of a sample"
    advice = "the mask of the algorithm or the renderer is wrong"
    if (
        trained
        and foreign
        and not first
        and any(it.loss_weights.keys() - _CREDITED for it in records)
    ):
        return Finding("masks", CheckVerdict.SLOW, f"{seen}, as an algorithm may mean it to be")
    return Finding.judged("masks", seen, bool(trained) and not (first or foreign), advice)


def _versions(record: TokenRecord) -> np.ndarray:
    """[T] that sampled each token; all 0 where nobody noted it."""
    if not record.versions:
        return np.zeros(len(record.token_ids), int)
    return np.concatenate([np.full(count, version) for version, count in record.versions])


def unit_line(records: Sequence[TokenRecord]) -> Finding:
    """Logprobs are nats of probabilities, entropies are not negative, all are numbers."""
    engine = np.concatenate([it.sampling_logprobs for it in records])
    trainer = np.concatenate([it.policy_logprobs for it in records])
    entropies = np.concatenate([it.entropies for it in records])
    advantages = np.concatenate([it.advantages for it in records])
    wrong = {
        "engine's logprobs above 0": engine > 1e-4,
        "trainer's logprobs above 0": trainer > 1e-4,
        "negative entropies": entropies < -1e-4,
        "numbers that are not finite": ~np.isfinite(engine + trainer + entropies + advantages),
    }
    found = [f"{int(it.sum()):,} {name}" for name, it in wrong.items() if it.any()]
    seen = f"logprobs {engine.mean():.2f} nats, entropies {entropies.mean():.2f}"
    said = f"{seen}; {', '.join(found)}" if found else seen
    return Finding.judged("units", said, not found, "`gradus lab mismatch` shows such tokens")


def agreement_line(records: Sequence[TokenRecord]) -> Finding:
    """On the weights of the first step, which sampled and are trained, both sides agree."""
    if not records:
        return Finding("engine and trainer", CheckVerdict.UNKNOWN, "the first step has no tokens")
    gaps = np.concatenate([it.policy_logprobs - it.sampling_logprobs for it in records])
    gap = float(np.abs(gaps).mean())
    seen = f"{gap:.2g} nats apart in the first step, over {len(gaps):,} tokens"
    advice = "`gradus lab mismatch RUN` names the cause"
    return Finding.judged("engine and trainer", seen, gap <= _FAR, advice)


def credit_line(records: Sequence[TokenRecord]) -> Finding:
    """Some advantages are not 0, of both signs, and the loss pushes the way that they say."""
    advantages = np.concatenate([it.advantages for it in records])
    pushes = np.concatenate([it.pushes for it in records])
    up, down = int((advantages > 0).sum()), int((advantages < 0).sum())
    sizes = np.where(advantages != 0, np.abs(pushes), 0.0)
    moved, total = int((sizes > 0).sum()), float(sizes.sum())
    agreeing = float(sizes[np.sign(pushes) == np.sign(advantages)].sum()) / total if total else 0.0
    seen = (
        f"{up:,} tokens are praised and {down:,} blamed; {agreeing:.1%} of the push on the "
        f"{moved:,} that move goes that way"
    )
    if not (up or down) and pushes.any():
        seen = "this algorithm gives no advantages, and its tokens move"
        return Finding("credit", CheckVerdict.UNKNOWN, seen)
    advice = "look at the algorithm's advantages and the sign of the loss"
    return Finding.judged("credit", seen, bool(up and down) and agreeing >= _AGREES, advice)
