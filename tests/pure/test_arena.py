"""The arena: who gets which bytes, and when they come back."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from collections.abc import Iterator

import pytest
import torch

from dtorch.errors import PoolError
from dtorch.runtime.arena import COPY_BYTES, PAGE, Arena, Block, extent, size_class
from dtorch.runtime.config import Config
from dtorch.runtime.shared import SharedState

MIB = 1 << 20


@pytest.fixture
def state() -> Iterator[SharedState]:
    s = SharedState.create(Config(ring_bytes=1 << 12, arena_bytes=64 * MIB, slots=16))
    yield s
    s.close()


@pytest.fixture
def arena(state: SharedState) -> Arena:
    return Arena(state, idle_limit=16 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "capacity"),
    [
        *((0, 64), (1, 64), (64, 64), (65, 128), (2048, 2048), (2049, 4096), (4096, 4096), (4097, 8192)),
        *((32769, 36864), (MIB, MIB), (MIB + 1, MIB + MIB // 8), (64 * MIB, 64 * MIB)),
    ],
)
def test_size_class(nbytes: int, capacity: int) -> None:
    assert size_class(nbytes) == capacity


def test_size_classes_hold_what_they_serve_and_waste_at_most_an_eighth() -> None:
    for n in range(1, 3_000_000, 997):
        c = size_class(n)
        assert c >= n
        assert size_class(c) == c
        if n >= 8 * PAGE:
            assert c <= n + n // 8 + PAGE and c % PAGE == 0


@pytest.mark.parametrize(
    ("shape", "stride", "count"),
    [((), (), 1), ((3,), (1,), 3), ((0, 4), (4, 1), 0), ((2, 3), (1, 2), 6), ((2, 3), (10, 1), 13), ((5,), (0,), 1)],
)
def test_extent(shape: tuple[int, ...], stride: tuple[int, ...], count: int) -> None:
    assert extent(shape, stride) == count


def test_blocks_never_overlap_and_all_comes_back(arena: Arena) -> None:
    rng = random.Random(5)
    held: list[Block] = []
    for _ in range(4000):
        if held and rng.random() < 0.5:
            arena.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(arena.alloc(rng.choice((1, 64, 100, 3000, 5000, 70_000, 300_000))))
            assert held[-1].offset % (PAGE if held[-1].capacity >= PAGE else 64) == 0
    spans = sorted((b.offset, b.offset + b.capacity) for b in held)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= arena.limit
    assert arena.stats().used == sum(b.capacity for b in held)
    assert arena.stats().blocks == len(held)
    for b in held:
        arena.free(b)
    assert (arena.stats().used, arena.stats().blocks) == (0, 0)


def test_the_same_size_gets_the_same_pages_again(arena: Arena) -> None:
    first = arena.alloc(MIB)
    arena.free(first)
    assert arena.alloc(MIB).offset == first.offset


def test_full_arena_raises_with_the_option_to_set_and_recovers(arena: Arena) -> None:
    blocks = [arena.alloc(8 * MIB) for _ in range(8)]
    with pytest.raises(MemoryError, match=r"configure\(arena_bytes="):
        arena.alloc(1)
    for b in blocks:
        arena.free(b)
    whole = arena.alloc(64 * MIB)  # needs every idle block merged again
    assert whole.offset == 0
    arena.free(whole)


def test_idle_memory_is_bounded_and_given_back_to_the_kernel(arena: Arena, state: SharedState) -> None:
    blocks = [arena.alloc(4 * MIB) for _ in range(8)]
    for b in blocks:
        arena.map[b.offset : b.offset + b.capacity] = b"\1" * b.capacity
        arena.free(b)
    assert arena.stats().idle == 16 * MIB
    assert os.fstat(state.arena_fd).st_blocks * 512 == 16 * MIB
    assert arena.trim() == 16 * MIB
    assert os.fstat(state.arena_fd).st_blocks == 0
    assert arena.stats().peak == 32 * MIB
    arena.reset_peak()
    assert arena.stats().peak == 0


def test_freeing_twice_is_an_error(arena: Arena) -> None:
    block = arena.alloc(1)
    arena.free(block)
    with pytest.raises(ValueError, match="freed twice"):
        arena.free(block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (300, 200), (0, 4)])
@pytest.mark.parametrize("columns", [False, True])
def test_tensor_holds_what_was_written(arena: Arena, dtype: torch.dtype, shape: tuple[int, ...], columns: bool) -> None:
    stride = torch.empty(shape[::-1]).stride()[::-1] if columns else torch.empty(shape).stride()
    torch.manual_seed(0)
    value = torch.empty_strided(shape, stride, dtype=dtype).copy_(torch.randint(0, 2, shape))
    block = arena.alloc(extent(shape, stride) * dtype.itemsize)
    arena.view(block, dtype, shape, stride).copy_(value)
    out = arena.tensor(block, dtype, shape, stride)
    assert out.dtype == dtype and out.stride() == stride
    assert torch.equal(out, value)
    shared = extent(shape, stride) * dtype.itemsize > COPY_BYTES
    assert arena.stats().blocks == (1 if shared else 0)
    del out
    assert arena.stats().blocks == 0


def test_block_lives_until_its_last_alias_dies(arena: Arena) -> None:
    block = arena.alloc(MIB)
    out = arena.tensor(block, torch.float32, (512, 512), (512, 1)).fill_(3)
    row, array, storage = out[3], out.numpy(), out.untyped_storage()
    del out, row
    assert arena.stats().blocks == 1
    assert array[511, 511] == 3
    del array
    gc.collect()
    assert arena.stats().blocks == 1
    del storage
    assert arena.stats().blocks == 0


def test_finalizers_inside_alloc_do_not_deadlock(arena: Arena) -> None:
    """A collection that runs under the lock frees blocks in the very thread that holds it."""
    block = arena.alloc(MIB)
    with arena._lock:
        arena.free(block)
    assert arena.stats().blocks == 0


def test_threads(arena: Arena) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            n = rng.choice((100, 5000, 100_000))
            block = arena.alloc(n)
            t = (
                arena.tensor(block, torch.uint8, (n,), (1,))
                if n > COPY_BYTES
                else arena.view(block, torch.uint8, (n,), (1,))
            )
            t.fill_(seed)
            if not bool((t == seed).all()):
                failures.append(f"thread {seed}, {n} bytes")
            if n <= COPY_BYTES:
                arena.free(block)
            del t

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert not failures
    assert arena.stats().blocks == 0


def test_results_outlive_the_pool_and_later_ones_are_refused(state: SharedState) -> None:
    arena = Arena(state)
    kept = arena.tensor(arena.alloc(MIB), torch.uint8, (MIB,), (1,)).fill_(7)
    state.close()
    assert int(kept.sum()) == 7 * MIB
    del kept


def test_closed_arena(state: SharedState) -> None:
    arena = Arena(state)
    block = arena.alloc(64)
    state.close()
    with pytest.raises(PoolError):
        arena.tensor(block, torch.uint8, (64,), (1,))
    with pytest.raises(PoolError):
        arena.alloc(64)


def test_a_forked_child_gives_nothing_back(arena: Arena) -> None:
    """Its copy of the bookkeeping must not punch holes in memory that is the parent's."""
    kept = arena.tensor(arena.alloc(32 * MIB), torch.uint8, (32 * MIB,), (1,)).fill_(7)
    pid = os.fork()
    if pid == 0:
        del kept
        try:
            arena.alloc(1)
        except PoolError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert int(kept[::PAGE].sum()) == 7 * (32 * MIB // PAGE)
