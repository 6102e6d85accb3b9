"""Shared memory for tensor payloads: uploads on their way to executors, results on their way back.

Only the client allocates; executors map the same file and are told offsets. Blocks come in size classes, so a
program that asks for the same shapes again and again gets the same, already touched pages again (first touch costs
four times a copy). Small classes are cut from slabs; blocks of a page and more are page-aligned extents, merged with
their neighbours when they go cold. Idle bytes beyond a limit are given back to the kernel.

Results are handed to the user without a copy: the returned ``torch.Tensor`` lies in its block, and the block is free
again when the last tensor, storage or numpy array over it dies. That can be in any thread, inside a garbage
collection, inside :meth:`Arena.alloc` itself; so freeing never waits for the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..errors import PoolError
from .shared import SharedState

__all__ = ["COPY_BYTES", "Arena", "ArenaStats", "Block", "extent", "size_class", "view"]

PAGE = 4096
COPY_BYTES = 64 << 10  # results up to here are copied: cheaper than keeping a block for them
_SMALLEST = 64
_SLAB = 64 << 10
_STEPS = 8  # classes per doubling, so at most an eighth of a large block is slack


def size_class(nbytes: int) -> int:
    """Bytes of the block that serves `nbytes`: a power of two below a page, eight steps a doubling from there on."""
    if nbytes <= PAGE // 2:
        return max(_SMALLEST, 1 << (nbytes - 1).bit_length() if nbytes else 0)
    step = max(PAGE, (1 << (nbytes - 1).bit_length() - 1) // _STEPS)
    return -(-nbytes // step) * step


def extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements lie between the first and the last of a strided tensor, both included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def view(memory: Any, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor of `shape` and `stride` (elements) that lies at byte `offset` of `memory`, without a copy.

    `memory` stays alive as long as the tensor does; nothing else keeps the bytes from being used again.
    """
    count = extent(shape, stride)
    if count == 0:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).as_strided(shape, stride)


class Block:
    """A piece of the arena that is in use. Owned by whoever allocated it, until :meth:`Arena.free`.

    Attributes:
        offset: first byte, from the start of the arena.
        nbytes: bytes asked for.
        capacity: bytes set aside, the size class.
    """

    __slots__ = ("_freed", "capacity", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int, capacity: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.capacity = capacity
        self._freed = False

    def __repr__(self) -> str:
        return f"Block(offset={self.offset}, nbytes={self.nbytes}, capacity={self.capacity})"


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Bytes of an arena; all but `limit` and `blocks` count whole blocks.

    Attributes:
        limit: most the arena can hold.
        used: in use now.
        peak: most that was in use at once, since the start or :meth:`Arena.reset_peak`.
        idle: kept for reuse, still taking memory.
        blocks: how many blocks are in use.
    """

    limit: int
    used: int
    peak: int
    idle: int
    blocks: int


class Arena:
    """The client's allocator over the arena file of `state`. Any thread may call anything.

    Args:
        state: the pool's shared memory.
        idle_limit: bytes of free large blocks to keep touched for reuse.
    """

    def __init__(self, state: SharedState, *, idle_limit: int = 512 << 20) -> None:
        self.map = state.arena_map
        self.limit = len(self.map)
        self.idle_limit = min(idle_limit, self.limit)
        # A forked child has copies of tensors and of this bookkeeping, but the memory is the parent's.
        self._pid = os.getpid()
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._lock = threading.Lock()
        self._returned: deque[Block] = deque()
        # Free memory is in exactly one of three places: a small class, the idle extents (touched, newest last), or
        # the cold extents (address → bytes, no two adjacent, never touched or given back to the kernel).
        self._small: dict[int, list[int]] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._idle_by_size: dict[int, list[int]] = {}
        self._cold: list[tuple[int, int]] = [(0, self.limit)]
        self._idle_bytes = self._used = self._peak = self._blocks = 0
        self._kept = 0

    def keep(self, nbytes: int) -> None:
        """Never give pages of the first `nbytes` back to the kernel: a device copies to and from those very pages."""
        with self._lock:
            self._kept = max(self._kept, nbytes)

    def alloc(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, 64-byte aligned, page-aligned from 4 KiB on. Its bytes are undefined.

        Raises:
            MemoryError: the arena is full even after everything idle was given up.
            PoolError: this process is a fork of the one that owns the arena, or the arena is closed.
        """
        if os.getpid() != self._pid or self.map.closed:
            raise PoolError(
                "the arena for tensor payloads is closed, or belongs to the process this one was forked from; "
                "start a pool of your own with dtorch.restart()"
            )
        capacity = size_class(nbytes)
        with self._lock:
            self._take_back()
            offset = self._small_offset(capacity) if capacity < PAGE else self._large_offset(capacity)
            if offset is not None:
                self._used += capacity
                self._peak = max(self._peak, self._used)
                self._blocks += 1
        if offset is None:
            used = self.stats().used
            raise MemoryError(
                f"the arena for shared tensor payloads cannot hold {nbytes:,} more bytes: {used:,} of {self.limit:,} "
                "are in use. Drop results that are no longer needed, or raise it before the pool starts: "
                f"dtorch.configure(arena_bytes={max(2 * self.limit, 2 * (used + capacity))})"
            )
        return Block(offset, nbytes, capacity)

    def free(self, block: Block) -> None:
        """Give `block` back. Never waits, so finalizers may call it.

        Raises:
            ValueError: it was given back before.
        """
        if block._freed:
            raise ValueError(f"{block!r} was freed twice")
        block._freed = True
        if os.getpid() != self._pid:
            return
        self._returned.append(block)
        # Whoever holds the lock may have looked at the deque just before: look again after every release.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def tensor(self, block: Block, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """The tensor that executors wrote into `block`, which now belongs to it.

        Up to 64 KiB it is a copy and the block is free at once. Above, it lies in the block.

        Raises:
            PoolError: the arena was closed before anyone took the result.
        """
        if self.map.closed:
            raise PoolError("the pool was closed before this result was taken; compute it again after dtorch.restart()")
        count = extent(shape, stride)
        if count * dtype.itemsize > COPY_BYTES:
            memory = _owner_type(block.capacity).from_buffer(self.map, block.offset)
            memory.arena, memory.block = self, block
            return torch.frombuffer(memory, dtype=dtype, count=count).as_strided(shape, stride)
        out = torch.empty_strided(shape, stride, dtype=dtype)
        if count:
            ctypes.memmove(out.data_ptr(), self._base + block.offset, count * dtype.itemsize)
        self.free(block)
        return out

    def view(self, block: Block, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """A tensor over `block` that does not own it, to fill it for an upload."""
        return view(self.map, block.offset, dtype, shape, stride)

    def stats(self) -> ArenaStats:
        """What the arena holds now."""
        with self._lock:
            self._take_back()
            return ArenaStats(self.limit, self._used, self._peak, self._idle_bytes, self._blocks)

    def reset_peak(self) -> None:
        """Count the peak from what is in use now."""
        with self._lock:
            self._take_back()
            self._peak = self._used

    def trim(self, keep: int = 0) -> int:
        """Give idle memory beyond `keep` bytes back to the kernel; how many bytes that were."""
        with self._lock:
            self._take_back()
            return self._cool(keep)

    # What follows runs under the lock.

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._used -= block.capacity
            self._blocks -= 1
            if block.capacity < PAGE:
                self._small[block.capacity].append(block.offset)
            else:
                self._idle[block.offset] = block.capacity
                self._idle_by_size.setdefault(block.capacity, []).append(block.offset)
                self._idle_bytes += block.capacity
        if self._idle_bytes > self.idle_limit:
            self._cool(self.idle_limit)

    def _small_offset(self, capacity: int) -> int | None:
        free = self._small.setdefault(capacity, [])
        if not free:
            slab = self._large_offset(_SLAB)
            if slab is None:
                return None
            free.extend(range(slab + _SLAB - capacity, slab - 1, -capacity))
        return free.pop()

    def _large_offset(self, capacity: int) -> int | None:
        same = self._idle_by_size.get(capacity)
        if same:
            offset = same.pop()
            del self._idle[offset]
            self._idle_bytes -= capacity
            return offset
        offset = self._cold_offset(capacity)
        if offset is None and self._cool(0):
            offset = self._cold_offset(capacity)
        return offset

    def _cold_offset(self, capacity: int) -> int | None:
        """The lowest cold extent that is large enough, cut to size."""
        for i, (start, size) in enumerate(self._cold):
            if size >= capacity:
                if size == capacity:
                    del self._cold[i]
                else:
                    self._cold[i] = (start + capacity, size - capacity)
                return start
        return None

    def _cool(self, keep: int) -> int:
        """Move idle extents, longest idle first, to the cold ones until `keep` bytes are left; bytes moved."""
        cooled = 0
        while self._idle and self._idle_bytes > keep:
            offset, size = self._idle.popitem(last=False)
            self._idle_by_size[size].remove(offset)
            self._idle_bytes -= size
            cooled += size
            if offset >= self._kept:
                with contextlib.suppress(OSError):  # locked pages stay; nothing depends on their going
                    self.map.madvise(mmap.MADV_REMOVE, offset, size)
            self._add_cold(offset, size)
        return cooled

    def _add_cold(self, offset: int, size: int) -> None:
        cold = self._cold
        i = bisect_left(cold, (offset, 0))
        if i < len(cold) and offset + size == cold[i][0]:
            size += cold.pop(i)[1]
        if i and sum(cold[i - 1]) == offset:
            offset, before = cold.pop(i - 1)
            size += before
        insort(cold, (offset, size))


@cache
def _owner_type(capacity: int) -> Any:
    """A buffer type of `capacity` bytes whose instances give their block back when they die.

    One type per size class, so there are few. Its finalizer costs half of ``weakref.finalize``.
    """

    def __del__(self: Any) -> None:
        self.arena.free(self.block)

    return type("ArenaBuffer", (ctypes.c_char * capacity,), {"__del__": __del__, "__slots__": ("arena", "block")})
