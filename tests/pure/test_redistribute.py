"""Redistribution plans, run by threads that stand in for executors, against plain torch."""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.executor.collectives import Comm
from dtorch.executor.redistribution import run, run_many
from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.program import pieces
from dtorch.runtime.shared import ABORT
from dtorch.sharding.redistribute import Redistribution, move_cost, plan_redistribute
from dtorch.sharding.steps import is_zero, kept_dims
from dtorch.spec import TensorSpec

R, P = Replicate(), Partial()
SLOT = 4096


class World:
    """`n` executors as threads of this process, on one collective memfd."""

    def __init__(self, n: int = 4, slot: int = SLOT) -> None:
        self.n, self.slot = n, slot
        self.fd = os.memfd_create("collective")
        self.control = memoryview(bytearray(8 * 64)).cast("Q")
        state = SimpleNamespace(control=self.control, collective_fd=self.fd, max_executors=8)
        self.comms = [Comm(state, e, "shm", slot) for e in range(n)]
        self.regions: dict[tuple[int, ...], int] = {}

    def region(self, members: tuple[int, ...]) -> int:
        return self.regions.setdefault(members, len(self.regions))

    def plan(self, src: TensorSpec, dst: TensorSpec, executors: int | None = None) -> Redistribution:
        n = executors or self.n
        return plan_redistribute(src, dst, lambda mesh, r: mesh.ids[r] % n, self.region, self.slot)

    def run(self, work: dict[int, Callable[[Comm], object]]) -> dict[int, object]:
        """What each executor's function gives; fails rather than hangs."""
        results: dict[int, object] = {}

        def body(e: int) -> None:
            try:
                results[e] = work[e](self.comms[e])
            except BaseException as error:
                results[e] = error

        threads = [threading.Thread(target=body, args=(e,), daemon=True) for e in work]
        for t in threads:
            t.start()
        deadline = time.monotonic() + 20
        for t in threads:
            t.join(max(0.0, deadline - time.monotonic()))
        if any(t.is_alive() for t in threads):
            self.control[ABORT] = 1
            raise AssertionError("the executors wait for each other")
        for e in results.values():
            if isinstance(e, BaseException):
                raise e
        return results


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    w = World()
    yield w
    os.close(w.fd)


def executors(plan: Redistribution, spec: TensorSpec, n: int) -> dict[int, list[int]]:
    return {e: [r for r in range(spec.mesh.nranks) if spec.mesh.ids[r] % n == e] for e in plan.programs}


class Case:
    """A tensor under `src`: a random term for each coordinate of its Partial dims, and what follows from them."""

    def __init__(self, src: TensorSpec, dst: TensorSpec, seed: int) -> None:
        self.src, self.dst = src, dst
        g = torch.Generator().manual_seed(seed)
        self.partial = [i for i, p in enumerate(src.placements) if isinstance(p, Partial)]
        sizes = [range(src.mesh.shape[i]) for i in self.partial]
        # Small whole numbers: exact in every dtype whatever the order.
        self.terms = {
            at: torch.randint(-8, 9, src.shape, generator=g).to(src.dtype).as_strided(src.shape, src.stride)
            if math.prod(src.shape) == 0
            else torch.empty_strided(src.shape, src.stride, dtype=src.dtype).copy_(
                torch.randint(-8, 9, src.shape, generator=g)
            )
            for at in product(*sizes)
        }

    def local(self, rank: int) -> torch.Tensor:
        at = self.src.mesh.coordinates[rank]
        return cut(self.terms[tuple(at[i] for i in self.partial)], self.src.region(rank))

    def expected(self, rank: int) -> torch.Tensor:
        """What `rank` of dst must hold."""
        src, dst = self.src, self.dst
        region = dst.region(rank)
        if is_zero(src, dst, rank):
            return torch.zeros([n for _, n in region], dtype=dst.dtype)
        kept = kept_dims(src, dst)
        at = dst.mesh.coordinates[rank]
        terms = [
            t
            for where, t in self.terms.items()
            if all(where[self.partial.index(i)] == at[i] for i in kept)
        ]
        kinds = {src.placements[i].reduce_op for i in self.partial if i not in kept}
        stacked = torch.stack(terms)
        if "max" in kinds:
            value = stacked.amax(0)
        elif "min" in kinds:
            value = stacked.amin(0)
        else:
            value = stacked.sum(0)
            divisor = math.prod(
                src.mesh.shape[i] for i in self.partial if i not in kept and src.placements[i] == Partial("avg")
            )
            if divisor > 1:
                value = value / divisor if value.is_floating_point() else value.div(divisor, rounding_mode="floor")
        return cut(value.to(dst.dtype), region)


def cut(t: torch.Tensor, region: tuple[tuple[int, int], ...]) -> torch.Tensor:
    for d, (start, length) in enumerate(region):
        t = t.narrow(d, start, length)
    return t.clone()


def check(world: World, src: TensorSpec, dst: TensorSpec, n: int, seed: int = 0) -> Redistribution:
    case = Case(src, dst, seed)
    plan = world.plan(src, dst, n)
    programs = pickle.loads(pickle.dumps(plan.programs))
    mine = executors(plan, src, n)
    theirs = executors(plan, dst, n)
    results = world.run(
        {e: lambda comm, e=e, p=p: run(p, [case.local(r) for r in mine[e]], comm) for e, p in programs.items()}
    )
    for e, (outs, failure) in results.items():
        assert failure is False
        assert len(outs) == len(theirs[e])
        for r, out in zip(theirs[e], outs, strict=True):
            torch.testing.assert_close(out, case.expected(r), rtol=1e-6 if out.dtype.itemsize > 2 else 1e-2, atol=0)
            stride = dst.local_stride(r)
            if stride is not None and out.numel():
                assert out.stride() == stride
    return plan


def spec(shape, mesh, *placements: Placement, dtype=torch.float32, stride=None) -> TensorSpec:
    return TensorSpec.of(tuple(shape), stride, dtype, mesh, placements)


# -- every source and destination ------------------------------------------------------------------------------------


@st.composite
def placements(draw, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    kinds = draw(st.sampled_from([("sum", "avg"), ("max",), ("min",), ("sum",)]))
    choices = [R, *map(Partial, kinds), *map(Shard, range(ndim))]
    return tuple(draw(st.sampled_from(choices)) for _ in mesh.shape)


@st.composite
def cases(draw):
    ndim = draw(st.integers(0, 3))
    shape = tuple(draw(st.sampled_from([0, 1, 2, 3, 5, 7, 12, 33])) for _ in range(ndim))
    order = draw(st.permutations(range(ndim)))
    stride, step = [0] * ndim, 1
    for d in reversed(order):
        stride[d] = step
        step *= max(shape[d], 1)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int8, torch.bfloat16]))
    meshes = st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 1, 2), (2, 2, 2)])
    mesh = init_device_mesh("cpu", draw(meshes))
    other = mesh
    if draw(st.integers(0, 3)) == 0:
        size = draw(meshes)
        ids = draw(st.permutations(range(8)))[: math.prod(size)]
        other = DeviceMesh("cpu", torch.tensor(ids).view(size).tolist())
    src = TensorSpec.of(shape, tuple(stride), dtype, mesh, draw(placements(mesh, ndim)))
    dst = TensorSpec.of(shape, tuple(stride), dtype, other, draw(placements(other, ndim)))
    return src, dst, draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(0, 1 << 16))


@settings(max_examples=int(os.environ.get("DTORCH_TEST_EXAMPLES", "300")), deadline=None, derandomize=True)
@given(cases())
def test_any_source_to_any_destination(world: World, case) -> None:
    src, dst, n, seed = case
    check(world, src, dst, n, seed)
