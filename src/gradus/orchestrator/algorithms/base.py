"""An algorithm writes credit onto the traces of finished episodes.

Credit lives on verifiers' own message nodes, one value per sampled token, and `samples.py` lays it
out: `advantages` feed the rl loss, `loss_weights["ce"]` and `loss_weights["ref_kl"]` the other
components, `reference_logprobs` the reference loss. A node without credit trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace


class Algorithm(Protocol):
    """Turns outcomes into credit. Built with the `options` of its config as keyword arguments."""

    async def score_episode(self, episode: WireEpisode) -> None:
        """Credit that needs one episode only; may ask a frozen model."""
        ...

    def score_group(self, episodes: Sequence[WireEpisode]) -> None:
        """Credit that compares the finished episodes of one task; there may be one or none."""
        ...

    def state(self) -> dict[str, Any]:
        """What a restart would lose, as JSON values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()` of an earlier run."""
        ...


def trainable_traces(episodes: Iterable[WireEpisode]) -> list[WireTrace]:
    """The traces that may train: of a trainable agent, and without an error."""
    return [t for episode in episodes for t in episode.traces if t.ok and t.agent.trainable]


def assign_advantage(trace: WireTrace, advantage: float) -> None:
    """Give every sampled token of the trace the same advantage."""
    for node in trace.nodes:
        if node.sampled:
            node.advantages = [advantage] * len(node.logprobs)
