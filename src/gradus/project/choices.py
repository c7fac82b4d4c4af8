"""What a run is set to for these rows, this model and this machine, each with its reason."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.config import TrainerConfig
from gradus.errors import ConfigError
from gradus.plan import learning_rate
from gradus.plan.gpus import GIB, FoundGpus
from gradus.plan.hardware import Hardware
from gradus.plan.memory import ModelShape, footprint_of

_FREE_REPLY = 256
"""Tokens of a reply where no answer says how long one is."""
_THOUGHTS = 512
"""Tokens before the answer of a model that may think."""
_ROOM = 64
"""Tokens of what is said between two replies."""
_LEAST_REPLY = 8
_LEAST_ANSWER, _MORE_ANSWER = 16, 8
_TRAINER_SHARE = 0.5
"""Of the memory; the engine and the other processes have the rest."""
TINY = 20_000_000
_ADAPTER_RANK = 16
_WIDTH = 96
"""Of comments."""
_MICRO_BATCH = 2048


@dataclass(frozen=True)
class Setting:
    """A key of a config with its value, and why it has it.

    >>> print(Setting("group_size", 8, "Enough to compare.").toml())
    # Enough to compare.
    group_size = 8
    """

    key: str
    value: Any
    reason: str = ""

    def toml(self) -> str:
        lines = [it for line in self.reason.splitlines() for it in textwrap.wrap(line, _WIDTH)]
        return "\n".join([*(f"# {line}" for line in lines), f"{self.key} = {_toml(self.value)}"])


def toml(tables: Iterable[tuple[str, Sequence[Setting]]], *, head: str) -> str:
    """A whole file: comment lines, then tables by their headers, "" for the top."""
    blocks = ["\n".join(f"# {line}" for line in head.splitlines())]
    for header, settings in tables:
        lines = [setting.toml() for setting in settings]
        blocks.append("\n".join([header, *lines] if header else lines))
    return "\n\n".join(blocks) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(it)}" for key, it in value.items()) + " }"
    return f"{value:g}" if isinstance(value, float) and value < 1e-3 else _json(value)


def _json(value: Any) -> str:
    """JSON that is TOML too: no halves of a character, and no DEL as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True)
class RowLengths:
    """How long the rows are for a model, and how large the model is."""

    prompt_tokens: int
    """Of the longest prompt, tools included."""
    answer_tokens: int
    """Of the longest answer; 0 without answers."""
    how: str
    """What was counted, for a person."""
    renderer: str = ""
    """The renderer's name; "" where it is not known."""
    model: str = ""
    """Its name, or its folder."""
    shape: ModelShape | None = None
    most_tokens: int | None = None
    """The model's positions."""
    longest_row: int = 1
    """The row of the longest prompt, from 1."""
    may_think: bool = False
    """Whether a reply may begin with thoughts, or that is not known."""


def choose(lengths: RowLengths, num_rows: int, turns: int, gpus: FoundGpus) -> dict[str, Setting]:
    """The numbers of all stages by their keys, and `dtype`; `rank` is there where only adapters
    fit. `turns` is how often the model speaks in an episode.

    ConfigError for a prompt that leaves the model no room to reply.
    """
    is_free = not lengths.answer_tokens
    grown = math.ceil(1.5 * lengths.answer_tokens) + _MORE_ANSWER
    said = _FREE_REPLY if is_free else max(_LEAST_ANSWER, grown)
    thoughts = _THOUGHTS if lengths.may_think else 0
    think = f", and {thoughts} in case it thinks first" if thoughts else ""
    said = wanted = said + thoughts
    needed = lengths.prompt_tokens + turns * said + (turns - 1) * _ROOM + 16
    length = math.ceil(needed / 32) * 32
    if lengths.most_tokens is not None and length > lengths.most_tokens:
        length = lengths.most_tokens
        said = min(said, (length - lengths.prompt_tokens) // turns)
        if said < _LEAST_REPLY:
            raise ConfigError(
                f"row {lengths.longest_row} has a prompt of {lengths.prompt_tokens:,} tokens, and "
                f"the model reads {length:,} with its replies; shorten that row and others as "
                "long, leave them out, or name a model that reads more with --model"
            )
    parameters = None if lengths.shape is None else lengths.shape.num_parameters
    is_tiny = parameters is not None and parameters < TINY
    size, groups = (16, 16) if is_tiny else (8, 16 if gpus.gpus else 8)
    batch = max(1, min(32, num_rows // 4))
    steps = max(20, min(400, math.ceil((12 if is_tiny else 6) * num_rows / batch)))
    again = f" x {turns} turns" if turns > 1 else ""
    least = f", at least {_LEAST_ANSWER}" if grown < _LEAST_ANSWER else ""
    formula = f"1.5 x the {lengths.answer_tokens} tokens of the longest answer + {_MORE_ANSWER}"
    why = "a guess, a paragraph, as there are no answers to measure" if is_free else formula + least
    why += think
    if said < wanted:
        why = f"all that the longest prompt leaves of the {length:,} tokens that the model reads"
    passes = f"{steps * batch / num_rows:.2g} x the {num_rows} rows, or less: see [validation]"
    prompt = f"{lengths.prompt_tokens} tokens of the longest prompt"
    fit = _fit(lengths.shape, length, gpus)
    chosen = [
        Setting("max_length_tokens", length, f"{prompt}, {said} to reply{again}; {lengths.how}"),
        Setting("max_completion_tokens", said, why),
        Setting("groups_per_batch", groups, f"{groups} x {size} episodes a step"),
        Setting("group_size", size, "episodes of one task, which are compared with each other"),
        Setting("batch_conversations", batch),
        Setting("max_steps", steps, passes),
        Setting("dtype", "auto", f"{Hardware.current(gpus).dtype()} on this machine"),
        *fit,
    ]
    rates = _rates(lengths.model, has_adapters=len(fit) > 1)
    return {setting.key: setting for setting in chosen} | rates


def _fit(shape: ModelShape | None, length: int, gpus: FoundGpus) -> list[Setting]:
    """Every weight where those with gradients and moments fit, else adapters."""
    own = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = gpus.gpus[-1].memory_bytes if gpus.gpus else own
    tokens = max(_MICRO_BATCH, length)
    why = "one of the longest samples, or several: raise it while memory lasts"
    micro_batch = Setting("micro_batch_tokens", tokens, why)
    if shape is None or memory is None:
        return [micro_batch]
    trainer = TrainerConfig(compute_dtype="float32")
    found = footprint_of(shape, trainer, on_gpu=bool(gpus.gpus))
    needed = found.device_bytes if gpus.gpus else found.host_bytes
    room, place = _TRAINER_SHARE * memory, "GPU" if gpus.gpus else "main memory"
    told = f"{shape.num_parameters / 1e6:.3g}M parameters take {needed / GIB:.1f} GiB to train"
    told += f", and half of the {place} is {room / GIB:.1f}"
    return [micro_batch] if needed <= room else [micro_batch, Setting("rank", _ADAPTER_RANK, told)]


def _rates(model: str, *, has_adapters: bool) -> dict[str, Setting]:
    rl = learning_rate.choose("rl", model, has_adapters=has_adapters).lr
    sft = learning_rate.choose("sft", model, has_adapters=has_adapters).lr
    reason = 'what "auto" takes for {} at its size; the first key to vary, by x 1/3 and x 3'
    settings = Setting("lr", rl, reason.format("RL")), Setting("lr", sft, reason.format("SFT"))
    return dict(zip(("lr", "sft_lr"), settings, strict=True))
