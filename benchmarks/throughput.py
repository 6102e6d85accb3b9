"""Op/s from issue to value: 10,000 dependent additions of 8×8 float32, then the result is read.

    python benchmarks/throughput.py [--rounds 7] [--ops 10000]

dtorch with one and with two executors (Shard(0) on two ranks), beside plain torch and beside the floor
(benchmarks/floor.py: one executor, the same work, nothing around it), in the same rounds. One torch thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from side_by_side import Floor, conditions, rounds, table

import dtorch


def chain(x: torch.Tensor, y: torch.Tensor, ops: int, read: Callable[[torch.Tensor], object]) -> float:
    """Op/s of `ops` additions, each of the last one's result."""
    repeat = range(ops)
    start = time.perf_counter()
    z = x
    for _ in repeat:
        z = z + y
    read(z)
    return ops / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ops", type=int, default=10_000)
    args = parser.parse_args()

    torch.set_num_threads(1)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    mesh = dtorch.init_device_mesh("cpu", 2)
    one = [dtorch.Tensor(t) for t in (x, y)]
    two = [dtorch.distribute_tensor(t, mesh, [dtorch.Shard(0)]) for t in (x, y)]

    def wait(t: torch.Tensor) -> object:
        return t.to_torch()  # type: ignore[attr-defined]

    with Floor() as floor:
        rates = rounds(
            {
                "floor, 1 executor": lambda: floor.measure()[1],
                "plain torch": lambda: chain(x, y, args.ops, lambda t: t),
                "dtorch, 1 executor": lambda: chain(*one, args.ops, wait),
                "dtorch, 2 executors": lambda: chain(*two, args.ops, wait),
            },
            args.rounds,
        )
    floor_rate = rates["floor, 1 executor"]
    print(f"op/s from issue to value, {args.ops} dependent ops, median of {args.rounds} rounds; {conditions()}\n")
    rows = [[name, f"{rate:,.0f}", f"{floor_rate / rate:.2f}"] for name, rate in rates.items()]
    print(table(["", "op/s", "cost/floor"], rows))


main()
