"""Filters drop finished samples that would not help the step; metrics still count them.

A filter gives a verdict on one sample. An enforced one drops what it does not keep; any other only
flags it, which shows what it would drop. Verdicts are in the episode's record.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.config import FilterConfig, GibberishConfig, ModelConfig, RepetitionConfig
from gradus.errors import ConfigError
from gradus.gate import is_ours, plugin_name
from gradus.log import get_logger
from gradus.orchestrator.algorithms.credit import tolerance
from gradus.orchestrator.algorithms.inputs import InputsChanged, Lent
from gradus.orchestrator.failures import FILTER_FAILED, blaming
from gradus.orchestrator.groups.samples import BuiltEpisode
from gradus.orchestrator.traces import is_truncated
from gradus.orchestrator.types import EpisodeFailed, Failure, Group, Verdict
from gradus.plugins import building, find_plugin, refuse_async
from gradus.run.model_files import model_folder
from gradus.wire.sample import Sample
from gradus.wire.tokens import BoolArray, FloatArray

NO_TOKENS = "no_trainable_tokens"
"""Reason for a finished episode without a sample, e.g. cut before its first sampled token."""
log = get_logger(__name__)

VOCABULARY_OPTION = "vocabulary_size"


@dataclass(frozen=True)
class FilterContext:
    """Where a sample comes from, for filters that look at more than its arrays."""

    trace: WireTrace
    """Of which the sample is a branch: messages, rewards, metrics, info."""
    is_truncated: bool
    """Whether a limit cut the trace short."""
    task_key: str | int
    """Identity of the task."""
    episodes: Sequence[WireEpisode]
    """The finished episodes of the group, with their credit, in the order of their starts."""
    failed: Sequence[WireEpisode] = ()
    """Episodes of the group that came back with an error."""
    largest_credit: float = 0.0
    """The largest |advantage · weight| of any token of the group's samples."""


class Filter(Protocol):
    """A verdict on one sample, whose arrays are read-only.

    Built with the `options` of its config as keyword arguments. A class with
    `needs_vocabulary_size = True` is also given `vocabulary_size`, that of the model. One with
    `needs_context = True` has `keeps(sample, context)` instead, see `ContextFilter`.
    """

    name: str
    """The reason in records and counters."""

    def keeps(self, sample: Sample) -> bool:
        """False for a sample that should not train."""


class ContextFilter(Protocol):
    """A filter that also sees the trace of the sample, its truncation and its group."""

    name: str
    """The reason in records and counters."""
    needs_context: ClassVar[bool]
    """True."""

    def keeps(self, sample: Sample, context: FilterContext) -> bool:
        """False for a sample that should not train."""


@dataclass(frozen=True)
class ActiveFilter:
    """A filter, the name of its verdicts, and whether they count."""

    filter: Filter | ContextFilter
    is_enforced: bool
    name: str
    """The filter's, followed by a number when several filters have that name."""

    def judge(self, sample: Sample, context: FilterContext) -> Verdict:
        """The verdict on one sample."""
        given = (sample, context) if needs_context(self.filter) else (sample,)
        keeps: Callable[..., bool] = self.filter.keeps
        answer = keeps(*given)
        if not isinstance(answer, bool | np.bool_):
            raise TypeError(f"keeps gives {answer!r}; give True or False")
        if answer:
            return Verdict.KEEP
        return Verdict.DROP if self.is_enforced else Verdict.FLAG


def needs_context(chosen: object) -> bool:
    """Whether a filter, or a class of filters, sees more than the sample."""
    return bool(getattr(chosen, "needs_context", False))


class ZeroAdvantage:
    """Drops samples without any gradient: every advantage is 0, or a rounding error beside the
    largest of the group, and no other loss is weighed.

    >>> ZeroAdvantage().name
    'zero_advantage'
    """

    name = "zero_advantage"
    needs_context: ClassVar[bool] = True

    def keeps(self, sample: Sample, context: FilterContext) -> bool:
        """False when no token has credit, or only rounding errors."""
        for loss, weights in sample.arrays.loss_weights.items():
            credit, least = weights, 0.0
            if loss == "rl":
                # Credit of its own scale: an algorithm may divide the rewards by anything.
                credit, least = _rl_credit(sample), tolerance(context.largest_credit)
            if bool(np.any(np.abs(credit) > least)):
                return True
        return False


class Gibberish:
    """Drops samples with a rare token that the policy itself finds less likely than chance.

    High token ids are the last merges of a vocabulary. One of them, sampled with a logprob below
    -ln V - offset, is a sign of a broken sampler or a collapsed policy.

    >>> Gibberish(GibberishConfig(), vocabulary_size=151_936).name
    'gibberish'
    """

    name = "gibberish"
    needs_vocabulary_size: ClassVar[bool] = True

    def __init__(self, config: GibberishConfig, *, vocabulary_size: int) -> None:
        self._token_id = config.token_id
        self._lowest_logprob = -math.log(vocabulary_size) - config.logprob_offset

    def keeps(self, sample: Sample) -> bool:
        """False when any sampled token is rare and less likely than chance."""
        is_rare = sample.arrays.token_ids > self._token_id
        return not bool(np.any(is_rare & (sample.arrays.sampling_logprobs < self._lowest_logprob)))


class Repetition:
    """Drops samples in which the policy was nearly certain for very many tokens in a row.

    >>> Repetition(RepetitionConfig()).name
    'repetition'
    """

    name = "repetition"

    def __init__(self, config: RepetitionConfig) -> None:
        self._tokens = config.tokens
        self._logprob = math.log(config.probability)

    def keeps(self, sample: Sample) -> bool:
        """False when a run of certain tokens is that long."""
        is_certain = _sampled(sample) & (sample.arrays.sampling_logprobs > self._logprob)
        return _longest_run(is_certain) < self._tokens


def build_filters(
    configs: Sequence[FilterConfig], *, vocabulary_size: int | None
) -> list[ActiveFilter]:
    """The filters in order; `vocabulary_size` None means that it is not known.

    ConfigError for an unknown filter or option, and for an enforced filter that needs to know the
    vocabulary; one that only flags is left out with a warning.
    """
    active: list[ActiveFilter] = []
    for config in configs:
        kind = find_plugin("filter", config.target)
        given = {}
        if getattr(kind, "needs_vocabulary_size", False):
            size = config.arguments().get(VOCABULARY_OPTION) or vocabulary_size
            if size is None:
                _miss_vocabulary(config)
                continue
            given[VOCABULARY_OPTION] = size
        _check_signature(kind, config)
        built = _build(kind, config, given)
        name = _free_name(built.name, {other.name for other in active})
        active.append(ActiveFilter(built, config.enforce, name))
    return active


def read_vocabulary_size(model: ModelConfig) -> int | None:
    """`vocab_size` of a model directory or of the hub's local cache; None when it is not there.

    The network is never asked: inference has fetched the model before the orchestrator starts.
    """
    folder = model_folder(model.name)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    text = config.get("text_config") if isinstance(config, dict) else None
    return _vocab_size(config) or _vocab_size(text)


def _vocab_size(config: object) -> int | None:
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None


def filter_group(
    filters: Sequence[ActiveFilter], group: Group, built: Sequence[BuiltEpisode]
) -> None:
    """Add to `group` the samples that every filter keeps, all verdicts, and why others are dropped.

    An episode on which a filter raises gives no sample, and a group of which one changes anything
    gives none at all.
    """
    readers = [it.filter for it in filters if needs_context(it.filter) and not is_ours(it.filter)]
    played = [it.episode for it in group.played if it.episode is not None]
    lent = Lent(played, is_trusted=not readers)
    try:
        _filter_group(filters, group, built, lent)
        lent.take_back()
    except InputsChanged as error:
        blamed = " or ".join(plugin_name("filter", reader) for reader in readers)
        text = f"{blamed}, source {group.source!r}, group {group.id}: {error}"
        group.fail(Failure(FILTER_FAILED, text))


def _filter_group(
    filters: Sequence[ActiveFilter],
    group: Group,
    built: Sequence[BuiltEpisode],
    lent: Lent,
) -> None:
    episodes = lent.copies_of(group.finished_episodes)
    failed = lent.copies_of([p.episode for p in group.played if p.episode and p.failure])
    samples = [sample for it in built for sample in it.samples]
    largest = max((float(np.abs(_rl_credit(s)).max(initial=0)) for s in samples), default=0.0)
    for it in built:
        if not it.samples:
            group.dropped[it.played.id] = NO_TOKENS
        try:
            for sample in it.samples:
                trace = lent.copy_of(it.episode).traces[int(sample.id.split("/")[1])]
                context = FilterContext(
                    trace,
                    is_truncated=is_truncated(trace),
                    task_key=group.task.key,
                    episodes=episodes,
                    failed=failed,
                    largest_credit=largest,
                )
                verdicts = group.verdicts[sample.id] = judge(filters, sample.frozen(), context)
                reason = dropped_by(verdicts)
                if reason is None:
                    group.samples.append(sample)
                else:
                    group.dropped[sample.id] = reason
        except EpisodeFailed as failure:
            group.drop_episode(it.played, failure.failure)


def judge(
    filters: Sequence[ActiveFilter], sample: Sample, context: FilterContext
) -> dict[str, Verdict]:
    """Name of each filter → its verdict on the sample; EpisodeFailed names one that raises."""
    verdicts: dict[str, Verdict] = {}
    where = f"source {sample.environment!r}, sample {sample.id}"
    for active in filters:
        with blaming(f"filter {active.name!r}", active.filter, where, failure=FILTER_FAILED):
            verdicts[active.name] = active.judge(sample, context)
    return verdicts


def dropped_by(verdicts: Mapping[str, Verdict]) -> str | None:
    """Name of the first filter that drops the sample; None when it may train."""
    return next((name for name, verdict in verdicts.items() if verdict is Verdict.DROP), None)


def _free_name(name: str, taken: Collection[str]) -> str:
    """`name`, or the first of `name_2`, `name_3`, … that is free."""
    numbered = (name if n == 1 else f"{name}_{n}" for n in itertools.count(1))
    return next(free for free in numbered if free not in taken)


def _check_signature(kind: type, config: FilterConfig) -> None:
    """ConfigError unless `keeps` takes what it will be given, and answers at once."""
    refuse_async(f"filter {config.type!r}", kind, "keeps")
    given = ("sample", "context") if needs_context(kind) else ("sample",)
    try:
        inspect.signature(kind.keeps).bind(None, *given)  # type: ignore[attr-defined]
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"filter {config.type!r} must have `keeps({', '.join(given)})`: {error}. A filter that "
            "sets `needs_context = True` is given the context too"
        ) from error


def _build(kind: type, config: FilterConfig, given: Mapping[str, Any]) -> Filter:
    with building(f"filter {config.type!r}", config.arguments()):
        built: Filter = kind(**{**config.arguments_for(kind), **given})
    if not isinstance(getattr(built, "name", None), str):
        raise ConfigError(
            f"filter {config.type!r} must have a `name`, a text: the reason in records and counters"
        )
    return built


def _miss_vocabulary(config: FilterConfig) -> None:
    text = (
        f"filter {config.type!r} needs the size of the vocabulary, and the model's config.json is "
        f"not found; write it into its options as {VOCABULARY_OPTION}"
    )
    if config.enforce:
        raise ConfigError(text)
    log.warning("%s. Until then the filter flags nothing", text)


def _rl_credit(sample: Sample) -> FloatArray:
    """[T]: what each token adds to the gradient of rl."""
    arrays = sample.arrays
    weights = arrays.loss_weights.get("rl")
    return np.zeros(0, np.float32) if weights is None else weights * arrays.advantages


def _sampled(sample: Sample) -> BoolArray:
    """[T]: the tokens that the policy sampled; a token of probability 1 has logprob 0."""
    sampled: BoolArray = sample.arrays.sampling_logprobs != 0
    for loss in ("rl", "ref_kl"):
        if loss in sample.arrays.loss_weights:
            sampled = sampled | (sample.arrays.loss_weights[loss] != 0)
    return sampled


def _longest_run(flags: BoolArray) -> int:
    """Length of the longest row of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
