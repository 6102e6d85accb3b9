"""A million operators of every kind: what either side holds at the end is what it held at the beginning."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.runtime.client import client

from .model import Model
from .parts import Violation
from .sizes import Sizes, memory, sizes_of_client, sizes_of_executors

__all__ = ["Trials"]

OPERATORS = 10_000
# Bounds that are reached before the first round that is counted: what is within them is no growth.
_BOUNDS: dict[str, Any] = {"plan_cache": 64, "ring_bytes": 1 << 20}
_WARM_UP = 3


class Trials:
    """Rounds of 10,000 operators, after each of which all is measured."""

    def __init__(self) -> None:
        dtorch.configure(**_BOUNDS)
        self._mesh = dtorch.init_device_mesh("cpu", (2,))
        self._model = Model("tp", self._mesh)
        self._memory: list[list[int]] = []
        self._held: list[list[Sizes]] = []
        for seed in range(-_WARM_UP, 0):
            self._round(seed)

    def trial(self, seed: int) -> None:
        self._round(seed)
        pids = [os.getpid(), *client().pool.pids.values()]
        self._held.append([sizes_of_client(), *sizes_of_executors(self._mesh)])
        self._memory.append([memory(pid) for pid in pids])

    def _growth(self) -> list[int] | None:
        """Bytes, of the client and each executor, that the last tenth of all trials holds more than the first."""
        tenth = len(self._memory) // 10
        if not tenth:
            return None
        ends = self._memory[:tenth], self._memory[-tenth:]
        first, last = ([int(statistics.median(column)) for column in zip(*end, strict=True)] for end in ends)
        return [b - a for a, b in zip(first, last, strict=True)]

    def _round(self, seed: int) -> None:
        lots = random.Random(seed)
        c = client()
        began = c.writer.issued
        while c.writer.issued - began < OPERATORS:
            lots.choice([_chain, _views, _in_place, _moves, _values, _futures, _new_shapes, self._train, _failures])(
                lots, self._mesh
            )
        dtorch.ones(1, device_mesh=self._mesh).sum().item()
        c.flush()
        gc.collect()

    def _train(self, lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
        for _ in range(20):
            loss = self._model.step()
        if not loss.item() < 10:
            raise Violation(f"the loss has become {loss.item()}")

    def close(self) -> Iterator[str | float]:
        tenth = max(1, len(self._held) // 10)
        for i, who in enumerate(["the client", "executor 0", "executor 1"]):
            for name in Sizes.__slots__:
                values = [getattr(held[i], name) for held in self._held]
                # Caches are not full to the last plan at any time.
                slack = _BOUNDS["plan_cache"] // 4 if name == "plans" else 0
                if min(values[-tenth:]) > max(values[:tenth]) + slack:
                    yield f"{who} holds more {name}: {values}"
        growth = self._growth()
        if growth is not None:
            megabytes = [[round(n / (1 << 20), 1) for n in each] for each in self._memory]
            print(f"memory of the client and the executors after each round, MB: {megabytes}", file=sys.stderr)
            yield max(0, *growth) / (1 << 20)
        dtorch.shutdown()


def _equal(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise Violation(f"{got}, where {wanted} was due")


def _chain(lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.zeros(4, 4, device_mesh=mesh, placements=[lots.choice([Shard(0), Replicate()])])
    for _ in range(300):
        x = x + 1
    _equal(x.sum().item(), 16 * 300)


def _views(lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.arange(24, device_mesh=mesh)
    for _ in range(50):
        y = x.view(2, 12).t()[:6].reshape(-1).unsqueeze(0)
    _equal(y.sum().item(), sum([*range(6), *range(12, 18)]))


def _in_place(lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.zeros(8, 4, device_mesh=mesh, placements=[Shard(0)])
    column = x[:, :2]
    for _ in range(100):
        x.add_(1)
        column.mul_(1.0)
    _equal(x.sum().item(), 3200)


def _moves(lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.arange(64, dtype=torch.float32, device_mesh=mesh).view(8, 8)
    for _ in range(25):
        x = x.redistribute(placements=[Shard(0)]).redistribute(placements=[Shard(1)]).redistribute(
            placements=[Replicate()]
        )  # fmt: skip
        partial = x.redistribute(placements=[Shard(0)]).sum(0)
        assert isinstance(partial.placements[0], Partial)
        partial.redistribute(placements=[Replicate()])
    _equal(x.sum().item(), 2016)


def _values(lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
    """Values in and out, small ones and ones that lie in the arena."""
    for _ in range(20):
        value = torch.full((lots.choice([4, 5000, 40_000]),), 2.0)
        there = dtorch.distribute_tensor(value, mesh, [lots.choice([Shard(0), Replicate()])])
        if not (there * 2).to_torch().eq(4).all():
            raise Violation("an uploaded value came back as another")


def _futures(lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
    """Awaited, cancelled, and dropped."""
    x = dtorch.ones(1000, device_mesh=mesh, placements=[Shard(0)])

    async def one(k: int) -> torch.Tensor:
        return await (x * k)

    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(one(k)) for k in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    got = asyncio.run(main())
    # One that was cancelled may have had its value before.
    wanted = [k if k % 3 or isinstance(g, torch.Tensor) else None for k, g in enumerate(got)]
    _equal([int(g[7]) if isinstance(g, torch.Tensor) else None for g in got], wanted)
    for _ in range(20):
        (x + 1).to_torch_async()


def _new_shapes(lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
    """Calls that have no plan yet: the caches of plans are bounded."""
    for _ in range(10):
        n = lots.randrange(1, 100_000)
        _equal((dtorch.ones(n, device_mesh=mesh) * 2)[:1].item(), 2)


def _failures(lots: random.Random, mesh: dtorch.DeviceMesh) -> None:
    """Operators that fail on one rank, and their dependents."""
    rows = torch.tensor([0, 0, 0, 99])
    weight = dtorch.ones(8, 4, device_mesh=mesh)
    bad = torch.nn.functional.embedding(dtorch.distribute_tensor(rows, mesh, [Shard(0)]), weight)
    try:
        (bad + 1).redistribute(placements=[Replicate()]).to_torch()
    except IndexError:
        return
    raise Violation("a failure was not raised")
