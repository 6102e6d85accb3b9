"""What an await costs: ``await (a + b).to_torch_async()`` from asyncio, alone and with 1,000 in flight.

    python benchmarks/await_latency.py [--rounds 9] [--seconds 3]

Side by side, in the same rounds: ``asyncio.to_thread`` of plain torch's addition, and an actor method of Ray where Ray
is installed. Then the processor time that an await of a value which does not come takes, over some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from side_by_side import conditions, table

import dtorch

TARGETS = {"p50, µs": 60.0, "awaits/s": 20_000.0, "CPU of a pending await, %": 1.0}


def ray_call() -> tuple[Callable[[], Awaitable[Any]] | None, str]:
    """An addition by an actor of Ray, or why there is none."""
    if importlib.util.find_spec("ray") is None:
        return None, "Ray is not installed"
    ray = __import__("ray")
    ray.init(num_cpus=2, logging_level="ERROR", include_dashboard=False)

    @ray.remote
    class Adder:
        def __init__(self) -> None:
            self.a, self.b = torch.randn(8, 8), torch.randn(8, 8)

        def add(self) -> torch.Tensor:
            return self.a + self.b

    actor = Adder.remote()
    return lambda: actor.add.remote(), ""


async def one_by_one(call: Callable[[], Awaitable[Any]], n: int) -> list[float]:
    """µs of each of `n` awaits, one after another."""
    taken = []
    for _ in range(n):
        start = time.perf_counter()
        await call()
        taken.append((time.perf_counter() - start) * 1e6)
    return taken


async def in_flight(call: Callable[[], Awaitable[Any]], at_once: int, total: int) -> tuple[float, float]:
    """(awaits/s, µs of this process per await) of `total`, `at_once` of them in flight: as many tasks, each awaiting
    one value after another."""

    async def task() -> None:
        for _ in range(total // at_once):
            await call()

    cpu, start = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(task())
    return total / (time.perf_counter() - start), (time.process_time() - cpu) / total * 1e6


async def pending(seconds: float) -> float:
    """Percent of a core that this process takes while one await waits for a value that takes `seconds`."""

    def late(rank: int) -> torch.Tensor:
        time.sleep(seconds)
        return torch.ones(1)

    mesh = dtorch.init_device_mesh("cpu", (1,))
    future = dtorch.from_local(late, mesh, [dtorch.Replicate()], shape=(1,)).to_torch_async()
    task = asyncio.create_task(wait_for(future))
    await asyncio.sleep(0.2)
    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds - 0.5)
    used = (time.process_time() - cpu) / (time.perf_counter() - start)
    await task
    return 100 * used


async def wait_for(future: dtorch.TensorFuture[Any]) -> Any:
    return await future


async def measure(rounds: int, seconds: float) -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    a, b = dtorch.Tensor(x), dtorch.Tensor(y)
    ray, reason = ray_call()
    peers: dict[str, Callable[[], Awaitable[Any]]] = {
        "dtorch": lambda: (a + b).to_torch_async(),
        "to_thread(torch add)": lambda: asyncio.to_thread(torch.add, x, y),
    }
    if ray is not None:
        peers["Ray actor"] = ray
    rows: dict[str, list[list[float]]] = {name: [] for name in peers}
    for call in peers.values():
        await one_by_one(call, 100)
        await in_flight(call, 100, 500)
    for _ in range(rounds):
        for name, call in peers.items():
            n = 300 if name != "Ray actor" else 30
            taken = sorted(await one_by_one(call, n))
            rate, cpu = await in_flight(call, 1000, 5000 if name != "Ray actor" else 1000)
            rows[name].append([statistics.median(taken), taken[int(0.99 * n)], rate, cpu])
    share = await pending(seconds)

    print(f"awaits from asyncio, medians of {rounds} rounds; {conditions()}\n")
    medians = {
        name: [statistics.median(column) for column in zip(*figures, strict=True)] for name, figures in rows.items()
    }
    shown = [
        [name, f"{p50:.0f}", f"{p99:.0f}", f"{rate:,.0f}", f"{cpu:.0f}"]
        for name, (p50, p99, rate, cpu) in medians.items()
    ]
    if reason:
        shown.append([f"Ray: skipped, {reason}", "", "", "", ""])
    print(table(["", "p50, µs", "p99, µs", "awaits/s, 1,000 in flight", "client's CPU per await, µs"], shown))
    print(f"\none pending await: {share:.2f} % of a core over {seconds:g} s\n")
    p50, _, rate, _ = medians["dtorch"]
    found = dict(zip(TARGETS, (p50, rate, share), strict=True))
    for name, target in TARGETS.items():
        met = found[name] >= target if name == "awaits/s" else found[name] <= target
        print(f"target {name}: {target:g}; {found[name]:,.1f}, {'met' if met else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(args.rounds, args.seconds))


main()
