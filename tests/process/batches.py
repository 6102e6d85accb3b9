"""What the tests of batched functions share: callers all at once, and batches that end when they are told to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from dtorch.aio import batched

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def row(*values: float) -> torch.Tensor:
    """float32[1, n]"""
    return torch.tensor([values], dtype=torch.float32)


async def together(calls: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """What each of `calls` returns or raises, all made at once, in order."""
    out: list[Any] = [None] * len(calls)

    async def one(i: int) -> None:
        try:
            out[i] = await calls[i]()
        except Exception as error:
            out[i] = error

    async with anyio.create_task_group() as group:
        for i in range(len(calls)):
            group.start_soon(one, i)
    return out


async def settle() -> None:
    """Until everything that can go on without time passing has."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


class Gated:
    """A batched function whose batches end when they are told to; it remembers the rows of each."""

    def __init__(self, **options: Any) -> None:
        self.batches: list[list[float]] = []
        self.gates: list[anyio.Event] = []

        async def double(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            self.batches.append(x[:, 0].tolist())
            self.gates.append(anyio.Event())
            await self.gates[-1].wait()
            return x * scale

        self.call = batched(**{"max_size": 4, "max_delay": 1e9, **options})(double)

    def open(self) -> None:
        for gate in self.gates:
            gate.set()


def counted(function: Any) -> bool:
    """Whether the counters add up."""
    m = function.metrics
    return bool(
        m.requests == m.refused + m.completed + m.failed + m.cancelled + m.pending and m.queue_depth <= m.pending
    )
