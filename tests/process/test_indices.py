"""What torch refuses inside ``t[...]`` is refused in its words, on any mesh; and views made in place are torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh
from dtorch.placement import Placement

PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1)]


def six_by_five(placement: Placement) -> dtorch.Tensor:
    return dtorch.distribute_tensor(torch.arange(30.0).reshape(6, 5), init_device_mesh("cpu", 2), [placement])


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize(
    "index",
    [
        torch.ones(2, dtype=torch.bool),
        torch.ones(7, dtype=torch.bool),
        torch.ones(6, 4, dtype=torch.bool),
        torch.ones(6, 5, 1, dtype=torch.bool),
        torch.ones(4, dtype=torch.uint8),
        (slice(None), torch.ones(6, dtype=torch.bool)),
        torch.tensor([1, 2], dtype=torch.int8),
    ],
    ids=["short", "long", "narrow", "deep", "uint8", "second", "int8"],
)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_an_index_that_torch_refuses(index: object, placement: Placement) -> None:
    plain, t = torch.arange(30.0).reshape(6, 5), six_by_five(placement)
    with pytest.raises(IndexError) as wanted:
        plain[index]  # type: ignore[index]
    with pytest.raises(IndexError) as read:
        t[index]  # type: ignore[index]
    with pytest.raises(IndexError):
        t[index] = torch.ones(5)  # type: ignore[index]
    assert str(read.value) == str(wanted.value)
    assert torch.equal(t.to_torch(), plain)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.transpose_(0, 1),
        lambda t: t.transpose_(-1, 0),
        lambda t: t.swapaxes_(0, 1),
        lambda t: t.swapdims_(0, 1),
        lambda t: t.unsqueeze_(1).squeeze_(1),
        lambda t: t.unsqueeze_(1).squeeze_((1,)),
        lambda t: t.unsqueeze_(0).squeeze_().t_(),
    ],
)
def test_views_made_in_place(change: Callable[[torch.Tensor], torch.Tensor], placement: Placement) -> None:
    plain, t = torch.arange(30.0).reshape(6, 5), six_by_five(placement)
    row = t.detach()
    changed = change(t)
    change(plain)
    assert changed is t
    assert torch.equal(t.to_torch(), plain)
    assert t.stride() == plain.stride()
    t.fill_(1)
    assert torch.equal(row.to_torch(), torch.ones(6, 5))
