"""Several tensors moved in one command, as a backward moves gradients: each comes out as if it were moved alone."""

from __future__ import annotations

import random

import pytest
import torch

import dtorch
from dtorch import Partial, Placement, Replicate, Shard
from dtorch.runtime.moves import redistribute_many

SHAPES = ((5,), (5, 1), (1, 1), (4, 3), (), (0, 3))


def _placements(rng: random.Random, ndim: int, dims: int) -> tuple[Placement, ...]:
    partial = Partial(rng.choice(["sum", "avg", "max"]))
    return tuple(rng.choice([Replicate(), *[Shard(d) for d in range(ndim)], partial]) for _ in range(dims))


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2)])
def test_values_are_those_of_single_moves(mesh_shape: tuple[int, ...]) -> None:
    mesh, rng = dtorch.init_device_mesh("cpu", mesh_shape), random.Random(0)
    torch.manual_seed(0)
    for _ in range(150):
        values = [torch.randn(rng.choice(SHAPES)) for _ in range(rng.choice([2, 3]))]
        moves = []
        for x in values:
            source, target = (_placements(rng, x.ndim, mesh.ndim) for _ in range(2))
            t = dtorch.distribute_tensor(x, mesh, source)
            moves.append((t, t._spec.with_placements(target)))
        for x, (t, spec), out in zip(values, moves, redistribute_many(moves), strict=True):
            assert out.placements == spec.placements
            torch.testing.assert_close(out.to_torch(), x, msg=lambda m, t=t, s=spec: f"{t._spec} to {s}: {m}")


def test_a_gradient_of_which_one_line_of_ranks_holds_nothing() -> None:
    """A line of empty pieces takes part in no all_reduce, yet its ranks' results are results."""
    mesh = dtorch.init_device_mesh("cpu", (2, 2))
    a, b = torch.randn(5, 1), torch.randn(5)
    plain = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    (plain[1] / plain[0]).square().sum().backward()
    x = dtorch.distribute_tensor(a, mesh, [Shard(1), Replicate()]).requires_grad_()
    y = dtorch.distribute_tensor(b, mesh, [Replicate(), Partial("avg")]).requires_grad_()
    with dtorch.auto_redistribute():
        (y / x).square().sum().backward()
    for t, p in zip((x, y), plain, strict=True):
        torch.testing.assert_close(t.grad.to_torch(), p.grad)
