"""`gradus lab mismatch RUN`: what makes trainer and engine disagree, cause by cause.

The stored tokens are scored again along a chain that begins with what the engine said and ends with
what the trainer said; each link changes one thing, so that the differences of the links add up to
the gap of each token. Where the engine, or the trainer, is explained better by a setting that the
config does not say, the chain takes that setting, and its link shows what it costs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers.utils.logging import disable_progress_bar

from gradus.cli.options import take_options, take_value, wants_help, whole_number
from gradus.config import RunConfig, resolve_sources
from gradus.errors import ConfigError, CorruptStateError, ExitCode
from gradus.monitor.token_record import TokenRecord, all_records
from gradus.orchestrator.play.renderer import load_policy_tokenizer
from gradus.run.episodes import locate_episodes
from gradus.run.lease import run_at
from gradus.run.model_files import model_folder
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launched
from gradus_lab.replay.journal_reader import RecordKey
from gradus_lab.replay.recording import RecordedEpisodes
from gradus_lab.rescoring import (
    ADAPTED,
    BARE,
    FACTORS,
    MERGED,
    OWN,
    Nats,
    SamplingCut,
    Scores,
    StoredSample,
    WeightsOnDisk,
    packed_scores,
    plain_scores,
    save_whole,
)

NUM_TOKENS = 2_000
USAGE = f"""usage: gradus lab mismatch RUN [--tokens N] [--json]

Splits what trainer and engine of a run disagree on into causes, on N tokens, {NUM_TOKENS:,} unless
given."""
WORST = 5
_ENOUGH = 1.3
"""What the config says is kept unless something else explains the numbers better by this factor."""
_CLOSE = {"float32": 1e-4, "bfloat16": 4e-3}
"""Nats of a token that rounding explains anyway."""
UNCUT = SamplingCut()
_CUTS = (
    UNCUT,
    *(SamplingCut(top_p=p) for p in (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)),
    SamplingCut(top_k=20),
    SamplingCut(top_k=50),
)
KERNELS, ENGINE_DTYPE, SAMPLING = "engine's kernels", "engine's dtype", "sampling cuts"
TEMPERATURE, STALE, LAG = "temperature", "engine served other weights", "staleness"
ADAPTER, TRAINER_DTYPE, PACKING = "adapter", "trainer's dtype", "batch shape"
REST, RETOKENISED = "not explained", "re-tokenised text"
NOT_LOOKED_AT = (
    "stale prefix cache, apart from other weights",
    "router of a mixture of experts",
    "penalties and biases of sampling",
    "the engine's own kernels against another backend of it",
)


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print(USAGE)
        return ExitCode.DONE
    options, rest = take_options(words, {"--json": ""})
    tokens, rest = take_value(rest, "--tokens", wants="a number of tokens")
    num_tokens = whole_number("--tokens", tokens) or NUM_TOKENS
    if len(rest) != 1:
        raise ConfigError(f"name one run, not {' '.join(rest)!r}\n{USAGE}")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    told = f"scoring up to {num_tokens:,} tokens again for each cause, which takes minutes"
    print(told, file=sys.stderr, flush=True)
    with TemporaryDirectory(prefix="gradus-mismatch-") as scratch:
        found, base = examine_mismatch(Path(rest[0]), num_tokens, Path(scratch))
        decode = load_policy_tokenizer(str(base)).decode
    lines = [json.dumps(as_json(found, decode))] if options else table(found, decode)
    print("\n".join(lines))
    return ExitCode.DONE


@dataclass(frozen=True)
class Cause:
    """One link of the chain."""

    name: str
    nats: Nats
    """[N] by how much it moves each token from the engine's number towards the trainer's."""
    note: str = ""
    """The setting that was found, where it is not the config's."""

    @property
    def size(self) -> float:
        return float(np.abs(self.nats).mean())


@dataclass(frozen=True)
class Splitting:
    """The gap of all tokens, and its causes, the largest first."""

    gap: Nats
    causes: tuple[Cause, ...]
    tokens: tuple[tuple[str, int, int], ...]
    """Sample, place and id of each token."""
    left_out: int = 0
    """Samples whose weights are not on the disk."""
    not_looked_at: tuple[str, ...] = NOT_LOOKED_AT

    def rows(self) -> list[dict[str, Any]]:
        whole = sum(cause.size for cause in self.causes) or 1.0
        return [
            {
                "cause": cause.name,
                "nats_per_token": cause.size,
                "mean": float(cause.nats.mean()),
                "share": cause.size / whole,
                "p99": float(np.quantile(np.abs(cause.nats), 0.99)),
                "note": cause.note,
            }
            for cause in self.causes
        ]

    def worst(self, cause: Cause) -> list[tuple[str, int, int, float]]:
        """The tokens that a cause moves most: sample, place, id, nats."""
        order = np.argsort(-np.abs(cause.nats))[:WORST]
        return [(*self.tokens[at], float(cause.nats[at])) for at in order]


@dataclass
class _Chain:
    """From the engine's number to the trainer's."""

    at: Nats
    causes: list[Cause] = field(default_factory=list)

    def link(self, name: str, to: Nats, note: str = "") -> None:
        self.causes.append(Cause(name, to - self.at, note))
        self.at = to


def split(
    chosen: Sequence[StoredSample],
    weights: WeightsOnDisk,
    config: RunConfig,
    *,
    retokenised: frozenset[str] = frozenset(),
    packed: Callable[..., Nats] = packed_scores,
) -> Splitting:
    """The causes of the gap of these samples; `retokenised` names those with other tokens."""
    engine = np.concatenate([it.record.sampling_logprobs for it in chosen]).astype(np.float64)
    trainer = np.concatenate([it.record.policy_logprobs for it in chosen]).astype(np.float64)
    bench = _Bench(chosen, weights, config)
    chain = _Chain(engine)
    found = bench.explain(engine)
    own = config.inference.dtype
    if own == "bfloat16":
        chain.link(KERNELS, bench.numbers(found, own))
    exact = bench.numbers(found)
    chain.link(ENGINE_DTYPE if own == "bfloat16" else KERNELS, exact)
    found = replace(found, cut=UNCUT)
    chain.link(SAMPLING, bench.numbers(found), str(bench.explained_cut))
    column = bench.temperature_of(trainer)
    note = "" if column == found.column else bench.told(found.column, column)
    found = replace(found, column=column)
    chain.link(TEMPERATURE, bench.numbers(found), note)
    note = "" if found.version is None else f"version {found.version} answered throughout"
    chain.link(STALE, bench.numbers(replace(found, version=None)), note)
    mode, found = found.mode, replace(found, version=None)
    if bench.has_adapter:
        note = "" if mode == bench.declared_mode else f"the engine's adapter was {mode}"
        found = replace(found, mode=ADAPTED)
        chain.link(ADAPTER, bench.numbers(found), note)
    chain.link(LAG, bench.trained(column))
    dtype = config.trainer.compute_dtype
    if dtype != "float32":
        chain.link(TRAINER_DTYPE, bench.trained(column, dtype))
    chain.link(PACKING, bench.packed(column, packed))
    chain.link(REST, trainer)
    causes = _with_retokenised(chain.causes, chosen, retokenised)
    places = [
        (it.record.sample_id, int(place), int(it.record.token_ids[place]))
        for it in chosen
        for place in it.places
    ]
    ordered = sorted(causes, key=lambda cause: -cause.size)
    return Splitting(trainer - engine, tuple(ordered), tuple(places))


def _with_retokenised(
    causes: Sequence[Cause], chosen: Sequence[StoredSample], names: frozenset[str]
) -> list[Cause]:
    """The engine's own part of samples that were trained as other tokens has that cause."""
    if not names:
        return list(causes)
    other = np.concatenate([np.full(len(it.places), it.record.sample_id in names) for it in chosen])
    first = causes[0]
    return [
        Cause(RETOKENISED, np.where(other, first.nats, 0.0), f"{len(names)} samples"),
        replace(first, nats=np.where(other, 0.0, first.nats)),
        *causes[1:],
    ]


@dataclass(frozen=True)
class _Engine:
    """Settings that explain what an engine said."""

    version: int | None = None
    """None for those that the records name."""
    mode: str = ADAPTED
    column: int = OWN
    cut: SamplingCut = UNCUT


class _Bench:
    """Owns the scores of the chosen samples under every setting that was asked for."""

    def __init__(
        self, chosen: Sequence[StoredSample], weights: WeightsOnDisk, config: RunConfig
    ) -> None:
        self._chosen, self._weights, self._config = chosen, weights, config
        self._scores: dict[tuple[int, str, str], Scores] = {}
        lora = config.trainer.lora
        self.has_adapter = lora is not None
        self.declared_mode = MERGED if lora is not None and lora.serve == "merged" else ADAPTED
        self.explained_cut = UNCUT
        sampling = resolve_sources(config).train[0].complete.sampling
        body = sampling.extra_body
        given = body.get("top_k")
        top_k = given if isinstance(given, int) and given > 0 else 0
        self._declared_cut = SamplingCut(sampling.top_p or 1.0, top_k)
        self._cuts = tuple(dict.fromkeys([self._declared_cut, *_CUTS]))
        self._sampled = np.concatenate([it.versions for it in chosen])
        self._steps = np.concatenate([np.full(len(it.places), it.step) for it in chosen])

    def score(self, version: int, mode: str = ADAPTED, dtype: str = "float32") -> Scores:
        if not self._weights.is_adapter(version):
            mode = ADAPTED
        key = (version, mode, dtype)
        if key not in self._scores:
            model = self._weights.model(version, mode)
            self._scores[key] = plain_scores(model, self._chosen, self._cuts, dtype)
        return self._scores[key]

    def numbers(self, engine: _Engine, dtype: str = "float32") -> Nats:
        """[N] that an engine of these settings says."""
        if engine.version is not None:
            return self._column(self.score(engine.version, engine.mode, dtype), engine)
        found = np.zeros(len(self._sampled))
        versions = np.where(self._sampled < 0, self._steps, self._sampled)
        for version in np.unique(versions):
            own = self._column(self.score(int(version), engine.mode, dtype), engine)
            found = np.where(versions == version, own, found)
        return found

    def _column(self, scores: Scores, engine: _Engine) -> Nats:
        if engine.cut != UNCUT:
            return scores.by_cut[:, self._cuts.index(engine.cut)]
        return scores.by_temperature[:, engine.column]

    def explain(self, engine: Nats) -> _Engine:
        """The settings that are closest to what the engine said; the config's, where they do."""
        declared = _Engine(mode=self.declared_mode, cut=self._declared_cut)
        modes = (ADAPTED, MERGED, BARE) if self.has_adapter else (ADAPTED,)
        versions = [None, *sorted(self._weights.folders)[-4:], 0]
        settings = [(version, mode) for version in dict.fromkeys(versions) for mode in modes]
        options = [_Engine(*it, cut=self._declared_cut) for it in settings]
        options += [replace(declared, cut=cut) for cut in self._cuts]
        options += [replace(declared, cut=UNCUT, column=it) for it in range(len(FACTORS) + 1)]
        best = self._closest(options, engine, declared)
        self.explained_cut = best.cut if best.cut != UNCUT else UNCUT
        return best

    def _closest(self, options: Sequence[_Engine], said: Nats, declared: _Engine) -> _Engine:
        limit = _CLOSE.get(self._config.inference.dtype, _CLOSE["float32"])
        own = _distance(self.numbers(declared), said)
        best = min(options, key=lambda it: _distance(self.numbers(it), said))
        is_better = own > _ENOUGH * _distance(self.numbers(best), said) and own > limit
        return best if is_better else declared

    def temperature_of(self, trainer: Nats) -> int:
        """The column that is closest to what the trainer said; the config's, where it does."""
        limit = _CLOSE.get(self._config.trainer.compute_dtype, _CLOSE["float32"])
        own = _distance(self.trained(OWN), trainer)
        apart = [_distance(self.trained(it), trainer) for it in range(len(FACTORS) + 1)]
        best = int(np.argmin(apart))
        return best if own > _ENOUGH * apart[best] and own > limit else OWN

    def told(self, engine: int, trainer: int) -> str:
        ours, theirs = self._temperature(trainer), self._temperature(engine)
        return f"engine at {theirs:.3g}, trainer at {ours:.3g}"

    def _temperature(self, column: int) -> float:
        return self._chosen[0].temperature * FACTORS[column] if column < len(FACTORS) else 1.0

    def trained(self, column: int, dtype: str = "float32") -> Nats:
        """[N] of the weights that were trained in each step."""
        found = np.zeros(len(self._steps))
        for version in np.unique(self._steps):
            own = self.score(int(version), ADAPTED, dtype).by_temperature[:, column]
            found = np.where(self._steps == version, own, found)
        return found

    def packed(self, column: int, score: Callable[..., Nats]) -> Nats:
        """[N] by the trainer's own model, the samples of a step packed into rows."""
        found = []
        for step in sorted({it.step for it in self._chosen}):
            own = [it for it in self._chosen if it.step == step]
            heat = [
                1.0 if column == len(FACTORS) else it.temperature * FACTORS[column] for it in own
            ]
            folder = self._weights.folders[step]
            if folder.parent.name == "checkpoints" or self._weights.is_adapter(step):
                folder = self._weights.scratch / f"whole_{step}"
                if not folder.exists():
                    save_whole(self._weights.model(step), self._weights.base, folder)
            found.append(score(folder, own, heat, self._config.trainer))
        return np.concatenate(found)


def _distance(ones: Nats, others: Nats) -> float:
    """Mean nats of a token, of which at most one counts: a few odd tokens decide nothing."""
    return float(np.minimum(np.abs(ones - others), 1.0).mean())


# From the folder of a run.
def examine_mismatch(root: Path, num_tokens: int, scratch: Path) -> tuple[Splitting, Path]:
    """The causes in a run, from what it stored, and its tokenizer's folder."""
    run_dir = run_at(root)
    launched = read_launched(run_dir)
    if launched.kind != "rl":
        raise ConfigError(
            f"{root} is of kind {launched.kind!r}; engine and trainer meet in rl alone"
        )
    config = RunConfig.model_validate(dict(launched.written))
    base = model_folder(config.model.name)
    if base is None:
        raise ConfigError(
            f"the model {config.model.name} that {root} began with is not on this machine"
        )
    weights = WeightsOnDisk(run_dir, base, scratch)
    chosen, left_out = _choose(run_dir, config, weights, num_tokens)
    other = _retokenised(run_dir, chosen)
    found = split(chosen, weights, config, retokenised=other or frozenset())
    missing = () if other is not None else ("re-tokenised text: the run keeps no replay",)
    return replace(found, left_out=left_out, not_looked_at=(*NOT_LOOKED_AT, *missing)), base


def _choose(
    run_dir: RunDirectory, config: RunConfig, weights: WeightsOnDisk, num_tokens: int
) -> tuple[list[StoredSample], int]:
    """Samples of the newest steps whose weights are all here, in the order of their steps."""
    if not run_dir.tokens.is_dir():
        raise ConfigError(
            f"{run_dir.root} keeps no tokens: trainer.recorded_share was 0, or it is old"
        )
    steps = sorted(
        (int(it.name.removeprefix("step_")) for it in run_dir.tokens.glob("step_*")), reverse=True
    )
    found: list[StoredSample] = []
    count = left_out = 0
    for step in steps:
        heat = _temperatures(run_dir, config, step)
        for record in all_records(run_dir, step):
            episode = record.sample_id.partition("/")[0]
            one = StoredSample(record, step, heat.get(episode, heat[""]))
            wanted = {step, *(int(it) for it in one.versions if it >= 0)}
            if not len(one.places) or not wanted <= weights.folders.keys():
                left_out += bool(len(one.places))
                continue
            if count >= num_tokens:
                break
            found.append(one)
            count += len(one.places)
    if not found:
        have = ", ".join(map(str, sorted(weights.folders)))
        raise ConfigError(
            f"{run_dir.root}: the weights that sampled and trained its stored tokens are gone ("
            f"left: {have}); look at a run while it runs, or keep checkpoints of each step"
        )
    return sorted(found, key=lambda it: it.step), left_out


def _temperatures(run_dir: RunDirectory, config: RunConfig, step: int) -> dict[str, float]:
    """Episode → temperature where sources differ; under the empty name that of the first."""
    by_source = {
        it.complete.name: it.complete.sampling.temperature or 1.0
        for it in resolve_sources(config).train
    }
    found = {"": next(iter(by_source.values()))}
    if len(set(by_source.values())) > 1:
        path = run_dir.root / "episodes" / f"step_{step}" / "train.jsonl"
        for _, episode in locate_episodes(path, with_texts=False):
            if episode is not None and episode.source in by_source:
                found[episode.id] = by_source[episode.source]
    return found


def _retokenised(run_dir: RunDirectory, chosen: Sequence[StoredSample]) -> frozenset[str] | None:
    """Samples in which tokens that the engine sent do not stand as it sent them; None without a
    replay."""
    found = set()
    terms = sorted({it.record.term for it in chosen})
    with suppress(CorruptStateError, ConfigError), RecordedEpisodes(run_dir, terms) as episodes:
        for it in chosen:
            name = it.record.sample_id.partition("/")[0]
            with suppress(CorruptStateError):
                played = episodes.load(RecordKey(it.record.term, name))
                if played.episode is not None and not _stands(played.episode, it.record):
                    found.add(it.record.sample_id)
        return frozenset(found)
    return None


def _stands(episode: Any, record: TokenRecord) -> bool:
    """Whether each trained token lies in a run of tokens that the engine sent."""
    trace = int(record.sample_id.split("/")[1])
    sent = [np.array(node.token_ids) for node in episode.traces[trace].nodes if node.sampled]
    covered = np.zeros(len(record.token_ids), bool)
    for ids in sent:
        for at in range(len(record.token_ids) - len(ids) + 1):
            if len(ids) and np.array_equal(record.token_ids[at : at + len(ids)], ids):
                covered[at : at + len(ids)] = True
    return bool(covered[record.is_trained].all())


Decode = Callable[[Sequence[int]], str]


def as_json(found: Splitting, decode: Decode) -> dict[str, Any]:
    causes = []
    for cause, row in zip(found.causes, found.rows(), strict=True):
        worst = [
            {"sample": sample, "place": place, "token": decode([token]), "nats": nats}
            for sample, place, token, nats in found.worst(cause)
        ]
        causes.append({**row, "worst": worst})
    return {
        "tokens": len(found.gap),
        "samples_left_out": found.left_out,
        "gap_mean": float(found.gap.mean()),
        "gap_nats_per_token": float(np.abs(found.gap).mean()),
        "causes": causes,
        "not_looked_at": list(found.not_looked_at),
    }


def table(found: Splitting, decode: Decode) -> Iterator[str]:
    """For a person."""
    size, p99 = np.abs(found.gap).mean(), np.quantile(np.abs(found.gap), 0.99)
    yield (
        f"trainer - engine: {size:.2g} nats per token (mean {found.gap.mean():+.2g}, "
        f"p99 {p99:.2g}) over {len(found.gap):,} tokens"
    )
    if found.left_out:
        yield f"{found.left_out:,} stored samples are left out: their weights are not on the disk"
    yield f"{'cause':<30}{'nats/token':>11}{'mean':>10}{'share':>7}{'p99':>9}"
    for row in found.rows():
        yield (
            f"{row['cause']:<30}{row['nats_per_token']:>11.5f}{row['mean']:>+10.5f}"
            f"{row['share']:>7.0%}{row['p99']:>9.4f}  {row['note']}".rstrip()
        )
    first = found.causes[0]
    yield f"most of {first.name}:"
    for sample, place, token, nats in found.worst(first):
        yield f"  {nats:+8.3f} nats  {decode([token])!r:<16} token {place} of {sample}"
    yield f"not looked at: {'; '.join(found.not_looked_at)}"
