"""Layers that carry state from token to token, run one sample at a time.

A mixer's projections, gates and norms read the packed row as they are. Its convolution and its
scan, by transformers' reference code or by the kernels of `flash-linear-attention` where a GPU has
them, would read the row as one text. Here they get the rectangles of padded attention, one sample
in each line: state flows forward only, so that padding behind a sample changes nothing. Where ranks
share the row, each gets whole samples of a part of the heads.

Shapes: P tokens that are here, T tokens of the row, H heads, K key heads or groups, B samples of a
rectangle, L the longest of them; C channels of a convolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradus.trainer.model.cpu.attention import PaddedRows, to_rows, to_tokens
from gradus.trainer.model.cpu.scan import chunk_scan

MIXERS = frozenset(
    {
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        *("OlmoHybridGatedDeltaNet", "KimiLinearDeltaAttention"),
        *("Mamba2Mixer", "NemotronHMamba2Mixer", "FalconH1Mixer", "BambaMixer"),
        *("GraniteMoeHybridMambaLayer", "Lfm2ShortConv", "Lfm2MoeShortConv"),
    }
)
"""Classes of transformers whose first argument is [B, L, ·] and whose result has that shape."""
_CONVOLUTION = "causal_conv1d_fn"
_DELTA_SCANS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_MAMBA_SCAN = "mamba2_chunk_scan"
"""What transformers' model files call their own copies of what mixes tokens."""

Forward = Callable[..., Any]


def state_mixers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The known parts of a model that mix tokens by a state or a convolution."""
    return [mixer for mixer in module.modules() if type(mixer).__name__ in MIXERS]


def separate_states(layers: Sequence[torch.nn.Module]) -> None:
    """Let each mixer read a packed row sample by sample, in place.

    A layer's forward tells its mixer how the row is packed, again when backward computes it again.
    """
    for layer in layers:
        for mixer in state_mixers(layer):
            mixing = _Mixing(mixer)
            mixer.forward = partial(_of_tokens, mixing.in_place())
            layer.forward = partial(_in_row, layer.forward, mixing)


def _in_row(forward: Forward, mixing: _Mixing, *args: Any, **kwargs: Any) -> Any:
    mixing.layout = kwargs["packed_layout"]
    return forward(*args, **kwargs)


def _of_tokens(forward: Forward, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Caches and masks are never set here."""
    return forward(hidden_states)


class _Convolution(NamedTuple):
    """What a mixer asked of its convolution: weights [C, ·], and [C] or none."""

    weight: Tensor
    bias: Tensor | None
    activation: str | None


class _Mixing:
    """What stands in a mixer in the place of its convolution and its scan.

    The convolution waits for the scan, so that both happen on the same rectangles.
    """

    layout: Any = None
    """Of the row that the layer reads."""

    def __init__(self, mixer: torch.nn.Module) -> None:
        self._mixer: Any = mixer
        self._own: Any = inspect.unwrap(type(mixer).forward)
        names = self._own.__globals__
        self._convolution: Forward = names[_CONVOLUTION]
        self._delta_scan = next((names[scan] for scan in _DELTA_SCANS if scan in names), None)
        self._is_alone = self._delta_scan is None and _MAMBA_SCAN not in names
        self._asked: _Convolution | None = None

    def in_place(self) -> Forward:
        """The mixer's own forward, which finds these in the place of its functions."""
        own = self._own
        ours = {_CONVOLUTION: self.convolve, _MAMBA_SCAN: self.scan_mamba}
        names = own.__globals__ | ours | dict.fromkeys(_DELTA_SCANS, self.scan_delta)
        forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        forward.__kwdefaults__ = own.__kwdefaults__
        return MethodType(forward, self._mixer)

    def convolve(
        self,
        tokens: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, C, P]: as it came where a scan follows."""
        self._asked = _Convolution(weight, bias, activation)
        if not self._is_alone:
            return tokens
        mixed = self._mixed([tokens[0].T[..., None]], [], lambda channels: channels)
        return mixed[..., 0].T[None]

    def scan_delta(
        self, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        """[1, P, H, ·], from queries, keys and values of that shape, fading g and strength beta."""
        copies = value.shape[2] // getattr(self._mixer, "num_k_heads", value.shape[2])

        def scan(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            shared = value.shape[2] // query.shape[2]
            query, key = (tensor.repeat_interleave(shared, dim=2) for tensor in (query, key))
            assert self._delta_scan is not None
            found: Tensor = self._delta_scan(query, key, value, g=g, beta=beta, **options)[0]
            return found

        convolved = [query[0, :, ::copies], key[0, :, ::copies], value[0]]
        return self._mixed(convolved, [g[0], beta[0]], scan)[None], None

    def scan_mamba(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
    ) -> Tensor:
        """[1, P, H, ·], from what `chunk_scan` takes."""
        own = self.layout.own_part
        options |= {name: own(options[name]) for name in ("D", "dt_bias")}
        A = own(A)

        def scan(hidden_states: Tensor, into: Tensor, out: Tensor, dt: Tensor) -> Tensor:
            return chunk_scan(hidden_states, dt, A, into, out, **options)

        return self._mixed([hidden_states[0], B[0], C[0]], [dt[0]], scan)[None]

    def _mixed(self, convolved: list[Tensor], others: list[Tensor], scan: Forward) -> Tensor:
        """[P, H, ·]: what the scan gives for tensors [P, H or K, ·], the first of them convolved.

        The scan takes and gives [B, L, H or K, ·].
        """
        layout, first = self.layout, len(convolved)
        convolution = self._own_convolution(convolved)
        whole = layout.own_heads([*convolved, *others])
        channels = [tensor.flatten(1) for tensor in whole[:first]]
        padded: PaddedRows = layout.rows(channels[0].dtype)
        sizes = [block.num_rows for block in padded.blocks]
        flat = [torch.cat(channels, 1), *(tensor.flatten(1) for tensor in whole[first:])]
        split = [torch.split(to_rows(tensor, padded), sizes) for tensor in flat]
        parts, shape = [], torch.Size()
        for block, rows, *more in zip(padded.blocks, *split, strict=True):
            lines = rows.view(block.samples, block.length, -1).transpose(1, 2)
            done = self._convolution(lines, *convolution[:2], activation=convolution.activation)
            pieces = torch.split(done.transpose(1, 2), [it.shape[1] for it in channels], -1)
            given = [
                piece.reshape(block.samples, block.length, *like.shape[1:])
                for piece, like in zip([*pieces, *more], whole, strict=True)
            ]
            mixed: Tensor = scan(*given)
            shape = mixed.shape[2:]
            parts.append(mixed.reshape(block.num_rows, -1))
        rows = to_tokens(torch.cat(parts), padded)
        tokens: Tensor = layout.all_heads(rows.reshape(-1, *shape))
        return tokens

    def _own_convolution(self, convolved: list[Tensor]) -> _Convolution:
        """Of the channels of this rank's heads."""
        assert self._asked is not None, "a scan without its convolution"
        (weight, bias, activation), self._asked = self._asked, None
        shapes = [tensor.shape[1:] for tensor in convolved]

        def own(per_channel: Tensor) -> Tensor:
            parts = torch.split(per_channel, [shape.numel() for shape in shapes])
            by_head = [
                it.reshape(*shape, *it.shape[1:]) for it, shape in zip(parts, shapes, strict=True)
            ]
            return torch.cat([self.layout.own_part(tensor).flatten(0, 1) for tensor in by_head])

        return _Convolution(own(weight), None if bias is None else own(bias), activation)
