"""Redistribution: from any placements on any mesh to any others, as one program per executor.

Pure functions from specs to values. One idea serves every case: the region of a destination rank is put together
from slices that source ranks hold; where the source is Partial, each slice is the reduction of one term per
coordinate, in rank order. A plan is a chain of few steps: the exchange of such slices, and before it, where
many ranks want the same reduction, an all_reduce or reduce_scatter that makes it once. Where executors host so many
ranks that their slices would be too many, they are put together by executor first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from ..mesh import DeviceMesh
from ..placement import Partial, Placement, Replicate, Shard
from ..program import SLOT_BYTES, Program, Step
from ..spec import TensorSpec
from . import steps
from .exchange import count_pieces, exchange

__all__ = ["Redistribution", "free", "move_cost", "plan_redistribute"]

ONE_STEP_BYTES = 64 << 10
"""Below this size latency decides: reduce and move in one step, even if ranks then reduce the same thing."""

FEW_PIECES = 2048
"""Up to so many slices are planned, and copied, as they are."""

LARGE_PIECE = 64 << 10
"""Slices of this many bytes are worth a copy of their own, however many they are."""


@dataclass(frozen=True, slots=True)
class Redistribution:
    """How `src` becomes `dst`.

    Attributes:
        src, dst: specs of one tensor, before and after.
        programs: what each executor that holds a shard of either has to run.
        kinds: the collectives this amounts to between ranks, in order: "all_reduce", "all_gather",
            "reduce_scatter", "all_to_all", or "send" from one mesh to another. Empty where no rank needs another.
        bytes_moved: bytes that the busiest rank receives.
    """

    src: TensorSpec
    dst: TensorSpec
    programs: dict[int, Program]
    kinds: tuple[str, ...]
    bytes_moved: int

    @property
    def local(self) -> bool:
        """Whether nothing crosses a process line."""
        return not any(p.groups for p in self.programs.values())


def plan_redistribute(
    src: TensorSpec,
    dst: TensorSpec,
    executor_of: Callable[[DeviceMesh, int], int],
    region: Callable[[tuple[int, ...]], int],
    slot_bytes: int = SLOT_BYTES,
) -> Redistribution:
    """Plan the redistribution of a tensor from `src` to `dst`, on one mesh or two.

    Args:
        src, dst: the same shape and dtype.
        executor_of: the executor of a rank of a mesh.
        region: the number of the place in collective memory where the executors given (ascending) meet; always
            the same for the same members, never the same for others.
        slot_bytes: of the collective memory's slots.

    Raises:
        ValueError: the shapes or dtypes differ.
    """
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise ValueError(
            f"redistribute: {src.describe()} cannot become {dst.describe()}: placements and mesh may change, "
            "shape and dtype may not"
        )
    world = steps.World(dst, executor_of, region, slot_bytes)
    hosts: set[int] = set()
    kinds: list[str] = []
    links = [part for link in _chain(src, dst) for part in _by_executor(link, world)]
    for link in links:
        hosts.update(world.hosts(link.src.mesh), world.hosts(link.dst.mesh))
        if link.kind:
            kinds.append(link.kind)
    found: dict[int, list[Step]] = {e: [] for e in sorted(hosts)}
    for link in links:
        for e, step in _steps(link, world).items():
            found[e].append(step)
    fusable = all(steps.is_one_all_reduce(s) for s in found.values())
    programs = {e: Program(src.dtype, world.order, tuple(s), slot_bytes, fusable) for e, s in found.items()}
    return Redistribution(src, dst, programs, tuple(kinds), move_cost(src, dst.placements, dst.mesh))


@dataclass(frozen=True, slots=True)
class _Link:
    """One step between two specs."""

    src: TensorSpec
    dst: TensorSpec
    how: str  # "exchange", "all_reduce" or "reduce_scatter"
    kind: str  # as counted, "" where no rank needs another


def _steps(link: _Link, world: steps.World) -> dict[int, Step]:
    if link.how == "all_reduce":
        return steps.all_reduce(link.src, link.dst, world)
    if link.how == "reduce_scatter":
        return steps.reduce_scatter(link.src, link.dst, world)
    return exchange(link.src, link.dst, world)


def _by_executor(link: _Link, world: steps.World) -> list[_Link]:
    """`link` as it is or, where that is an exchange of too many small slices, in two: to executors, then to ranks.

    Between two ranks that cut a tensor along different dims there is a slice for every pair; hundreds of ranks
    on few executors would plan and copy them one by one. In between, each executor holds one piece.
    """
    src, dst = link.src, link.dst
    if link.how == "all_reduce" or (link.how == "reduce_scatter" and steps.can_reduce_scatter(src, dst, world)):
        return [link]
    one = [_Link(src, dst, "exchange", link.kind)]
    if max(src.mesh.nranks, dst.mesh.nranks) <= 8 or steps.kept_dims(src, dst):
        return one
    pieces = count_pieces(src, dst, world)
    if pieces <= FEW_PIECES or src.numel * src.dtype.itemsize >= pieces * LARGE_PIECE:
        return one
    mesh = world.executors(sorted({*world.hosts(src.mesh), *world.hosts(dst.mesh)}))
    # Where terms are reduced, each is reduced once, on the executor that holds the piece.
    spread = [Shard(d) for d in range(src.ndim)] if mesh.nranks > 1 else [Replicate()]
    mids = [src.with_placements((p,), mesh) for p in spread]
    count, best = min(
        ((count_pieces(src, mid, world) + count_pieces(mid, dst, world), i) for i, mid in enumerate(mids)),
        default=(pieces, 0),
    )
    if count >= pieces:
        return one
    return [_Link(src, mids[best], "exchange", link.kind), _Link(mids[best], dst, "exchange", "")]


# -- which steps ----------------------------------------------------------------------------------------------------


def _cut_later(placements: Sequence[Placement], i: int, dim: int) -> bool:
    """Whether a mesh dim after `i` shards tensor dim `dim`: a cut at `i` then moves what those hold."""
    return any(type(p) is Shard and p.dim == dim for p in placements[i + 1 :])


def free(src: tuple[Placement, ...], dst: tuple[Placement, ...]) -> bool:
    """Whether `src` becomes `dst`, on one mesh, without communication, whatever the shape.

    So are Replicate to Shard, unless a later mesh dim shards that tensor dim, and Replicate to Partial.
    """
    state = list(src)
    for i, (p, q) in enumerate(zip(src, dst, strict=True)):
        if p == q:
            continue
        if type(p) is not Replicate or (type(q) is Shard and _cut_later(state, i, q.dim)):
            return False
        state[i] = q
    return True


def _chain(src: TensorSpec, dst: TensorSpec) -> list[_Link]:
    reduced = steps.reduced_dims(src, dst)
    if not reduced:
        return [_Link(src, dst, "exchange", _kind(src, dst))]
    same = src.mesh is dst.mesh
    state = list(src.placements)
    if same:
        for i, q in enumerate(dst.placements):
            if type(state[i]) is Replicate and type(q) is Shard and not _cut_later(state, i, q.dim):
                state[i] = q
    how = "all_reduce"
    for i in reduced:
        q = dst.placements[i] if same else None
        if len(reduced) == 1 and type(q) is Shard and not _cut_later(state, i, q.dim):
            state[i] = q
            how = "reduce_scatter"
        else:
            state[i] = Replicate()
    mid = TensorSpec.of(dst.shape, dst.stride, dst.dtype, src.mesh, tuple(state))
    if mid is dst:
        return [_Link(src, dst, how, how)]
    wanted, held = _wanted(src, dst)
    if wanted <= held or wanted * src.dtype.itemsize <= ONE_STEP_BYTES:
        return [_Link(src, dst, "exchange", "reduce_scatter" if wanted <= held else "all_reduce")]
    return [_Link(src, mid, how, how), _Link(mid, dst, "exchange", _kind(mid, dst))]


def _wanted(src: TensorSpec, dst: TensorSpec) -> tuple[int, int]:
    """Elements that the ranks of `dst` must reduce, and how many of them are different."""
    kept = math.prod(src.mesh.shape[i] for i in steps.kept_dims(src, dst))
    ranks = [r for r in range(dst.mesh.nranks) if not steps.is_zero(src, dst, r)]
    return sum(math.prod(dst.local_shape(r)) for r in ranks), src.numel * kept


def _kind(src: TensorSpec, dst: TensorSpec) -> str:
    """The collective that the exchange amounts to."""
    if _within(src, dst):
        return ""
    if src.mesh is not dst.mesh:
        return "send"
    resharded = any(p != q and type(q) is Shard for p, q in zip(src.placements, dst.placements, strict=True))
    return "all_to_all" if resharded else "all_gather"


def _within(src: TensorSpec, dst: TensorSpec) -> bool:
    """Whether every rank of `dst` already holds, on the same device, all of `src` that it needs."""
    if src.mesh is dst.mesh and free(src.placements, dst.placements):
        return True
    home = {d: r for r, d in enumerate(src.mesh.ids)} if src.mesh.device_type == dst.mesh.device_type else {}
    kept = steps.kept_dims(src, dst)
    for r, device in enumerate(dst.mesh.ids):
        region = dst.region(r)
        if steps.is_zero(src, dst, r) or not math.prod(n for _, n in region):
            continue
        own = home.get(device)
        if own is None or _overlap(src.region(own), region) < math.prod(n for _, n in region):
            return False
        here, there = src.mesh.coordinates[own], dst.mesh.coordinates[r]
        if any(here[i] != there[i] for i in kept):
            return False
    return True


def _overlap(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> int:
    """Elements in both regions."""
    total = 1
    for (s, n), (t, m) in zip(a, b, strict=True):
        total *= max(0, min(s + n, t + m) - max(s, t))
    return total


# -- cost -----------------------------------------------------------------------------------------------------------


def move_cost(src: TensorSpec, placements: tuple[Placement, ...], mesh: DeviceMesh | None = None) -> int:
    """Bytes that the busiest rank receives when `src` moves to `placements` (on `mesh`), without making the plan.

    What a rank already holds costs nothing. A reduction over G ranks costs G - 1 terms of the rank's share of
    it and then the shares of others, which is what a reduce_scatter and an all_gather receive.
    """
    dst = src.with_placements(placements, mesh)
    same = dst.mesh is src.mesh
    if same and (dst is src or free(src.placements, placements)):
        return 0
    reduced = steps.reduced_dims(src, dst)
    terms = math.prod(src.mesh.shape[i] for i in reduced)
    sharing = 1
    for i in reduced:
        if not same:
            sharing = terms
        elif type(placements[i]) is Replicate or (type(placements[i]) is Partial and placements[i] != Partial()):
            sharing *= src.mesh.shape[i]
    home = {d: r for r, d in enumerate(src.mesh.ids)} if src.mesh.device_type == dst.mesh.device_type else {}
    most = 0
    for r in _corners(dst.mesh):
        if steps.is_zero(src, dst, r):
            continue
        region = dst.region(r)
        size = math.prod(n for _, n in region)
        own = home.get(dst.mesh.ids[r])
        held = 0 if own is None else _overlap(src.region(own), region)
        share = -(-size // sharing)
        received = (terms - 1) * share + size - (min(held, share) if terms > 1 else held)
        most = max(most, received)
    return most * src.dtype.itemsize


def _corners(mesh: DeviceMesh) -> list[int]:
    """Ranks that stand for all of `mesh`: the first two and the last along each dim."""
    if mesh.nranks <= 8:
        return list(range(mesh.nranks))
    strides = steps.rank_strides(mesh)
    ends = [sorted({0, 1, n - 1}) if n > 1 else [0] for n in mesh.shape]
    return [sum(c * s for c, s in zip(at, strides, strict=True)) for at in product(*ends)]
