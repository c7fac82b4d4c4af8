"""The only encoder and decoder for bytes that cross a process or a restart: msgpack with typed
numpy arrays.

No pickle. An array travels as [dtype, shape, raw bytes]; only the dtypes below are accepted. Arrays
of int16, the experts of a sample's tokens, are the largest by far and are compressed, so a message
can take at most MAX_RATIO times its bytes.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np

from gradus.errors import ProtocolError
from gradus.wire.micro_batch import RankBatch

T = TypeVar("T")
_DTYPES = {"uint8", "uint16", "int16", "int32", "int64", "float32", "bool"}
_COMPRESSED = "int16"
MAX_RATIO = 32
"""The bytes of an array by those that it has on the wire; what would be less is padded."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        raw = array.tobytes()
        if str(array.dtype) == _COMPRESSED:
            raw = zlib.compress(raw, level=1).ljust(len(raw) // MAX_RATIO + 1, b"\0")
        return [str(array.dtype), list(array.shape), raw]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_other(expected: type, value: Any) -> Any:
    kind = get_origin(expected) or expected
    if kind is Counter:
        return Counter(msgspec.convert(value, dict[str, int]))
    if kind is not np.ndarray:
        raise TypeError(f"cannot decode {expected}")
    if not (isinstance(value, list) and len(value) == 3):
        raise ValueError("an array must be [dtype, shape, bytes]")
    dtype, shape, raw = value
    if dtype not in _DTYPES or not isinstance(raw, bytes) or not isinstance(shape, list):
        raise ValueError(f"array of dtype {dtype!r} is not accepted; use one of {sorted(_DTYPES)}")
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"array shape {shape!r} is not a list of sizes")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if dtype == _COMPRESSED:
        raw = _uncompressed(raw, size)
    if size != len(raw):
        raise ValueError(f"array of shape {shape} and dtype {dtype} cannot have {len(raw)} bytes")
    return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)


def _uncompressed(raw: bytes, size: int) -> bytes:
    """At most one byte more than the array has; ValueError where these are no such bytes."""
    if size > MAX_RATIO * len(raw):
        raise ValueError(f"{len(raw)} bytes claim to hold {size}, above {MAX_RATIO} times as many")
    reader = zlib.decompressobj()
    try:
        return reader.decompress(raw, size + 1)
    except zlib.error as error:
        raise ValueError(f"an array cannot be read: {error}") from error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[T] | Any) -> T:
    """The message of type `kind` in `data`; ProtocolError when it is anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_other)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise ProtocolError(f"{len(data)} bytes are not a valid {name}: {error}") from error


def decode_rank_batch(data: bytes) -> RankBatch:
    """One rank's part of a batch, with every micro batch checked."""
    batch: RankBatch = decode(data, RankBatch)
    for micro_batch in batch.micro_batches:
        micro_batch.check()
    return batch
