"""An algorithm writes credit onto the traces of finished episodes.

Credit lives on verifiers' own message nodes, and `samples.py` lays it out. `advantages`, one value
per sampled token, feed the rl loss; `reference_logprobs`, laid out the same, the reference loss;
`loss_weights[name]`, one value per token, weigh the other components ("ce", "ce_batch", "ref_kl").
A node without credit trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

LARGEST_REWARD = 1e18
"""Credit is float32, and the square of an advantage must fit into it."""


@dataclass(frozen=True)
class CreditContext:
    """Where the episodes come from that an algorithm scores, and where it leaves its numbers.

    >>> context = CreditContext("words", task_key="a1b2")
    >>> context.record("baseline", 0.5)
    """

    environment: str
    """Name of the source."""
    task_key: str | int
    """Identity of the task; the same text or number in every pass and after a restart."""
    failed: Sequence[WireEpisode] = ()
    """Episodes of the group that came back with an error. They train nothing, whatever an
    algorithm writes on them; a baseline may count what was rewarded in them."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Averaged over groups and recorded as `group/<source>/<name>/mean`."""
    played: Sequence[WireEpisode] = ()
    """All that came back, finished or failed, when a group is scored in the order of their
    starts."""

    def record(self, name: str, value: float) -> None:
        """Leave a number about this group; the last one of a name counts."""
        self.numbers[name] = value


class Algorithm(Protocol):
    """Turns outcomes into credit. Built with the `options` of its config as keyword arguments.

    Each source has its own object. `score_episode` runs once for every finished episode, while
    other episodes still play; `score_group` once for every group whose last episode ended.
    """

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:
        """Credit that needs one episode only; may wait for a frozen model."""
        ...

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:
        """Credit that compares the finished episodes of one task; there may be one or none."""
        ...

    def state(self) -> dict[str, Any]:
        """What a restart would lose, as JSON values; see `Curriculum.state`."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()` of an earlier run; CorruptStateError when it is another's."""
        ...


def trainable_traces(episodes: Iterable[WireEpisode]) -> list[WireTrace]:
    """The traces that may train: of a trainable agent, and without an error."""
    return [t for episode in episodes for t in episode.traces if t.ok and t.agent.trainable]


def num_sampled_tokens(trace: WireTrace) -> int:
    """Tokens that the model wrote in a trace; those of a turn that branches share count once."""
    return sum(
        call.usage.completion_tokens
        for call in trace.calls
        if call.node is not None and call.usage is not None
    )


def assign_advantage(trace: WireTrace, advantage: float) -> None:
    """Give every sampled token of the trace the same advantage."""
    for node in trace.nodes:
        if node.sampled:
            node.advantages = [advantage] * len(node.logprobs)
