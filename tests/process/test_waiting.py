"""Waiters in threads, asyncio and trio on one pool: nobody is forgotten, nobody hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import anyio
import anyio.lowlevel
import pytest
import trio

from dtorch.runtime import hubs
from dtorch.runtime import ring as ring_module
from dtorch.runtime.waiting import Ready, Waiting, in_event_loop
from tests.process.echo_executor import HOLD, EchoPool


@pytest.fixture
def pool() -> Iterator[EchoPool]:
    p = EchoPool()
    yield p
    p.close()


ALL_KINDS: list[Callable[[Waiting, Ready], object]] = [
    lambda waiting, ready: waiting.wait_thread(ready, 20),
    lambda waiting, ready: asyncio.run(waiting.wait_loop(ready)),
    lambda waiting, ready: trio.run(waiting.wait_loop, ready),
]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_thread_waits_until_ready(pool: EchoPool) -> None:
    for delay in (0, 0, 300, 20_000):
        ticket = pool.issue(delay)
        assert pool.waiting.wait_thread(ticket.is_done)
        assert ticket.answered()
        pool.slots.give(ticket)
    assert pool.waiting.count == 0


def test_thread_timeout(pool: EchoPool) -> None:
    ticket = pool.issue(HOLD)
    start = time.monotonic()
    assert not pool.waiting.wait_thread(ticket.is_done, 0.03)
    assert time.monotonic() - start >= 0.03
    assert not pool.waiting.wait_thread(ticket.is_done, 0)
    pool.release()
    assert pool.waiting.wait_thread(ticket.is_done, 5)
    assert pool.waiting.count == 0


def test_interrupt_ends_a_wait(pool: EchoPool) -> None:
    ticket = pool.issue(HOLD)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.waiting.wait_thread(ticket.is_done)
    timer.join()
    assert pool.waiting.count == 0


def test_hooks(pool: EchoPool) -> None:
    calls: list[str] = []
    pool.waiting.on_block = lambda: calls.append("block")
    pool.waiting.on_wake = lambda: calls.append("wake")
    pool.waiting.wait_thread(lambda: True)
    assert calls == []
    pool.waiting.wait_thread(pool.issue(20_000).is_done)
    assert calls[0] == "block"
    assert set(calls[1:]) == {"wake"}


def test_waits_last_until_run_ahead_is_below_its_bound(pool: EchoPool) -> None:
    answers = iter([True, True, False, True, True, False])
    pool.waiting.over_bound = lambda: next(answers)
    pool.waiting.wait_thread(lambda: True)
    assert list(answers) == [True, True, False]
    answers = iter([True, True, False])
    asyncio.run(pool.waiting.wait_loop(lambda: True))
    assert list(answers) == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_loop_waits_and_leaves_nothing(pool: EchoPool, backend: str) -> None:
    async def main() -> None:
        async def one(delay: int) -> None:
            ticket = pool.issue(delay)
            await pool.waiting.wait_loop(ticket.is_done)
            assert ticket.answered()
            pool.slots.give(ticket)

        async with anyio.create_task_group() as group:
            for i in range(50):
                group.start_soon(one, 0 if i % 10 else 2000)
        await one(0)

    anyio.run(main, backend=backend)  # the first run makes what stays for good
    before = open_descriptors()
    for _ in range(3):
        anyio.run(main, backend=backend)
    assert open_descriptors() <= before
    assert pool.waiting.count == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancelled_waits_harm_nobody(pool: EchoPool, backend: str) -> None:
    done: list[int] = []

    async def main() -> None:
        async def one(i: int) -> None:
            ticket = pool.issue(500)
            # Every third gives up at some point, the one that leads in a trio loop among them.
            with anyio.move_on_after(0.001 if i % 3 == 0 else 30) as scope:
                await pool.waiting.wait_loop(ticket.is_done)
            if not scope.cancelled_caught:
                assert ticket.answered()
                done.append(i)

        async with anyio.create_task_group() as group:
            for i in range(60):
                group.start_soon(one, i)

    anyio.run(main, backend=backend)
    assert {i for i in range(60) if i % 3} <= set(done)
    assert pool.waiting.count == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_error_in_ready_reaches_its_waiter_alone(pool: EchoPool, backend: str) -> None:
    async def main() -> None:
        looks = 0

        def bad() -> bool:
            nonlocal looks
            looks += 1
            if looks > hubs._PASSES + 4:
                raise ZeroDivisionError
            return False

        async def fails() -> None:
            with pytest.raises(ZeroDivisionError):
                await pool.waiting.wait_loop(bad)

        async with anyio.create_task_group() as group:
            group.start_soon(fails)
            await anyio.sleep(0.01)
            while looks <= hubs._PASSES + 4:
                await pool.waiting.wait_loop(pool.issue(2000).is_done)

    anyio.run(main, backend=backend)
    assert pool.waiting.count == 0


def test_loop_that_closes_under_its_waiters_is_counted_out(pool: EchoPool) -> None:
    ticket = pool.issue(HOLD)
    loop = asyncio.new_event_loop()
    task = loop.create_task(pool.waiting.wait_loop(ticket.is_done))
    loop.run_until_complete(asyncio.sleep(0.02))
    assert pool.waiting.count == 1
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    assert pool.waiting.count == 0


def test_idle_loop_has_no_reader(pool: EchoPool) -> None:
    async def main() -> None:
        await pool.waiting.wait_loop(pool.issue(20_000).is_done)
        hub = pool.waiting._local.asyncio()
        assert not hub.closed
        await asyncio.sleep(2.5 * hubs.RECHECK)
        assert hub.closed
        await pool.waiting.wait_loop(pool.issue(20_000).is_done)

    asyncio.run(main())


def test_a_lost_wake_up_costs_no_more_than_the_recheck(pool: EchoPool) -> None:
    """The status word alone, without the eventfd: what a waiter sees if a wake-up were ever lost."""
    for wait in ALL_KINDS:
        flag = threading.Event()
        timer = threading.Timer(0.05, flag.set)
        timer.start()
        start = time.monotonic()
        wait(pool.waiting, flag.is_set)
        assert time.monotonic() - start < 5
        timer.join()


def test_death_frees_all_kinds_of_waiters(pool: EchoPool) -> None:
    tickets = [pool.issue(HOLD) for _ in range(30)]
    freed: list[int] = []

    def thread(i: int) -> None:
        pool.waiting.wait_thread(tickets[i].is_done, 20)
        freed.append(i)

    async def several(first: int) -> None:
        async def one(i: int) -> None:
            await pool.waiting.wait_loop(tickets[i].is_done)
            freed.append(i)

        async with anyio.create_task_group() as group:
            for i in range(first, first + 10):
                group.start_soon(one, i)

    threads = [threading.Thread(target=thread, args=(i,)) for i in range(10)]
    threads += [
        threading.Thread(target=lambda f=first, b=backend: anyio.run(several, f, backend=b))
        for first, backend in ((10, "asyncio"), (20, "trio"))
    ]
    for t in threads:
        t.start()
    deadline = time.monotonic() + 10
    while pool.waiting.count < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert freed == []
    pool.kill()
    for t in threads:
        t.join(5)
    assert sorted(freed) == list(range(30))
    assert not any(t.answered() for t in tickets)
    assert pool.waiting.count == 0


def test_closing_the_pool_frees_waiters() -> None:
    pool = EchoPool()
    ticket = pool.issue(HOLD)
    thread = threading.Thread(target=pool.waiting.wait_thread, args=(ticket.is_done, 20))
    thread.start()
    time.sleep(0.05)
    pool.close()
    thread.join(5)
    assert not thread.is_alive()
    assert ticket.is_done() and not ticket.answered()


def test_watch_without_a_loop_uses_a_thread_only_as_long_as_it_must(pool: EchoPool) -> None:
    called: list[int] = []
    for i in range(20):
        pool.waiting.watch(pool.issue(1000).is_done, lambda i=i: called.append(i))
    helpers = [t for t in threading.enumerate() if t.name == "dtorch-callbacks"]
    assert len(helpers) <= 1
    for t in helpers:
        t.join(5)
        assert not t.is_alive()
    assert sorted(called) == list(range(20))
    pool.waiting.watch(lambda: True, lambda: called.append(99))
    deadline = time.monotonic() + 5
    while 99 not in called and time.monotonic() < deadline:
        time.sleep(0.005)
    assert called[-1] == 99


def test_watch_inside_asyncio_uses_the_loop(pool: EchoPool) -> None:
    async def main() -> None:
        here = threading.get_ident()
        where: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        pool.waiting.watch(pool.issue(1000).is_done, lambda: where.set_result(threading.get_ident()))
        assert await where == here

    asyncio.run(main())


def test_in_event_loop() -> None:
    async def inside() -> bool:
        return in_event_loop()

    assert not in_event_loop()
    assert anyio.run(inside, backend="asyncio")
    assert anyio.run(inside, backend="trio")
    assert not in_event_loop()


def test_waiting_sleeps(pool: EchoPool) -> None:
    """One pending wait of each kind costs next to no processor time."""
    for wait in ALL_KINDS:
        wait(pool.waiting, lambda: True)
        ticket = pool.issue(300_000)
        before = time.process_time()
        wait(pool.waiting, ticket.is_done)
        assert time.process_time() - before < 0.1


def test_stress(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 threads, an asyncio and a trio loop, with pauses and cancellations, on a ring that laps many times.

    Without the timed second looks, so that a single lost wake-up shows.
    """
    monkeypatch.setattr(hubs, "RECHECK", 1000)
    monkeypatch.setattr(ring_module, "_RECHECK_MS", 1_000_000)
    pool = EchoPool(ring_bytes=1 << 13)
    per = 6000
    seed = 20261129
    counted = dict.fromkeys(("thread", "asyncio", "trio"), 0)
    lock = threading.Lock()

    def count(kind: str, n: int) -> None:
        with lock:
            counted[kind] += n

    def thread(k: int) -> None:
        rng = random.Random(seed + k)
        for j in range(per):
            ticket = pool.issue(rng.choice((0, 0, 20, 200)) if j % 50 == 0 else 0)
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.0003)
            assert pool.waiting.wait_thread(ticket.is_done, 20)
            assert ticket.answered()
            pool.slots.give(ticket)
        count("thread", per)

    async def loop(kind: str) -> None:
        rng = random.Random(seed + len(kind))

        async def one() -> None:
            for _ in range(per // 10):
                ticket = pool.issue()
                if rng.random() < 0.05:
                    await anyio.lowlevel.checkpoint()
                if rng.random() < 0.05:
                    with anyio.move_on_after(0):
                        await pool.waiting.wait_loop(ticket.is_done)
                else:
                    await pool.waiting.wait_loop(ticket.is_done)
                    assert ticket.answered()
                pool.slots.give(ticket)
                count(kind, 1)

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(one)

    threads = [threading.Thread(target=thread, args=(k,), daemon=True) for k in range(4)]
    threads += [
        threading.Thread(target=lambda b=backend: anyio.run(loop, b, backend=b), daemon=True)
        for backend in ("asyncio", "trio")
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    hung = [t for t in threads if t.is_alive()]
    try:
        assert not hung, f"seed {seed}: {len(hung)} hung, {counted}"
        assert counted == {"thread": 4 * per, "asyncio": per, "trio": per}, f"seed {seed}"
        assert pool.waiting.count == 0
        deadline = time.monotonic() + 5
        while pool.slots.sweep() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pool.slots.sweep() == 0
    finally:
        pool.close()


def test_waiting_needs_nothing_closed(pool: EchoPool) -> None:
    """A Waiting that is dropped takes its epolls with it."""
    before = open_descriptors()
    other = Waiting(pool.state)
    other.wait_thread(pool.issue(300_000).is_done)
    assert open_descriptors() == before + 1
    del other
    assert open_descriptors() == before
