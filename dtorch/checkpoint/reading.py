"""Reading boxes of tensors out of files: no more bytes than the box needs, in whole blocks, each checked."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .pieces import BLOCK, Chunk, checksums

__all__ = ["copy_overlap"]

# Bytes read at once: large for the disk, small for memory.
_READ = 16 << 20


def copy_overlap(local: Tensor, region: tuple[tuple[int, int], ...], chunk: Chunk, fd: Callable[[str], int]) -> int:
    """Copy what `chunk` has of `region` to its place in `local`; how many elements that were."""
    box: list[tuple[int, int]] = []
    for (start, n), begin, size in zip(region, chunk.start, chunk.sizes, strict=True):
        low, high = max(start, begin), min(start + n, begin + size)
        if low >= high:
            return 0
        box.append((low, high))
    target = local
    for d, (low, high) in enumerate(box):
        target = target.narrow(d, low - region[d][0], high - low)
    inner = [(low - begin, high - begin) for (low, high), begin in zip(box, chunk.start, strict=True)]
    if chunk.pickled:
        target.copy_(_narrowed(_unpickled(chunk, local.dtype, fd(chunk.file)), inner))
        return target.numel()
    if not box:
        target, inner, chunk = target.reshape(1), [(0, 1)], chunk._replace(sizes=(1,))
    row = prod(chunk.sizes[1:]) * local.dtype.itemsize
    step = max(1, _READ // row)
    first, last = inner[0]
    for r in range(first, last, step):
        end = min(r + step, last)
        data = _read_bytes(chunk, fd(chunk.file), r * row, end * row)
        rows = data.view(local.dtype).view(end - r, *chunk.sizes[1:])
        target.narrow(0, r - first, end - r).copy_(_narrowed(rows, [(0, end - r), *inner[1:]]))
    return target.numel()


def _narrowed(t: Tensor, box: list[tuple[int, int]]) -> Tensor:
    for d, (low, high) in enumerate(box):
        t = t.narrow(d, low, high - low)
    return t


def _read_bytes(chunk: Chunk, fd: int, begin: int, end: int) -> Tensor:
    """Bytes `begin` to `end` of a chunk, checked as far as there are checksums."""
    if chunk.checks is None:
        return _pread(chunk, fd, begin, end)
    low, high = begin // BLOCK, -(-end // BLOCK)
    data = _pread(chunk, fd, low * BLOCK, min(high * BLOCK, chunk.nbytes))
    for i, found in enumerate(checksums(data.numpy())):
        if found != chunk.checks[low + i]:
            at = chunk.offset + (low + i) * BLOCK
            raise CheckpointError(f"{chunk.file}: damaged: the checksum of the block at byte {at:,} is wrong")
    return data[begin - low * BLOCK : end - low * BLOCK]


def _pread(chunk: Chunk, fd: int, begin: int, end: int) -> Tensor:
    out = torch.empty(end - begin, dtype=torch.uint8)
    raw: Any = out.numpy()
    view = memoryview(raw)
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], chunk.offset + begin + done)
        if n == 0:
            at = chunk.offset + begin + done
            raise CheckpointError(f"{chunk.file}: truncated: it ends at byte {at:,}, before its last tensor does")
        done += n
    return out


def _unpickled(chunk: Chunk, dtype: torch.dtype, fd: int) -> Tensor:
    """The tensor that ``torch.save`` made the chunk of."""
    data = _pread(chunk, fd, 0, chunk.nbytes).numpy().tobytes()
    where = f"{chunk.file}: damaged: the item at byte {chunk.offset:,}"
    if chunk.checks is not None and zlib.crc32(data) != chunk.checks[0]:
        raise CheckpointError(f"{where} has another checksum")
    try:
        if chunk.checks is None:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                if archive.testzip() is not None:
                    raise ValueError
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # damaged bytes raise anything
        raise CheckpointError(f"{where} is no tensor that torch saved") from None
    if not isinstance(found, Tensor) or found.dtype != dtype or tuple(found.shape) != chunk.sizes:
        raise CheckpointError(f"{where} is not the {dtype} {list(chunk.sizes)} that was to be there")
    return found
