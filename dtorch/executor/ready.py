"""Fast paths of redistribution, for one small shard per executor: what latency is made of.

A program that takes one tensor and gives one, in one round through shared memory, is compiled to a function that
holds its slot views and cuts: one write a peer, one barrier, one read. The protocol on the wire is that of
:class:`~dtorch.executor.shm_collectives.Group`, so that a peer may run the same program the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..program import AllReduce, Cut, Exchange, GroupRef, Program, ReduceScatter
from .collectives import Comm
from .reducing import reducer
from .shm_collectives import DIRECT_BYTES, Group

__all__ = ["Ready", "make_ready"]

EXCHANGE_BYTES = 1 << 20
"""Results above this size take the general way, which looks after large memory."""

Ready = Callable[[Tensor], tuple[Tensor, int]]
"""From this executor's shard to (a fresh result, nonzero if a peer was poisoned)."""


def make_ready(program: Program, comm: Comm) -> Ready | None:
    """The fast path of `program`, or None where it must go the general way."""
    if len(program.steps) != 1 or program.order is not None:
        return None
    step = program.steps[0]
    if len(step.outs) != 1:
        return None
    if isinstance(step, Exchange):
        return _exchange(step, program.dtype, comm)
    if len(step.lines) != 1:
        return None
    if isinstance(step, AllReduce):
        return _all_reduce(step, program.dtype, comm)
    return _reduce_scatter(step, program.dtype, comm)


def _group(ref: GroupRef, comm: Comm) -> Group | None:
    """The group, if it is one of shared memory."""
    group = comm.shared(*ref)
    return group if type(group) is Group else None


def _pair(group: Group, member: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views of a slot for even and for odd arrivals."""
    return group.view(member, 0, offset, tuple(shape), dtype), group.view(member, 1, offset, tuple(shape), dtype)


def _key(cut: Cut) -> slice | tuple[slice, ...]:
    """`cut` as an index: less than half the cost of ``narrow``."""
    if not cut:
        return ()
    slices = [slice(None)] * (1 + max(dim for dim, _, _ in cut))
    for dim, start, length in cut:
        slices[dim] = slice(start, start + length)
    return slices[0] if len(slices) == 1 else tuple(slices)


def _all_reduce(step: AllReduce, dtype: torch.dtype, comm: Comm) -> Ready | None:
    line, shape = step.lines[0], step.outs[0]
    if line.group is None or line.mine != ((0, ()),) or len(line.rows) != len(line.group.members):
        return None
    group = _group(line.group, comm)
    if group is None or prod(shape) * dtype.itemsize > min(DIRECT_BYTES, group.slot // 2):
        return None
    reduce, barrier = reducer(dtype, step.op, step.divisor, group.n), group.barrier
    order = [m for m, _ in line.rows]
    mine = _pair(group, group.me, 0, shape, dtype)
    theirs = list(zip(*[_pair(group, m, 0, shape, dtype) for m in order], strict=True))
    place = order.index(group.me)

    def call(x: Tensor) -> tuple[Tensor, int]:
        out = x.new_empty(shape)
        parity = (group.sequence + 1) & 1
        terms = list(theirs[parity])
        terms[place] = x
        mine[parity].copy_(x)
        bad = barrier()
        reduce(out, terms)
        return out, bad

    return call


def _reduce_scatter(step: ReduceScatter, dtype: torch.dtype, comm: Comm) -> Ready | None:
    line, shape = step.lines[0], step.outs[0]
    group = _group(line.group, comm)
    if group is None or line.src:
        return None
    share = group.share()
    if max(map(prod, line.shapes)) * dtype.itemsize > share:
        return None
    me, reduce, barrier = group.me, reducer(dtype, step.op, step.divisor, group.n), group.barrier
    writes = [
        (_key(line.cuts[j]), _pair(group, me, (j - (j > me)) * share, line.shapes[j], dtype))
        for j in range(group.n)
        if j != me and prod(line.shapes[j])
    ]
    own, place, some = _key(line.cuts[me]), line.rows.index(me), prod(shape) > 0
    theirs = list(
        zip(*[_pair(group, m, (me - (me > m)) * share if m != me else 0, shape, dtype) for m in line.rows], strict=True)
    )

    def call(x: Tensor) -> tuple[Tensor, int]:
        out = x.new_empty(shape)
        parity = (group.sequence + 1) & 1
        terms = list(theirs[parity])
        terms[place] = x[own]
        for key, views in writes:
            views[parity].copy_(x[key])
        bad = barrier()
        if some:
            reduce(out, terms)
        return out, bad

    return call


class _Part(NamedTuple):
    """The slice `cut` of the output: the slice `source` of the input, or what the `views` (even, odd) show."""

    cut: Cut
    source: Cut
    views: tuple[Tensor, Tensor] | None


def _tiles(parts: Sequence[_Part], shape: tuple[int, ...]) -> int | None:
    """The dim along which `parts`, in order, make up a tensor of `shape`; None if they do not."""
    if any(len(part.cut) != 1 for part in parts) or len({part.cut[0][0] for part in parts}) != 1:
        return None
    end = 0
    for part in parts:
        _, start, length = part.cut[0]
        if start != end:
            return None
        end += length
    dim = parts[0].cut[0][0]
    return dim if end == shape[dim] else None


def _exchange(step: Exchange, dtype: torch.dtype, comm: Comm) -> Ready | None:
    shape = step.outs[0]
    if step.zeros or step.reduces or any(c.src for c in step.copies) or any(w.src for w in step.writes):
        return None
    if prod(shape) * dtype.itemsize > EXCHANGE_BYTES:
        return None
    if step.group is None:
        if len(step.copies) != 1 or step.copies[0].out_cut:
            return None
        key = _key(step.copies[0].src_cut)
        return lambda x: (x[key].clone(memory_format=torch.contiguous_format), 0)
    group = _group(step.group, comm)
    if group is None or step.rounds != 1 or any(r.out < 0 for r in step.reads):
        return None
    parts = [_Part(c.out_cut, c.src_cut, None) for c in step.copies]
    for r in step.reads:
        lengths = list(shape)
        for dim, _, length in r.cut:
            lengths[dim] = length
        parts.append(_Part(r.cut, (), _pair(group, r.member, r.offset, lengths, dtype)))
    parts.sort(key=lambda part: part.cut)
    dim = _tiles(parts, shape)
    barrier, view, me = group.barrier, group.view, group.me
    writes = [(_key(w.cut), w.offset) for w in step.writes]
    places = [_key(part.cut) for part in parts]
    local = [(i, _key(part.source)) for i, part in enumerate(parts) if part.views is None]
    remote: list[list[Tensor]] = [[], []]
    for part in parts:
        for parity in (0, 1):
            # What is local has its place kept by anything, and is filled in by each call.
            remote[parity].append(torch.empty(0, dtype=dtype) if part.views is None else part.views[parity])

    def call(x: Tensor) -> tuple[Tensor, int]:
        out = x.new_empty(shape)
        sequence = group.sequence + 1
        pieces = remote[sequence & 1].copy()
        for i, key in local:
            pieces[i] = x[key]
        for key, offset in writes:
            section = x[key]
            view(me, sequence, offset, section.shape, dtype).copy_(section)
        bad = barrier()
        if dim is not None:
            torch.cat(pieces, dim, out=out)
        else:
            for key, piece in zip(places, pieces, strict=True):
                out[key].copy_(piece)
        return out, bad

    return call
