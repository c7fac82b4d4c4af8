"""What the trainer said of the tokens of an episode, joined to its messages by the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from gradus.errors import ConfigError, CorruptStateError, ProtocolError
from gradus.monitor.token_record import TokenRecord, read_records, record_folder
from gradus.run.paths import RunDirectory

NUMBERS = ("policy", "entropy", "advantage", "weight", "push", "reference")
_DAMAGED = (OSError, ValueError, IndexError)
"""What arrays that do not fit each other raise too."""
Found = dict[tuple[int, int], dict[str, list[float | None]]]
"""By the places of trace and message: for each name, a number for each of its tokens."""


class Node(Protocol):
    """A message of a trace."""

    parent: int | None
    token_ids: list[int]


def trained_numbers(
    run_dir: RunDirectory, step: int, episode: str, traces: Sequence[Sequence[Node]]
) -> tuple[Found, str]:
    """The numbers of the tokens that trained in `step`, and why there are none."""
    if not run_dir.tokens.is_dir():
        return {}, (
            "the run keeps none (an evaluation, trainer.recorded_share = 0, or a run of an older "
            "gradus)"
        )
    if not record_folder(run_dir, step).is_dir():
        return {}, (
            f"tokens/step_{step} is not there: the step is not trained yet, none of its groups was "
            "chosen, or orchestrator.keep_gib deleted it"
        )
    found: Found = {}
    try:
        for record in read_records(run_dir, step, episode):
            _join(found, record, traces)
    except (*_DAMAGED, ConfigError, CorruptStateError, ProtocolError) as error:
        return {}, str(error)
    if found:
        return found, ""
    return {}, (
        "this group is not of the share that is kept (trainer.recorded_share), or nothing of the "
        "episode trained"
    )


def _join(found: Found, record: TokenRecord, traces: Sequence[Sequence[Node]]) -> None:
    """Add a record to the messages of the branch that begins with its tokens, if there is one."""
    number = record.sample_id.rpartition("/")[0].rpartition("/")[2]
    if not number.isdecimal() or int(number) >= len(traces):
        return
    nodes, wanted = traces[int(number)], record.token_ids.tolist()
    for path in _branches(nodes):
        tokens = [token for node in path for token in nodes[node].token_ids]
        if tokens[: len(wanted)] == wanted:
            _spread(found, record, int(number), [(it, len(nodes[it].token_ids)) for it in path])
            return


def _branches(nodes: Sequence[Node]) -> Iterator[list[int]]:
    """The path to each message that none follows; a damaged trace may lead in a circle."""
    parents = {node.parent for node in nodes}
    for leaf in (place for place in range(len(nodes)) if place not in parents):
        path: list[int] = []
        at: int | None = leaf
        while at is not None and 0 <= at < len(nodes) and at not in path:
            path.append(at)
            at = nodes[at].parent
        yield path[::-1]


def _spread(
    found: Found, record: TokenRecord, trace: int, sizes: Sequence[tuple[int, int]]
) -> None:
    """A message that branches share trains in one of them; its numbers are of that one."""
    weights = sum(record.loss_weights.values(), np.zeros(len(record.pushes), np.float32))
    columns: tuple[Any, ...] = (
        *(record.policy_logprobs, record.entropies, record.advantages, weights, record.pushes),
        np.nan if record.reference_logprobs is None else record.reference_logprobs,
    )
    values = np.full((len(columns), sum(size for _, size in sizes)), np.nan)
    for row, column in zip(values, columns, strict=True):
        row[np.flatnonzero(record.is_trained)] = column
    start = 0
    for node, size in sizes:
        part, start = values[:, start : start + size], start + size
        if not np.isnan(part).all():
            found[trace, node] = {
                name: [number if np.isfinite(number) else None for number in row]
                for name, row in zip(NUMBERS, part.tolist(), strict=True)
            }
