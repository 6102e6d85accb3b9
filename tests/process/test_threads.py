"""Many threads, one pool: right values, and each thread its own errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh

THREADS = 8


def at_once(work: Callable[[int], Any], n: int = THREADS) -> list[Any]:
    """``work(i)`` in `n` threads that start together; what they return."""
    barrier = threading.Barrier(n)

    def run(i: int) -> Any:
        barrier.wait(30)
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return [f.result(60) for f in [pool.submit(run, i) for i in range(n)]]


def test_values() -> None:
    mesh = init_device_mesh("cpu", (2,))

    def work(i: int) -> torch.Tensor:
        # The same few plans, first met by all threads at once, and one nobody else has.
        x = dtorch.distribute_tensor(torch.full((4, 4), float(i)), mesh, [Shard(0)])
        total = dtorch.zeros(4, 4, device_mesh=mesh)
        for k in range(30):
            total.add_((x * k).redistribute(placements=[Replicate()]))
        own = dtorch.ones(i + 1, device_mesh=mesh).sum()
        return total.to_torch()[0, 0] + own.to_torch()

    for _ in range(3):
        assert [int(v) for v in at_once(work)] == [i * sum(range(30)) + i + 1 for i in range(THREADS)]


def test_each_thread_gets_its_own_errors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = dtorch.arange(8, device_mesh=mesh).float()[:, None] * dtorch.ones(4, device_mesh=mesh)

    def work(i: int) -> Any:
        seen: list[Any] = []
        for k in range(10):
            rows = torch.tensor([0, i]) if (i + k) % 2 else torch.tensor([0, 100 + i])
            out = torch.nn.functional.embedding(dtorch.distribute_tensor(rows, mesh, [Replicate()]), weight)
            try:
                seen.append(int(out.sum().item()))
            except IndexError as error:
                assert isinstance(error, dtorch.RemoteError) and ".work" not in error.site
                assert error.site.endswith("in work")
                seen.append("failed")
            with pytest.raises(RuntimeError, match="size"):
                dtorch.ones(i + 2) + dtorch.ones(i + 4)
        return seen

    for i, seen in enumerate(at_once(work)):
        assert seen == [4 * i if (i + k) % 2 else "failed" for k in range(10)]


def test_random_draws_keep_the_ranks_alike() -> None:
    mesh = init_device_mesh("cpu", (2,))

    def work(i: int) -> None:
        target = mesh if i % 2 else dtorch.DeviceMesh("cpu", [i // 2 % 2])
        for _ in range(20):
            drawn = dtorch.rand(16, device_mesh=target)
        if i % 2:
            assert drawn.to_local(0).equal(drawn.to_local(1))

    at_once(work)


def test_the_first_use_by_many_threads_starts_one_pool() -> None:
    dtorch.shutdown()
    assert at_once(lambda i: (dtorch.ones(4) * i).sum().item()) == [4.0 * i for i in range(THREADS)]


def test_autograd_in_threads() -> None:
    mesh = init_device_mesh("cpu", (2,))

    def work(i: int) -> list[float]:
        w = dtorch.ones(4, device_mesh=mesh, requires_grad=True)
        x = dtorch.distribute_tensor(torch.full((4, 4), float(i)), mesh, [Shard(0)])
        (x * w).sum().redistribute(placements=[Replicate()]).backward()
        return w.grad.tolist()

    assert at_once(work) == [[4.0 * i] * 4 for i in range(THREADS)]


def test_futures_wait_anywhere() -> None:
    x = dtorch.arange(8)
    futures = [(x * k).sum().to_torch_async() for k in range(50)]

    def work(i: int) -> list[int]:
        return [int(f.get(timeout=30)) for f in futures[:: 1 if i % 2 else -1]]

    wanted = [28 * k for k in range(50)]
    for i, got in enumerate(at_once(work)):
        assert got == (wanted if i % 2 else wanted[::-1])
