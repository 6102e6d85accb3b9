"""The traps of sharded tensors, each by name, with the right value; what is not legal is refused, never wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, PlacementError, Replicate, Shard, init_device_mesh

from .programs import Program


@pytest.fixture(scope="module")
def two() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2,))


@pytest.fixture(scope="module")
def square() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2, 2))


def rows(n: int = 5, m: int = 4) -> torch.Tensor:
    return torch.arange(float(n * m), dtype=torch.float64).reshape(n, m)


def summands(value: torch.Tensor, mesh: dtorch.DeviceMesh, kind: str = "sum") -> dtorch.Tensor:
    """`value` as a Partial whose ranks hold different things."""
    return Program(mesh).lay(value, [Partial(kind)] * mesh.ndim)


def same(ours: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(ours.to_torch(), plain, rtol=1e-12, atol=1e-12)  # type: ignore[attr-defined]


def right_or_refused(f: Callable[..., Any], plain: torch.Tensor, ours: dtorch.Tensor) -> None:
    """Strict: the right value or PlacementError. With auto_redistribute: the right value."""
    try:
        same(f(ours), f(plain))
    except PlacementError:
        pass
    with dtorch.auto_redistribute():
        same(f(ours), f(plain))


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "d[:2].add_(1)": lambda d: d[:2].add_(1),
    "d[0].fill_(1)": lambda d: d[0].fill_(1),
    "init.ones_(d[:2])": lambda d: torch.nn.init.ones_(d[:2]),
    "d[1:4].zero_()": lambda d: d[1:4].zero_(),
    "d[:, 1].mul_(2)": lambda d: d[:, 1].mul_(2),
    "d.t()[0].add_(1)": lambda d: d.t()[0].add_(1),
    "d.view(-1)[3:].zero_()": lambda d: d.view(-1)[3:].zero_(),
    "d[2] = 5": lambda d: d.__setitem__(2, 5.0),
    "d[d > 3] = 0": lambda d: d.__setitem__(d > 3, 0.0),
    "d.diagonal().fill_(9)": lambda d: d.diagonal().fill_(9),
    "d.split(2)[1].zero_()": lambda d: d.split(2)[1].zero_(),
}


@pytest.mark.parametrize("auto", [False, True], ids=["strict", "auto"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_through_a_view_reaches_the_base_on_every_rank_or_is_refused(
    name: str, placement: Any, auto: bool, two: dtorch.DeviceMesh
) -> None:
    plain = rows()
    d = dtorch.distribute_tensor(plain, two, [placement])
    try:
        with dtorch.auto_redistribute(auto):
            WRITES[name](d)
    except PlacementError:
        assert isinstance(placement, Shard)
    else:
        WRITES[name](plain)
    same(d, plain)
    for rank in range(2):
        piece = plain if placement == Replicate() else plain.chunk(2, placement.dim)[rank]
        assert torch.equal(d.to_local(rank), piece)


PARTIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fill_": lambda t: t.clone().fill_(3),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "empty_like then fill": lambda t: torch.empty_like(t).fill_(2),
    "+ scalar": lambda t: t + 2.0,
    "add_ scalar": lambda t: t.clone().add_(2.0),
    "1 - x": lambda t: 1 - t,
    "- scalar": lambda t: t - 1.5,
    "* scalar": lambda t: t * -2.0,
    "neg": torch.neg,
    "norm": torch.linalg.vector_norm,
    "var": torch.var,
    "max": torch.max,
    "amin": lambda t: t.amin(0),
    "mean": torch.mean,
    "square": torch.square,
    "relu": torch.relu,
    "softmax": lambda t: t.softmax(-1),
    "cumsum": lambda t: t.cumsum(0),
    "pad": lambda t: F.pad(t, (1, 1), value=2.0),
    "where": lambda t: torch.where(t > 3, t, 0.0),
    "+ itself": lambda t: t + t,
    "* itself": lambda t: t * t,
    "argmax": lambda t: t.argmax(),
}


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("name", PARTIAL)
def test_of_a_partial(name: str, kind: str, two: dtorch.DeviceMesh) -> None:
    plain = rows(3, 4) - 5
    right_or_refused(PARTIAL[name], plain, summands(plain, two, kind))


def test_partial_and_replicate_meet(two: dtorch.DeviceMesh) -> None:
    plain, other = rows(), rows() * 3 - 7
    whole = dtorch.distribute_tensor(other, two, [Replicate()])
    for kind in ("sum", "avg", "max", "min"):
        for f in (torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: b - a, lambda a, b: b * a):
            right_or_refused(lambda t, f=f: f(t, whole if isinstance(t, dtorch.Tensor) else other), plain,
                             summands(plain, two, kind))  # fmt: skip


@pytest.mark.parametrize("kind", ["max", "min"])
def test_negating_swaps_max_and_min(kind: str, two: dtorch.DeviceMesh) -> None:
    plain = rows() - 8
    negative = -summands(plain, two, kind)
    assert negative.placements == [Partial({"max": "min", "min": "max"}[kind])]  # type: ignore[attr-defined]
    same(negative, -plain)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("ignore", [-100, 1])
def test_nll_loss_over_uneven_shards(reduction: str, weighted: bool, ignore: int, two: dtorch.DeviceMesh) -> None:
    plain = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    target = torch.tensor([0, 1, 2, 1, 0])
    weight = torch.tensor([1.0, 5.0, 0.25], dtype=torch.float64) if weighted else None
    mine = [dtorch.distribute_tensor(t, two, [Shard(0)]).requires_grad_(t is plain) for t in (plain, target)]
    plain.requires_grad_()
    theirs = F.nll_loss(plain, target, weight, reduction=reduction, ignore_index=ignore)
    ours = F.nll_loss(mine[0], mine[1], weight, reduction=reduction, ignore_index=ignore)
    same(ours.detach(), theirs.detach())
    theirs.sum().backward()
    ours.sum().backward()
    assert plain.grad is not None and mine[0].grad is not None
    same(mine[0].grad, plain.grad)


@pytest.mark.parametrize("f", [torch.mean, lambda t: t.mean(0), lambda t: t.mean(0, keepdim=True), torch.var_mean])
def test_mean_over_uneven_shards(f: Any, two: dtorch.DeviceMesh, square: dtorch.DeviceMesh) -> None:
    plain = rows(5, 3)
    for mesh, at in ((two, [Shard(0)]), (square, [Shard(0), Shard(0)]), (square, [Shard(1), Shard(0)])):
        theirs, ours = f(plain), f(dtorch.distribute_tensor(plain, mesh, at))
        for a, b in zip(ours if isinstance(ours, tuple) else [ours], theirs if isinstance(theirs, tuple) else [theirs],
                        strict=True):  # fmt: skip
            same(a, b)


@pytest.mark.parametrize("f", [lambda t: t.flatten(), lambda t: t.view(-1), lambda t: t.view(2, 10),
                               lambda t: t.reshape(10, 2), lambda t: t.view(5, 2, 2)])  # fmt: skip
def test_flatten_of_an_uneven_shard(f: Any, two: dtorch.DeviceMesh) -> None:
    for placement in (Shard(0), Shard(1)):
        right_or_refused(f, rows(), dtorch.distribute_tensor(rows(), two, [placement]))


def test_gathering_five_rows_cut_twice(square: dtorch.DeviceMesh) -> None:
    d = dtorch.distribute_tensor(rows(), square, [Shard(0), Shard(0)])
    assert [d.to_local(r).shape[0] for r in range(4)] == [2, 1, 1, 1]
    for at in ([Replicate(), Replicate()], [Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(1), Shard(0)]):
        moved = d.redistribute(placements=at)
        same(moved, rows())
        same(moved.redistribute(placements=[Shard(0), Shard(0)]), rows())


def test_a_replicate_is_not_sliced_into_a_cut_that_a_later_mesh_dim_made(square: dtorch.DeviceMesh) -> None:
    plain = rows(4, 1)
    a = dtorch.distribute_tensor(plain, square, [Shard(0), Shard(0)])
    b = dtorch.distribute_tensor(plain * 10, square, [Replicate(), Shard(0)])
    with dtorch.auto_redistribute():
        assert (a + b).flatten().tolist() == [0, 11, 22, 33]


ALONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argmax": lambda t: t.argmax(0),
    "argmin": lambda t: t.argmin(0),
    "max values": lambda t: t.max(0).values,
    "max indices": lambda t: t.max(0).indices,
    "topk": lambda t: t.topk(2, 0).values,
    "topk indices": lambda t: t.topk(2, 0).indices,
    "sort": lambda t: t.sort(dim=0, stable=True).values,
    "argsort": lambda t: t.argsort(dim=0, stable=True),
    "cumsum": lambda t: t.cumsum(0),
    "cumprod": lambda t: t.cumprod(0),
    "softmax": lambda t: t.softmax(0),
    "logsumexp": lambda t: t.logsumexp(0),
    "norm": lambda t: t.norm(dim=0),
    "var": lambda t: t.var(0),
    "median": lambda t: t.median(0).values,
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(2, 0),
    "diff": lambda t: t.diff(dim=0),
    "tril": lambda t: t.tril(),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "kthvalue": lambda t: t.kthvalue(2, 0).values,
}


@pytest.mark.parametrize("name", ALONG)
def test_along_a_sharded_dim(name: str, two: dtorch.DeviceMesh, square: dtorch.DeviceMesh) -> None:
    plain = torch.tensor([[3.0, -1], [2, 7], [9, 0], [4, 4.5], [5, 6]], dtype=torch.float64)
    right_or_refused(ALONG[name], plain, dtorch.distribute_tensor(plain, two, [Shard(0)]))
    right_or_refused(ALONG[name], plain, dtorch.distribute_tensor(plain, square, [Shard(0), Shard(0)]))


def test_a_spatially_sharded_convolution(two: dtorch.DeviceMesh) -> None:
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for placement in (Shard(0), Shard(1), Shard(2), Shard(3)):
        right_or_refused(lambda t: F.conv2d(t, w, padding=1), x, dtorch.distribute_tensor(x, two, [placement]))


def test_shard_of_the_last_dim_counted_from_the_end(two: dtorch.DeviceMesh) -> None:
    d = dtorch.distribute_tensor(rows(), two, [Shard(-1)])
    assert d.placements == [Shard(1)]
    same(d.sum(-1), rows().sum(-1))


@pytest.mark.parametrize("f", [torch.max, torch.sum, torch.argmax, lambda t: t.amin(0), lambda t: t.prod(),
                               lambda t: t @ t.t(), lambda t: F.embedding(torch.tensor([0]), t)])  # fmt: skip
def test_empty_shards(f: Any) -> None:
    mesh = init_device_mesh("cpu", (3,))
    plain = rows(1, 2) - 3
    d = dtorch.distribute_tensor(plain, mesh, [Shard(0)])
    assert d.to_local(2).shape == (0, 2)
    right_or_refused(f, plain, d)


def test_a_replicated_bias_is_added_once(two: dtorch.DeviceMesh) -> None:
    bias, a, b = torch.ones(1), torch.ones(1, 4), torch.ones(4, 1)
    ours = torch.addmm(
        dtorch.distribute_tensor(bias, two, [Replicate()]),
        dtorch.distribute_tensor(a, two, [Shard(1)]),
        dtorch.distribute_tensor(b, two, [Shard(0)]),
    )
    assert ours.to_torch().item() == 5  # type: ignore[attr-defined]
    linear = F.linear(
        dtorch.distribute_tensor(a, two, [Shard(1)]),
        dtorch.distribute_tensor(b.t(), two, [Shard(1)]),
        dtorch.distribute_tensor(bias, two, [Replicate()]),
    )
    assert linear.to_torch().item() == 5  # type: ignore[attr-defined]


def test_dropout_differs_across_shards_and_agrees_across_replicas(square: dtorch.DeviceMesh) -> None:
    plain = torch.ones(6, 8)
    torch.manual_seed(3)
    wanted = F.dropout(plain, 0.5)
    for at in ([Shard(0), Replicate()], [Replicate(), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)]):
        dtorch.manual_seed(3)
        d = F.dropout(dtorch.distribute_tensor(plain, square, at), 0.5)
        assert torch.equal(d.to_torch(), wanted)  # type: ignore[attr-defined]
        for rank in range(4):
            piece = wanted
            for dim, (start, length) in enumerate(d._spec.region(rank)):  # type: ignore[attr-defined]
                piece = piece.narrow(dim, start, length)
            assert torch.equal(d.to_local(rank), piece)  # type: ignore[attr-defined]


def test_half_precision_summands_do_not_overflow_nor_round_before_the_sum(two: dtorch.DeviceMesh) -> None:
    parts = [torch.tensor([70000.0, 2049.0]), torch.tensor([-69000.0, -2048.0])]
    single = dtorch.DTensor.from_local(parts, two, [Partial()])
    with pytest.raises(PlacementError):
        single.half()
    with dtorch.auto_redistribute():
        assert single.half().tolist() == [1000, 1]
    mean = dtorch.DTensor.from_local([torch.full((4,), 60000.0, dtype=torch.float16)] * 2, two, [Partial("avg")])
    assert mean.redistribute(placements=[Replicate()]).tolist() == [60000.0 // 32 * 32] * 4
    data = torch.full((4, 4096), 1.0, dtype=torch.float16)
    assert dtorch.distribute_tensor(data, two, [Shard(1)]).sum(1).tolist() == [4096.0] * 4


def test_foreach_over_two_meshes_names_both(two: dtorch.DeviceMesh, square: dtorch.DeviceMesh) -> None:
    mixed = [dtorch.ones(2, device_mesh=two), dtorch.ones(2, device_mesh=square)]
    with pytest.raises(dtorch.DeviceMeshError, match=r"2, 2"):
        torch._foreach_add_(mixed, 1.0)
    assert [t.tolist() for t in mixed] == [[1, 1], [1, 1]]


def test_a_number_that_changes_every_step_makes_no_new_plan(two: dtorch.DeviceMesh) -> None:
    t = dtorch.ones(4, device_mesh=two, placements=[Shard(0)], dtype=torch.float64)
    t * 0.5, t.add_(1.0, alpha=0.25), t + 3
    before = {f: len(f._dtorch.plans) for f in OPERATORS}
    for step in range(1, 50):
        t = t * (0.5 + step)
        t.add_(1.0 + step, alpha=1.0 / step)
        t = t + step
        t = t / (1.0 + step)
    grown = {f.name(): len(f._dtorch.plans) - n for f, n in before.items()}
    assert all(n <= 2 for n in grown.values()), grown


OPERATORS = [torch.ops.aten.mul.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor]


def test_keys_do_not_confuse_arguments_that_compare_equal(two: dtorch.DeviceMesh) -> None:
    plain = rows(2, 3)
    d = dtorch.distribute_tensor(plain, two, [Replicate()])
    for f in (lambda t: t.sum([0]), lambda t: t.sum([1]), lambda t: t.sum(0, True), lambda t: t.sum(0, False)):
        same(f(d), f(plain))
    for value in (1, True, 1.0, 0.0, -0.0, 0, False):
        theirs, ours = torch.full((2,), value), torch.full_like(d[0, :2], value, dtype=torch.full((), value).dtype)
        assert ours.dtype == theirs.dtype
        same(ours, theirs)
        a, b = torch.copysign(plain + 1, torch.tensor(float(value))), torch.copysign(d + 1, float(value))
        same(b, a)
        assert (d.int() + value).dtype == (plain.int() + value).dtype
        same(d.int() + value, plain.int() + value)
    for p in (2, 2.0, True):
        same(d**p, plain**p)
        assert (d.int() ** p).dtype == (plain.int() ** p).dtype


def test_a_view_of_ragged_pieces_is_refused_or_right(two: dtorch.DeviceMesh) -> None:
    for i in range(6):
        for j in range(i, 6):
            right_or_refused(lambda t, i=i, j=j: t[i:j], rows(), dtorch.distribute_tensor(rows(), two, [Shard(0)]))
