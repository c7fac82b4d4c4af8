"""An algorithm writes credit onto the traces of finished episodes.

Credit has one value per token of a message. `write_credit` writes it, `read_credit` reads it, and
both check it. `advantages` feed the rl loss, `reference_logprobs` the reference loss, and
`loss_weights[name]` weigh the components ("rl", "ce", "ce_batch", "ce_trace",
"ref_kl"). A message without credit trains nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace

from gradus.errors import CreditError
from gradus.orchestrator.types import Group
from gradus.wire.tokens import HIGHEST_LOGPROB, LOSS_NAMES, SAMPLED_ONLY

LARGEST_REWARD = 1e18
"""Credit is float32, and the square of an advantage must fit into it."""
_LARGEST = 1e19
"""Of any number of credit, for the same reason."""

Values = Sequence[float] | NDArray[Any]
"""One number per token of a message."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CreditContext:
    """Tells an algorithm of the group that it scores, and records its numbers.

    >>> context = CreditContext("words", task_key="a1b2")
    >>> context.record("baseline", 0.5)
    """

    environment: str
    """Name of the source."""
    task_key: str | int
    """Identity of the task; the same text or number in every pass and after a restart."""
    failed: Sequence[WireEpisode] = ()
    """Episodes of the group that came back with an error. They never train; a baseline may still
    count their rewards."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Averaged over groups and recorded as `group/<source>/<name>/mean`."""
    played: Sequence[WireEpisode] = ()
    """Finished and failed episodes together, in the order of their starts."""

    def record(self, name: str, value: float) -> None:
        """Record a number about this group; the last one of a name counts.

        CreditError for what is not a finite number, and for a name that is not text.
        """
        if not isinstance(name, str):
            raise CreditError(f"record({name!r}, {value!r}): the name must be a text")
        number = np.asarray(value)
        if number.ndim or number.dtype.kind not in "fiub" or not math.isfinite(number):
            raise CreditError(f"record({name!r}, {value!r}): the value must be a finite number")
        self.numbers[name] = float(number)

    def check(self) -> None:
        """CreditError for a number that was written past `record`."""
        for name, value in list(self.numbers.items()):
            self.record(name, value)


class Algorithm:
    """Turns outcomes into credit. Built with the `options` of its config as keyword arguments, or
    in one `config` where it takes that.

    A subclass overrides what it needs. Each source has its own object. `score_episode` runs once
    per finished episode, while others still play; `score_group` once per group, after its last
    episode.
    """

    @property
    def calls_foreign_code(self) -> bool:
        """True if an algorithm of gradus calls a function of the user."""
        return False

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:
        """Credit that needs one episode only; may wait for a frozen model.

        A resume plays open groups again, so what is counted here is counted twice for them; count
        in `score_group`, whose state matches the checkpoint.
        """

    def score_group(
        self, episodes: Sequence[WireEpisode], context: CreditContext
    ) -> Awaitable[None] | None:
        """Credit that compares the finished episodes of one task; there may be one or none.

        May be `async def`, for a judge that sees the whole group: then several groups are scored at
        once while others play, and a replay takes the recorded credit. Change what `state()` holds
        only after the last `await`.
        """

    def state(self) -> dict[str, Any]:
        """Return what a restart would lose, as JSON values; see `Curriculum.state`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()` of an earlier run; CorruptStateError when it is another's."""


def assign_advantage(trace: WireTrace, advantage: float) -> None:
    """Give every sampled token of the trace the same advantage.

    What `write_credit` would write; one number for all tokens needs one check.
    """
    value = float(_numbers("advantages", [advantage], 1)[0])
    for node in trace.nodes:
        if node.sampled:
            node.advantages = [value] * int(sum(node.mask))


@dataclass(frozen=True)
class TokenCredit:
    """The credit of one message; arrays have shape [T], T the number of its tokens."""

    mask: NDArray[np.bool_]
    """True if the model sampled the token."""
    advantages: Floats
    """0 on tokens that were not sampled, and where the algorithm gave none."""
    has_advantages: bool
    """True if the algorithm gave the message advantages, perhaps zeros."""
    reference_logprobs: Floats
    """NaN where no reference model scored."""
    loss_weights: Mapping[str, Floats]
    """By component; one that is absent was not weighed."""

    @property
    def nothing(self) -> Floats:
        """A zero per token."""
        return np.zeros(len(self.mask))

    @property
    def default_weight(self) -> Floats:
        """The weight of `rl` where the algorithm wrote none: 1 on sampled tokens with credit."""
        return self.mask.astype(np.float64) if self.has_advantages else self.nothing


def write_credit(
    node: MessageNode,
    *,
    advantages: Values | float | None = None,
    reference_logprobs: Values | None = None,
    loss_weights: Mapping[str, Values] | None = None,
) -> None:
    """Write credit onto one message; what is left out does not change.

    Each argument has one value per token of the message, so `len(node.token_ids)` in all; one
    number as `advantages` goes to every sampled token. `advantages` must be 0, and
    `reference_logprobs` NaN, where `node.mask` says that nothing was sampled; NaN elsewhere means
    that no model scored the token. CreditError, before anything is written, for another length, a
    value that is not finite, an unknown component, or a weight of `rl` or `ref_kl` on a token that
    was not sampled.
    """
    mask = np.array(node.mask, dtype=np.bool_)
    if advantages is not None and np.ndim(advantages) == 0:
        advantages = np.where(mask, _numbers("advantages", [advantages], 1)[0], 0.0)
    changes: dict[str, Any] = {}
    if advantages is not None:
        chosen = _numbers("advantages", advantages, len(mask))
        _refuse_unsampled("advantages", chosen != 0, mask)
        changes["advantages"] = chosen[mask].tolist()
    if reference_logprobs is not None:
        scores = _numbers("reference_logprobs", reference_logprobs, len(mask), may_be_nan=True)
        _refuse_unsampled("reference_logprobs", ~np.isnan(scores), mask)
        changes["reference_logprobs"] = scores[mask].tolist()
    if loss_weights is not None:
        _refuse_other_than_dict(loss_weights)
        changes["loss_weights"] = {**(node.loss_weights or {}), **loss_weights}
    written = node.model_copy(update=changes)
    credit = read_credit(written)
    if loss_weights is not None:
        changes["loss_weights"] = {k: v.tolist() for k, v in credit.loss_weights.items()}
    for name, value in changes.items():
        setattr(node, name, value)


def read_credit(node: MessageNode) -> TokenCredit:
    """The credit of one message, one value per token; CreditError says what is wrong with it.

    verifiers keeps `advantages` and `reference_logprobs` for the sampled tokens only; nothing but
    this function and `write_credit` needs to know.
    """
    mask = np.array(node.mask, dtype=np.bool_)
    advantages = np.zeros(len(mask))
    if node.advantages is not None:
        advantages[mask] = _sampled_numbers("advantages", node.advantages, mask)
    scores = np.full(len(mask), np.nan)
    if node.reference_logprobs is not None:
        scores[mask] = _sampled_numbers("reference_logprobs", node.reference_logprobs, mask)
    if bool(np.any(scores > HIGHEST_LOGPROB)):
        raise CreditError(f"reference_logprobs holds {np.nanmax(scores):g}; a logprob is at most 0")
    weights = _weights(node.loss_weights or {}, mask, scores)
    return TokenCredit(mask, advantages, node.advantages is not None, scores, weights)


def credit_by_node(trace: WireTrace) -> dict[int, TokenCredit]:
    """`id(node)` → its credit, for every message of a trace; CreditError names the message."""
    credit: dict[int, TokenCredit] = {}
    for number, node in enumerate(trace.nodes):
        try:
            credit[id(node)] = read_credit(node)
        except CreditError as error:
            raise CreditError(
                f"agent {trace.agent.name!r}, message {number} ({node.message.role}, "
                f"{len(node.token_ids)} tokens, {sum(node.mask)} of them sampled): {error}"
            ) from error
    return credit


EpisodeCredit = Mapping[int, TokenCredit]
"""The credit of every message that may train, by `id(node)`."""


def settle_group(group: Group) -> dict[str, EpisodeCredit]:
    """The credit of each finished episode by its id, checked; CreditError names the episode."""
    credit: dict[str, EpisodeCredit] = {}
    for played, episode in group.finished:
        try:
            credit[played.id] = settle_credit(episode)
        except CreditError as error:
            raise CreditError(f"episode {played.id}, {error}") from error
    return credit


def settle_credit(episode: WireEpisode) -> EpisodeCredit:
    """Check the credit of every trace that may train, and keep it as plain numbers.

    It comes back too, by `id(node)`. CreditError names the trace, its agent and the message.
    """
    settled: dict[int, TokenCredit] = {}
    for number, trace in enumerate(episode.traces):
        if not (trace.ok and trace.agent.trainable):
            continue
        try:
            credit = credit_by_node(trace)
        except CreditError as error:
            raise CreditError(f"trace {number}, {error}") from error
        for node in trace.nodes:
            _store(node, credit[id(node)])
        settled |= credit
    return settled


def has_credit(episode: WireEpisode) -> bool:
    """Tell whether anything wrote credit onto a message of the episode."""
    return any(
        node.advantages is not None
        or node.reference_logprobs is not None
        or node.loss_weights is not None
        for trace in episode.traces
        for node in trace.nodes
    )


def keep_credit(episodes: Iterable[WireEpisode], numbers: dict[str, float]) -> Callable[[], None]:
    """A function that restores the credit that the episodes have now, and the recorded numbers."""
    kept_numbers = dict(numbers)
    nodes = [node for e in episodes for trace in e.traces for node in trace.nodes]
    kept = [
        copy.deepcopy((node.advantages, node.reference_logprobs, node.loss_weights))
        for node in nodes
    ]

    def put_back() -> None:
        for node, credit in zip(nodes, copy.deepcopy(kept), strict=True):
            node.advantages, node.reference_logprobs, node.loss_weights = credit
        numbers.clear()
        numbers.update(kept_numbers)

    return put_back


def _store(node: MessageNode, credit: TokenCredit) -> None:
    """Numbers of numpy become Python's, which the records of an episode can hold."""
    if credit.has_advantages:
        node.advantages = credit.advantages[credit.mask].tolist()
    if node.reference_logprobs is not None:
        node.reference_logprobs = credit.reference_logprobs[credit.mask].tolist()
    if node.loss_weights is not None:
        node.loss_weights = {name: w.tolist() for name, w in credit.loss_weights.items()}


def _weights(
    loss_weights: Mapping[str, Values], mask: NDArray[np.bool_], scores: Floats
) -> dict[str, Floats]:
    _refuse_other_than_dict(loss_weights)
    weights: dict[str, Floats] = {}
    for name, values in loss_weights.items():
        if name not in LOSS_NAMES:
            raise CreditError(f"loss_weights names {name!r}; use {', '.join(LOSS_NAMES)}")
        weights[name] = _numbers(f"loss_weights[{name!r}]", values, len(mask))
        if name in SAMPLED_ONLY:
            _refuse_unsampled(f"loss_weights[{name!r}]", weights[name] != 0, mask)
    if "ref_kl" in weights and bool(np.any((weights["ref_kl"] != 0) & np.isnan(scores))):
        raise CreditError("loss_weights['ref_kl'] weighs a token without a reference logprob")
    return weights


def _refuse_other_than_dict(loss_weights: object) -> None:
    if not isinstance(loss_weights, Mapping):
        raise CreditError(f"loss_weights is a {type(loss_weights).__name__}; it must be a dict")


def _sampled_numbers(name: str, values: Any, mask: NDArray[np.bool_]) -> Floats:
    """Check what verifiers keeps of a message: one value per sampled token."""
    return _numbers(
        name, values, int(mask.sum()), "sampled tokens", may_be_nan=name == "reference_logprobs"
    )


def _numbers(
    name: str, values: Any, length: int, tokens: str = "tokens", *, may_be_nan: bool = False
) -> Floats:
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise CreditError(f"{name} is {values!r}; it must have one value per token")
    found = np.asarray(values) if len(values) else np.zeros(0)
    if found.ndim != 1 or found.dtype.kind not in "fiub":
        raise CreditError(f"{name} holds values that are not numbers, e.g. {_first_odd(values)!r}")
    if len(found) != length:
        raise CreditError(
            f"{name} has {len(found)} values for {length} {tokens}; write credit with "
            "write_credit(node, ...), one value per token"
        )
    numbers = found.astype(np.float64)
    wrong = ~(np.abs(numbers) <= _LARGEST)
    if may_be_nan:
        wrong &= ~np.isnan(numbers)
    if bool(wrong.any()):
        index = int(np.argmax(wrong))
        raise CreditError(f"{name} is {numbers[index]} at token {index}; it must be finite")
    return numbers


def _first_odd(values: Any) -> object:
    """The first value that is not a number."""
    return next((v for v in values if not isinstance(v, int | float)), values)


def _refuse_unsampled(name: str, used: NDArray[np.bool_], mask: NDArray[np.bool_]) -> None:
    wrong = used & ~mask
    if bool(wrong.any()):
        raise CreditError(
            f"{name} is set at token {int(np.argmax(wrong))}, which the model did not sample; "
            "see node.mask"
        )
