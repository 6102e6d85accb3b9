"""Memory that crosses the process line is bounded: what is on its way is waited for, what is held is told."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch.runtime import config
from dtorch.runtime.client import client

from .stopping import stopped

KIB_64 = torch.arange(16_384, dtype=torch.float32)  # fourteen of them fill what the arena has for uploads


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    dtorch.shutdown()
    before = config.current()
    dtorch.configure(arena_bytes="1M", slots=64)
    yield
    dtorch.shutdown()
    dtorch.configure(arena_bytes=before.arena_bytes, slots=before.slots)


def test_uploads_that_are_faster_than_executors_wait() -> None:
    total = dtorch.zeros(16_384)
    assert total.sum().item() == 0
    done = threading.Event()

    def upload() -> None:
        nonlocal total
        for _ in range(100):
            total = total + dtorch.Tensor(KIB_64)
        done.set()

    with stopped():
        thread = threading.Thread(target=upload)
        thread.start()
        assert not done.wait(0.3)
        assert client().arena.stats().used <= 1 << 20
    thread.join(20)
    torch.testing.assert_close(total.to_torch(), 100 * KIB_64)


def test_a_fetch_waits_for_uploads_that_fill_the_arena() -> None:
    x = dtorch.ones(32_768)
    assert x.sum().item() == 32_768
    with stopped():
        kept = [dtorch.Tensor(KIB_64) for _ in range(14)]
        values: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: values.append(x.to_torch()))
        thread.start()
        time.sleep(0.2)
        assert not values
    thread.join(20)
    assert torch.equal(values[0], torch.ones(32_768))
    assert all(torch.equal(t.to_torch(), KIB_64) for t in kept)


def test_in_a_loop_too_many_uploads_raise_with_the_line_to_write() -> None:
    assert dtorch.ones(1).item() == 1

    async def main() -> int:
        kept = []
        with stopped(), pytest.raises(dtorch.RunAheadError, match=r"await dtorch\.aio\.ready_to_send\(\)"):
            for _ in range(17):
                kept.append(dtorch.Tensor(KIB_64))
        for t in kept:
            assert torch.equal(await t, KIB_64)
        return len(kept)

    assert asyncio.run(main()) == 14


def test_in_a_loop_that_line_is_enough() -> None:
    assert dtorch.ones(1).item() == 1

    async def main() -> torch.Tensor:
        total = dtorch.zeros(16_384)
        for _ in range(200):
            await dtorch.aio.ready_to_send()
            total = total + dtorch.Tensor(KIB_64)
        return await total

    torch.testing.assert_close(asyncio.run(main()), 200 * KIB_64)


def test_awaits_pause_while_uploads_fill_half_of_the_arena() -> None:
    first = dtorch.ones(1).to_torch_async()
    assert first.wait(20)

    async def main() -> bool:
        async def ask() -> torch.Tensor:
            return await first

        with stopped():
            kept = [dtorch.Tensor(KIB_64) for _ in range(9)]
            task = asyncio.create_task(ask())
            await asyncio.sleep(0.2)
            paused = not task.done()
        await asyncio.wait_for(task, 20)
        return paused and torch.equal(await kept[-1], KIB_64)

    assert asyncio.run(main())


def test_results_that_are_held_are_an_error_and_dropping_them_is_enough() -> None:
    x = dtorch.ones(32_768)  # 128 KiB: its value is not copied out of the arena
    held = [x.to_torch() for _ in range(8)]
    with pytest.raises(MemoryError, match=r"Drop results.*configure\(arena_bytes="):
        x.to_torch()
    with pytest.raises(MemoryError, match="Drop results"):
        dtorch.Tensor(KIB_64)
    assert all(torch.equal(h, torch.ones(32_768)) for h in held)
    held.clear()
    assert x.to_torch().sum() == 32_768
    assert dtorch.Tensor(KIB_64).sum().item() == KIB_64.sum()


def test_what_can_never_fit_is_refused_at_once() -> None:
    x = dtorch.ones(1)
    with pytest.raises(MemoryError, match=r"cannot hold 4,000,000 more bytes.*configure\(arena_bytes="):
        dtorch.Tensor(torch.zeros(1_000_000))
    large = dtorch.zeros(1_000_000)
    with pytest.raises(MemoryError, match="cannot hold 4,000,000 more bytes"):
        large.to_torch_async()
    assert (large.sum() + x).item() == 1


def test_results_nobody_waits_for_give_their_room_back() -> None:
    x = dtorch.ones(32_768)
    assert x.sum().item() == 32_768
    with stopped():
        for _ in range(7):
            x.to_torch_async()  # dropped before it came
        values: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: values.append(x.to_torch()))
        thread.start()
        time.sleep(0.2)
        assert not values
    thread.join(20)
    assert torch.equal(values[0], torch.ones(32_768))


def test_a_death_ends_the_wait_for_room() -> None:
    assert dtorch.ones(1).item() == 1
    pid = client().pool.pids[0]
    errors: list[BaseException] = []

    def upload() -> None:
        try:
            kept = [dtorch.Tensor(KIB_64) for _ in range(17)]
            kept.clear()
        except BaseException as error:
            errors.append(error)

    os.kill(pid, signal.SIGSTOP)
    thread = threading.Thread(target=upload)
    thread.start()
    time.sleep(0.2)
    assert not errors
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    thread.join(20)
    assert time.monotonic() - start < 1
    assert isinstance(errors[0], dtorch.ExecutorDiedError)


def test_more_values_than_slots_are_refused_and_all_others_come() -> None:
    x = dtorch.ones(1)
    assert x.item() == 1
    with stopped():
        asked = [x.to_torch_async() for _ in range(64)]
        with pytest.raises(dtorch.RunAheadError, match=r"configure\(slots=128\)"):
            x.to_torch_async()
    assert [f.get(20).item() for f in asked] == [1.0] * 64
    assert x.item() == 1


@pytest.mark.parametrize("where", ["thread", "loop", "hard bound"])
def test_what_pauses_takes_in_failures_that_executors_wait_to_tell(where: str) -> None:
    """More failures than their reply ring holds, while somebody waits for them to catch up: both sides waited."""
    dtorch.shutdown()
    before = config.current()
    hard = 200 if where == "hard bound" else 100_000
    dtorch.configure(run_ahead_soft=100, run_ahead_hard=hard, reply_bytes=4096)
    try:
        weight, rows = dtorch.ones(8, 4), dtorch.tensor([99])
        first = weight.to_torch_async()
        assert first.wait(20)
        failed = [torch.nn.functional.embedding(rows, weight) for _ in range(600)]

        async def main() -> torch.Tensor:
            with stopped():
                failed.extend(torch.nn.functional.embedding(rows, weight) for _ in range(150))
            return await asyncio.wait_for(_value(first), 20)

        value = asyncio.run(main()) if where == "loop" else first.get(20)
        assert torch.equal(value, torch.ones(8, 4))
        with pytest.raises(IndexError):
            failed[-1].sum().item()
        assert weight.sum().item() == 32
        client().drain()
        client().failures._asked |= set(client().failures._reports)
    finally:
        dtorch.shutdown()
        names = ("run_ahead_soft", "run_ahead_hard", "reply_bytes")
        dtorch.configure(**{name: getattr(before, name) for name in names})


async def _value(future: dtorch.TensorFuture[torch.Tensor]) -> torch.Tensor:
    return await future
