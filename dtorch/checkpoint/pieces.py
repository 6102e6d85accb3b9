"""What a checkpoint is made of, as client and executors tell each other of it. Values, and the checksums of bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

__all__ = [
    "BLOCK", "Chunk", "Piece", "Source", "Stored", "Wanted", "blocks", "canonical", "checksum", "checksums",
]  # fmt: skip

BLOCK = 1 << 20
"""Bytes under one checksum: what is read of a tensor is read in whole blocks."""


class Piece(NamedTuple):
    """Part of a tensor, as one executor writes it: what rank `rank` of mesh `mesh` holds of `ref`.

    `number` counts the pieces of a save, `file` and `offset` say where it goes, `start` and `sizes` which box of the
    tensor `name` it is.
    """

    number: int
    ref: int
    mesh: int
    rank: int
    file: str
    offset: int
    name: str
    start: tuple[int, ...]
    sizes: tuple[int, ...]


class Chunk(NamedTuple):
    """A box of a tensor, as it lies in a file: row-major bytes, or what ``torch.save`` made of it (`pickled`).

    `checks` are the CRC-32 of its bytes, one a block (or, if `pickled`, one in all); None where the file has none.
    """

    file: str
    offset: int
    nbytes: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    checks: tuple[int, ...] | None = None
    pickled: bool = False


class Wanted(NamedTuple):
    """A tensor to be read: what each rank takes of it, as ((start, length) per dim) and strides, and where it lies."""

    ref: int
    mesh: int
    name: str
    dtype: torch.dtype
    regions: tuple[tuple[tuple[int, int], ...], ...]
    strides: tuple[tuple[int, ...] | None, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint: its `chunks` in files, or its `value` where the whole file had to be read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    value: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that was opened: the tree of the state, and where its tensors are.

    `stamps`: of its files, as they were when their headers were read (:func:`files.stamp`).
    """

    path: str
    tree: Any
    tensors: dict[str, Stored]
    stamps: Mapping[str, Any] = field(default_factory=dict[str, Any])


def blocks(nbytes: int) -> int:
    """How many checksums `nbytes` have."""
    return -(-nbytes // BLOCK)


def checksums(data: Any) -> tuple[int, ...]:
    """The CRC-32 of every block of `data`."""
    view = memoryview(data)
    return tuple(zlib.crc32(view[i : i + BLOCK]) for i in range(0, len(view), BLOCK))


def canonical(value: Any) -> bytes:
    """`value` as JSON of one form only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def checksum(value: Any) -> str:
    """The CRC-32 of a JSON value, in hex."""
    return f"{zlib.crc32(canonical(value)):08x}"


def contiguous_rows(region: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    """Whether `region` of a row-major tensor of `shape` is one run of bytes because it is whole in all dims but 0."""
    return all(span == (0, n) for span, n in zip(region[1:], shape[1:], strict=True))
