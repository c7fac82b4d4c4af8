"""Keys and items of a config, for the three task sets over the same items."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, field_validator

from gradus_gpqa.items import HUB_DATASET, KINDS, LEVELS, Item, generate_items, hub_items
from gradus_kit.tasksets.holdout import HoldoutKeys

DEFAULT_NUM_ITEMS = 200
INSTRUCTION = "Answer with the letter of the right option."


class GpqaConfig(vf.TasksetConfig, HoldoutKeys):
    """Which items, the same keys for all three task sets."""

    source: Literal["generated", "hub"] = "generated"
    """`generated` makes items offline, `hub` loads `dataset`, which is gated."""
    num_items: int | None = Field(None, ge=1)
    """Number of items. None means 200 of `generated`, and all of `hub`."""
    seed: int = 0
    """Seed of the generated questions and of the order of the options."""
    kinds: list[str] = Field(default_factory=lambda: list(KINDS), min_length=1)
    """Generators to use, in turn."""
    levels: list[int] = Field(default_factory=lambda: list(LEVELS), min_length=1)
    """Levels to use: 1 is easy, 3 is hard."""
    dataset: str = HUB_DATASET
    """Data set on the hub, or a local folder with its columns."""
    subset: str | None = "gpqa_main"
    """Its part: `gpqa_main`, `gpqa_extended` or `gpqa_diamond`."""
    dataset_split: str = "train"
    """Split of the data set."""
    holdout_fraction: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the items that is held out, by the hash of each."""

    @field_validator("kinds")
    @classmethod
    def _known_kinds(cls, kinds: list[str]) -> list[str]:
        if unknown := sorted(set(kinds) - set(KINDS)):
            raise ValueError(f"{unknown[0]!r} is not a kind; there are {', '.join(KINDS)}")
        return list(dict.fromkeys(kinds))

    @field_validator("levels")
    @classmethod
    def _known_levels(cls, levels: list[int]) -> list[int]:
        if unknown := sorted(set(levels) - set(LEVELS)):
            raise ValueError(f"{unknown[0]} is not a level; there are 1, 2 and 3")
        return list(dict.fromkeys(levels))


def load_items(config: GpqaConfig) -> list[Item]:
    """The items of a config, on its side of the hold-out."""
    if config.source == "generated":
        num = config.num_items or DEFAULT_NUM_ITEMS
        items: Iterable[Item] = generate_items(
            num, seed=config.seed, kinds=config.kinds, levels=config.levels
        )
    else:
        rows = hub_items(
            config.dataset, subset=config.subset, split=config.dataset_split, seed=config.seed
        )
        items = itertools.islice(rows, config.num_items)
    return [item for item in items if config.keeps(item.key)]
