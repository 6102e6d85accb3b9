"""What must hold on any mesh, however its ranks are shared out among executors.

`test_meshes.py` runs all of it: here on this machine's cores, and in processes of their own with other numbers of
executors, with gloo for the collectives, and in simulation.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, DeviceMeshError, Partial, PlacementError, Replicate, Shard, init_device_mesh, nn
from dtorch.placement import Placement

R, P, S = Replicate(), Partial(), Shard
TWO = init_device_mesh("cpu", 2)
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
THREE = init_device_mesh("cpu", (2, 1, 3))
HUGE = init_device_mesh("cpu", (3, 2, 4, 3, 6), mesh_dim_names=["pod", "host", "dp", "cp", "tp"])


def whole(*shape: int) -> torch.Tensor:
    """Values that no two places share; sums of them are exact in float64."""
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)


def pieces(t: dtorch.Tensor) -> list[list[int]]:
    """The shape of what each rank holds, as the executors have it."""
    return [list(t.to_local(rank).shape) for rank in range(t.device_mesh.size())]


def same_pieces(t: dtorch.Tensor) -> None:
    """Every rank holds what the spec says it holds, and together they are the whole."""
    full = t.detach().to_torch()
    for rank in range(t.device_mesh.size()):
        expected = full
        for d, (start, length) in enumerate(t._spec.region(rank)):
            expected = expected.narrow(d, start, length)
        assert torch.equal(t.detach().to_local(rank), expected), (rank, t.placements)


# -- one grid ---------------------------------------------------------------------------------------------------------


def test_factories_on_a_grid() -> None:
    for placements in ([S(0), S(1)], [S(0), S(0)], [S(1), R], [R, R]):
        where = {"device_mesh": GRID, "placements": placements}
        for made, expected in [
            (dtorch.zeros(5, 3, **where), torch.zeros(5, 3)),
            (dtorch.ones(5, 3, dtype=torch.int32, **where), torch.ones(5, 3, dtype=torch.int32)),
            (dtorch.full((5, 3), 2.5, **where), torch.full((5, 3), 2.5)),
            (dtorch.eye(5, 3, **where), torch.eye(5, 3)),
            (dtorch.tensor([[1, 2, 3]] * 5, **where), torch.tensor([[1, 2, 3]] * 5)),
            (dtorch.from_torch(whole(5, 3), **where), whole(5, 3)),
        ]:
            assert made.placements == placements
            assert torch.equal(made.to_torch(), expected)
            same_pieces(made)
    for placements in ([S(0), S(0)], [R, S(0)], [S(0), R]):
        for name, args in [("arange", (7,)), ("arange", (1, 9, 2)), ("linspace", (0, 1, 7)), ("logspace", (0, 1, 6))]:
            made = getattr(dtorch, name)(*args, device_mesh=GRID, placements=placements)
            assert torch.equal(made.to_torch(), getattr(torch, name)(*args)), name
            same_pieces(made)


@pytest.mark.parametrize("shape", [(5, 3), (8, 4), (1, 6), (0, 4)])
def test_uneven_and_empty_shards(shape: tuple[int, int]) -> None:
    x = whole(*shape)
    for placements in itertools.product([R, S(0), S(1)], repeat=2):
        t = dtorch.distribute_tensor(x, GRID, placements)
        same_pieces(t)
        y = (t * 2 + 1).relu()
        assert y.placements == list(placements)
        assert torch.equal(y.to_torch(), (x * 2 + 1).relu())
        assert torch.equal(t.sum().to_torch(), x.sum())
        assert torch.equal(t.sum(0).to_torch(), x.sum(0))
        assert torch.equal(t.T.to_torch(), x.T)
        if x.numel():
            assert torch.equal(t.amax(1).to_torch(), x.amax(1))
            assert t.mean().item() == x.mean().item()
    five = dtorch.distribute_tensor(whole(5), GRID, [S(0), S(0)])
    assert pieces(five) == [[2], [1], [1], [1]]


def test_matmul_on_a_grid() -> None:
    a, b = whole(6, 4), whole(4, 8)
    for pa, pb, out in [
        ([S(0), R], [R, S(1)], [S(0), S(1)]),
        ([S(0), S(1)], [R, S(0)], [S(0), P]),
        ([S(1), S(1)], [S(0), S(0)], [P, P]),
        ([S(0), S(0)], [R, R], [S(0), S(0)]),
        ([R, R], [S(1), S(1)], [S(1), S(1)]),
    ]:
        y = dtorch.distribute_tensor(a, GRID, pa) @ dtorch.distribute_tensor(b, GRID, pb)
        assert y.placements == out
        assert torch.equal(y.to_torch(), a @ b)


PLACED: list[list[Placement]] = [
    [R, R], [S(0), R], [R, S(1)], [S(0), S(1)], [S(0), S(0)], [S(1), S(0)], [P, R], [P, S(0)], [P, P],
]  # fmt: skip


@pytest.mark.parametrize("src", PLACED, ids=str)
def test_redistribute_on_a_grid(src: list[Placement]) -> None:
    x = whole(5, 3)
    t = dtorch.distribute_tensor(x, GRID, src)
    for dst in PLACED:
        moved = t.redistribute(placements=dst)
        assert moved.placements == dst
        assert torch.equal(moved.to_torch(), x)
        if P not in dst:
            same_pieces(moved)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_summands_are_reduced(op: str) -> None:
    locals = [whole(3, 4) * (rank - 1) for rank in range(4)]
    t = dtorch.DTensor.from_local(locals, GRID, [Partial(op), Partial(op)])
    stacked = torch.stack(locals)
    expected = {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
    assert torch.equal(t.to_torch(), expected)
    for dst in ([R, R], [S(0), R], [S(1), S(0)], [Partial(op), R], [S(0), Partial(op)]):
        assert torch.equal(t.redistribute(placements=dst).to_torch(), expected), dst


def test_three_mesh_dims() -> None:
    x = whole(7, 5)
    for src, dst in itertools.product([[S(0), R, S(0)], [S(1), S(0), S(0)], [P, S(0), P], [R, R, R]], repeat=2):
        t = dtorch.distribute_tensor(x, THREE, src)
        assert torch.equal(t.redistribute(placements=dst).to_torch(), x)
    y = dtorch.distribute_tensor(x, THREE, [S(0), R, S(1)])
    assert torch.equal((y @ y.T.redistribute(placements=[R, R, S(0)])).to_torch(), x @ x.T)


# -- a mesh larger than the machine -----------------------------------------------------------------------------------


def test_432_ranks() -> None:
    rows, columns = [S(0)] * 5, [S(1)] * 5
    x = whole(450, 8)
    t = dtorch.distribute_tensor(x, HUGE, rows)
    assert HUGE.size() == 432
    # Cut five times, in mesh order: 450 → 150, 75, 19 (and 18), 7 (and less), 2 (and less, or nothing).
    assert t.to_local(0).shape == (2, 8) and t.to_local(5).shape == (0, 8)
    assert torch.equal((t + 1).relu().to_torch(), x + 1)
    assert torch.equal(t.sum(0).to_torch(), x.sum(0))
    across = t.redistribute(placements=columns)
    assert torch.equal(across.to_torch(), x)
    assert torch.equal(across.redistribute(placements=[R] * 5).to_local(431), x)
    w = whole(8, 3)
    assert torch.equal((t @ dtorch.distribute_tensor(w, HUGE)).to_torch(), x @ w)
    product = across @ dtorch.distribute_tensor(w, HUGE, rows)
    assert product.placements == [P] * 5
    assert torch.equal(product.redistribute(placements=rows).to_torch(), x @ w)
    assert torch.equal(product.to_torch(), x @ w)
    assert torch.equal(dtorch.arange(1000, device_mesh=HUGE, placements=rows).to_torch(), torch.arange(1000))
    torch.manual_seed(3)
    dtorch.manual_seed(3)
    mixed = [S(0), R, S(1), R, S(0)]
    assert torch.equal(dtorch.randn(50, 9, device_mesh=HUGE, placements=mixed).to_torch(), torch.randn(50, 9))


# -- from one mesh to another -----------------------------------------------------------------------------------------

MESHES = {
    "one": DeviceMesh("cpu", [0]),
    "two": TWO,
    "the other two": DeviceMesh("cpu", [3, 2]),
    "overlapping": DeviceMesh("cpu", [1, 2, 3]),
    "grid": GRID,
    "grid elsewhere": DeviceMesh("cpu", [[7, 3], [1, 6]]),
}


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("source", MESHES)
def test_from_any_mesh_to_any_other(source: str, target: str) -> None:
    x = whole(5, 4)
    a, b = MESHES[source], MESHES[target]
    for first, second in [(S(0), S(0)), (S(0), S(1)), (P, R), (S(1), P)]:
        src = [first] * a.ndim
        dst = [R] * (b.ndim - 1) + [second]
        t = dtorch.distribute_tensor(x, a, src)
        moved = t.redistribute(b, dst)
        assert moved.device_mesh is b and moved.placements == dst
        assert torch.equal(moved.to_torch(), x)
        if second != P:
            same_pieces(moved)
    if a is not b:
        assert t.to(b).placements == [R] * b.ndim
        assert torch.equal(t.to(b).to_local(), x)


def test_gradients_come_back_over_meshes() -> None:
    x = whole(4, 3)
    t = dtorch.distribute_tensor(x, TWO, [S(0)]).requires_grad_()
    y = (t * 2).redistribute(MESHES["overlapping"], [S(1)]) ** 2
    y.redistribute(GRID, [R, S(0)]).sum().backward()
    assert t.grad is not None and t.grad.device_mesh is TWO and t.grad.placements == [S(0)]
    assert torch.equal(t.grad.to_torch(), 8 * x)


def test_one_operator_needs_one_mesh() -> None:
    a, b = dtorch.ones(4, device_mesh=TWO), dtorch.ones(4, device_mesh=GRID)
    with pytest.raises(DeviceMeshError) as raised:
        a + b
    assert str(raised.value).startswith(
        "add: tensors of one operator must lie on one mesh, but float32[4] [Replicate()] lies on "
        "DeviceMesh('cpu', (2)) and float32[4] [Replicate(), Replicate()] on DeviceMesh('cpu', (dp=2, tp=2)).\n"
        "  Write:  x = x.redistribute("
    )
    assert torch.equal((a + b.redistribute(TWO)).to_torch(), torch.full((4,), 2.0))


def test_what_needs_communication_is_refused() -> None:
    t = dtorch.distribute_tensor(whole(4, 6), GRID, [R, S(1)])
    with pytest.raises(PlacementError) as raised:
        t.softmax(1)
    lines = str(raised.value).splitlines()
    assert lines[:2] == [
        "softmax(dim=1) cannot run on these placements",
        "    input: float64[4, 6] on cpu(dp=2, tp=2): [Replicate(), Shard(1)]",
    ]
    assert any(line.startswith("  Write:  input = input.redistribute(placements=[") for line in lines), lines
    with dtorch.auto_redistribute():
        assert torch.allclose(t.softmax(1).to_torch(), whole(4, 6).softmax(1))


# -- by name ----------------------------------------------------------------------------------------------------------


def test_redistribute_like_and_by_dict() -> None:
    x = whole(4, 6)
    t = dtorch.distribute_tensor(x, GRID, [S(0), R])
    like = t.redistribute_like(dtorch.ones(7, device_mesh=TWO, placements=[S(0)]))
    assert like.device_mesh is TWO and like.placements == [S(0)] and torch.equal(like.to_torch(), x)
    # The names that a mesh lacks are ignored: one dictionary serves every mesh.
    layout = {"tp": S(1), "dp": R, "pp": S(0), "ep": P}
    moved = t.redistribute_by_dict(placements_dict=layout)
    assert moved.placements == [R, S(1)] and torch.equal(moved.to_torch(), x)
    moved = t.redistribute_by_dict(HUGE, layout, "replicate")
    assert moved.placements == [R, R, R, R, S(1)] and torch.equal(moved.to_torch(), x)
    moved = t.redistribute_by_dict(GRID, {"tp": S(0)}, "keep")
    assert moved.placements == [S(0), S(0)] and torch.equal(moved.to_torch(), x)
    with pytest.raises(ValueError, match="no placement for mesh dim 'dp'"):
        t.redistribute_by_dict(placements_dict={"tp": S(0)})
    with pytest.raises(DeviceMeshError, match="have no names"):
        t.redistribute_by_dict(TWO, layout)
    both = dtorch.tensors_redistribute_by_dict([t, t + 1], GRID, layout)
    assert [b.placements for b in both] == [[R, S(1)]] * 2


def test_a_slice_stands_for_a_dim() -> None:
    x = whole(4, 6)
    t = dtorch.distribute_tensor(x, GRID["tp"], [S(1)])
    assert t.device_mesh is GRID and t.placements == [R, S(1)]
    assert torch.equal(t.to_torch(), x)
    # Its other dims stay as they are.
    batch = dtorch.distribute_tensor(x, GRID, [S(0), R])
    assert batch.redistribute(GRID["tp"], [S(1)]).placements == [S(0), S(1)]
    assert dtorch.zeros(4, device_mesh=GRID["dp"], placements=[S(0)]).placements == [S(0), R]
    two = HUGE["dp", "tp"]
    assert two.shape == (4, 6)
    t = dtorch.distribute_tensor(x, two, [S(0), S(1)])
    assert t.device_mesh is HUGE and t.placements == [R, R, S(0), R, S(1)]
    assert torch.equal(t.to_torch(), x)


# -- stages -----------------------------------------------------------------------------------------------------------


def test_a_pipeline_of_two_stages() -> None:
    """`unbind` gives the meshes of the stages; activations and gradients cross between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["pp", "tp"])
    first, second = mesh.unbind("pp")
    assert [m.mesh.tolist() for m in (first, second)] == [[0, 1], [2, 3]]
    assert first.mesh_dim_names == ("tp",)
    torch.manual_seed(0)
    stages = [nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)]
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    loss = nn.functional.mse_loss(stages[1](torch.tanh(stages[0](x))), y)
    loss.backward()
    expected = [p.grad for stage in stages for p in stage.parameters()]
    placed = [
        [dtorch.distribute_tensor(p.detach(), m, [how]).requires_grad_() for p in stage.parameters()]
        for stage, m, how in zip(stages, (first, second), (S(0), R), strict=True)
    ]
    # Two microbatches; the second stage's gradients add up.
    losses = []
    for rows in (slice(0, 2), slice(2, 4)):
        hidden = torch.tanh(nn.functional.linear(dtorch.distribute_tensor(x[rows], first), *placed[0]))
        assert hidden.device_mesh is first and hidden.placements == [S(1)]
        hidden = hidden.redistribute(second, [R])
        out = nn.functional.linear(hidden, *placed[1])
        losses.append(nn.functional.mse_loss(out, dtorch.distribute_tensor(y[rows], second)) / 2)
        losses[-1].backward()
    assert sum(part.item() for part in losses) == pytest.approx(loss.item(), rel=1e-12)
    for p, grad in zip(itertools.chain(*placed), expected, strict=True):
        assert p.grad.device_mesh is p.device_mesh and p.grad.placements == p.placements
        assert torch.allclose(p.grad.to_torch(), grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("placements", [[S(0), R], [S(0), S(0)], [R, S(1)], [S(0), S(1)], [R, R]], ids=str)
def test_writes_through_views_reach_every_rank_or_are_refused(placements: list[Placement]) -> None:
    x = whole(7, 5)
    t = dtorch.distribute_tensor(x, GRID, placements)
    for view in (
        lambda t: t[1],
        lambda t: t[:, 2],
        lambda t: t[2:6],
        lambda t: t.T[3],
        lambda t: t.view(35)[::2],
        lambda t: t.unsqueeze(1).expand(7, 2, 5)[:, 0],
        lambda t: t.diagonal(),
        lambda t: t[:],
        lambda t: t.chunk(2, 1)[1].unbind(1)[0],
    ):
        try:
            part = view(t)
        except PlacementError:
            continue
        part.mul_(3)
        view(x).mul_(3)
        assert torch.equal(part.to_torch(), view(x))
        assert torch.equal(t.to_torch(), x)
        same_pieces(t)


@pytest.mark.skipif("DTORCH_DTENSOR_IN_SAME_DEVICE" not in os.environ, reason="runs in simulation only")
def test_a_simulated_mesh_of_gpus() -> None:
    mesh = init_device_mesh("cuda", (2, 4))
    t = dtorch.distribute_tensor(whole(5, 9), mesh, [S(0), S(1)])
    assert t.device == torch.device("cuda:0")
    assert torch.equal((t @ t.T.redistribute(placements=[R, S(0)])).to_torch(), whole(5, 9) @ whole(5, 9).T)
    assert torch.equal(t.cpu().to_torch(), whole(5, 9))
