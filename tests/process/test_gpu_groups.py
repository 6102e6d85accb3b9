"""Groups of GPU executors, with gloo in the place of NCCL: the same calls on the same interface, between processes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtorch.executor import collectives
from dtorch.executor.collectives import Comm, GlooGroup, HostGroup, NcclGroup
from dtorch.executor.device import DeviceError
from dtorch.executor.redistribution import run, run_many
from dtorch.executor.shm_collectives import Group
from dtorch.mesh import init_device_mesh
from dtorch.placement import Partial, Placement, Replicate, Shard
from dtorch.spec import TensorSpec

from .test_collectives import SLOT, Pool

R, P, S = Replicate(), Partial(), Shard


class OverGloo(NcclGroup):
    """NCCL's group, its process group replaced."""

    _make = GlooGroup._make


def _comm(comm: Comm, me: int, accelerators: int, nccl: bool = True) -> Comm:
    collectives.NcclGroup = OverGloo  # type: ignore[misc]  # of this forked process alone
    return Comm(comm.state, me, "shm", SLOT, accelerators=accelerators, nccl=nccl)


def _spec(n: int, placement: Placement, dtype: torch.dtype) -> TensorSpec:
    shape = (5, 6)
    return TensorSpec.of(shape, (6, 1), dtype, init_device_mesh("cpu", n), (placement,))


WHOLE = torch.arange(30.0).view(5, 6)


def _cut(spec: TensorSpec, rank: int, whole: torch.Tensor) -> torch.Tensor:
    for dim, (start, length) in enumerate(spec.region(rank)):
        whole = whole.narrow(dim, start, length)
    return whole.contiguous().to(spec.dtype)


def _local(spec: TensorSpec, rank: int) -> torch.Tensor:
    return (WHOLE * (rank + 1)).to(spec.dtype) if spec.is_partial else _cut(spec, rank, WHOLE)


def _sum(n: int, source: Placement) -> torch.Tensor:
    """The value that `source` stands for where the ranks hold what `_local` gives them."""
    if not isinstance(source, Partial):
        return WHOLE
    factors = [float(rank + 1) for rank in range(n)]
    return WHOLE * {"sum": sum(factors), "avg": sum(factors) / n, "max": max(factors)}[source.reduce_op]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("first", "nccl"), [(0, True), (0, False), (1, True)], ids=["nccl", "no nccl", "mixed"])
def test_moves(n: int, first: int, nccl: bool) -> None:
    """All GPUs with NCCL, all without, and one CPU among GPUs."""
    pairs = [(R, S(0)), (S(0), R), (S(0), S(1)), (P, R), (P, S(1)), (Partial("avg"), R), (Partial("max"), R)]
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    with Pool(n) as pool:
        moves = [(_spec(n, source, dtype), source, to) for dtype in dtypes for source, to in pairs]
        plans = [pool.plan(spec, to) for spec, _, to in moves]

        def work(me: int, comm: Comm, _: Any) -> list[str]:
            gpus = _comm(comm, me, first, nccl)
            wrong = []
            for (spec, source, to), plan in zip(moves, plans, strict=True):
                outs, bad = run(plan.programs[me], [_local(spec, me)], gpus)
                want = _cut(spec.with_placements((to,)), me, _sum(n, source))
                if bad or not torch.allclose(
                    outs[0].float(), want.float(), rtol=1e-2 if spec.dtype.itemsize == 2 else 0
                ):
                    wrong.append(f"{spec.dtype} {source} {to}: {bad} {outs}, wanted {want}")
            return wrong

        assert pool.finish(pool.start(work)) == [[]] * n


def test_poison_is_known_to_all_before_anything_is_sent() -> None:
    spec = _spec(2, P, torch.float32)

    def work(me: int, comm: Comm, _: Any) -> list[Any]:
        gpus = _comm(comm, me, 0)
        program = plan.programs[me]
        told = []
        for poisoned in (None, 1, 0, None):
            outs, bad = run(program, [_local(spec, me)], gpus, poison=poisoned == me)
            told.append((bool(bad), [o.sum().item() for o in outs]))
        outs, bad = run_many([program] * 3, [[_local(spec, me)]] * 3, gpus)
        told.append((bool(bad), [o[0].sum().item() for o in outs]))
        return told

    total = 3 * 435.0
    want = [(False, [total]), (True, []), (True, []), (False, [total]), (False, [total] * 3)]
    with Pool(2) as pool:
        plan = pool.plan(spec, R)
        assert pool.finish(pool.start(work)) == [want, want]


def test_a_group_of_one() -> None:
    """What tests/device/there.py does on a GPU."""
    group = OverGloo(os.memfd_create("group"), 0, (0,), 0, lambda: 0)
    for dtype, divisor in ((torch.float32, 1), (torch.bfloat16, 2)):
        x = torch.arange(1000.0).to(dtype)
        out = torch.empty_like(x)
        assert group.all_reduce([x], out, [(0, 0)], "sum", divisor) == 0
        assert torch.equal(out, (x.float() / divisor).to(dtype))


def test_a_transfer_that_cannot_be_enqueued_ends_the_executor() -> None:
    group = NcclGroup.__new__(NcclGroup)
    group.members, group.n, group.me = (0, 1), 2, 0
    group.barrier = lambda poison=0: 0  # type: ignore[method-assign]

    def refuse(*args: object) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    group._pg = type("Broken", (), {"allreduce": refuse, "alltoall_base": refuse})
    rows = [(0, 0), (1, 0)]
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(DeviceError, match="unhandled system error"):
            group.all_reduce([torch.ones(4, dtype=dtype)], torch.empty(4, dtype=dtype), rows, "sum", 1)


@pytest.mark.parametrize(
    ("members", "me", "accelerators", "nccl", "kind"),
    [
        ((0, 1), 0, 8, True, Group),
        ((8, 9), 8, 8, True, NcclGroup),
        ((8, 9), 8, 8, False, HostGroup),
        ((0, 8), 0, 8, True, Group),
        ((0, 8), 8, 8, True, HostGroup),
    ],
)
def test_which_group_is_whose(members: tuple[int, ...], me: int, accelerators: int, nccl: bool, kind: type) -> None:
    state = SimpleNamespace(max_executors=16, control=memoryview(b""), collective_fd=-1)
    comm = Comm(state, me, accelerators=accelerators, nccl=nccl)
    assert comm._kind(members) is kind
