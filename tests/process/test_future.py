"""TensorFuture: one value, any number of askers, from threads, asyncio and trio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import logging
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import torch
import uvloop

from dtorch.future import TensorFuture, VoidFutureCollect
from dtorch.runtime import modes
from tests.process.echo_executor import HOLD, EchoPool
from tests.process.scripts import ROOT

BACKENDS = ["asyncio", "trio"]


@pytest.fixture
def pool() -> Iterator[EchoPool]:
    p = EchoPool()
    yield p
    p.close()


def fail() -> Any:
    raise IndexError("index out of range in self")


def test_get(pool: EchoPool) -> None:
    future = pool.future(HOLD, lambda: 7)
    assert not future.is_ready() and future.running()
    assert repr(future) == "<TensorFuture pending>"
    with pytest.raises(TimeoutError, match=r"0\.001 s; it is still on its way"):
        future.get(timeout=0.001)
    assert not future.wait_for(1)
    pool.release()
    assert future.wait(timeout=5) and future.wait_for(0)
    assert future.get() == future.get(timeout=0) == future.result() == 7
    assert future.exception() is None
    assert future.is_ready() and future.done() and not future.cancel() and not future.cancelled()
    assert repr(future) == "<TensorFuture holding a value>"


def test_resolve_is_called_once_whoever_asks(pool: EchoPool) -> None:
    calls: list[int] = []
    future = pool.future(5000, lambda: calls.append(threading.get_ident()) or len(calls))
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(future.get())) for _ in range(8)]
    threads += [threading.Thread(target=lambda: got.append(asyncio.run(as_coroutine(future)))) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert got == [1] * 10
    assert len(calls) == 1


async def as_coroutine(future: TensorFuture[Any]) -> Any:
    return await future


def test_an_error_is_raised_at_every_ask_and_does_not_grow(pool: EchoPool) -> None:
    future = pool.future(0, fail)
    lengths = set()
    for _ in range(5):
        with pytest.raises(IndexError, match="index out of range") as caught:
            future.get()
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(lengths) == 1
    assert isinstance(future.exception(), IndexError)
    with pytest.raises(IndexError):
        asyncio.run(as_coroutine(future))
    assert repr(future) == "<TensorFuture holding IndexError>"


def test_an_interrupt_while_fetching_is_not_the_value(pool: EchoPool) -> None:
    answers = iter([KeyboardInterrupt(), None])

    def resolve() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "value"

    future = pool.future(0, resolve)
    future.wait()
    with pytest.raises(KeyboardInterrupt):
        future.get()
    assert future._resolve is not None  # it can be asked again; this pool's own fetch gave the slot back already


@pytest.mark.parametrize("backend", BACKENDS)
def test_await_any_number_of_times(pool: EchoPool, backend: str) -> None:
    got: list[Any] = []

    async def main() -> None:
        future = pool.future(3000)

        async def ask() -> None:
            got.append(await future)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(ask)
        got.append(await future)
        got.append(await future)

    anyio.run(main, backend=backend)
    assert got == ["value"] * 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_future_across_loops(pool: EchoPool, backend: str) -> None:
    future = pool.future(3000)
    for b in (backend, *BACKENDS):
        assert anyio.run(as_coroutine, future, backend=b) == "value"


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancelled_await_leaves_the_future_usable(pool: EchoPool, backend: str) -> None:
    async def main() -> None:
        future = pool.future(HOLD)
        with anyio.move_on_after(0.005) as scope:
            await future
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.001):
                await future
        pool.release()
        assert await future == "value"

    anyio.run(main, backend=backend)
    assert pool.waiting.count == 0


def test_asyncio_tools(pool: EchoPool) -> None:
    async def main() -> None:
        assert await asyncio.wait_for(as_coroutine(pool.future(1000)), 5) == "value"
        assert await asyncio.gather(*(as_coroutine(pool.future()) for _ in range(20))) == ["value"] * 20
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(as_coroutine(pool.future(HOLD)), 0.005)
        pool.release()
        assert await asyncio.wrap_future(pool.future(1000)) == "value"
        with pytest.raises(IndexError):
            await asyncio.wrap_future(pool.future(1000, fail))

    asyncio.run(main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_future_frees_its_slot_when_the_answer_arrives(pool: EchoPool, backend: str) -> None:
    freed: list[int] = []

    async def main() -> None:
        with anyio.move_on_after(0.005):
            await pool.future(HOLD, abandoned=freed)

    anyio.run(main, backend=backend)
    gc.collect()
    assert pool.slots.sweep() == 1 and freed == []
    pool.release()
    deadline = time.monotonic() + 5
    while pool.slots.sweep() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert freed == [0]
    later = [pool.future(0, abandoned=freed) for _ in range(3)]
    assert [f.get() for f in later] == ["value"] * 3
    del later
    assert freed == [0]  # those were fetched


def test_death_raises_everywhere(pool: EchoPool) -> None:
    futures = [pool.future(HOLD) for _ in range(200)]
    threading.Timer(0.05, pool.kill).start()
    start = time.monotonic()
    for future in futures:
        with pytest.raises(RuntimeError, match="died"):
            future.get(10)
    assert time.monotonic() - start < 3
    with pytest.raises(RuntimeError, match="died"):
        asyncio.run(as_coroutine(pool.future()))


def test_callbacks(pool: EchoPool, caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []
    arrived = threading.Event()
    future = pool.future(10_000)
    future.add_done_callback(lambda f: called.append(f.get()))
    future.add_done_callback(lambda f: 1 / 0)
    future.add_done_callback(lambda f: arrived.set())
    assert arrived.wait(5)
    with caplog.at_level(logging.ERROR, "dtorch"):
        future.add_done_callback(lambda f: 1 / 0)
    assert "ZeroDivisionError" in caplog.text
    future.add_done_callback(lambda f: called.append("late"))
    assert called == ["value", "late"]


def test_callbacks_run_once_even_if_a_get_is_first(pool: EchoPool) -> None:
    called: list[int] = []
    futures = [pool.future(100 * (i % 3)) for i in range(100)]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda f, i=i: called.append(i))
        future.get()
    for t in threading.enumerate():
        if t.name == "dtorch-callbacks":
            t.join(5)
    assert sorted(called) == list(range(100))


def test_callback_in_a_loop_runs_in_its_thread(pool: EchoPool) -> None:
    async def main() -> None:
        where: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        pool.future(2000).add_done_callback(lambda f: where.set_result(threading.get_ident()))
        assert await where == threading.get_ident()

    asyncio.run(main())


def test_concurrent_futures_tools(pool: EchoPool) -> None:
    futures = [pool.future(3000 * i, (lambda: 1) if i else fail) for i in range(4)]
    order = list(concurrent.futures.as_completed(futures, timeout=10))
    assert set(order) == set(futures)
    done, left = concurrent.futures.wait(futures, timeout=5)
    assert len(done) == 4 and not left
    slow = pool.future(HOLD)
    assert concurrent.futures.wait([slow], timeout=0.01) == (set(), {slow})
    done, _ = concurrent.futures.wait([slow, futures[1]], return_when="FIRST_COMPLETED", timeout=5)
    assert done == {futures[1]}


@pytest.mark.parametrize("ask", ["wrap_future", "wait", "as_completed", "callback in a thread"])
def test_a_loop_that_ends_takes_no_callbacks_with_it(pool: EchoPool, ask: str) -> None:
    """The loop that asked first is over when the value comes: who asks later is told all the same."""
    future = pool.future(HOLD)

    async def first() -> None:
        wrapped = asyncio.wrap_future(future)
        await asyncio.wait([wrapped], timeout=0.01)

    async def later() -> Any:
        asyncio.get_running_loop().call_later(0.02, pool.release)
        return await asyncio.wait_for(asyncio.wrap_future(future), 10)

    asyncio.run(first())
    if ask == "wrap_future":
        assert asyncio.run(later()) == "value"
        return
    threading.Timer(0.02, pool.release).start()
    if ask == "wait":
        assert concurrent.futures.wait([future], timeout=10) == ({future}, set())
    elif ask == "as_completed":
        assert list(concurrent.futures.as_completed([future], timeout=10)) == [future]
    else:
        called = threading.Event()
        future.add_done_callback(lambda f: called.set())
        assert called.wait(10)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_ends_leaves_its_callbacks_to_a_thread(pool: EchoPool, new_loop: Any) -> None:
    """Nobody asks again: the callback comes all the same, once."""
    future, called = pool.future(HOLD), threading.Event()
    calls: list[Any] = []

    async def main() -> None:
        future.add_done_callback(lambda f: (calls.append(f.get()), called.set()))
        await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    pool.release()
    assert called.wait(10)
    time.sleep(0.05)
    assert calls == ["value"]


def test_a_program_ends_quietly_with_callbacks_pending() -> None:
    code = """
import asyncio, time, torch, dtorch

def late(rank):
    time.sleep(4)
    return torch.ones(1)

t = dtorch.from_local(late, dtorch.DeviceMesh("cpu"), [dtorch.Replicate()], shape=(1,))
futures = [(t + i).to_torch_async() for i in range(3)]

async def main():
    futures[0].add_done_callback(lambda f: None)
    try:
        await asyncio.wait_for(asyncio.wrap_future(futures[1]), 0.01)
    except TimeoutError:
        print("late")

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "late\n", "")


def test_asyncio_wait_takes_a_future(pool: EchoPool) -> None:
    async def main() -> None:
        first, second = pool.future(100, lambda: "first"), pool.future(HOLD)
        done, left = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        assert done == {first} and left == {second}
        assert (await asyncio.wait([second], timeout=0.01)) == (set(), {second})
        # Another thread fetches it: this loop is told in its own.
        fetching = asyncio.get_running_loop().run_in_executor(None, second.get)
        pool.release()
        done, left = await asyncio.wait_for(asyncio.wait([first, second]), 10)
        assert done == {first, second} and not left and await fetching == "value"
        assert second.remove_done_callback(print) == 0

    asyncio.run(main(), debug=True)


def test_callbacks_come_in_the_loop_that_asked(pool: EchoPool) -> None:
    threads: list[int] = []

    async def main() -> None:
        future = pool.future(HOLD)
        removed, kept = threads.append, lambda f: threads.append(threading.get_ident())
        for callback in (removed, kept, removed):
            future.add_done_callback(callback)
        assert future.remove_done_callback(removed) == 2
        getting = asyncio.get_running_loop().run_in_executor(None, future.get)
        pool.release()
        await getting
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert threads == [threading.get_ident()]


def test_a_future_is_neither_pickled_nor_copied(pool: EchoPool) -> None:
    for future in (pool.future(HOLD), pool.future(0)):
        assert copy.copy(future) is future
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="Write:  await future"):
                copied(future)
    pool.release()


def test_concurrent_futures_count_each_future_once_whoever_fetches_it(pool: EchoPool) -> None:
    for _ in range(40):
        futures = [pool.future(50 * (i % 5)) for i in range(10)]
        fetching = threading.Thread(target=lambda futures=futures: [f.get() for f in futures])
        fetching.start()
        assert set(concurrent.futures.as_completed(futures, timeout=10)) == set(futures)
        assert concurrent.futures.wait(futures, timeout=10) == (set(futures), set())
        fetching.join(10)


def test_collect(pool: EchoPool) -> None:
    both = VoidFutureCollect([pool.future(0), pool.future(HOLD)])
    assert not both.is_ready()
    with pytest.raises(TimeoutError):
        both.get(timeout=0.001)
    pool.release()
    assert both.get() is None and both.is_ready() and both.wait()
    assert asyncio.run(as_coroutine(VoidFutureCollect([pool.future(100 * i) for i in range(50)]))) is None
    with pytest.raises(IndexError):
        VoidFutureCollect([pool.future(), pool.future(0, fail), pool.future()]).get()
    assert VoidFutureCollect([], pool.waiting).get() is None
    with pytest.raises(ValueError, match="waiting="):
        VoidFutureCollect([])


@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_do_not_leak_between_interleaved_tasks(pool: EchoPool, backend: str) -> None:
    """Every task keeps its own modes over awaits, and tasks started meanwhile start with torch's."""
    ordinary = modes.current()
    seen: list[tuple[str, modes.Modes, modes.Modes]] = []

    async def task(name: str, context: Any) -> None:
        seen.append((name, modes.current(), ordinary))
        with context:
            mine = modes.current()
            for i in range(12):
                await pool.future(300 * (i % 4))
                seen.append((name, modes.current(), mine))
        seen.append((name, modes.current(), ordinary))
        await pool.future(300)
        seen.append((name, modes.current(), ordinary))

    async def cancelled() -> None:
        with anyio.move_on_after(0.002), torch.inference_mode():
            await pool.future(100_000)
        seen.append(("cancelled", modes.current(), ordinary))

    async def main() -> None:
        contexts = {
            "plain": torch.enable_grad(),
            "no_grad": torch.no_grad(),
            "inference": torch.inference_mode(),
            "autocast": torch.autocast("cpu", torch.bfloat16),
            "half": torch.autocast("cpu", torch.float16),
            "nested inference": torch.inference_mode(),
        }
        async with anyio.create_task_group() as group:
            for name, context in contexts.items():
                group.start_soon(task, name, context)
                await pool.future(200)
            group.start_soon(cancelled)
            for _ in range(20):
                await pool.future(200)
                seen.append(("main", modes.current(), ordinary))

    anyio.run(main, backend=backend)
    assert len(seen) == 6 * 15 + 21
    for name, got, wanted in seen:
        assert got == wanted, name
    assert modes.current() == ordinary
    assert torch.ones(1, requires_grad=True).sum().requires_grad


def test_inference_tensors_follow_the_task(pool: EchoPool) -> None:
    """Inference mode is more than its flag: what is made must be of the right kind too."""

    async def inference() -> list[bool]:
        with torch.inference_mode():
            kinds = []
            for _ in range(5):
                await pool.future(500)
                kinds.append(torch.ones(2).mul(2).is_inference())
            return kinds

    async def training() -> list[bool]:
        kinds = []
        w = torch.ones(2, requires_grad=True)
        for _ in range(5):
            await pool.future(500)
            loss = w.mul(2).sum()
            kinds.append(loss.requires_grad and not loss.is_inference())
        return kinds

    async def main() -> None:
        got = await asyncio.gather(inference(), training(), inference(), training())
        assert got == [[True] * 5] * 4

    asyncio.run(main())


def test_adopted_modes_are_the_loops_own(pool: EchoPool) -> None:
    def run() -> None:
        others: list[bool] = []
        mine: list[bool] = []

        async def other() -> None:
            others.append(torch.is_grad_enabled())

        async def main() -> None:
            modes.adopt()
            for context in (torch.no_grad(), torch.enable_grad()):
                with context:
                    task = asyncio.ensure_future(other())
                    await pool.future(50_000)
                    mine.append(torch.is_grad_enabled())
                await task

        with torch.no_grad():
            asyncio.run(main())
        assert (others, mine) == ([False, False], [False, True])
        assert torch.is_grad_enabled()

    thread_raises: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            thread_raises.append(error)

    thread = threading.Thread(target=guarded)  # its own modes end with it
    thread.start()
    thread.join(10)
    assert thread_raises == []
