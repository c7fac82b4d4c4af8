"""A seed of its own for every model call of an episode.

An engine that gets the same seed twice draws the same random numbers twice. If all calls of an
episode shared one seed, a move would depend on the luck of the move before: in a game, whoever
answers a bet would bet more often, whatever the policy says.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

REMEMBERED_PROMPTS = 65_536
"""Prompts whose repetitions are counted; the oldest is forgotten first."""


class RequestSeeds:
    """Turns the seed of an episode into the seed of one request, by its prompt.

    The same episode with the same prompts gets the same seeds, in whatever order requests come.
    Who asks the same prompt again, such as several solvers of one problem, gets another seed.

    >>> seeds = RequestSeeds()
    >>> first, again = (seeds.renewed({"seed": 1, "messages": []})["seed"] for _ in range(2))
    >>> first == again
    False
    """

    def __init__(self, *, remembered_prompts: int = REMEMBERED_PROMPTS) -> None:
        self._remembered = remembered_prompts
        self._asked: OrderedDict[bytes, int] = OrderedDict()

    def renewed(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body of a generate or a chat request with its own seed; one without a seed as it
        is."""
        sampling = body.get("sampling_params")
        if isinstance(sampling, Mapping) and sampling.get("seed") is not None:
            seed = self._seed_of(sampling["seed"], body.get("token_ids"))
            return {**body, "sampling_params": {**sampling, "seed": seed}}
        if body.get("seed") is not None:
            prompt = body.get("messages", body.get("prompt", body.get("input")))
            return {**body, "seed": self._seed_of(body["seed"], prompt)}
        return body

    def _seed_of(self, seed: object, prompt: object) -> int:
        asked = hashlib.sha256(msgspec.json.encode([seed, prompt])).digest()
        count = self._asked.pop(asked, 0)
        self._asked[asked] = count + 1
        if len(self._asked) > self._remembered:
            self._asked.popitem(last=False)
        digest = hashlib.sha256(asked + count.to_bytes(8)).digest()
        # 31 bits, because some engines read a seed as a signed integer of 32.
        return int.from_bytes(digest[:4]) >> 1
