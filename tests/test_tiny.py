"""dtorch in a minute: read it from top to bottom.

    python -m pytest tests/test_tiny.py

Everything here runs on two CPU executors of this machine; on GPUs only the word "cpu" changes.
"""

from __future__ import annotations

import asyncio
import copy
import traceback

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard, init_device_mesh, nn

mesh = init_device_mesh("cpu", 2, mesh_dim_names=["dp"])


def test_it_is_pytorch() -> None:
    a = dtorch.randn(4, 8)  # nothing is computed here: the call is sent to an executor
    b = (a @ a.T).relu().sum()
    assert isinstance(b, torch.Tensor)
    assert b.item() > 0  # waits here, and only here


def test_random_numbers_are_torchs() -> None:
    dtorch.manual_seed(7)
    torch.manual_seed(7)
    assert torch.equal(dtorch.randn(100).to_torch(), torch.randn(100))


def test_a_tensor_can_be_spread_over_devices() -> None:
    t = dtorch.tensor([[1, 2], [3, 4], [5, 6]], device_mesh=mesh, placements=[Shard(0)])
    assert tuple(t.shape) == (3, 2)  # shape, sum, print: always about the whole
    assert t.to_local(0).tolist() == [[1, 2], [3, 4]]  # pieces are cut as torch.chunk cuts
    assert t.to_local(1).tolist() == [[5, 6]]
    assert t.sum().item() == 21
    assert "placements=" in repr(t) and "5" in repr(t)


def test_operators_carry_placements_along() -> None:
    x = dtorch.randn(6, 4, device_mesh=mesh, placements=[Shard(0)])
    w = dtorch.randn(4, 3, device_mesh=mesh)  # Replicate, unless you say otherwise
    y = (x @ w).relu()
    assert y.placements == [Shard(0)]
    torch.testing.assert_close(y.to_torch(), (x.to_torch() @ w.to_torch()).relu())


def test_a_contraction_of_shards_is_a_sum_not_yet_done() -> None:
    x = dtorch.ones(2, 8, device_mesh=mesh, placements=[Shard(1)])
    w = dtorch.ones(8, 2, device_mesh=mesh, placements=[Shard(0)])
    y = x @ w
    assert y.placements == [Partial()]
    assert y.to_local(0).tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert y.redistribute(placements=[Replicate()]).to_local(0).tolist() == [[8.0, 8.0], [8.0, 8.0]]


def test_what_would_need_communication_is_refused_with_the_line_to_write() -> None:
    x = dtorch.randn(4, 6, device_mesh=mesh, placements=[Shard(1)])
    with pytest.raises(dtorch.PlacementError, match="softmax") as raised:
        x.softmax(dim=1)
    assert "redistribute(placements=[Shard(0)])" in str(raised.value)
    with dtorch.auto_redistribute():
        torch.testing.assert_close(x.softmax(dim=1).to_torch(), x.to_torch().softmax(dim=1))


def test_in_place_writes_through_views_reach_every_rank() -> None:
    t = dtorch.zeros(4, 2, device_mesh=mesh, placements=[Shard(0)])
    column = t[:, 1]
    column.add_(1)
    t.view(8)[:].mul_(3)
    assert t.tolist() == [[0.0, 3.0]] * 4
    assert column.to_local(1).tolist() == [3.0, 3.0]


def test_data_parallel_training_is_one_argument() -> None:
    dtorch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    model = copy.deepcopy(plain).to(mesh)  # parameters Replicate on the mesh
    x, y = torch.randn(10, 8), torch.randint(0, 3, (10,))

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> list[float]:
        out = []
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # gradients arrive reduced, with the parameters' placements
            optimizer.step()
            out.append(loss.item())
        return out

    expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), x, y)
    x, y = (dtorch.distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y))
    ours = losses(model, dtorch.optim.AdamW(model.parameters(), lr=0.01), x, y)

    assert model[0].weight.grad.placements == [Replicate()]
    assert ours == pytest.approx(expected, abs=1e-6)


async def test_values_can_be_awaited() -> None:
    ticks = 0

    async def heartbeat() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    beat = asyncio.create_task(heartbeat())
    a = dtorch.rand(300, 300)
    for _ in range(20):
        a = a @ a / 100
    future = a.to_torch_async()
    value = await future
    beat.cancel()

    assert value.shape == (300, 300)
    assert ticks > 0  # the loop went on turning
    assert torch.equal(await a, value)  # any number of times


def test_an_error_far_away_names_the_line_that_issued_it() -> None:
    table = dtorch.zeros(4, 2)
    bad = nn.functional.embedding(dtorch.tensor([0, 9]), table)  # the line to blame
    later = bad + 1
    with pytest.raises(IndexError) as raised:
        later.to_torch()
    assert isinstance(raised.value, dtorch.RemoteError)
    text = "".join(traceback.format_exception(raised.value))
    line = test_an_error_far_away_names_the_line_that_issued_it.__code__.co_firstlineno + 2
    assert f"test_tiny.py:{line}" in text
    assert table.tolist() == [[0.0, 0.0]] * 4  # nothing else is harmed


def test_a_mesh_may_be_larger_than_the_machine() -> None:
    big = init_device_mesh("cpu", (3, 2, 4, 3, 6))
    t = dtorch.arange(1000, device_mesh=big, placements=[Shard(0), *[Replicate()] * 3, Shard(0)])
    assert big.size() == 432
    assert t.redistribute(placements=[Replicate()] * 5).to_local(431).tolist() == list(range(1000))
