"""The steps of a redistribution, spelled out for each executor (:mod:`dtorch.program`)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from ..mesh import DeviceMesh
from ..placement import Partial, Replicate, Shard
from ..program import (
    AllReduce,
    Copy,
    Cut,
    Exchange,
    GroupRef,
    Read,
    Reduce,
    ReduceLine,
    ReduceScatter,
    ScatterLine,
    Step,
    Write,
    pad,
    pieces,
)
from ..spec import TensorSpec, contiguous_stride, cut

__all__ = [
    "World",
    "all_reduce",
    "exchange",
    "is_one_all_reduce",
    "is_zero",
    "kept_dims",
    "rank_strides",
    "reduce_scatter",
    "reduced_dims",
]

Region = tuple[tuple[int, int], ...]
"""(start, length) per tensor dim."""


# -- Partial --------------------------------------------------------------------------------------------------------


def kept_dims(src: TensorSpec, dst: TensorSpec) -> tuple[int, ...]:
    """The mesh dims whose Partial stays: a rank's summand comes from the rank at the same coordinate."""
    if src.mesh.shape != dst.mesh.shape:
        return ()
    pairs = enumerate(zip(src.placements, dst.placements, strict=True))
    return tuple(i for i, (p, q) in pairs if type(p) is Partial and p == q)


def reduced_dims(src: TensorSpec, dst: TensorSpec) -> tuple[int, ...]:
    """The mesh dims of `src` whose summands are reduced on the way to `dst`."""
    kept = kept_dims(src, dst)
    return tuple(i for i, p in enumerate(src.placements) if type(p) is Partial and i not in kept)


def is_zero(src: TensorSpec, dst: TensorSpec, rank: int) -> bool:
    """Whether `rank` holds zeros: the value of a tensor that becomes Partial(sum) goes to coordinate 0."""
    kept = kept_dims(src, dst)
    at = dst.mesh.coordinates[rank]
    return any(p == Partial() and at[i] and i not in kept for i, p in enumerate(dst.placements) if type(p) is Partial)


def _reduction(src: TensorSpec, reduced: Iterable[int]) -> tuple[str, int]:
    """(op, divisor) of the reduction over the mesh dims `reduced`."""
    op, divisor = "sum", 1
    for i in reduced:
        p = src.placements[i]
        assert isinstance(p, Partial)
        if p.reduce_op == "avg":
            divisor *= src.mesh.shape[i]
        elif p.reduce_op != "sum":
            op = p.reduce_op
    return op, divisor


# -- ranks, executors, dims -----------------------------------------------------------------------------------------


def rank_strides(mesh: DeviceMesh) -> tuple[int, ...]:
    """How far the rank moves with one step along each mesh dim."""
    return contiguous_stride(mesh.shape)


class _Hosts(NamedTuple):
    executor: tuple[int, ...]  # of each rank
    index: tuple[int, ...]  # of each rank among those of its executor
    ranks: dict[int, tuple[int, ...]]  # of each executor


class World:
    """What the steps of one redistribution share: who hosts what, where groups meet, in which order dims lie."""

    def __init__(
        self,
        spec: TensorSpec,
        executor_of: Callable[[DeviceMesh, int], int],
        region: Callable[[tuple[int, ...]], int],
        slot: int,
    ) -> None:
        self.slot = slot
        self.itemsize = spec.dtype.itemsize
        self._executor_of, self._region = executor_of, region
        self._hosts: dict[DeviceMesh, _Hosts] = {}
        self.order = _memory_order(spec)
        self._place = list(range(spec.ndim))
        for i, d in enumerate(self.order or ()):
            self._place[d] = i

    def hosts(self, mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
        """The ranks of each executor of `mesh`."""
        return self.of(mesh).ranks

    def of(self, mesh: DeviceMesh) -> _Hosts:
        """Who hosts the ranks of `mesh`."""
        found = self._hosts.get(mesh)
        if found is None:
            executor = tuple(self._executor_of(mesh, r) for r in range(mesh.nranks))
            ranks: dict[int, list[int]] = defaultdict(list)
            index = [0] * mesh.nranks
            for r, e in enumerate(executor):
                index[r] = len(ranks[e])
                ranks[e].append(r)
            found = _Hosts(executor, tuple(index), {e: tuple(rs) for e, rs in ranks.items()})
            self._hosts[mesh] = found
        return found

    def group(self, executors: Iterable[int]) -> GroupRef | None:
        """The group of `executors`, or None for one alone."""
        members = tuple(sorted(set(executors)))
        return GroupRef(members, self._region(members)) if len(members) > 1 else None

    def shape(self, region: Region) -> tuple[int, ...]:
        """Lengths of `region`, dims in memory order."""
        return tuple(region[d][1] for d in self.order) if self.order else tuple(n for _, n in region)

    def cut(self, inner: Region, outer: Region) -> Cut:
        """`inner` as a slice of a tensor that holds `outer`, dims in memory order."""
        place = self._place
        return tuple(
            (place[d], s - t, n) for d, ((s, n), (t, m)) in enumerate(zip(inner, outer, strict=True)) if n != m
        )

    def outs(self, spec: TensorSpec) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Shapes of the shards that each executor holds under `spec`."""
        return {e: tuple(self.shape(spec.region(r)) for r in ranks) for e, ranks in self.of(spec.mesh).ranks.items()}


def _memory_order(spec: TensorSpec) -> tuple[int, ...] | None:
    """The dims of `spec` from slowest to fastest, or None for row-major (or no dense) strides."""
    if spec.is_contiguous or spec.local_stride(0) is None:
        return None
    return tuple(sorted(range(spec.ndim), key=lambda d: (spec.stride[d], spec.shape[d]), reverse=True))


def _lines(mesh: DeviceMesh, dims: Sequence[int]) -> list[list[int]]:
    """The ranks of `mesh` that differ only along `dims`, line by line, each in rank order."""
    strides = rank_strides(mesh)
    along = [sum(a) for a in product(*[[c * strides[i] for c in range(mesh.shape[i])] for i in dims])]
    rest = [i for i in range(mesh.ndim) if i not in dims]
    starts = [sum(a) for a in product(*[[c * strides[i] for c in range(mesh.shape[i])] for i in rest])]
    return [[start + a for a in along] for start in starts]


# -- all_reduce, reduce_scatter -------------------------------------------------------------------------------------


def is_one_all_reduce(steps: Sequence[Step]) -> bool:
    """Whether `steps` are a single all_reduce over one line, of something."""
    return (
        len(steps) == 1
        and isinstance(steps[0], AllReduce)
        and len(steps[0].lines) == 1
        and math.prod(steps[0].outs[0]) > 0
    )


def all_reduce(src: TensorSpec, dst: TensorSpec, world: World) -> dict[int, Step]:
    """Partial becomes Replicate along some mesh dims; Replicate may be sliced on the way."""
    reduced = reduced_dims(src, dst)
    op, divisor = _reduction(src, reduced)
    hosts = world.of(src.mesh)
    lines: dict[int, list[ReduceLine]] = {e: [] for e in hosts.ranks}
    for ranks in _lines(src.mesh, reduced):
        executors = [hosts.executor[r] for r in ranks]
        members = sorted(set(executors))
        empty = not math.prod(n for _, n in dst.region(ranks[0]))
        group = None if empty else world.group(members)
        rows: list[tuple[int, int]] = []
        mine: dict[int, list[tuple[int, Cut]]] = {e: [] for e in members}
        for r, e in zip(ranks, executors, strict=True):
            rows.append((members.index(e), len(mine[e])))
            mine[e].append((hosts.index[r], world.cut(dst.region(r), src.region(r))))
        if empty:
            continue
        for e in members:
            outs = tuple(hosts.index[r] for r, x in zip(ranks, executors, strict=True) if x == e)
            lines[e].append(ReduceLine(group, tuple(rows), tuple(mine[e]), outs))
    shapes = world.outs(dst)
    return {e: AllReduce(shapes[e], tuple(lines[e]), op, divisor) for e in hosts.ranks}


def reduce_scatter(src: TensorSpec, dst: TensorSpec, world: World) -> dict[int, Step] | None:
    """Partial becomes Shard along one mesh dim; None where an executor hosts two ranks of a line."""
    reduced = reduced_dims(src, dst)
    op, divisor = _reduction(src, reduced)
    hosts = world.of(src.mesh)
    lines: dict[int, list[ScatterLine]] = {e: [] for e in hosts.ranks}
    for ranks in _lines(src.mesh, reduced):
        executors = [hosts.executor[r] for r in ranks]
        members = sorted(executors)
        group = world.group(executors)
        if group is None or len(group.members) != len(ranks):
            return None
        by_member = [ranks[executors.index(e)] for e in members]
        rows = tuple(members.index(e) for e in executors)
        # All hold the same region of the source, so one list of slices serves all.
        cuts = tuple(world.cut(dst.region(r), src.region(ranks[0])) for r in by_member)
        shapes = tuple(world.shape(dst.region(r)) for r in by_member)
        if not any(math.prod(s) for s in shapes):
            continue
        for r, e in zip(ranks, executors, strict=True):
            lines[e].append(ScatterLine(group, rows, hosts.index[r], cuts, shapes, hosts.index[r]))
    outs = world.outs(dst)
    return {e: ReduceScatter(outs[e], tuple(lines[e]), op, divisor) for e in hosts.ranks}


# -- exchange -------------------------------------------------------------------------------------------------------


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


class _Part:
    """What one executor does in an exchange, while it is being put together."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.needs: list[tuple[int, Section, int, Cut]] = []  # owner, section, out (or -1), slice
        self.reduces: list[Reduce] = []
        self.zeros: list[int] = []
        self.sections: dict[Section, list[int]] = {}  # what it publishes → readers


Section = tuple[int, Region]
"""A slice that travels: (source rank, region)."""


def exchange(src: TensorSpec, dst: TensorSpec, world: World) -> dict[int, Step]:
    """Any redistribution in one step: every rank takes its slices from whoever holds them."""
    op, divisor = _reduction(src, reduced_dims(src, dst))
    froms, tos = world.of(src.mesh), world.of(dst.mesh)
    sources = _Sources(src, dst, world)
    parts: dict[int, _Part] = defaultdict(_Part)
    for r, e in enumerate(tos.executor):
        region, part = dst.region(r), parts[e]
        if is_zero(src, dst, r):
            part.zeros.append(tos.index[r])
        elif all(n for _, n in region):
            for box, terms in sources.of(r, e):
                _take(part, parts, e, tos.index[r], world.cut(box, region), box, terms, froms, src, world)
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
                froms.index[rank],
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
            tuple(reads), tuple(part.reduces), tuple(part.zeros), op, divisor,
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
    froms: _Hosts,
    src: TensorSpec,
    world: World,
) -> None:
    """Note that `part`'s output `out` gets `box`, reduced from the ranks `terms`, at the slice `where`."""
    found: list[tuple[int, Cut]] = []
    for rank in terms:
        owner = froms.executor[rank]
        if owner == me:
            found.append((froms.index[rank], world.cut(box, src.region(rank))))
            if len(terms) == 1:
                part.copies.append(Copy(out, where, *found[0]))
            continue
        readers = parts[owner].sections.setdefault((rank, box), [])
        if me not in readers:
            readers.append(me)
        found.append((-1 - len(part.needs), ()))
        part.needs.append((owner, (rank, box), *((out, where) if len(terms) == 1 else (-1, ()))))
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


