"""How late an event loop's heartbeat is while the cores are busy with tensors.

    python benchmarks/event_loop.py [--seconds 30]

A coroutine wants to run every millisecond; how much later it does is the lag. Beside it, in turn: dtorch, whose
executors multiply matrices of 1024 without a pause; the same products by plain torch in the loop; and by plain torch in
``asyncio.to_thread``. As many products are under way as there are executors, one torch thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import torch
from side_by_side import conditions, table

import dtorch
from dtorch import aio

TARGET = 5.0  # ms, p99 of dtorch
SIZE = 1024


async def heartbeat(lags: list[float], period: float = 0.001) -> None:
    """Append the ms by which each beat is late, until cancelled."""
    due = time.perf_counter() + period
    while True:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        lags.append(max(0.0, now - due) * 1e3)
        due = max(due + period, now)


async def measure(work: Callable[[float], Awaitable[int]], seconds: float) -> tuple[list[float], float]:
    """(lags, products/s) while `work` runs for `seconds`."""
    await work(0.5)  # warm
    lags: list[float] = []
    beating = asyncio.create_task(heartbeat(lags))
    await asyncio.sleep(0)
    start = time.perf_counter()
    done = await work(seconds)
    rate = done / (time.perf_counter() - start)
    beating.cancel()
    return lags, rate


def busy(executors: int) -> Callable[[float], Awaitable[int]]:
    """Every executor of dtorch has always a few products before it."""
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    placed = [
        (dtorch.Tensor(a, device_mesh=mesh), dtorch.Tensor(b, device_mesh=mesh))
        for mesh in (dtorch.DeviceMesh("cpu", [i]) for i in range(executors))
    ]

    async def work(seconds: float) -> int:
        async def one(x: torch.Tensor, y: torch.Tensor) -> int:
            until, n = time.perf_counter() + seconds, 0
            behind = x @ y
            while time.perf_counter() < until:
                ahead = x @ y
                await behind.ready()  # type: ignore[attr-defined]
                behind, n = ahead, n + 1
            await behind.ready()  # type: ignore[attr-defined]
            return n

        return sum(await aio.gather(*(one(x, y) for x, y in placed)))

    return work


def plain(in_thread: bool, at_once: int) -> Callable[[float], Awaitable[int]]:
    """Plain torch, in the loop or in threads."""
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)

    async def work(seconds: float) -> int:
        async def one() -> int:
            until, n = time.perf_counter() + seconds, 0
            while time.perf_counter() < until:
                if in_thread:
                    await asyncio.to_thread(torch.mm, a, b)
                else:
                    torch.mm(a, b)
                    await asyncio.sleep(0)
                n += 1
            return n

        return sum(await asyncio.gather(*(one() for _ in range(at_once))))

    return work


async def main_async(seconds: float) -> None:
    executors = len(os.sched_getaffinity(0))
    peers = {
        "dtorch": busy(executors),
        "plain torch in to_thread": plain(True, executors),
        "plain torch in the loop": plain(False, 1),
    }
    rows, p99 = [], 0.0
    print(f"lag of a heartbeat of 1 ms, {seconds:g} s each; {executors} products of {SIZE}² at once; {conditions()}\n")
    for name, work in peers.items():
        lags, rate = await measure(work, seconds)
        lags.sort()
        at = [lags[min(len(lags) - 1, int(q * len(lags)))] for q in (0.5, 0.99, 1.0)]
        if name == "dtorch":
            p99 = at[1]
        rows.append([name, *(f"{x:.2f}" for x in at), f"{len(lags):,}", f"{rate:.0f}"])
    print(table(["", "p50, ms", "p99, ms", "max, ms", "beats", "products/s"], rows))
    print(f"\ntarget p99 of dtorch, ms: {TARGET:g}; {p99:.2f}, {'met' if p99 <= TARGET else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(main_async(args.seconds))


main()
