"""Tensors in coroutines, on asyncio and on trio: awaiting, cancelling, and calls that would stop the loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import random
import sys
import time
import types
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch
import trio

import dtorch
from dtorch import Replicate, Shard, aio, init_device_mesh
from dtorch.runtime import blocking
from dtorch.runtime.client import client

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@pytest.fixture
def mesh() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2,))


def slow(mesh: dtorch.DeviceMesh, seconds: float = 0.3) -> dtorch.Tensor:
    """float32[4], Shard(0), of ones, that takes a while."""

    def make(rank: int) -> torch.Tensor:
        time.sleep(seconds)
        return torch.ones(2)

    return dtorch.from_local(make, mesh, [Shard(0)], shape=(4,))


# -- awaiting -------------------------------------------------------------------------------------------------------


@BACKENDS
def test_values_and_errors(mesh: dtorch.DeviceMesh, backend: str) -> None:
    async def main() -> None:
        x = dtorch.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        assert (await x).equal(torch.arange(8.0).view(4, 2))
        assert (await x.sum().to_torch_async()) == 28
        assert await x.ready() is None
        await dtorch.Graph.sync_async()
        rows = dtorch.distribute_tensor(torch.tensor([0, 1, 2, 99]), mesh, [Shard(0)])
        bad = torch.nn.functional.embedding(rows, dtorch.ones(8, 4, device_mesh=mesh))
        for ask in (lambda: bad, bad.ready, bad.to_torch_async):
            with pytest.raises(IndexError) as caught:
                made = ask()
                await made
            assert isinstance(caught.value, dtorch.RemoteError) and caught.value.site.endswith("in main")

    anyio.run(main, backend=backend)


@BACKENDS
def test_one_future_awaited_by_many(mesh: dtorch.DeviceMesh, backend: str) -> None:
    async def main() -> None:
        future = (slow(mesh) * 3).to_torch_async()
        got: list[Any] = []

        async def one() -> None:
            got.append(await future)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(one)
        assert len(got) == 20 and all(v is got[0] for v in got)
        assert got[0].tolist() == [3.0] * 4
        assert await future is got[0]

    anyio.run(main, backend=backend)


@BACKENDS
def test_cancelling_some_of_many(mesh: dtorch.DeviceMesh, backend: str) -> None:
    rng = random.Random(7)

    async def main() -> None:
        x = dtorch.arange(4, device_mesh=mesh)
        got: dict[int, int] = {}
        cut: set[int] = set()

        async def one(i: int) -> None:
            with anyio.move_on_after(rng.choice([0, 0.001, 0.01, 10])) as scope:
                got[i] = int(await (x * i).sum())
            if scope.cancelled_caught:
                cut.add(i)

        block = slow(mesh, 0.1)
        async with anyio.create_task_group() as group:
            for i in range(300):
                group.start_soon(one, i)
        assert cut and got and not cut & got.keys() and len(cut) + len(got) == 300
        assert all(v == 6 * i for i, v in got.items())
        assert (await block).tolist() == [1.0] * 4
        await dtorch.Graph.sync_async()

    anyio.run(main, backend=backend)
    # What was abandoned has been freed.
    dtorch.Graph.sync()
    assert client().slots.sweep() == 0
    assert client().waiting.count == 0


@BACKENDS
def test_a_timeout_leaves_all_usable(mesh: dtorch.DeviceMesh, backend: str) -> None:
    async def main() -> None:
        future = slow(mesh).to_torch_async()
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.02):
                await future
        assert (await future).tolist() == [1.0] * 4

    anyio.run(main, backend=backend)


@BACKENDS
def test_grad_mode_does_not_leak(mesh: dtorch.DeviceMesh, backend: str) -> None:
    async def main() -> None:
        seen: list[bool] = []
        waiting = anyio.Event()

        async def inside() -> None:
            with torch.no_grad():
                waiting.set()
                await slow(mesh, 0.1)
                seen.append(torch.is_grad_enabled())
                await slow(mesh, 0.01).ready()
                seen.append(torch.is_grad_enabled())

        async def outside() -> None:
            await waiting.wait()
            for _ in range(5):
                seen.append(not torch.is_grad_enabled())
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as group:
            group.start_soon(inside)
            group.start_soon(outside)
        assert seen == [False] * 7
        assert torch.is_grad_enabled()

    anyio.run(main, backend=backend)


def test_two_loops_and_a_thread_share_a_future(mesh: dtorch.DeviceMesh) -> None:
    future = slow(mesh, 0.2).sum().to_torch_async()

    async def one() -> float:
        return (await future).item()

    async def main() -> list[float]:
        return [
            await one(),
            await asyncio.to_thread(lambda: trio.run(one)),
            await asyncio.to_thread(lambda: asyncio.run(one())),
            await asyncio.to_thread(lambda: future.get().item()),
        ]

    assert asyncio.run(main()) == [4.0] * 4


def close_under_waiters(make_loop: Callable[[], asyncio.AbstractEventLoop], wait: Callable[[], Awaitable[Any]]) -> None:
    """Run 30 tasks of `wait` in a loop that is closed before any has its value."""

    async def many() -> None:
        await asyncio.gather(*(asyncio.ensure_future(wait()) for _ in range(30)))

    loop = make_loop()
    loop.create_task(many())
    loop.call_later(0.02, loop.stop)
    loop.run_forever()
    loop.close()


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_loops_closed_under_their_waiters_leave_nothing(mesh: dtorch.DeviceMesh, kind: str) -> None:
    make_loop = asyncio.new_event_loop if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    a = dtorch.ones(8, device_mesh=mesh, placements=[Shard(0)])

    async def wait() -> torch.Tensor:
        return await (a * 2).sum()

    assert asyncio.run(wait()).item() == 16
    gc.collect()
    waiting = client().waiting
    slots, used = client().slots.sweep(), client().arena._used
    for _ in range(6):
        late = slow(mesh)
        close_under_waiters(make_loop, lambda late=late: late.to_torch_async())
        del late
        gc.collect()
        assert waiting.count == 0
    assert asyncio.run(wait()).item() == 16  # this count is written where executors read it
    deadline = time.monotonic() + 10
    while (client().slots.sweep(), client().arena._used) != (slots, used) and time.monotonic() < deadline:
        dtorch.Graph.sync()
        client().drain()
    assert (client().slots.sweep(), client().arena._used) == (slots, used)


def test_the_pool_starts_without_holding_the_loop() -> None:
    dtorch.shutdown()

    async def main() -> tuple[float, float]:
        longest, last, value = 0.0, time.perf_counter(), None

        async def use() -> None:
            nonlocal value
            value = await (dtorch.ones(4) * 2).sum()

        task = asyncio.create_task(use())
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        await task
        return longest, float(value)

    began = time.perf_counter()
    longest, value = asyncio.run(main())
    took = time.perf_counter() - began
    assert value == 8
    assert longest < max(0.25, took / 3), (longest, took)


# -- calls that would stop the loop ---------------------------------------------------------------------------------


def test_a_blocking_call_in_a_loop_warns_once_per_call_site(mesh: dtorch.DeviceMesh) -> None:
    calls = {
        "(await t).item()": lambda t: t.sum().item(),
        "await t": lambda t: t.to_torch(),
        "if await t:": lambda t: bool(t.sum().redistribute(placements=[Replicate()])),
        "print(await t)": lambda t: repr(t),
        "(await t).tolist()": lambda t: t.tolist(),
        "(await t).numpy()": lambda t: t.numpy(),
        "float(await t)": lambda t: float(t.sum()),
        "await future": lambda t: t.to_torch_async().get(),
        "await Graph.sync_async()": lambda t: dtorch.Graph.sync(),
    }

    async def main() -> None:
        for instead, call in calls.items():
            for told in (1, 0):
                t = slow(mesh, 0.1)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    call(t)
                assert [w.category for w in caught] == [dtorch.BlockingCallWarning] * told, instead
                for w in caught:
                    assert f"Write:  {instead}\n" in str(w.message)
                    assert w.filename == __file__ and w.lineno == call.__code__.co_firstlineno

    asyncio.run(main())


def test_no_warning_outside_a_loop_nor_for_what_is_there(mesh: dtorch.DeviceMesh) -> None:
    assert slow(mesh, 0.01).sum().item() == 4

    async def main() -> None:
        future = slow(mesh, 0.01).to_torch_async()
        await future
        assert future.get().tolist() == [1.0] * 4
        await asyncio.to_thread(lambda: slow(mesh, 0.01).sum().item())

    asyncio.run(main())


def test_what_asks_and_waits_is_refused_however_soon_its_value_is_there(mesh: dtorch.DeviceMesh) -> None:
    calls: list[Callable[[torch.Tensor], object]] = [
        lambda t: t.sum().item(),
        lambda t: t.to_torch(),
        lambda t: t.to_local(0),
        lambda t: repr(t),
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: dtorch.Graph.sync(),
    ]

    async def main() -> None:
        t = dtorch.ones(4, device_mesh=mesh, placements=[Replicate()])
        await t
        with dtorch.aio.strict():
            for call in calls * 20:
                with pytest.raises(dtorch.BlockingCallError):
                    call(t)

    asyncio.run(main())


def test_trio_is_a_loop_too(mesh: dtorch.DeviceMesh) -> None:
    async def main() -> None:
        with pytest.warns(dtorch.BlockingCallWarning, match=r"await t"):
            slow(mesh, 0.01).to_torch()

    trio.run(main)


def test_not_in_a_notebook(mesh: dtorch.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)

    async def main() -> None:
        assert slow(mesh, 0.01).sum().item() == 4

    asyncio.run(main())


def test_strict_mode_refuses(mesh: dtorch.DeviceMesh) -> None:
    async def main() -> None:
        t = slow(mesh, 0.01)
        token = blocking.strict.set(True)
        for _ in range(2):
            with pytest.raises(dtorch.BlockingCallError, match=r"Write:  \(await t\)\.item\(\)"):
                t.sum().item()
        assert (await t.sum()).item() == 4
        blocking.strict.reset(token)

    asyncio.run(main())
    assert slow(mesh, 0.01).redistribute(placements=[Replicate()]).tolist() == [1.0] * 4


def test_what_a_decomposition_checks_is_awaited_in_its_own_form(mesh: dtorch.DeviceMesh) -> None:
    def matrix() -> dtorch.Tensor:
        t = dtorch.distribute_tensor(torch.eye(4) * 4, mesh, [Replicate()])
        return t + slow(mesh, 0.05).redistribute(placements=[Replicate()]).sum() * 0

    async def main() -> None:
        aio.strict()
        names = ("cholesky", "inv", "solve", "lu_factor", "ldl_factor")
        for name in names:
            a = matrix()
            with pytest.raises(
                dtorch.BlockingCallError, match=rf"^linalg\.{name}\(\) waits.*\n.*torch\.linalg\.{name}_ex\("
            ):
                getattr(torch.linalg, name)(*[a] * (2 if name == "solve" else 1))
        found, info = torch.linalg.cholesky_ex(matrix())
        assert (await info).item() == 0 and (await found).equal(torch.eye(4) * 2)

    asyncio.run(main())


@pytest.mark.parametrize("tool", ["wait", "as_completed"])
def test_tools_of_threads_in_a_loop_are_blocking_calls(mesh: dtorch.DeviceMesh, tool: str) -> None:
    def use(*futures: Any) -> list[Any]:
        if tool == "wait":
            return list(concurrent.futures.wait(futures, timeout=20).done)
        return list(concurrent.futures.as_completed(futures, timeout=20))

    async def main() -> None:
        there, future = (slow(mesh, 0) * 2).to_torch_async(), slow(mesh).to_torch_async()
        await there
        aio.strict()
        assert use(there) == [there]  # nothing to wait for
        for _ in range(2):
            with pytest.raises(dtorch.BlockingCallError, match=rf"{tool}\(\) waits.*\n.*dtorch\.aio\..*\n.* in use"):
                use(there, future)
        assert (await future).tolist() == [1.0] * 4
        assert set(use(there, future)) == {there, future}
        aio.strict(False)
        late = slow(mesh).to_torch_async()
        with pytest.warns(dtorch.BlockingCallWarning, match=rf"concurrent\.futures\.{tool}\(\) waits"):
            assert use(late) == [late]  # it stops the loop, but not for ever
        assert (await late).tolist() == [1.0] * 4

    asyncio.run(main())
