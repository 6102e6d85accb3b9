"""Views under auto_redistribute: where the base had to move they are copies, which read right or not at all."""

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


@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_reads_like_the_view_and_refuses_to_be_written(name: str) -> None:
    t, plain = five_by_two(), torch.arange(10.0).reshape(5, 2)
    view = VIEWS[name](t)
    assert torch.equal(view.to_torch(), VIEWS[name](plain))  # type: ignore[attr-defined]
    assert torch.equal((view * 2).to_torch(), VIEWS[name](plain) * 2)  # type: ignore[attr-defined]
    for write in (
        lambda: view.add_(1),
        lambda: view.detach().zero_(),
        lambda: view.data.zero_(),
        lambda: copy.copy(view).zero_(),
        lambda: torch._foreach_add_([view], 1.0),
        lambda: torch.neg(view, out=view),
        lambda: view.unsqueeze_(0).fill_(1),
    ):
        with pytest.raises(dtorch.PlacementError, match=r"clone\(\)"):
            write()
    assert torch.equal(t.to_torch(), plain)


def test_writing_by_index_where_rows_lie_apart_is_refused() -> None:
    t = five_by_two()
    with pytest.raises(dtorch.PlacementError, match=r"clone\(\)"):
        t[1:] = 2.0
    with pytest.raises(dtorch.PlacementError, match=r"clone\(\)"):
        torch.nn.init.ones_(t[:2])
    assert torch.equal(t.to_torch(), torch.arange(10.0).reshape(5, 2))


def test_a_copy_is_out_of_date_once_its_base_is_written() -> None:
    t = five_by_two()
    view = t.view(10)
    row = view[2:4]
    t.add_(1)
    for read in (lambda: view.sum(), lambda: view.to_torch(), lambda: view.to_local(0), lambda: row + 1):
        with pytest.raises(dtorch.PlacementError, match="out of date"):
            read()
    assert t.view(10).tolist() == [float(x) for x in range(1, 11)]


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
    t = five_by_two()
    with torch.inference_mode():
        view = t.view(10)
        assert view.sum().item() == 45
        with pytest.raises(dtorch.PlacementError, match=r"clone\(\)"):
            view.add_(1)


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
