"""Views under auto_redistribute: where the base had to move they are copies, which read and write like the view."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh


@pytest.fixture(autouse=True)
def _auto() -> Iterator[None]:
    with dtorch.auto_redistribute():
        yield


def five_by_two() -> dtorch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return dtorch.distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda t: t.view(10),
    "slice": lambda t: t[:2],
    "select": lambda t: t[0],
    "split": lambda t: t.split(2)[1],
    "diagonal": lambda t: t.diagonal(),
    "view of a view": lambda t: t[1:].t(),
}


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda view: view.add_(1),
    "detach": lambda view: view.detach().zero_(),
    "data": lambda view: view.data.fill_(3),
    "copy.copy": lambda view: copy.copy(view).zero_(),
    "foreach": lambda view: torch._foreach_add_([view], 1.0),
    "foreach, twice": lambda view: torch._foreach_mul_([view, view], [2.0, 3.0]),
    "out=": lambda view: torch.neg(view, out=view),
    "unsqueeze_": lambda view: view.unsqueeze_(0).fill_(1),
    "t_": lambda view: view.t_().mul_(2),
    "an element": lambda view: view.__setitem__(0, 7.0),
    "from a plain tensor": lambda view: view.copy_(torch.full(view.shape, 5.0)),
    "by itself": lambda view: view.mul_(view),
    "in inference mode": torch.inference_mode()(lambda view: view.sub_(3)),
}


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_reads_and_writes_like_the_view(name: str, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    for what, write in WRITES.items():
        plain = torch.arange(10.0).reshape(5, 2)
        t = dtorch.distribute_tensor(plain, mesh, [Shard(0)] * len(shape))
        placements = t.placements
        # A true view; the copy; others of the same base, and of the copy: all see the write.
        pairs = [(f(t), f(plain)) for f in (lambda x: x[:], lambda x: x.t(), VIEWS[name], lambda x: x[1:3])]
        pairs.append((pairs[2][0][:1], pairs[2][1][:1]))
        if what in ("data", "copy.copy") and pairs[2][0]._spec.copied is None:
            continue  # a true view, and no version tells of what is written to its data
        for _ in range(2):
            for view in (pairs[2][0], pairs[2][1]):
                write(view)
            for ours, theirs in [(t, plain), *pairs]:
                assert torch.equal(ours.to_torch(), theirs), what  # type: ignore[attr-defined]
                assert torch.equal((ours * 2).to_torch(), theirs * 2), what  # type: ignore[attr-defined]
        assert t.placements == placements


def test_writing_by_index_where_rows_lie_apart() -> None:
    t, plain = five_by_two(), torch.arange(10.0).reshape(5, 2)
    for x in (t, plain):
        x[1] = 1.0
        x[1:4] = 3
        x[0] = torch.tensor([5.0, 6.0])
        x[1:][2:, 1] += 2
        x.fill_diagonal_(9.0)
        torch.nn.init.ones_(x[3:])
    assert torch.equal(t.to_torch(), plain)
    assert t.placements == [Shard(0)]


def test_a_copy_sees_that_its_base_is_written() -> None:
    t = five_by_two()
    view = t.view(10)
    row = view[2:4]
    data = t[1:3].data
    t.add_(1)
    for read in (view.to_torch, lambda: (view + 0).to_torch(), lambda: view.to_local(0)):
        assert read().tolist() == [float(x) for x in range(1, 11)]  # type: ignore[no-untyped-call]
    assert row.tolist() == [3, 4]
    assert data.tolist() == [[3, 4], [5, 6]]
    row.zero_()
    assert view[:5].tolist() == [1, 2, 0, 0, 5]


def test_what_is_written_and_read_where_nothing_may_move() -> None:
    t = five_by_two()
    view, late = t[1:3], t[3:]
    view.zero_()
    with dtorch.auto_redistribute(False):
        assert view.tolist() == [[0, 0], [0, 0]]
        for write in (lambda: view.add_(1), lambda: torch.neg(view, out=view), lambda: torch._foreach_add_([view], 1)):
            with pytest.raises(dtorch.PlacementError, match=r"would not reach the float32\[5, 2\] \[Shard\(0\)\]"):
                write()
        for read in (lambda: late.sum(), late.to_torch, lambda: late.to_local(0), lambda: late[0]):
            with pytest.raises(dtorch.PlacementError, match="out of date"):
                read()
    assert late.tolist() == [[6, 7], [8, 9]]
    assert t.tolist() == [[0, 1], [0, 0], [0, 0], [6, 7], [8, 9]]


def test_metadata_in_place_is_no_write() -> None:
    plain = torch.arange(12.0).reshape(4, 3)
    mesh = init_device_mesh("cpu", (2,))
    for change in (
        lambda y: y.t_(),
        lambda y: y.transpose_(0, 1),
        lambda y: y.unsqueeze_(1),
        lambda y: y.unsqueeze_(1).squeeze_(),
        lambda y: y.squeeze_(),
        lambda y: y.as_strided_((2, 2), (3, 1)),
        lambda y: y.swapdims_(0, 1),
    ):
        ours, theirs = dtorch.distribute_tensor(plain, mesh, [Shard(0)])[1:3], plain.clone()[1:3]
        change(ours), change(theirs)
        assert torch.equal((ours + 1).to_torch(), theirs + 1)
        with dtorch.auto_redistribute(False):
            assert torch.equal((ours + 1).to_torch(), theirs + 1)


def test_composites_that_change_metadata_in_place() -> None:
    x = torch.randn(4, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    mesh, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 2))
    pooled = torch.nn.functional.adaptive_avg_pool2d(dtorch.distribute_tensor(x, mesh, [Shard(0)]), 1) + 1
    torch.testing.assert_close(pooled.to_torch(), torch.nn.functional.adaptive_avg_pool2d(x, 1) + 1)
    a, b = torch.randn(4), torch.randn(4, 6)
    product = dtorch.distribute_tensor(a, square, [Replicate(), Shard(0)]) @ dtorch.distribute_tensor(
        b, square, [Replicate(), Shard(1)]
    )
    torch.testing.assert_close(product.to_torch(), a @ b)


def test_composites_that_write_to_views_of_their_own() -> None:
    mesh = init_device_mesh("cpu", (2,))
    cell, x = torch.nn.GRU(3, 5, batch_first=True), torch.randn(2, 4, 3)
    want, _ = cell(x)
    want.square().sum().backward()
    weights = [dtorch.distribute_tensor(p.detach(), mesh, [Shard(0)]).requires_grad_() for p in cell.parameters()]
    at, state = dtorch.distribute_tensor(x, mesh), dtorch.zeros(1, 2, 5, device_mesh=mesh)
    got, _ = torch.gru(at, state, weights, True, 1, 0.0, True, False, True)
    torch.testing.assert_close(got.to_torch(), want)
    got.square().sum().backward()
    for ours, theirs in zip(weights, cell.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_torch(), theirs.grad)
    a, tau = torch.randn(5, 5), torch.randn(5)
    grads = []
    for p, q in (
        (a.clone(), tau.clone()),
        (dtorch.distribute_tensor(a, mesh, [Shard(1)]), dtorch.distribute_tensor(tau, mesh, [Shard(0)])),
    ):
        torch.linalg.householder_product(p.requires_grad_(), q.requires_grad_()).sin().sum().backward()
        grads.append([p.grad, q.grad])
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-3, atol=1e-5)


def test_a_chunk_of_a_result_in_shards_is_written() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.randn(4, 3), torch.randn(6, 3)
    ours, theirs = (
        torch.nn.functional.linear(*pair)
        for pair in ((dtorch.distribute_tensor(x, mesh), dtorch.distribute_tensor(w, mesh, [Shard(0)])), (x, w))
    )
    for y in (ours, theirs):
        parts = y.chunk(3, 1)
        parts[0].add_(1)
        parts[1].mul_(parts[0])
        torch._foreach_add_([parts[2], y, y[1:3]], [1.0, 2.0, 3.0])
        torch._foreach_addcmul_([y[0], y[0, 1:]], [y[1], y[1, 1:]], [y[2], y[2, 1:]], [2.0, 3.0])
    torch.testing.assert_close(ours.to_torch(), theirs)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
def test_gradients_of_what_is_written_through_copies(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)

    def placed(t: torch.Tensor) -> torch.Tensor:
        return dtorch.distribute_tensor(t, mesh, [Shard(0)] * len(shape))

    results = []
    for lay in (placed, torch.clone):
        x, v = lay(torch.arange(15.0).view(5, 3)).requires_grad_(), lay(torch.arange(1.0, 4)).requires_grad_()
        y = x * 1
        y[1] = v
        y[2:4].mul_(3.0)
        y.diagonal().add_(v)
        y.view(-1)[2:7].mul_(y.detach().clone().view(-1)[3:8])
        y.t()[0][1:].sin_()
        (y * y).sum().backward()
        results.append((x.grad, v.grad, y.detach()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs)


def test_a_clone_of_a_copy_is_a_tensor_like_any_other() -> None:
    t = five_by_two()
    mine = t.view(10).clone()
    t.zero_()
    assert mine.add_(1).tolist() == [float(x) for x in range(1, 11)]
    deep = copy.deepcopy(five_by_two().view(10))
    assert deep.mul_(0).sum().item() == 0


def test_gradients_pass_through_copies_and_can_be_written() -> None:
    t = five_by_two().requires_grad_()
    (t.view(10) * torch.arange(10.0)).sum().backward()
    assert t.grad is not None
    t.grad.mul_(2)
    assert torch.equal(t.grad.to_torch(), 2 * torch.arange(10.0).reshape(5, 2))
    torch.nn.utils.clip_grad_norm_([t], 1.0)
    assert t.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_where_nothing_moves_a_view_is_a_view() -> None:
    t = five_by_two()
    t.t()[0].mul_(0)
    assert t.tolist() == [[0, 1], [0, 3], [0, 5], [0, 7], [0, 9]]


def test_in_inference_mode_too() -> None:
    """There are no versions there: a copy takes its view again wherever something may have been written."""
    with torch.inference_mode():
        t, plain = five_by_two(), torch.arange(10.0).reshape(5, 2)
        view, rows = t.view(10), t[1:3]
        assert view.sum().item() == 45
        view.add_(1)
        t[2] = 7.0
        t.mul_(2)
        rows[1].add_(1)
        plain.add_(1)
        plain[2] = 7.0
        plain.mul_(2)
        plain[2].add_(1)
        for ours, theirs in ((t, plain), (view, plain.view(10)), (rows, plain[1:3])):
            assert torch.equal(ours.to_torch(), theirs)
        t.mul_(2)
    with dtorch.auto_redistribute(False):
        assert torch.equal(rows.to_torch(), 2 * plain[1:3])


def test_strides_of_a_view_with_holes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Replicate()]):
        plain = torch.arange(20.0).reshape(5, 4)
        t = dtorch.distribute_tensor(plain, mesh, placements)
        for x in (t, plain):
            x[:, 1:3].fill_diagonal_(-1.0)
            x[1:, 1:].as_strided((2, 2), (5, 1)).mul_(3)
            x.as_strided((2, 2), (5, 1), 9).mul_(5)
        assert torch.equal(t.to_torch(), plain)
    t = dtorch.distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [Shard(0), Replicate()])
    with pytest.raises(dtorch.PlacementError, match="holes"):
        t[:, 1:3].as_strided((3,), (1,))


def test_a_plain_tensor_that_held_a_leaf_gives_it_a_gradient_on_its_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,))
    leaf = dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    plain = torch.zeros(4)
    plain.add_(leaf)
    (plain * torch.arange(4.0)).sum().backward()
    assert isinstance(leaf.grad, dtorch.Tensor) and leaf.grad.placements == [Shard(0)]
    assert leaf.grad.tolist() == [0, 1, 2, 3]
    assert Replicate() not in leaf.grad.placements


def test_a_backward_undoes_writes_through_views_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    weight, x = torch.arange(15.0).reshape(3, 5), torch.arange(5.0).reshape(1, 5)
    grads = []
    for leaf, other in (
        (
            dtorch.distribute_tensor(weight, mesh, [Shard(1), Replicate()]).requires_grad_(),
            dtorch.distribute_tensor(x, mesh, [Shard(0), Replicate()]),
        ),
        (weight.clone().requires_grad_(), x),
    ):
        y = torch.nn.functional.linear(leaf, other)
        y[-2:].zero_()
        # One gradient of y is whole on every rank, the other lies in shards: their sum is viewed where it is cut.
        (torch.maximum(other, y).sum() + y.sum()).backward()
        grads.append(leaf.grad)
    ours, theirs = grads
    assert isinstance(ours, dtorch.Tensor) and theirs is not None
    assert torch.equal(ours.to_torch(), theirs) and theirs[1:].abs().sum() == 0
