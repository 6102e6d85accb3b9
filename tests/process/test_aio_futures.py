"""Awaiting real values with the tools of asyncio, anyio and threads; cancelling; failures that nobody asks for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import random
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
import trio

import dtorch
from dtorch import Replicate, Shard, aio, init_device_mesh
from dtorch.runtime.client import client

from .loops import LOOPS, on


@pytest.fixture
def mesh() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2,))


def slow(mesh: dtorch.DeviceMesh, seconds: float = 0.2) -> dtorch.Tensor:
    """float32[4], Shard(0), of ones, that takes a while."""

    def make(rank: int) -> torch.Tensor:
        time.sleep(seconds)
        return torch.ones(2)

    return dtorch.from_local(make, mesh, [Shard(0)], shape=(4,))


def failing(mesh: dtorch.DeviceMesh, rows: int = 99) -> dtorch.Tensor:
    weight = dtorch.ones(8, 4, device_mesh=mesh)
    return torch.nn.functional.embedding(dtorch.tensor([0, rows], device_mesh=mesh), weight)


async def value_of(future: Any) -> Any:
    return await future


# -- one value, many who ask -----------------------------------------------------------------------------------------


@LOOPS
def test_await_repeatedly_and_by_many_tasks(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        future = (slow(mesh) * 3).to_torch_async()
        got: list[Any] = []

        async def one() -> None:
            got.append(await future)
            got.append(await future)

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(one)
        assert len(got) == 100 and all(v is got[0] for v in got) and got[0].tolist() == [3.0] * 4

    on(loop, main)


def test_one_value_for_all_loops_and_threads_at_once(mesh: dtorch.DeviceMesh) -> None:
    future = slow(mesh).sum().to_torch_async()
    results: list[float] = []
    ways = [
        lambda: asyncio.run(value_of(future)),
        lambda: on("uvloop", lambda: value_of(future)),
        lambda: trio.run(value_of, future),
        lambda: future.get(),
        lambda: future.result(30),
    ]
    threads = [threading.Thread(target=lambda way=way: results.append(way().item())) for way in ways * 2]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert results == [4.0] * 10


@LOOPS
def test_ready_says_that_it_exists_and_fetches_nothing(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        t = slow(mesh) * 2
        used = client().arena.stats().blocks
        assert await t.ready() is None
        assert client().arena.stats().blocks <= used
        bad = failing(mesh)
        with pytest.raises(IndexError):
            await bad.ready()

    on(loop, main)


@LOOPS
def test_a_thousand_random_cancels_among_a_thousand_awaits(mesh: dtorch.DeviceMesh, loop: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    go = tmp_path / "go"

    def hold(rank: int) -> torch.Tensor:
        while not go.exists():
            time.sleep(0.005)
        return torch.ones(2)

    async def main() -> int:
        base = dtorch.arange(8, device_mesh=mesh, placements=[Shard(0)])
        got: dict[int, int] = {}
        cut: list[int] = []

        async def one(i: int, scope: anyio.CancelScope) -> None:
            with scope:
                got[i] = int(await (base * i).sum().redistribute(placements=[Replicate()]))
            if scope.cancelled_caught:
                cut.append(i)

        scopes = [anyio.CancelScope() for _ in range(2000)]
        unlucky = rng.sample(range(2000), 1000)
        block = dtorch.from_local(hold, mesh, [Shard(0)], shape=(4,))  # all wait behind it, and can be cancelled
        async with anyio.create_task_group() as group:
            for i, scope in enumerate(scopes):
                group.start_soon(one, i, scope)
            for i in unlucky:
                if rng.random() < 0.1:
                    await anyio.lowlevel.checkpoint()
                scopes[i].cancel()
                if i == unlucky[700]:
                    go.touch()  # the rest race with their values
        assert set(range(2000)) - got.keys() <= set(unlucky)
        assert not set(cut) & got.keys() and len(cut) + len(got) == 2000
        assert all(v == 28 * i for i, v in got.items())
        assert (await block).tolist() == [1.0] * 4
        return len(cut)

    assert on(loop, main) > 500
    gc.collect()
    dtorch.Graph.sync()
    assert client().slots.sweep() == 0 and client().slots.in_use() == 0
    assert client().waiting.count == 0


@LOOPS
def test_a_cancelled_await_frees_its_result_on_arrival(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        await dtorch.Graph.sync_async()
        gc.collect()
        client().slots.sweep()
        before = client().arena.stats().used
        with anyio.move_on_after(0.05):
            await slow(mesh, 0.3).redistribute(placements=[Replicate()]).repeat(100_000)
        gc.collect()
        assert client().arena.stats().used > before
        with anyio.fail_after(20):
            while client().arena.stats().used > before:
                await dtorch.Graph.sync_async()

    on(loop, main)


# -- with the tools of others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_tools_of_asyncio(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        futures = [(slow(mesh, 0.02) * i).sum().to_torch_async() for i in range(6)]
        assert await asyncio.wrap_future(futures[2]) == 8
        wrapped = [asyncio.wrap_future(f) for f in futures]
        done, left = await asyncio.wait(wrapped, timeout=20)
        assert sorted(d.result().item() for d in done) == [0, 4, 8, 12, 16, 20] and not left
        again = [(slow(mesh, 0.02) * i).sum().to_torch_async() for i in range(3)]
        assert sorted([(await f).item() for f in asyncio.as_completed(map(value_of, again))]) == [0, 4, 8]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(value_of((slow(mesh, 0.02) * i).sum())) for i in range(3)]
        assert [t.result().item() for t in tasks] == [0, 4, 8]
        assert (await asyncio.wait_for(value_of(slow(mesh, 0.01)), 20)).tolist() == [1.0] * 4
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(value_of(slow(mesh, 0.3)), 0.01)
        async with asyncio.timeout(20):
            assert (await slow(mesh, 0.01).sum()).item() == 4
        with pytest.raises(IndexError):
            await asyncio.wrap_future(failing(mesh).to_torch_async())
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(value_of(failing(mesh)))
                group.create_task(asyncio.sleep(60))
        assert isinstance(caught.value.exceptions[0], IndexError)

    on(loop, main)


@LOOPS
def test_fail_after(mesh: dtorch.DeviceMesh, loop: str) -> None:
    async def main() -> None:
        future = slow(mesh, 0.3).sum().to_torch_async()
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.02):
                await future
        with anyio.fail_after(20):
            assert (await future).item() == 4

    on(loop, main)


def test_tools_of_threads(mesh: dtorch.DeviceMesh) -> None:
    futures = [(slow(mesh, 0.02) * i).sum().to_torch_async() for i in range(4)]
    done, left = concurrent.futures.wait(futures, timeout=20)
    assert {f.result().item() for f in done} == {0, 4, 8, 12} and not left
    more = [(slow(mesh, 0.02) * i).sum().to_torch_async() for i in range(4)]
    assert sorted(f.result().item() for f in concurrent.futures.as_completed(more, timeout=20)) == [0, 4, 8, 12]
    called = threading.Event()
    pending = slow(mesh, 0.05).to_torch_async()
    with pytest.raises(TimeoutError):
        pending.get(timeout=0.001)
    pending.add_done_callback(lambda f: called.set() if f.get().tolist() == [1.0] * 4 else None)
    assert called.wait(20)
    error = failing(mesh).to_torch_async().exception()
    assert isinstance(error, IndexError)


# -- failures that nobody asks for -----------------------------------------------------------------------------------


def settle(caplog: pytest.LogCaptureFixture, wanted: int) -> list[str]:
    """Messages of failures, once there are `wanted` or some time has passed."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        [dtorch.ones(1) for _ in range(40)]
        dtorch.Graph.sync()
        client().drain()
        found = [r.getMessage() for r in caplog.records if r.name == "dtorch" and r.levelno >= logging.ERROR]
        if (wanted and len(found) >= wanted) or time.monotonic() > deadline - (0 if wanted else 9):
            return found
        time.sleep(0.01)


@LOOPS
def test_a_dropped_future_that_fails_is_reported_once(
    mesh: dtorch.DeviceMesh, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with anyio.move_on_after(0.02):
            slow_first = slow(mesh, 0.3)
            await failing(mesh)
        del slow_first

    on(loop, main)
    (told,) = settle(caplog, 1)
    assert told.startswith("a value that was asked for was dropped unread, and could not be computed: IndexError: ")
    assert "issued at tests/process/test_aio_futures.py" in told and told.endswith("in failing")
    assert len(settle(caplog, 0)) == 1


def test_a_failed_future_whose_error_was_never_taken_is_reported_once(
    mesh: dtorch.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Event()
    future = failing(mesh).to_torch_async()
    future.add_done_callback(lambda f: called.set())
    assert called.wait(10)
    time.sleep(0.05)  # the helper thread lets go of it
    del future
    (told,) = settle(caplog, 1)
    assert told == "a future was dropped whose error nobody asked for"
    assert caplog.records[-1].exc_info and caplog.records[-1].exc_info[0].__name__ == "IndexError"  # type: ignore[union-attr]


def test_an_operator_that_failed_is_reported_once_when_the_last_value_is_dropped(
    mesh: dtorch.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    first = failing(mesh)
    second = first * 2
    third = second.redistribute(placements=[Replicate()])
    del first, second
    assert settle(caplog, 0) == []
    del third
    (told,) = settle(caplog, 1)
    assert told.startswith("a value was dropped unread, and could not be computed: IndexError: ")
    assert len(settle(caplog, 0)) == 1
    c = client()
    c.failures._asked |= set(c.failures._reports)


def test_what_was_asked_for_is_not_reported(mesh: dtorch.DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for _ in range(3):
            with pytest.raises(IndexError):
                await (failing(mesh) + 1)
        assert isinstance((await aio.gather(failing(mesh), return_exceptions=True))[0], IndexError)

    asyncio.run(main())
    with pytest.raises(IndexError):
        failing(mesh).to_torch()
    made = failing(mesh)
    future = made.to_torch_async()
    del made
    settle(caplog, 0)  # the value is dropped while its future is held
    assert isinstance(future.exception(), IndexError)
    assert settle(caplog, 0) == []
