"""Tensors that ended with their pool, and come back to life when they are written as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import dtorch
from dtorch import Replicate, Shard


@pytest.fixture
def mesh() -> Iterator[dtorch.DeviceMesh]:
    dtorch.shutdown()
    yield dtorch.init_device_mesh("cpu", (2,))
    dtorch.shutdown()


def plain(t: Any) -> Any:
    """A value of a state dict that does not change when the original does, nor ends with its pool."""
    return t.to_torch().clone() if isinstance(t, dtorch.Tensor) else copy.deepcopy(t)


def test_a_model_and_its_optimizer_are_filled_again_in_place(mesh: dtorch.DeviceMesh) -> None:
    torch.manual_seed(0)
    with dtorch.device_mesh(mesh):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    model = dtorch.distribute_module(model, mesh)
    optimizer = dtorch.optim.AdamW(model.parameters(), lr=0.1)
    batches = [torch.randn(8, 4) for _ in range(5)]

    def step(x: torch.Tensor) -> float:
        loss = (model(dtorch.distribute_tensor(x, mesh, [Shard(0)])) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    with dtorch.auto_redistribute():
        for x in batches[:3]:
            step(x)
        state = pytree.tree_map(plain, (model.state_dict(), optimizer.state_dict()))
        expected = [step(x) for x in batches[3:]]
        before = list(model.parameters())
        dtorch.restart()
        with pytest.raises(dtorch.TensorLostError, match=r"load_state_dict"):
            before[0].tolist()
        with pytest.raises(dtorch.TensorLostError):
            step(batches[3])
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        assert [step(x) for x in batches[3:]] == expected
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.copy_(torch.full((3, 2), 2.0)),
    lambda t: t.copy_(dtorch.full((3, 2), 2.0, device_mesh=t.device_mesh)),  # type: ignore[attr-defined]
    lambda t: t.fill_(2),
    lambda t: t.fill_(torch.tensor(2.0)),
    lambda t: t.zero_().add_(2),
    lambda t: t.uniform_(2, 2),
    lambda t: t.normal_(2, 0),
    lambda t: t.random_(2, 3),
    lambda t: torch.nn.init.constant_(t, 2),
    lambda t: t.detach().fill_(2),
]


def test_a_whole_write_brings_a_lost_tensor_back(mesh: dtorch.DeviceMesh) -> None:
    placements = [Replicate(), Shard(0)]

    def ones(placement: Any) -> list[dtorch.Tensor]:
        # Two of a kind: the second write has a plan already.
        return [dtorch.ones(3, 2, device_mesh=mesh, placements=[placement]) for _ in range(2)]

    lost = [(write, placement, ones(placement)) for write in WRITES for placement in placements]
    other_proxies = [[t.detach() for t in two] for _, _, two in lost]
    dtorch.restart()
    for (write, placement, two), others in zip(lost, other_proxies, strict=True):
        for t, other in zip(two, others, strict=True):
            write(t)
            assert t.tolist() == other.tolist() == [[2, 2]] * 3
            assert (t + other).sum().item() == 24
            assert t.placements == [placement]


def test_what_does_not_write_the_whole_leaves_it_lost(mesh: dtorch.DeviceMesh) -> None:
    lost = dtorch.ones(4, 2, device_mesh=mesh)
    view, source = lost[:2], dtorch.ones(4, 2, device_mesh=mesh)
    dtorch.restart()
    writes: list[Callable[[], Any]] = [
        lambda: lost.add_(1),
        lambda: lost[:2].fill_(1),
        lambda: lost.index_fill_(0, torch.tensor([0]), 1),
        lambda: lost.copy_(source),
    ]
    for write in writes:
        with pytest.raises(dtorch.TensorLostError):
            write()
            lost.tolist()
    lost.fill_(3)
    assert lost.tolist() == [[3, 3]] * 4
    with pytest.raises(dtorch.TensorLostError):
        view.tolist()


def test_a_refill_that_failed_is_never_read(mesh: dtorch.DeviceMesh) -> None:
    lost = dtorch.ones(2, 1, device_mesh=mesh)
    dtorch.restart()
    failed = torch.nn.functional.embedding(dtorch.tensor([9, 9], device_mesh=mesh), dtorch.ones(2, 1, device_mesh=mesh))
    lost.copy_(failed)
    for _ in range(2):
        with pytest.raises(dtorch.TensorLostError):
            lost.tolist()
        dtorch.clear_errors()
    lost.fill_(3)
    dtorch.clear_errors()
    assert lost.tolist() == [[3], [3]]
    assert (lost + 1).tolist() == [[4], [4]]
    with pytest.raises(IndexError):
        failed.tolist()
    # Lost again, and refilled again.
    dtorch.restart()
    with pytest.raises(dtorch.TensorLostError):
        lost.tolist()
    lost.copy_(torch.ones(2, 1))
    assert lost.tolist() == [[1], [1]]
