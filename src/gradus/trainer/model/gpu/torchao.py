"""Matrix products of decoder layers in float8, by the optional package `torchao`.

Weights stay what they are: float32 masters, gathered in the compute dtype, published under the same
names. Each product rounds its two factors to 8 bits, at a scale that it finds by their largest
element, forward and backward; sums are kept wider. The output layer, embeddings, routers, experts
in one tensor, adapters and layers whose sizes the kernels do not take keep the compute dtype.

What is trained then differs from what an engine samples in bfloat16 by more than rounding:
`loss/mismatch_kl/mean` shows by how much. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.trainer.model.kernels import DeviceFacts, multiplies_float8
from gradus.trainer.model.lora import ROUTERS, LoraLinear

logger = get_logger(__name__)

_STEP = 16
"""Both sizes of a weight must be multiples of this."""


def use_float8(
    layers: Sequence[torch.nn.Module], facts: DeviceFacts, torchao: Any = None
) -> list[str]:
    """Let the linear layers of decoder layers multiply in float8, in place; names them.

    Goes before `compile_layers`. ConfigError without the package, on a device whose arithmetic has
    no float8, or when no layer can be converted. `torchao` is the module `torchao.float8`.
    """
    if not multiplies_float8(facts):
        what = (
            "a CPU"
            if facts.kind != "cuda"
            else "a GPU of compute capability {}.{}".format(*facts.capability)
        )
        raise ConfigError(
            f"parallel.float8: {what} does not multiply float8; it takes a GPU of capability 8.9 "
            "or more (Ada, Hopper, Blackwell), or turn float8 off"
        )
    library = _library() if torchao is None else torchao
    converted: list[str] = []

    def converts(module: torch.nn.Module, name: str) -> bool:
        is_chosen = _takes_float8(module, name)
        if is_chosen:
            converted.append(name)
        return is_chosen

    # Rows of a micro batch are any number; padding them lets the kernels add over tokens.
    config = library.Float8LinearConfig(pad_inner_dim=True)
    for layer in layers:
        library.convert_to_float8_training(layer, module_filter_fn=converts, config=config)
    if not converted:
        raise ConfigError(
            f"parallel.float8: no linear layer of this model has sizes in steps of {_STEP}; turn "
            "float8 off"
        )
    logger.info("%d linear layers multiply in float8", len(converted))
    return converted


def _takes_float8(module: torch.nn.Module, name: str) -> bool:
    """Tell whether the float8 kernels compute this linear layer, and may."""
    if not isinstance(module, torch.nn.Linear) or isinstance(module, LoraLinear):
        return False
    fits = module.in_features % _STEP == 0 and module.out_features % _STEP == 0
    return fits and name.rpartition(".")[2] not in ROUTERS


def _library() -> Any:
    try:
        import torchao.float8
    except ModuleNotFoundError as error:
        raise ConfigError(
            "parallel.float8 needs the package 'torchao': pip install 'gradus-rl[float8]', or turn "
            "float8 off"
        ) from error
    return torchao.float8
