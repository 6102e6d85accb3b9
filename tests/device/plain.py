"""Plain torch on the GPU, for tests/device/check.py to compare with: `plain.py DEVICE FILE` writes its results to FILE.

A process of its own, because the client of dtorch must not initialise CUDA.
"""

from __future__ import annotations

import sys
import time

import programs
import torch


def chain(a: torch.Tensor, n: int) -> float:
    """µs per operator of `n` dependent additions, from issue to value."""
    start = time.perf_counter()
    b = a
    for _ in range(n):
        b = b + a
    b.cpu()
    return (time.perf_counter() - start) / n * 1e6


def issue(a: torch.Tensor, n: int) -> float:
    """µs per operator of `n` additions, until they are issued."""
    start = time.perf_counter()
    for _ in range(n):
        a + a
    return (time.perf_counter() - start) / n * 1e6


def main(device: str, path: str) -> None:
    def place(t: torch.Tensor) -> torch.Tensor:
        return t.to(device)

    torch.manual_seed(5)
    random = torch.rand(1000, device=device).cpu()
    a = place(torch.randn(8, 8))
    chain(a, 1000)
    results = {
        "ops": programs.run_ops(place, lambda t: t.cpu()),
        "losses": programs.train(programs.model().to(device), place),
        "random": random,
        "chain": sorted(chain(a, 5000) for _ in range(5))[2],
        "issue": sorted(issue(a, 1000) for _ in range(5))[2],
    }
    torch.save(results, path)


main(sys.argv[1], sys.argv[2])
