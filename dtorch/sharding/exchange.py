"""The step that serves every redistribution: each rank takes its slices from whoever holds them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from ..placement import Replicate, Shard
from ..program import Copy, Cut, Exchange, Read, Reduce, Step, Write, pad, pieces
from ..spec import TensorSpec, cut
from .steps import Hosts, Region, World, is_zero, kept_dims, rank_strides, reduced_dims, reduction

__all__ = ["count_pieces", "exchange"]


class _Segments(NamedTuple):
    """A tensor dim as cut by the mesh dims that shard it, in order."""

    starts: list[int]
    spans: list[tuple[int, int, int]]  # (start, stop, what its coordinates add to the rank)


def _segments(spec: TensorSpec) -> list[_Segments]:
    strides = rank_strides(spec.mesh)
    out: list[_Segments] = []
    for d, size in enumerate(spec.shape):
        spans = [(0, size, 0)]
        for i, p in enumerate(spec.placements):
            if type(p) is Shard and p.dim == d:
                cut_again: list[tuple[int, int, int]] = []
                for start, stop, base in spans:
                    for c in range(spec.mesh.shape[i]):
                        offset, length = cut(stop - start, spec.mesh.shape[i], c)
                        if length:
                            cut_again.append((start + offset, start + offset + length, base + c * strides[i]))
                spans = cut_again
        out.append(_Segments([s for s, _, _ in spans], spans))
    return out


class _Sources:
    """Which rank of `src` gives which slice to which rank of `dst`."""

    def __init__(self, src: TensorSpec, dst: TensorSpec, world: World) -> None:
        self._same = src.mesh is dst.mesh
        self._dst, self._executors = dst, world.of(src.mesh).executor
        self._strides = strides = rank_strides(src.mesh)
        self._kept = kept_dims(src, dst)
        sizes = src.mesh.shape
        reduced = reduced_dims(src, dst)
        self._replicas = [i for i, p in enumerate(src.placements) if type(p) is Replicate]
        self._terms = [sum(a) for a in product(*[[c * strides[i] for c in range(sizes[i])] for i in reduced])]
        self._copies = [sum(a) for a in product(*[[c * strides[i] for c in range(sizes[i])] for i in self._replicas])]
        self._segments = _segments(src)
        self._nearest: dict[int, dict[int, int]] = {}

    def of(self, rank: int, executor: int) -> Iterable[tuple[Region, list[int]]]:
        """The slices that make up the region of `rank` of dst, each with the ranks of its terms, in rank order."""
        at = self._dst.mesh.coordinates[rank]
        kept = sum(at[i] * self._strides[i] for i in self._kept)
        preferred = sum(at[i] * self._strides[i] for i in self._replicas) if self._same else None
        per_dim: list[list[tuple[int, int, int]]] = []
        for (start, length), segments in zip(self._dst.region(rank), self._segments, strict=True):
            stop = start + length
            i = bisect_right(segments.starts, start) - 1
            here: list[tuple[int, int, int]] = []
            while i < len(segments.spans) and segments.spans[i][0] < stop:
                a, b, base = segments.spans[i]
                a = max(a, start)
                here.append((a, min(b, stop) - a, base))
                i += 1
            per_dim.append(here)
        for box in product(*per_dim):
            base = kept + sum(b for _, _, b in box)
            region = tuple((s, n) for s, n, _ in box)
            yield region, [self._choose(base + t, preferred, rank, executor) for t in self._terms]

    def _choose(self, base: int, preferred: int | None, rank: int, executor: int) -> int:
        """The replica to take: one on the same executor, else the one at the same coordinates, else in turn."""
        if preferred is not None and self._executors[base + preferred] == executor:
            return base + preferred
        nearest = self._nearest.get(base)
        if nearest is None:
            nearest = self._nearest[base] = {}
            for c in self._copies:
                nearest.setdefault(self._executors[base + c], base + c)
        found = nearest.get(executor)
        if found is not None:
            return found
        if preferred is not None:
            return base + preferred
        return base + self._copies[rank % len(self._copies)]


def count_pieces(src: TensorSpec, dst: TensorSpec, world: World) -> int:
    """How many slices :func:`exchange` would plan, without planning them."""
    segments = _segments(src)
    terms = math.prod(src.mesh.shape[i] for i in reduced_dims(src, dst))
    # Replicas on one executor are put together once.
    regions = {(e, dst.region(r)) for r, e in enumerate(world.of(dst.mesh).executor) if not is_zero(src, dst, r)}
    pieces = 0
    for _, region in regions:
        if all(n for _, n in region):
            pieces += math.prod(
                bisect_right(cuts.starts, start + n - 1) - bisect_right(cuts.starts, start) + 1
                for (start, n), cuts in zip(region, segments, strict=True)
            )
    return pieces * terms


class _Part:
    """What one executor does in an exchange, while it is being put together."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.needs: list[tuple[int, Section, int, Cut]] = []  # owner, section, out (or -1), slice
        self.reduces: list[Reduce] = []
        self.zeros: list[int] = []
        self.repeats: list[tuple[int, int]] = []
        self.sections: dict[Section, list[int]] = {}  # what it publishes → readers


Section = tuple[int, Region]
"""A slice that travels: (source rank, region)."""


def exchange(src: TensorSpec, dst: TensorSpec, world: World) -> dict[int, Step]:
    """Any redistribution in one step: every rank takes its slices from whoever holds them."""
    op, divisor = reduction(src, reduced_dims(src, dst))
    froms, tos = world.of(src.mesh), world.of(dst.mesh)
    sources = _Sources(src, dst, world)
    parts: dict[int, _Part] = defaultdict(_Part)
    kept = kept_dims(src, dst)
    first: dict[tuple[int, Region, tuple[int, ...]], int] = {}
    for r, e in enumerate(tos.executor):
        region, part = dst.region(r), parts[e]
        if is_zero(src, dst, r):
            part.zeros.append(tos.place[r])
        elif all(n for _, n in region):
            # Replicas on one executor are put together once.
            at = dst.mesh.coordinates[r]
            like = first.setdefault((e, region, tuple(at[i] for i in kept)), r)
            if like != r:
                part.repeats.append((tos.place[r], tos.place[like]))
                continue
            for box, terms in sources.of(r, e):
                _take(part, parts, e, tos.place[r], world.cut(box, region), box, terms, froms, src, world)
    groups = _groups(parts)
    shapes = world.outs(dst)
    layouts: dict[int, dict[Section, tuple[int, int, int]]] = {}
    rounds: dict[tuple[int, ...], int] = defaultdict(int)
    for e, part in parts.items():
        layouts[e] = _layout(part, e, groups.get(e, (e,)), world)
        for _, _, end in layouts[e].values():
            rounds[groups[e]] = max(rounds[groups[e]], end)
    steps: dict[int, Step] = {}
    for e in {*froms.ranks, *tos.ranks}:
        part, members = parts[e], groups.get(e, (e,))
        place = {x: i for i, x in enumerate(members)}
        writes = [
            Write(
                froms.place[rank],
                world.cut(box, src.region(rank)),
                *layouts[e][rank, box][:2],
                tuple(place[x] for x in part.sections[rank, box]),
            )
            for rank, box in layouts.get(e, ())
        ]
        reads = [
            Read(place[owner], *layouts[owner][section][:2], out, where, world.shape(section[1]) if out < 0 else ())
            for owner, section, out, where in part.needs
        ]
        steps[e] = Exchange(
            world.group(members), rounds.get(members, 0), shapes.get(e, ()), tuple(part.copies), tuple(writes),
            tuple(reads), tuple(part.reduces), tuple(part.zeros), tuple(part.repeats), op, divisor,
        )  # fmt: skip
    return steps


def _take(
    part: _Part,
    parts: dict[int, _Part],
    me: int,
    out: int,
    where: Cut,
    box: Region,
    terms: list[int],
    froms: Hosts,
    src: TensorSpec,
    world: World,
) -> None:
    """Note that `part`'s output `out` gets `box`, reduced from the ranks `terms`, at the slice `where`."""
    found: list[tuple[int, Cut]] = []
    for rank in terms:
        owner = froms.executor[rank]
        if owner == me:
            found.append((froms.place[rank], world.cut(box, src.region(rank))))
            if len(terms) == 1:
                part.copies.append(Copy(out, where, *found[0]))
            continue
        readers = parts[owner].sections.setdefault((rank, box), [])
        if me not in readers:
            readers.append(me)
        found.append((-1 - len(part.needs), ()))
        if len(terms) == 1:
            part.needs.append((owner, (rank, box), out, where))
        else:
            part.needs.append((owner, (rank, box), -1, ()))
    if len(terms) > 1:
        part.reduces.append(Reduce(out, where, tuple(found)))


def _groups(parts: dict[int, _Part]) -> dict[int, tuple[int, ...]]:
    """The executors that exchange anything, each with all that it is connected to."""
    root: dict[int, int] = {}

    def find(e: int) -> int:
        root.setdefault(e, e)
        while root[e] != e:
            e = root[e]
        return e

    for e, part in parts.items():
        for readers in part.sections.values():
            for x in readers:
                root[find(x)] = find(e)
    found: dict[int, list[int]] = defaultdict(list)
    for e in sorted(root):
        found[find(e)].append(e)
    return {e: tuple(members) for members in found.values() for e in members}


def _layout(part: _Part, me: int, members: tuple[int, ...], world: World) -> dict[Section, tuple[int, int, int]]:
    """(round, offset, round after) of every section that `me` publishes.

    Sections are ordered by how far their first reader is from `me` around the group, so that in each round of an
    all_to_all every member has one peer to read from.
    """
    n = len(members)
    place = {e: i for i, e in enumerate(members)}

    def distance(section: Section) -> int:
        return min((place[x] - place[me]) % n for x in part.sections[section])

    layout: dict[Section, tuple[int, int, int]] = {}
    at, offset = 0, 0
    for section in sorted(part.sections, key=distance):
        shape = world.shape(section[1])
        nbytes = pad(math.prod(shape) * world.itemsize)
        count = 1 if nbytes <= world.slot else len(pieces(shape, world.itemsize, world.slot))
        if offset and (count > 1 or offset + nbytes > world.slot):
            at, offset = at + 1, 0
        layout[section] = (at, offset, at + count)
        if count > 1:
            at, offset = at + count, 0
        else:
            offset += nbytes
    return layout
