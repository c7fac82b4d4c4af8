"""What `lr = "auto"` means: a peak learning rate by kind of run, size of the model and adapters.

Between the rows of the table it goes by powers of the size. Where the numbers come from, and what
was measured of them, stands in docs/training.md; `benchmarks/learning_rate.py` measures them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar

from gradus.config import RunConfig, SftConfig, StrictConfig, TrainerConfig
from gradus.plan.memory import read_model_shape
from gradus.run.model_files import model_folder

Learning = Literal["rl", "sft"]
Config = TypeVar("Config", bound=StrictConfig)
Trained = TypeVar("Trained", bound=TrainerConfig | SftConfig)

_SIZES = (1e5, 1e6, 1e8, 1e9, 1e10, 1e11)
"""Parameters of the model, adapters aside."""
_RATES: dict[Learning, tuple[float, ...]] = {
    "rl": (1e-3, 5e-4, 5e-5, 5e-6, 2e-6, 1e-6),
    "sft": (6e-3, 3e-3, 3e-4, 5e-5, 1.5e-5, 1e-5),
}
"""Of AdamW on every weight, and of Muon, which is scaled to it."""
_ADAPTER_FACTORS = (1.0, 1.0, 10.0, 10.0, 10.0, 10.0)
"""What adapters take of that rate. Their best rate falls less with the size than that of all
weights does, so that they begin together."""
UNKNOWN_SIZE = 1e9
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z0-9])")


@dataclass(frozen=True)
class ChosenRate:
    """A learning rate, and why it is that."""

    lr: float
    reason: str

    def __str__(self) -> str:
        return f"{self.lr:g}, {self.reason}"


def learning_rate(kind: Learning, num_parameters: float, *, has_adapters: bool) -> float:
    """The rate for a model of a size, with two digits.

    >>> learning_rate("sft", 1e9, has_adapters=False), learning_rate("sft", 1e9, has_adapters=True)
    (5e-05, 0.0005)
    """
    rate = _between(num_parameters, _RATES[kind])
    if has_adapters:
        rate *= _between(num_parameters, _ADAPTER_FACTORS)
    return float(f"{rate:.1e}")


def _between(size: float, values: tuple[float, ...]) -> float:
    """The value at a size: straight lines between the rows, both axes in logarithms."""
    size = min(max(size, _SIZES[0]), _SIZES[-1])
    for (low, high), (first, last) in zip(pairwise(_SIZES), pairwise(values), strict=True):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return first * math.pow(last / first, share)
    return values[-1]


def choose(kind: Learning, model: str, *, has_adapters: bool) -> ChosenRate:
    """The rate for a model on this machine; for one that is not, by the size in its name."""
    folder = model_folder(model)
    shape = None if folder is None else read_model_shape(folder)
    named = _SIZE_IN_NAME.search(model.rpartition("/")[2])
    size, how = UNKNOWN_SIZE, " taken, since no file here tells them: better write lr"
    if shape is not None and shape.num_parameters:
        size, how = shape.num_parameters, ""
    elif named is not None:
        size, how = float(named[1]) * {"b": 1e9, "m": 1e6}[named[2].lower()], " by its name"
    what = "adapters" if has_adapters else "all weights"
    reason = f"chosen for {kind}, {what}, {_counted(size)} parameters{how}"
    return ChosenRate(learning_rate(kind, size, has_adapters=has_adapters), reason)


def with_learning_rate(config: Config, recorded: float | None = None) -> tuple[Config, str]:
    """The config with a number in the place of "auto", and why it is that; "" where one stands.

    A resumed run keeps the number that was `recorded`.
    """
    changed: Any
    if isinstance(config, SftConfig):
        changed, reason = with_rate(config, config.model.name, recorded)
        return changed, reason
    if not isinstance(config, RunConfig):
        return config, ""
    trainer, reason = with_rate(config.trainer, config.model.name, recorded)
    return config.model_copy(update={"trainer": trainer}) if reason else config, reason


def with_rate(learning: Trained, model: str, recorded: float | None = None) -> tuple[Trained, str]:
    """The same for what trains a model."""
    optimizer = learning.optimizer
    if optimizer.lr != "auto":
        return learning, ""
    kind: Learning = "sft" if isinstance(learning, SftConfig) else "rl"
    found = choose(kind, model, has_adapters=learning.lora is not None)
    if recorded is not None:
        found = ChosenRate(recorded, "as in the launches before")
    rated = optimizer.model_copy(update={"lr": found.lr})
    changed: Any = learning.model_copy(update={"optimizer": rated})
    return changed, str(found)


def _counted(number: float) -> str:
    """A count as a person says it.

    >>> _counted(134_515_008), _counted(7e9)
    ('135 M', '7 B')
    """
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
