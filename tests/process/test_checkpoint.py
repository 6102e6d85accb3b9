"""dtorch.utils.checkpoint: the recomputation drops out what the forward did."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch

import dtorch
from dtorch.runtime.client import client
from dtorch.runtime.draws import AskedState


def run(lib: Any, reentrant: bool | None, sequential: bool = False) -> list[torch.Tensor]:
    lib.manual_seed(2)
    nn = lib.nn
    m = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    x = lib.randn(4, 6, requires_grad=True)
    if reentrant is None:
        y = m(x)
    elif sequential:
        y = lib.utils.checkpoint.checkpoint_sequential(m, 2, x, use_reentrant=reentrant)
    else:
        y = lib.utils.checkpoint.checkpoint(m, x, use_reentrant=reentrant)
    after = lib.rand(3)
    y.sum().backward()
    values = [y.detach(), after, lib.rand(3), x.grad, *(p.grad for p in m.parameters())]
    return [v.to_torch() if isinstance(v, dtorch.Tensor) else v for v in values]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sequential", [False, True])
def test_gradients_are_those_without_a_checkpoint(reentrant: bool, sequential: bool) -> None:
    plain = run(torch, None)
    for got in (run(dtorch, None), run(dtorch, reentrant, sequential), run(torch, reentrant, sequential)):
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


def test_without_random_numbers_nothing_is_kept() -> None:
    x = dtorch.ones(3, requires_grad=True)
    for _ in range(20):
        dtorch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False).sum().backward()
    gc.collect()
    dtorch.Graph.sync()
    AskedState(client(), False).read()
    AskedState(client(), False).read()
    assert client().draws.unread == set()
    assert client()._replies == {}


def test_a_state_that_nobody_read_is_of_its_own_pool() -> None:
    """Another pool's replies are counted from the start again: none is thrown away for an old one's sake."""
    dtorch.rand(1)
    left = AskedState(client(), False)
    dtorch.restart()
    del left
    dtorch.rand(1)
    asked = [AskedState(client(), False) for _ in range(3)]
    assert len({a.read() for a in asked}) == 1


def test_in_a_loop_a_backward_that_waits_for_a_random_state_says_so() -> None:
    x = dtorch.ones(64, requires_grad=True)

    def dropped() -> torch.Tensor:
        return dtorch.utils.checkpoint.checkpoint(torch.nn.functional.dropout, x, use_reentrant=False).sum()

    async def main() -> None:
        with dtorch.aio.strict():
            with pytest.raises(dtorch.BlockingCallError, match=r"backward\(\) waits(.|\n)*aio\.call\(loss\.backward\)"):
                dropped().backward()
            loss = dropped()
            await dtorch.aio.call(loss.backward)
        assert x.grad is not None and (await x.grad).sum() == await loss

    asyncio.run(main())
