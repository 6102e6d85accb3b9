"""dtorch.aio.open: executors for the length of a block, whatever ends it, and what holds inside."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import anyio
import pytest
import torch

import dtorch
from dtorch import Replicate, aio
from dtorch.runtime import waiting
from dtorch.runtime.blocking import strict
from dtorch.runtime.client import current_client
from tests.conftest import started_here

from .loops import LOOPS, on
from .scripts import ROOT


def late(seconds: float, mesh: dtorch.DeviceMesh | None = None) -> dtorch.Tensor:
    """float32[1], of ones, that takes a while."""

    def make(rank: int) -> torch.Tensor:
        time.sleep(seconds)
        return torch.ones(1)

    mesh = mesh or dtorch.DeviceMesh("cpu")
    return dtorch.from_local(make, mesh, [Replicate()] * mesh.ndim, shape=(1,))


def nothing_is_left() -> None:
    """No process of a pool runs, and nobody waits in one."""
    assert current_client() is None
    deadline = time.monotonic() + 5
    while (left := started_here(os.getpid())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


class Left(Exception):
    """How a block is left."""


@LOOPS
def test_however_it_is_left_nothing_remains(loop: str) -> None:
    dtorch.shutdown()

    async def ends() -> None:
        async with aio.open() as session:
            t = dtorch.ones(4) * 2
            assert session.pressure.in_flight <= 20
            assert (await t).tolist() == [2.0] * 4
        nothing_is_left()
        with pytest.raises(dtorch.TensorLostError):
            await t
        dtorch.shutdown()  # that was a use of dtorch, outside of any session

    async def raises() -> None:
        with pytest.raises(Left):
            async with aio.open():
                pending = late(60).to_torch_async()
                raise Left
        with pytest.raises(dtorch.PoolError):
            await pending

    async def is_cancelled() -> None:
        client: list[Any] = []
        with anyio.move_on_after(30) as scope:
            async with aio.open():
                client.append(current_client())
                scope.cancel()
                await late(60)
        assert scope.cancelled_caught
        assert client[0].closed and client[0].waiting.count == 0

    for way in (ends, raises, is_cancelled):
        began = time.monotonic()
        on(loop, way)
        nothing_is_left()
        assert time.monotonic() - began < 40


@pytest.mark.parametrize("cancels", [1, 5])
@pytest.mark.parametrize("way", ["ends", "is cancelled"])
def test_a_task_that_is_cancelled_while_it_leaves_leaves_nothing(cancels: int, way: str) -> None:
    """asyncio's own cancel(), as of a timeout or a task group around it, comes at any await, again and again."""

    async def main() -> None:
        async def session(entered: anyio.Event) -> None:
            async with aio.open():
                assert (await dtorch.ones(2)).sum() == 2
                entered.set()
                if way == "is cancelled":
                    await asyncio.sleep(60)

        entered = anyio.Event()
        task = asyncio.create_task(session(entered))
        await entered.wait()
        await asyncio.sleep(0)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0.001)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert current_client() is None and not started_here(os.getpid())  # at once

    asyncio.run(main())


def test_the_first_operator_has_nothing_left_to_import() -> None:
    """Torch imports its DTensor, and sympy with it, at the first operator of a tensor of another kind: for a second."""
    code = """
import asyncio, gc, sys, dtorch

async def main():
    async with dtorch.aio.open():
        before = set(sys.modules)
        a = dtorch.ones(4, 4)
        await (a @ a)
        new = {name for name in sys.modules.keys() - before if not name.startswith("dtorch.")}
        assert not new and gc.isenabled(), new

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr


@LOOPS
def test_leaving_ends_the_waits_of_others(loop: str) -> None:
    errors: list[BaseException] = []

    async def main() -> None:
        async def other(started: anyio.Event) -> None:
            started.set()
            try:
                await late(60)
            except dtorch.PoolError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            with pytest.raises(Left):
                async with aio.open():
                    started = anyio.Event()
                    group.start_soon(other, started)
                    await started.wait()
                    await anyio.sleep(0.05)
                    raise Left

    on(loop, main)
    assert len(errors) == 1
    nothing_is_left()


@LOOPS
def test_leaving_waits_for_what_was_issued(loop: str, tmp_path: Any) -> None:
    done = tmp_path / "done"

    async def main() -> None:
        async with aio.open():

            def make(rank: int) -> torch.Tensor:
                time.sleep(1.5)
                done.write_text("yes")
                return torch.ones(1)

            dtorch.from_local(make, dtorch.DeviceMesh("cpu"), [Replicate()], shape=(1,))

    on(loop, main)
    assert done.read_text() == "yes"


@LOOPS
def test_nested_and_overlapping_sessions_share_the_pool_and_the_last_ends_it(loop: str) -> None:
    async def main() -> None:
        async with aio.open():
            pool = current_client()
            async with aio.open():
                t = dtorch.ones(2)
                assert current_client() is pool
            assert (await t).tolist() == [1.0, 1.0]
            first_in, first_may_leave, second_in = anyio.Event(), anyio.Event(), anyio.Event()

            async def first() -> None:
                async with aio.open():
                    first_in.set()
                    await first_may_leave.wait()

            async def second() -> None:
                await first_in.wait()
                async with aio.open():
                    second_in.set()
                    first_may_leave.set()
                    await anyio.sleep(0.02)
                    assert (await (t + 1)).tolist() == [2.0, 2.0]

            async with anyio.create_task_group() as group:
                group.start_soon(first)
                group.start_soon(second)
            assert current_client() is pool
        assert current_client() is None

    on(loop, main)
    nothing_is_left()


def test_sessions_in_two_loops_of_two_threads() -> None:
    both, results = threading.Barrier(2), []

    async def main() -> None:
        async with aio.open():
            await asyncio.to_thread(both.wait, 30)
            results.append((await dtorch.ones(3).sum()).item())
            await asyncio.to_thread(both.wait, 30)

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert results == [3.0, 3.0]
    nothing_is_left()


def test_an_open_that_fails_or_is_cancelled_leaves_nothing() -> None:
    async def main() -> None:
        with pytest.raises(dtorch.ConfigError, match="in_flight=0: expected a whole number of at least 1"):
            aio.open(in_flight=0)
        with pytest.raises(dtorch.DeviceMeshError):
            async with aio.open(mesh=dtorch.DeviceMesh("cuda")):
                raise AssertionError
        assert current_client() is None
        with anyio.move_on_after(0.05) as scope:  # a pool takes longer to start
            async with aio.open():
                await anyio.sleep_forever()
        assert scope.cancelled_caught

    asyncio.run(main())
    nothing_is_left()


def test_a_session_is_opened_once_at_a_time() -> None:
    async def main() -> None:
        session = aio.open()
        async with session:
            with pytest.raises(RuntimeError, match="open already"):
                await session.__aenter__()
        assert current_client() is None
        async with session:
            assert (await dtorch.ones(1)).item() == 1

    asyncio.run(main())


def test_leaving_a_pool_that_died_raises_nothing_of_its_own() -> None:
    async def main() -> None:
        async with aio.open():
            pids = current_client().pool.pids  # type: ignore[union-attr]
            os.kill(pids[0], 9)
            with pytest.raises(dtorch.ExecutorDiedError):
                while True:
                    await dtorch.ones(1)

    asyncio.run(main())
    nothing_is_left()


@LOOPS
def test_what_it_sets_holds_inside_and_in_tasks_started_there_only(loop: str) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    seen: dict[str, Any] = {}

    def look(name: str) -> None:
        seen[name] = (dtorch.get_default_device_mesh() == mesh, waiting.in_flight.get(), strict.get())

    async def main() -> None:
        async def beside(inside: anyio.Event, looked: anyio.Event) -> None:
            await inside.wait()
            look("beside")
            looked.set()

        async def child() -> None:
            look("child")

        async with anyio.create_task_group() as group:
            inside, looked = anyio.Event(), anyio.Event()
            group.start_soon(beside, inside, looked)
            async with aio.open(mesh=mesh, in_flight=100, strict=True), anyio.create_task_group() as inner:
                look("inside")
                assert dtorch.ones(2).device_mesh == mesh and aio.backlog().bound == 100
                inside.set()
                inner.start_soon(child)
                await looked.wait()
                async with aio.open():
                    look("nested")
        look("after")

    on(loop, main)
    assert seen == {
        "inside": (True, 100, True),
        "child": (True, 100, True),
        "nested": (True, 100, True),
        "beside": (False, None, False),
        "after": (False, None, False),
    }


def test_a_lifespan_holds_in_requests_too_which_are_no_children_of_it() -> None:
    fastapi = pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    mesh = dtorch.init_device_mesh("cpu", (2,))
    app = fastapi.FastAPI(lifespan=aio.lifespan(mesh=mesh, in_flight=64, strict=True))
    found: list[Any] = []

    @app.get("/async")
    async def in_the_loop() -> float:
        found.append((dtorch.get_default_device_mesh() == mesh, waiting.in_flight.get(), strict.get()))
        return float(await dtorch.ones(4).sum())

    @app.get("/def")
    def in_a_thread() -> float:
        # The synchronous API, in FastAPI's thread pool: nothing of the loop is stopped, and nothing warns.
        return float(dtorch.ones(4).sum())

    async def main() -> None:
        ready, over = asyncio.Event(), asyncio.Event()

        async def lifetime() -> None:
            async with app.router.lifespan_context(app):
                ready.set()
                await over.wait()

        task = asyncio.create_task(lifetime())
        await ready.wait()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as client:
            answers = await asyncio.gather(*(client.get(("/async", "/def")[i % 2]) for i in range(20)))
        assert [a.json() for a in answers] == [4.0] * 20
        over.set()
        await task

    asyncio.run(main())
    assert found == [(True, 64, True)] * 10
    assert waiting.in_flight.get() is None and not strict.get()
    assert dtorch.get_default_device_mesh() == dtorch.DeviceMesh("cpu")
    nothing_is_left()


@pytest.mark.parametrize("first_out", [0, 1])
def test_lifespans_overlap_and_end_in_any_order(first_out: int) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    before = dtorch.get_default_device_mesh()

    def holds() -> tuple[bool, int | None, bool]:
        return dtorch.get_default_device_mesh() == mesh, waiting.in_flight.get(), strict.get()

    async def main() -> None:
        lives = [
            aio.lifespan(mesh=mesh, in_flight=64, strict=True)(None),
            aio.lifespan(mesh=mesh, in_flight=32, strict=True)(None),
        ]
        for life in lives:
            await life.__aenter__()
        assert holds() == (True, 32, True)
        await lives.pop(first_out).__aexit__(None, None, None)
        assert holds() == (True, (32, 64)[first_out], True)
        async with aio.lifespan(in_flight=16)(None):
            assert holds() == (True, 16, True)
        assert holds() == (True, (32, 64)[first_out], True)
        await lives.pop().__aexit__(None, None, None)
        assert holds() == (False, None, False) and dtorch.get_default_device_mesh() == before

    asyncio.run(main())
    nothing_is_left()


def test_options_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(dtorch.ConfigError, match="strict='no': expected True or False"):
        aio.open(strict="no")  # type: ignore[arg-type]
    with pytest.raises(dtorch.ConfigError, match="enabled='no'"):
        aio.strict("no")  # type: ignore[arg-type]
    for wrong in (0, 1.5, True):
        with pytest.raises(dtorch.ConfigError, match="in_flight="):
            aio.open(in_flight=wrong)  # type: ignore[arg-type]

    async def main() -> None:
        with pytest.raises(dtorch.ConfigError, match="strict=1"):
            async with aio.lifespan(strict=1)(None):  # type: ignore[arg-type]
                raise AssertionError

    asyncio.run(main())
    assert not strict.get()
