"""What random programs await, cancel, drop and fail at: values that are on their way while the program goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import torch.nn.functional as F

import dtorch
from dtorch import aio

from .programs import OPERATORS, Digits, Maker, Pair, Program, Step

__all__ = ["FUTURES"]

_DROPPED_AFTER = 0.0002


def _await(use: Callable[[torch.Tensor], Awaitable[Any]]) -> Callable[[torch.Tensor], Any]:
    """A copy of a plain tensor; of a dtorch tensor what `use` makes of it in an event loop."""

    def f(t: torch.Tensor) -> Any:
        if not isinstance(t, dtorch.Tensor):
            return t.detach().clone(memory_format=torch.contiguous_format)

        async def main() -> Any:
            return (await use(t.detach())).contiguous()

        return asyncio.run(main())

    return f


async def _value(t: Any) -> Any:
    return await t


async def _through_future(t: Any) -> Any:
    future = t.to_torch_async()
    return await (future if future.is_ready() else asyncio.wrap_future(future))


async def _gathered(t: Any) -> Any:
    twice, once = await aio.gather(t + t, t)
    assert torch.equal(twice, once + once)
    return once


async def _as_completed(t: Any) -> Any:
    found = [await following async for following in _each(t)]
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


async def _each(t: Any) -> Any:
    for following in asyncio.as_completed([_value(t) for _ in range(3)]):
        yield following


async def _cancelled(t: Any) -> Any:
    """Awaits that are cancelled at once and a little later; then one that is not."""
    tasks = [asyncio.ensure_future(_value(t * k)) for k in range(4)]
    await asyncio.sleep(0)
    for task in tasks[:2]:
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DROPPED_AFTER):
            await asyncio.gather(*tasks[2:])
    assert await asyncio.gather(*tasks, return_exceptions=True)
    return await t


async def _ready_first(t: Any) -> Any:
    await t.ready()
    return t.to_torch()


async def _dropped(t: Any) -> Any:
    """Futures that nobody waits for."""
    for _ in range(5):
        (t + 1).to_torch_async()
    return await t


def _waited(t: torch.Tensor) -> torch.Tensor:
    """From a thread, with time limits that pass."""
    if not isinstance(t, dtorch.Tensor):
        return t.detach().clone(memory_format=torch.contiguous_format)
    future = t.detach().to_torch_async()
    with contextlib.suppress(TimeoutError):
        future.get(timeout=0)
    future.wait_for(0.1)
    got = future.get(timeout=60)
    assert got is future.result()
    return got.contiguous()


def _of_one(f: Callable[[torch.Tensor], Any]) -> Maker:
    def make(p: Program, d: Digits) -> Step:
        return [p.pick(d)], f, False

    return make


FUTURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "await": _await(_value),
    "await future": _await(_through_future),
    "await gather": _await(_gathered),
    "await as_completed": _await(_as_completed),
    "await cancelled": _await(_cancelled),
    "await ready": _await(_ready_first),
    "await behind dropped": _await(_dropped),
    "get with timeouts": _waited,
}
for _name, _f in FUTURES.items():
    OPERATORS[_name] = _of_one(_f)


def _grown(t: torch.Tensor) -> Any:
    """backward() in the middle of a program: gradients of a leaf of its own."""
    if not t.is_floating_point() or not t.numel():
        return t
    leaf = t.detach().clone().requires_grad_()
    with dtorch.auto_redistribute():
        (leaf * leaf).sum().backward()
    return leaf.grad


def _backward(p: Program, d: Digits) -> Step:
    return [p.pick(d, floating=True)], _grown, False


OPERATORS["backward here"] = _backward


def _out_of_range(p: Program, d: Digits) -> Step:
    """Fails on the ranks whose rows hold the index that is too large; torch refuses at once."""
    a = p.pick(d, floating=True, where=lambda t: t.ndim == 2 and t.shape[0] > 0 and t.is_floating_point())
    index = p.indices(a.plain.shape[0], (4,))
    index[d.below(4)] = a.plain.shape[0] + 3
    ours = dtorch.distribute_tensor(index, p.mesh, p.placements(d, (4,), partial=False))
    return [a, Pair(index, ours)], lambda t, x: F.embedding(x, t), False


OPERATORS["embedding out of range"] = _out_of_range
