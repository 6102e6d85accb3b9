"""all_reduce and reduce_scatter, spelled out for each executor (:mod:`dtorch.program`), and what all steps share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from ..mesh import DeviceMesh
from ..placement import Partial
from ..program import AllReduce, Cut, GroupRef, ReduceLine, ReduceScatter, ScatterLine, Step
from ..spec import TensorSpec, contiguous_stride

__all__ = [
    "Hosts",
    "Region",
    "World",
    "all_reduce",
    "can_reduce_scatter",
    "is_one_all_reduce",
    "is_zero",
    "kept_dims",
    "rank_strides",
    "reduce_scatter",
    "reduced_dims",
    "reduction",
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


def reduction(src: TensorSpec, reduced: Iterable[int]) -> tuple[str, int]:
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


class Hosts(NamedTuple):
    """Where the ranks of a mesh live."""

    executor: tuple[int, ...]  # of each rank
    place: tuple[int, ...]  # of each rank among those of its executor
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
        self._hosts: dict[DeviceMesh, Hosts] = {}
        self.order = _memory_order(spec)
        self._place = list(range(spec.ndim))
        for i, d in enumerate(self.order or ()):
            self._place[d] = i

    def hosts(self, mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
        """The ranks of each executor of `mesh`."""
        return self.of(mesh).ranks

    def of(self, mesh: DeviceMesh) -> Hosts:
        """Who hosts the ranks of `mesh`."""
        found = self._hosts.get(mesh)
        if found is None:
            executor = tuple(self._executor_of(mesh, r) for r in range(mesh.nranks))
            ranks: dict[int, list[int]] = defaultdict(list)
            index = [0] * mesh.nranks
            for r, e in enumerate(executor):
                index[r] = len(ranks[e])
                ranks[e].append(r)
            found = Hosts(executor, tuple(index), {e: tuple(rs) for e, rs in ranks.items()})
            self._hosts[mesh] = found
        return found

    def executors(self, indices: Sequence[int]) -> DeviceMesh:
        """A mesh with one rank on each of the executors `indices`; it exists for the planner alone."""
        mesh = DeviceMesh("cpu", list(indices), mesh_dim_names=["dtorch executor"])
        if mesh not in self._hosts:
            alone = {e: (r,) for r, e in enumerate(indices)}
            self._hosts[mesh] = Hosts(tuple(indices), (0,) * len(indices), alone)
        return mesh

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
    """Whether `steps` are a single all_reduce over one line, of something, whose result is all that comes out.

    (A line of empty pieces is none: what its ranks hold comes out as well.)
    """
    if len(steps) != 1 or not isinstance(steps[0], AllReduce) or len(steps[0].lines) != 1:
        return False
    step = steps[0]
    return len(step.lines[0].outs) == len(step.outs) and math.prod(step.outs[0]) > 0


def all_reduce(src: TensorSpec, dst: TensorSpec, world: World) -> dict[int, Step]:
    """Partial becomes Replicate along some mesh dims; Replicate may be sliced on the way."""
    reduced = reduced_dims(src, dst)
    op, divisor = reduction(src, reduced)
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
            mine[e].append((hosts.place[r], world.cut(dst.region(r), src.region(r))))
        if empty:
            continue
        for e in members:
            outs = tuple(hosts.place[r] for r, x in zip(ranks, executors, strict=True) if x == e)
            lines[e].append(ReduceLine(group, tuple(rows), tuple(mine[e]), outs))
    shapes = world.outs(dst)
    return {e: AllReduce(shapes[e], tuple(lines[e]), op, divisor) for e in hosts.ranks}


def can_reduce_scatter(src: TensorSpec, dst: TensorSpec, world: World) -> bool:
    """Whether every executor hosts at most one rank of each line, and there is more than one."""
    executor = world.of(src.mesh).executor
    lines = _lines(src.mesh, reduced_dims(src, dst))
    return all(len(ranks) == len({executor[r] for r in ranks}) > 1 for ranks in lines)


def reduce_scatter(src: TensorSpec, dst: TensorSpec, world: World) -> dict[int, Step]:
    """Partial becomes Shard along one mesh dim, where :func:`can_reduce_scatter`."""
    reduced = reduced_dims(src, dst)
    op, divisor = reduction(src, reduced)
    hosts = world.of(src.mesh)
    lines: dict[int, list[ScatterLine]] = {e: [] for e in hosts.ranks}
    for ranks in _lines(src.mesh, reduced):
        executors = [hosts.executor[r] for r in ranks]
        members = sorted(executors)
        group = world.group(executors)
        assert group is not None
        by_member = [ranks[executors.index(e)] for e in members]
        rows = tuple(members.index(e) for e in executors)
        # All hold the same region of the source, so one list of slices serves all.
        cuts = tuple(world.cut(dst.region(r), src.region(ranks[0])) for r in by_member)
        shapes = tuple(world.shape(dst.region(r)) for r in by_member)
        if not any(math.prod(s) for s in shapes):
            continue
        for r, e in zip(ranks, executors, strict=True):
            lines[e].append(ScatterLine(group, rows, hosts.place[r], cuts, shapes, hosts.place[r]))
    outs = world.outs(dst)
    return {e: ReduceScatter(outs[e], tuple(lines[e]), op, divisor) for e in hosts.ranks}
