"""Batches that end otherwise: by an error, by callers that leave, by stuck functions, with their session or loop."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import traceback
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import dtorch
from dtorch import Replicate, init_device_mesh
from dtorch.aio import batched, queueing
from dtorch.runtime.client import client

from .batches import BACKENDS, Gated, counted, row, settle, together


@pytest.fixture(scope="module")
def mesh() -> dtorch.DeviceMesh:
    return init_device_mesh("cpu", (2,))


# -- errors and cancellation ----------------------------------------------------------------------------------------


class Odd(Exception):
    """copy.copy() fails: its constructor wants more than it keeps."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@BACKENDS
def test_an_error_reaches_exactly_the_callers_of_its_batch(mesh: dtorch.DeviceMesh, backend: str) -> None:
    table = dtorch.ones(8, 2, device_mesh=mesh)

    @batched(max_size=4)
    async def f(x: torch.Tensor, kind: str) -> Any:
        if kind == "raise":
            raise KeyError("no", len(x))
        if kind == "odd":
            raise Odd(1, 2)
        return torch.nn.functional.embedding(dtorch.distribute_tensor(x, mesh, [Replicate()]), table)

    async def main() -> None:
        kinds = ["fine", "raise", "far", "odd"]
        rows = {kind: torch.tensor([[99 if kind == "far" else 3]]) for kind in kinds}
        got = await together([lambda k=k: f(rows[k], k) for k in kinds * 3])
        for kind, found in zip(kinds * 3, got, strict=True):
            if kind == "fine":
                assert found.tolist() == [[[1, 1]]]
            elif kind == "raise":
                assert type(found) is KeyError and found.args == ("no", 4)
            elif kind == "odd":
                assert type(found) is Odd and str(found) == "1 and 2"
            else:
                assert isinstance(found, IndexError) and isinstance(found, dtorch.RemoteError)
                assert found.site.endswith("in f") and found.executor_traceback
            if isinstance(found, Exception):
                lines = [frame.name for frame in traceback.extract_tb(found.__traceback__)]
                assert lines[-1] in ("f", "_outcome") or kind == "far", lines
                assert lines.count("one") == 1, f"a traceback has grown by another caller: {lines}"
        for kind in ("raise", "far", "odd"):
            errors = [e for k, e in zip(kinds * 3, got, strict=True) if k == kind]
            assert len({id(e) for e in errors}) == 3
        m = f.metrics
        assert (m.completed, m.failed, m.batches) == (3, 9, 4) and counted(f)

    anyio.run(main, backend=backend)


@BACKENDS
def test_cancelled_callers_drop_out_before_and_harm_nobody_after(backend: str) -> None:
    async def main() -> None:
        gated = Gated()
        got: dict[float, Any] = {}
        scopes: dict[float, anyio.CancelScope] = {}

        async def one(value: float) -> None:
            with anyio.CancelScope() as scope:
                scopes[value] = scope
                got[value] = (await gated.call(row(value))).item()

        async with anyio.create_task_group() as group:
            group.start_soon(one, 1)
            await settle()
            for value in (2, 3, 4):
                group.start_soon(one, value)
                await settle()
            scopes[3].cancel()
            await settle()
            assert gated.call.metrics.queue_depth == 2
            # Of the batch under way, the only caller leaves: that batch is broken off, and the next one is sent.
            scopes[1].cancel()
            await settle()
            assert gated.batches == [[1], [2, 4]]
            scopes[2].cancel()
            await settle()
            gated.open()
        assert got == {4: 8.0}
        m = gated.call.metrics
        assert (m.completed, m.cancelled, m.batches) == (1, 3, 2) and counted(gated.call)

    anyio.run(main, backend=backend)


def refuses_itself(name: str) -> Any:
    return pytest.raises(RuntimeError, match=rf"{name}: called inside itself(.|\n)*await {name}\.unbatched\(")


@BACKENDS
def test_a_function_that_calls_itself_is_told_what_to_write(backend: str) -> None:
    @batched()
    async def tree(x: torch.Tensor, unbatched: bool = False) -> torch.Tensor:
        if x.shape[1] == 1:
            return x
        return await (tree.unbatched if unbatched else tree)(x[:, :-1], unbatched)

    @batched()
    async def ping(x: torch.Tensor, after: Any = None) -> torch.Tensor:
        return await pong(x) if after is None else await after(x)

    @batched()
    async def pong(x: torch.Tensor) -> torch.Tensor:
        return await ping(x)

    @batched()
    async def same(x: torch.Tensor) -> torch.Tensor:
        await anyio.lowlevel.checkpoint()
        return x

    class Tree:
        def __init__(self, child: Tree | None) -> None:
            self.child = child

        @batched()
        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.child is None else await self.child.forward(x) + 1

    async def main() -> None:
        with anyio.fail_after(20):
            with refuses_itself("tree"):
                await tree(torch.ones(1, 3))
            assert (await tree(torch.ones(1, 1))).tolist() == [[1]]
            assert (await tree(torch.ones(1, 4), unbatched=True)).tolist() == [[1]]
            with refuses_itself("ping"):
                await ping(row(1))
            with refuses_itself("pong"):
                await pong(row(1))
            # Another function inside is nothing special, nor is the same one of another instance.
            got = await together([lambda i=i: ping(row(i), same) for i in range(5)])
            assert [t.item() for t in got] == list(range(5)) and same.metrics.batches <= 2
            assert (await Tree(Tree(Tree(None))).forward(row(1))).item() == 3
            assert tree.metrics.failed == 1 and counted(tree) and counted(ping) and counted(pong)

    anyio.run(main, backend=backend)


@BACKENDS
def test_what_a_function_has_started_may_call_it_when_its_batch_is_over(backend: str) -> None:
    async def main() -> None:
        got: list[float] = []
        over = anyio.Event()

        async def later() -> None:
            await over.wait()
            got.append((await f(row(3), False)).item())

        async with anyio.create_task_group() as group:

            @batched()
            async def f(x: torch.Tensor, start: bool) -> torch.Tensor:
                if start:
                    if backend == "asyncio":
                        tasks.append(asyncio.create_task(later()))
                    else:
                        group.start_soon(later)
                return x

            tasks: list[Any] = []
            await f(row(1), True)
            over.set()
            with anyio.fail_after(20):
                while not got:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
        assert got == [3]

    anyio.run(main, backend=backend)


@BACKENDS
def test_stuck_batches_that_nobody_waits_for_make_way(backend: str) -> None:
    ended: list[float] = []

    @batched(max_size=1)
    async def f(x: torch.Tensor) -> torch.Tensor:
        try:
            if x.item() < 0:
                await anyio.sleep_forever()
        finally:
            ended.append(x.item())
        return x

    async def impatient(value: float) -> None:
        with anyio.move_on_after(0.02):
            await f(row(value))

    async def main() -> None:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for value in (-1.0, -2.0):
                    group.start_soon(impatient, value)
                await settle()
                # Behind the two, before and after their callers have gone.
                assert (await f(row(3))).item() == 3
            assert (await f(row(4))).item() == 4
        assert sorted(ended[:2]) == [-2, -1] and ended[2:] == [3, 4]
        m = f.metrics
        assert (m.cancelled, m.completed) == (2, 2) and counted(f) and m.pending == 0

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_batch_goes_on_while_anybody_waits_for_it(backend: str) -> None:
    async def main() -> None:
        gated = Gated(max_size=2)
        scopes: list[anyio.CancelScope] = []
        got: list[Any] = []

        async def one(value: float) -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                got.append((await gated.call(row(value))).item())

        async with anyio.create_task_group() as group:
            # Two full batches under way: of (1), and of (2, 3).
            for value in (1, 2, 3):
                group.start_soon(one, value)
                await settle()
            assert gated.batches == [[1], [2, 3]]
            scopes[1].cancel()
            await settle()
            gated.open()
        assert sorted(got) == [2, 6] and gated.call.metrics.cancelled == 1

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_function_that_ignores_its_cancellation_is_named(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queueing, "_STUCK", 0.02)

    async def main() -> None:
        gate = anyio.Event()

        @batched(max_size=1)
        async def stubborn(x: torch.Tensor) -> torch.Tensor:
            with anyio.CancelScope(shield=True):
                await gate.wait()
            return x

        with anyio.move_on_after(0.01):
            await stubborn(row(1))
        with anyio.fail_after(20):
            while not caplog.records:  # noqa: ASYNC110
                await anyio.sleep(0.002)
            assert "stubborn: nobody waits for its batch any more" in caplog.text
            gate.set()
            assert (await stubborn(row(2))).item() == 2
        assert len(caplog.records) == 1 and counted(stubborn)

    with caplog.at_level("WARNING", logger="dtorch"):
        anyio.run(main, backend=backend)


@BACKENDS
def test_a_function_that_is_cancelled_inside_fails_its_own_batch_alone(backend: str) -> None:
    async def main() -> None:
        gated = Gated(max_size=1)

        @batched(max_size=1)
        async def f(x: torch.Tensor) -> torch.Tensor:
            if x[0, 0] < 0:
                raise asyncio.CancelledError
            return await gated.call(x)

        async with anyio.create_task_group() as group:
            got: list[Any] = []

            async def good() -> None:
                got.append(await f(row(1)))

            group.start_soon(good)
            await settle()
            if backend == "asyncio":
                with pytest.raises(dtorch.PoolError, match="its batch was cancelled"):
                    await f(row(-1))
            await settle()
            gated.open()
        assert [t.item() for t in got] == [2]

    anyio.run(main, backend=backend)


@BACKENDS
def test_thousands_of_calls_with_cancels_and_errors(mesh: dtorch.DeviceMesh, backend: str) -> None:
    weight = dtorch.full((1, 1), 3.0, device_mesh=mesh)

    @batched(max_size=16, max_delay=0.001)
    async def triple(x: torch.Tensor, kind: int = 0) -> Any:
        if bool((x < 0).any()):
            raise ValueError(sorted(x[:, 0].tolist()))
        if kind == 1:
            await anyio.sleep(0.001)
        return x @ weight

    async def main() -> None:
        rng = random.Random(5)
        outcomes: dict[str, int] = dict.fromkeys(["right", "failed", "cut"], 0)

        async def client_of(n: int) -> None:
            for i in range(30):
                value = float(100 * n + i + 1)
                bad = rng.random() < 0.02
                x = row(-value if bad else value).repeat(rng.choice([1, 1, 3]), 1)
                with anyio.move_on_after(rng.choice([0, 0.001, 0.003, 100, 100, 100, 100])) as scope:
                    try:
                        y = await triple(x, rng.choice([0, 0, 1]))
                        assert not bad and y.equal(x * 3)
                        outcomes["right"] += 1
                    except ValueError as error:
                        (values,) = error.args
                        assert any(v < 0 for v in values) and x[0, 0].item() in values
                        outcomes["failed"] += 1
                if scope.cancelled_caught:
                    outcomes["cut"] += 1

        async with anyio.create_task_group() as group:
            for n in range(80):
                group.start_soon(client_of, n)
        assert sum(outcomes.values()) == 2400 and all(outcomes.values())
        m = triple.metrics
        assert counted(triple) and m.pending == m.queue_depth == 0
        assert m.completed >= outcomes["right"] and m.requests <= 2400
        await dtorch.Graph.sync_async()

    anyio.run(main, backend=backend)
    dtorch.Graph.sync()
    assert client().slots.sweep() == 0
    assert client().waiting.count == 0


# -- the end --------------------------------------------------------------------------------------------------------


@BACKENDS
def test_leaving_aio_open_fails_what_waits(backend: str) -> None:
    async def main() -> None:
        gated = Gated(max_size=1)
        async with anyio.create_task_group() as group:
            got: list[Any] = []

            async def ask() -> None:
                got.extend(await together([lambda i=i: gated.call(row(i)) for i in range(5)]))

            async with dtorch.aio.open():
                group.start_soon(ask)
                await settle()
                assert len(gated.batches) == 2
            await settle()
            assert len(got) == 5 and all(type(e) is dtorch.PoolError for e in got)
            assert "double: dtorch.aio.open() was left before this request was answered" in str(got[0])
        assert gated.call.metrics.failed == 5 and counted(gated.call)

    anyio.run(main, backend=backend)


def test_the_end_of_a_loop_leaves_nothing_behind_and_the_next_loop_starts_afresh() -> None:
    @batched()
    async def slow(x: torch.Tensor, seconds: float = 0.0) -> torch.Tensor:
        await anyio.sleep(seconds)
        return x

    async def leave() -> None:
        task = asyncio.create_task(slow(row(1), 1000.0))  # noqa: F841, RUF006
        await settle()

    async def main() -> None:
        assert (await slow(row(2))).item() == 2

    for run in (leave, main, leave, main):
        asyncio.run(run())
    anyio.run(main, backend="trio")
    assert counted(slow) and slow.metrics.pending == 0
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()


# Python says so of a task that anyio has made and that is cancelled before its first step.
@pytest.mark.filterwarnings("ignore:coroutine 'Queue._send' was never awaited:RuntimeWarning")
def test_a_loop_whose_tasks_were_all_cancelled_goes_on() -> None:
    @batched()
    async def same(x: torch.Tensor) -> torch.Tensor:
        await anyio.lowlevel.checkpoint()
        return x

    async def main() -> None:
        for passes in range(6):
            task = asyncio.create_task(same(row(1)))
            for _ in range(passes):
                await asyncio.sleep(0)
            # Among them the one that sends, at each point of its life: it may not even have begun.
            for other in asyncio.all_tasks() - {asyncio.current_task()}:
                other.cancel()
            await asyncio.wait([task])
            await settle()
            with anyio.fail_after(20):
                assert (await same(row(2))).item() == 2
        assert counted(same) and same.metrics.pending == 0

    asyncio.run(main())
    gc.collect()


def test_loops_in_threads_have_queues_of_their_own() -> None:
    @batched()
    async def same(x: torch.Tensor) -> torch.Tensor:
        await anyio.lowlevel.checkpoint()
        return x

    async def main(n: int) -> None:
        for i in range(20):
            got = await together([lambda v=v: same(row(v)) for v in range(n, n + 10)])
            assert [t.item() for t in got] == list(range(n, n + 10)), i

    failed: list[BaseException] = []

    def run(n: int) -> None:
        try:
            anyio.run(main, n, backend="trio" if n % 2 else "asyncio")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert same.metrics.completed == 800 and counted(same)
