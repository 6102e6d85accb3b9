"""Many threads, one pool: right values, and each thread its own errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, init_device_mesh

from .scripts import run_body

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


def test_one_threads_failure_is_never_anothers_where_every_call_waits() -> None:
    """``DTORCH_BLOCKING=1``: calls raise at once, each its own failure, in eight threads on the same lines."""
    done = run_body(
        """
        import threading
        import torch, dtorch
        mesh = dtorch.init_device_mesh("cpu", (2,))
        weight = dtorch.ones(8, 4, device_mesh=mesh)
        wrong = []

        def work(i):
            for k in range(6):
                fails = (i + k) % 2 == 1
                rows = dtorch.tensor([0, 100 + i if fails else 1], device_mesh=mesh)
                try:
                    torch.nn.functional.embedding(rows, weight)
                except IndexError:
                    if not fails:
                        wrong.append((i, k, "another's"))
                else:
                    if fails:
                        wrong.append((i, k, "nothing"))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        print(wrong)
        """,
        DTORCH_BLOCKING="1",
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_failures_cross_no_threads_in_backward_writes_and_functions() -> None:
    mesh = init_device_mesh("cpu", (4,))

    def local(i: int, rank: int) -> torch.Tensor:
        if i % 2 and rank == i % 4:
            raise ValueError(f"thread {i}")
        return torch.full((1, 4), float(i))

    def work(i: int) -> list[Any]:
        seen: list[Any] = []
        w = dtorch.ones(4, device_mesh=mesh, requires_grad=True)
        target = dtorch.zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])
        x = dtorch.from_local(partial(local, i), mesh, [Shard(0)], shape=(4, 4))
        (x * w).sum().redistribute(placements=[Replicate()]).backward()
        target.add_(x)
        view = target[:, 0]
        for value in (
            w.grad,
            target,
            view,
            torch._foreach_add([x, target], 1.0)[0],
            x.redistribute(placements=[Replicate()]),
        ):
            try:
                seen.append(value.sum().item())
            except ValueError as error:
                seen.append(str(error))
        return seen

    for i, seen in enumerate(at_once(work)):
        assert seen == ([f"thread {i}"] * 5 if i % 2 else [16.0 * i, 16.0 * i, 4.0 * i, 16.0 * i + 16, 16.0 * i]), seen
