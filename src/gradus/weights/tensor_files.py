"""Tensors as safetensors files, which are hashed while they are written.

The format is an 8-byte length, a JSON header of that length and the values of every tensor end to
end. Blocks of a file are copied and hashed by several threads; nothing is read back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gradus.errors import ConfigError
from gradus.files import DurableFiles
from gradus.sealed import (
    BLOCK_BYTES,
    BlockDigest,
    FileEntry,
    content_entry,
    digest_block,
    entry_of,
    in_threads,
)

SHARD_BYTES = 4 << 30
"""Most bytes of tensors in one file; more are split over several files with an index."""

_ALIGNMENT = 8
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def write_tensors(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    files: DurableFiles,
    *,
    stem: str = "model",
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, FileEntry]:
    """Write the stream as `<stem>.safetensors`, or as shards with their index; what they hold.

    A stream that fails later leaves shards under other names.
    """
    shards: list[tuple[Path, FileEntry, list[str]]] = []
    total_bytes = 0
    for shard in _in_shards(tensors, shard_bytes):
        path = directory / f"shard-{len(shards):05d}"
        num_bytes = sum(tensor.nbytes for tensor in shard.values())
        written: list[FileEntry] = []
        files.stage_by(path, partial(_write_shard, shard, written), num_bytes=num_bytes)
        total_bytes += num_bytes
        shards.append((path, written[-1], list(shard)))
    if len(shards) == 1:
        [(path, entry, _)] = shards
        file = path.rename(directory / f"{stem}.safetensors")
        return {file.name: entry}
    entries: dict[str, FileEntry] = {}
    weight_map: dict[str, str] = {}
    for number, (path, entry, names) in enumerate(shards, start=1):
        file = path.rename(directory / f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors")
        entries[file.name] = entry
        weight_map |= dict.fromkeys(names, file.name)
    index = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    name = f"{stem}.safetensors.index.json"
    files.stage(directory / name, index.encode())
    return {**entries, name: content_entry(index.encode())}


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Make `path` hold these tensors, which are contiguous and in main memory."""
    # Wide values first, so that each lies at a multiple of its size; readers map the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    pieces = [memoryview(_header(names, tensors)), *(_raw(tensors[name]) for name in names)]
    blocks = list(_in_blocks(pieces))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:

        def write(number: int) -> BlockDigest:
            offset = number * BLOCK_BYTES
            for piece in blocks[number]:
                _write_at(descriptor, piece, offset)
                offset += len(piece)
            return digest_block(blocks[number])

        return entry_of(in_threads(write, range(len(blocks))))
    finally:
        os.close(descriptor)


def _write_shard(shard: Mapping[str, Tensor], written: list[FileEntry], path: Path) -> None:
    written.append(write_tensor_file(path, shard))


def _header(names: Iterable[str], tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ConfigError(f"{name} is {tensor.dtype}, which safetensors files do not hold")
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _in_blocks(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The pieces end to end, cut every BLOCK_BYTES."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for piece in pieces:
        rest = piece
        while len(rest) >= room:
            yield [*block, rest[:room]]
            rest, block, room = rest[room:], [], BLOCK_BYTES
        if len(rest):
            block.append(rest)
            room -= len(rest)
    if block:
        yield block


def _write_at(descriptor: int, piece: memoryview, offset: int) -> None:
    while len(piece):
        written = os.pwrite(descriptor, piece, offset)
        piece, offset = piece[written:], offset + written


def _in_shards(
    tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if shard and filled + tensor.nbytes > shard_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor
        filled += tensor.nbytes
    yield shard
