"""What an executor is told to do in a redistribution. Plain tuples, small to pickle; the client plans them
(:mod:`dtorch.sharding.redistribute`), executors run them (:mod:`dtorch.executor.redistribution`).

All dims here are in *memory order* (slowest first): where a tensor is not row-major, ``Program.order`` says which
of its dims comes where, so that the pieces that travel are contiguous at both ends.

Within a group of executors every transfer runs in *rounds*. In a round each member writes into its own slot,
arrives at a barrier, and reads from the slots of its peers. A *section* is a slice of one local tensor; it
is packed row-major into the slots of its owner, from a round and a byte offset on. One that is larger than a
slot takes a slot a round, in the pieces that :func:`pieces` names.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = [
    "LINE",
    "SLOT_BYTES",
    "AllReduce",
    "Copy",
    "Cut",
    "Exchange",
    "GroupRef",
    "Program",
    "Read",
    "Reduce",
    "ReduceLine",
    "ReduceScatter",
    "ScatterLine",
    "Step",
    "Write",
    "control_bytes",
    "pad",
    "pieces",
    "region_bytes",
]

LINE = 64
"""Bytes of a cache line: what different executors write never shares one."""

SLOT_BYTES = 2 << 20
"""Default bytes of one slot: large enough that barriers do not show, small enough for a core's cache."""

Cut = tuple[tuple[int, int, int], ...]
"""A slice of a tensor as (dim, start, length), one for each dim that is not taken whole."""


def pad(nbytes: int, to: int = LINE) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@lru_cache(1024)
def pieces(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[Cut, ...]:
    """The slices of a tensor of `shape` that go one at a time, each of at most `limit` bytes.

    They follow the row-major order of the elements and are of nearly equal size.
    """
    if math.prod(shape) * itemsize <= limit:
        return ((),)
    dim, inner = 0, math.prod(shape[1:]) * itemsize
    while inner > limit:
        dim += 1
        inner = math.prod(shape[dim + 1 :]) * itemsize
    count = -(-shape[dim] // (limit // inner))
    rows = -(-shape[dim] // count)
    spans = [(dim, start, min(rows, shape[dim] - start)) for start in range(0, shape[dim], rows)]
    outer: list[Cut] = [()]
    for d in range(dim):
        outer = [(*cut, (d, i, 1)) for cut in outer for i in range(shape[d])]
    return tuple((*cut, span) for cut in outer for span in spans)


class GroupRef(NamedTuple):
    """The executors `members` (ascending), who meet in region number `region` of the collective memory."""

    members: tuple[int, ...]
    region: int


class Copy(NamedTuple):
    """Local: the slice `src_cut` of local `src` to the slice `out_cut` of output `out`."""

    out: int
    out_cut: Cut
    src: int
    src_cut: Cut


class Write(NamedTuple):
    """Publish the slice `cut` of local `src` at (`round`, `offset`), for the members `readers` (indices)."""

    src: int
    cut: Cut
    round: int
    offset: int
    readers: tuple[int, ...]


class Read(NamedTuple):
    """Take what `member` (an index) publishes at (`round`, `offset`).

    It goes to the slice `cut` of output `out`; with `out` -1 it is a term of a :class:`Reduce`, of `shape`.
    """

    member: int
    round: int
    offset: int
    out: int
    cut: Cut
    shape: tuple[int, ...]


class Reduce(NamedTuple):
    """The slice `cut` of output `out` is the reduction of `terms`, in rank order.

    A term is (local index, slice of it), or (-1 - index into the reads, ()).
    """

    out: int
    cut: Cut
    terms: tuple[tuple[int, Cut], ...]


class Exchange(NamedTuple):
    """Any redistribution: outputs are put together from slices of the local tensors of the group.

    `zeros` are the outputs that are all zeros; `repeats` are (output, other output) of equal values, copied last;
    `op` and `divisor` say how the terms of `reduces` combine.
    """

    group: GroupRef | None
    rounds: int
    outs: tuple[tuple[int, ...], ...]
    copies: tuple[Copy, ...]
    writes: tuple[Write, ...]
    reads: tuple[Read, ...]
    reduces: tuple[Reduce, ...]
    zeros: tuple[int, ...]
    repeats: tuple[tuple[int, int], ...]
    op: str
    divisor: int


class ReduceLine(NamedTuple):
    """One all_reduce.

    `rows` has an entry for each rank, in rank order: (member index, which of that member's tensors). `mine`
    are this executor's, as (local index, slice); every output in `outs` receives the result.
    """

    group: GroupRef | None
    rows: tuple[tuple[int, int], ...]
    mine: tuple[tuple[int, Cut], ...]
    outs: tuple[int, ...]


class AllReduce(NamedTuple):
    """Partial to Replicate: sum, maximum or minimum over each line, then division by `divisor`."""

    outs: tuple[tuple[int, ...], ...]
    lines: tuple[ReduceLine, ...]
    op: str
    divisor: int


class ScatterLine(NamedTuple):
    """One reduce_scatter, of one rank per member.

    `rows` is the member index of each rank, in rank order; `cuts` and `shapes`, by member index, the slice of
    the local tensor `src` that the member ends up with. This executor's goes to output `out`.
    """

    group: GroupRef
    rows: tuple[int, ...]
    src: int
    cuts: tuple[Cut, ...]
    shapes: tuple[tuple[int, ...], ...]
    out: int


class ReduceScatter(NamedTuple):
    """Partial to Shard: each member reduces its own slice."""

    outs: tuple[tuple[int, ...], ...]
    lines: tuple[ScatterLine, ...]
    op: str
    divisor: int


Step = Exchange | AllReduce | ReduceScatter


class Program(NamedTuple):
    """One executor's part: `steps` in turn, each fed with the outputs of the one before.

    Attributes:
        dtype: of the tensors.
        order: the dims in memory order, or None for row-major tensors.
        steps: the first takes this executor's shards of the source in rank order; the last gives its shards of
            the destination in rank order.
        slot: bytes of the slots that the rounds were planned for.
        fusable: whether every executor's program is one all_reduce over one line, so that all may agree to run
            several such programs as one.
    """

    dtype: torch.dtype
    order: tuple[int, ...] | None
    steps: tuple[Step, ...]
    slot: int
    fusable: bool

    @property
    def groups(self) -> tuple[GroupRef, ...]:
        """The groups this executor meets, in order; empty where nothing crosses a process line."""
        found: list[GroupRef] = []
        for step in self.steps:
            for ref in (step.group,) if isinstance(step, Exchange) else [line.group for line in step.lines]:
                if ref is not None:
                    found.append(ref)
        return tuple(found)


def control_bytes(n: int) -> int:
    """Bytes before the slots in the region of a group of `n`: two arrival words and a sleep flag a member."""
    return pad(3 * n * LINE, 4096)


def region_bytes(n: int, slot: int) -> int:
    """Bytes of the region of a group of `n` with slots of `slot` bytes: the words, then two slots a member."""
    return control_bytes(n) + 2 * n * slot
