"""Collectives between the executors of one host, through shared memory.

A group of n executors meets in a *region* of the collective memfd: two arrival words and a sleep flag a member,
each on a cache line of its own, then two slots a member. All there is to the protocol:

* A barrier is ``sequence << 1 | poison`` in the arrival word of the sequence's parity, then a look at every
  peer's word. The poison bit is in the same load that says the peer has arrived, so no peer can see the one without
  the other; a word is used again at sequence + 2, when every peer has arrived at sequence + 1.
* What is to be read after arrival `s` is written before it, into the slot of the parity of `s`. A peer may read it
  until its own arrival at `s` + 1, and the slot is written again before arrival `s` + 2, which comes after everyone's
  arrival at `s` + 1. So one barrier a round is enough.
* A member that has failed takes part in as many barriers as its peers, with its poison bit set, and writes nothing.

Waiting is 20 times ``sched_yield``, then timed waits on the peer's word as a futex; each time-out looks at the
abort word, so that the death of a peer frees the others within milliseconds even if nobody wakes them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from ..program import LINE, SLOT_BYTES, Cut, control_bytes, pad, pieces, region_bytes
from .reducing import reducer

__all__ = ["Aborted", "Group", "narrow"]

DIRECT_BYTES = 64 << 10
"""Up to here each member of a larger group sums everything itself: one barrier instead of two."""

_YIELDS = 20
_WAIT_NS = 4_000_000
_VIEWS = 1024
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
# Only x86 keeps stores in order by itself.
_FENCED = platform.machine() != "x86_64"


class Aborted(RuntimeError):
    """A peer died: the collective will never finish, and its group cannot be used again."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_timeout = ctypes.byref(_Timespec(0, _WAIT_NS))


def _futex_wait(address: int, value: int) -> None:
    """Sleep while the 32-bit word at `address` is `value`, 4 ms at most."""
    if _FUTEX is None:
        time.sleep(50e-6)
        return
    if _syscall(_FUTEX, ctypes.c_void_p(address), 0, ctypes.c_uint32(value), _timeout, None, 0) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))


def _futex_wake(address: int) -> None:
    if _FUTEX is not None:
        _syscall(_FUTEX, ctypes.c_void_p(address), 1, 1 << 30, None, None, 0)


def narrow(t: Tensor, cut: Cut) -> Tensor:
    """The slice `cut` of `t`."""
    for dim, start, length in cut:
        t = t.narrow(dim, start, length)
    return t


class Group:
    """The executors `members`, seen from the one at index `me`.

    Every member must make the same calls in the same order, or take part in as many barriers (``…_rounds``) with
    :meth:`catch_up`. Calls return nonzero, on all members alike, if anyone was poisoned; the outputs then hold nothing
    of use.

    Args:
        fd: the collective memfd; grown where it is too short.
        offset: byte at which the region begins, a multiple of the page size.
        slot: bytes of a slot, the same for all members.
        members: executors, ascending.
        me: index of this one in `members`.
        aborted: nonzero once a peer has died.
    """

    def __init__(
        self,
        fd: int,
        offset: int,
        members: tuple[int, ...],
        me: int,
        aborted: Callable[[], int],
        slot: int = SLOT_BYTES,
    ) -> None:
        n = len(members)
        self.members, self.n, self.me, self.slot = members, n, me, slot
        nbytes = region_bytes(n, slot)
        if os.fstat(fd).st_size < offset + nbytes:
            # Unlike ftruncate, this can only make the file longer, whichever member is first.
            os.posix_fallocate(fd, offset + nbytes - 1, 1)
        memory = mmap.mmap(fd, nbytes, offset=offset)
        self._words = memoryview(memory).cast("Q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._data = control_bytes(n)
        self._aborted = aborted
        self.sequence = 0
        # Its release is a fence on both sides: publish then look at the flags, raise the flag then look at the word.
        self._lock = threading.Lock()
        step = LINE // 8
        self._mine = [(2 * me + parity) * step for parity in (0, 1)]
        self._others = [[(2 * j + parity) * step for j in range(n) if j != me] for parity in (0, 1)]
        self._flag = (2 * n + me) * step
        self._flags = [(2 * n + j) * step for j in range(n) if j != me]
        self._typed: dict[torch.dtype, Tensor] = {torch.uint8: self._bytes}
        self._views: dict[tuple[object, ...], Tensor] = {}

    # -- barrier ------------------------------------------------------------------------------------------------

    def barrier(self, poison: int = 0) -> int:
        """Wait until every member has arrived; nonzero if any came with `poison`.

        Raises:
            Aborted: a peer died meanwhile.
        """
        words, lock = self._words, self._lock
        self.sequence = sequence = self.sequence + 1
        parity, arrived = sequence & 1, sequence << 1
        mine = self._mine[parity]
        if _FENCED:
            lock.acquire()
            lock.release()
        words[mine] = arrived | poison
        lock.acquire()
        lock.release()
        for flag in self._flags:
            if words[flag]:
                _futex_wake(self._address + 8 * mine)
                break
        seen = poison
        for i in self._others[parity]:
            word = words[i]
            seen |= word if word >= arrived else self._await(i, arrived)
        if _FENCED:
            lock.acquire()
            lock.release()
        return seen & 1

    def _await(self, i: int, arrived: int) -> int:
        words, give_way = self._words, os.sched_yield
        for _ in range(_YIELDS):
            give_way()
            word = words[i]
            if word >= arrived:
                return word
        address = self._address + 8 * i
        try:
            while True:
                words[self._flag] = 1
                self._lock.acquire()
                self._lock.release()
                word = words[i]
                if word >= arrived:
                    return word
                if self._aborted():
                    raise Aborted(f"a peer of executor {self.members[self.me]} died in a collective of {self.members}")
                _futex_wait(address, word & 0xFFFFFFFF)
        finally:
            words[self._flag] = 0

    def catch_up(self, sequence: int) -> None:
        """Take part in all barriers up to `sequence` as one that has failed."""
        while self.sequence < sequence:
            self.barrier(1)

    def exchange_rounds(self, rounds: int) -> int:
        """How many barriers :meth:`exchange` takes."""
        return rounds

    def all_reduce_rounds(self, rows: Sequence[tuple[int, int]], count: int, dtype: torch.dtype) -> int:
        """How many barriers :meth:`all_reduce` takes."""
        chunks = -(-count // self._chunk(rows, count, dtype))
        return 2 * chunks if self._two_phase(count, dtype) else chunks

    def reduce_scatter_rounds(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """How many barriers :meth:`reduce_scatter` takes."""
        return max(map(len, self._parts(shapes, dtype)))

    def _chunk(self, rows: Sequence[tuple[int, int]], count: int, dtype: torch.dtype) -> int:
        height = 1 + max(row for _, row in rows)
        return min(count, pad(self.slot // height - LINE) // dtype.itemsize)

    def _two_phase(self, count: int, dtype: torch.dtype) -> bool:
        return self.n > 2 and count * dtype.itemsize > DIRECT_BYTES

    def share(self) -> int:
        """Bytes of a slot that :meth:`reduce_scatter` has for each peer."""
        return self.slot // (self.n - 1) // LINE * LINE

    def _parts(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[tuple[Cut, ...]]:
        share = self.share()
        return [pieces(shape, dtype.itemsize, share) if prod(shape) else () for shape in shapes]

    def view(self, member: int, sequence: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A row-major tensor in the slot of `member` for arrival `sequence`, from byte `offset` on."""
        key = (member, sequence & 1, offset, shape, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            typed = self._typed.get(dtype)
            if typed is None:
                typed = self._typed[dtype] = self._bytes.view(dtype)
            start = self._data + (2 * member + (sequence & 1)) * self.slot + offset
            flat = typed.narrow(0, start // dtype.itemsize, prod(shape))
            found = self._views[key] = flat.view(shape)
        return found

    # -- collectives --------------------------------------------------------------------------------------------

    def exchange(
        self,
        writes: Sequence[tuple[Tensor, int, int, tuple[int, ...]]],
        reads: Sequence[tuple[int, int, int, Tensor]],
        rounds: int,
    ) -> int:
        """Publish sections and read those of others: all_gather, all_to_all, broadcast and all between.

        Args:
            writes: (section, first round, byte offset, readers); the readers are not needed here.
            reads: (member, first round, byte offset, where it goes); shape and dtype are those of the section.
            rounds: of the whole group.
        """
        view = self.view
        if rounds == 1:
            sequence = self.sequence + 1
            for section, _, offset, _ in writes:
                view(self.me, sequence, offset, section.shape, section.dtype).copy_(section)
            bad = self.barrier()
            for member, _, offset, out in reads:
                out.copy_(view(member, sequence, offset, out.shape, out.dtype))
            return bad
        outgoing: list[list[tuple[int, Tensor]]] = [[] for _ in range(rounds)]
        incoming: list[list[tuple[int, int, Tensor]]] = [[] for _ in range(rounds)]
        for section, first, offset, _ in writes:
            for i, cut in enumerate(pieces(tuple(section.shape), section.element_size(), self.slot)):
                outgoing[first + i].append((offset, narrow(section, cut)))
        for member, first, offset, out in reads:
            for i, cut in enumerate(pieces(tuple(out.shape), out.element_size(), self.slot)):
                incoming[first + i].append((member, offset, narrow(out, cut)))
        bad = 0
        for sending, receiving in zip(outgoing, incoming, strict=True):
            sequence = self.sequence + 1
            for offset, section in sending:
                view(self.me, sequence, offset, section.shape, section.dtype).copy_(section)
            bad |= self.barrier()
            for member, offset, out in receiving:
                out.copy_(view(member, sequence, offset, out.shape, out.dtype))
        return bad

    def all_reduce(
        self, mine: Sequence[Tensor], out: Tensor, rows: Sequence[tuple[int, int]], op: str, divisor: int
    ) -> int:
        """Reduce equally shaped flat tensors over the group, in the order of `rows`.

        Args:
            mine: this member's tensors, flat and contiguous.
            out: flat and contiguous, of the same length and dtype.
            rows: (member, which of its tensors) of every term.
        """
        count, dtype = out.numel(), out.dtype
        chunk = self._chunk(rows, count, dtype)
        reduce = reducer(dtype, op, divisor, len(rows))
        if self._two_phase(count, dtype):
            return self._own_part(mine, out, rows, reduce, chunk)
        me, view, bad = self.me, self.view, 0
        pitch = pad(chunk * dtype.itemsize)
        for start in range(0, count, chunk):
            length = min(chunk, count - start)
            whole = length == count
            local = mine if whole else [x.narrow(0, start, length) for x in mine]
            sequence, shape = self.sequence + 1, (length,)
            for row, x in enumerate(local):
                view(me, sequence, row * pitch, shape, dtype).copy_(x)
            bad |= self.barrier()
            terms = [local[r] if m == me else view(m, sequence, r * pitch, shape, dtype) for m, r in rows]
            reduce(out if whole else out.narrow(0, start, length), terms)
        return bad

    def _own_part(
        self,
        mine: Sequence[Tensor],
        out: Tensor,
        rows: Sequence[tuple[int, int]],
        reduce: Callable[[Tensor, Sequence[Tensor]], None],
        chunk: int,
    ) -> int:
        """all_reduce of large tensors: each member reduces its own part of a chunk, then all copy all parts."""
        me, view, bad, dtype, count = self.me, self.view, 0, out.dtype, out.numel()
        size = dtype.itemsize
        pitch = pad(chunk * size)
        for start in range(0, count, chunk):
            length = min(chunk, count - start)
            part = pad(-(-length // self.n) * size) // size
            bounds = [(min(j * part, length), min((j + 1) * part, length)) for j in range(self.n)]
            begin, end = bounds[me]
            local = [x.narrow(0, start, length) for x in mine]
            sequence = self.sequence + 1
            for row, x in enumerate(local):
                for a, b in ((0, begin), (end, length)):  # nobody else reads my own part
                    if b > a:
                        view(me, sequence, row * pitch + a * size, (b - a,), dtype).copy_(x.narrow(0, a, b - a))
            bad |= self.barrier()
            here = out.narrow(0, start, length)
            own = here.narrow(0, begin, end - begin)
            if end > begin:
                shape = (end - begin,)
                reduce(
                    own,
                    [
                        local[r].narrow(0, begin, end - begin)
                        if m == me
                        else view(m, sequence, r * pitch + begin * size, shape, dtype)
                        for m, r in rows
                    ],
                )
                view(me, sequence + 1, 0, shape, dtype).copy_(own)
            bad |= self.barrier()
            for j, (a, b) in enumerate(bounds):
                if j != me and b > a:
                    here.narrow(0, a, b - a).copy_(view(j, sequence + 1, 0, (b - a,), dtype))
        return bad

    def reduce_scatter(
        self,
        x: Tensor,
        out: Tensor,
        rows: Sequence[int],
        cuts: Sequence[Cut],
        shapes: Sequence[tuple[int, ...]],
        op: str,
        divisor: int,
    ) -> int:
        """Reduce the slice ``cuts[me]`` of every member's tensor, in the member order `rows`, into `out`.

        Args:
            x: this member's tensor, of any strides.
            cuts, shapes: the slice that each member ends up with, by member index.
        """
        n, me, view, bad, dtype = self.n, self.me, self.view, 0, out.dtype
        share, parts = self.share(), self._parts(shapes, out.dtype)
        reduce = reducer(dtype, op, divisor, n)
        sections = [narrow(x, cut) for cut in cuts]
        for i in range(max(map(len, parts))):
            sequence = self.sequence + 1
            for j in range(n):
                if j != me and i < len(parts[j]):
                    section = narrow(sections[j], parts[j][i])
                    view(me, sequence, (j - (j > me)) * share, section.shape, dtype).copy_(section)
            bad |= self.barrier()
            if i < len(parts[me]):
                cut = parts[me][i]
                to, own = narrow(out, cut), narrow(sections[me], cut)
                shape = to.shape
                reduce(to, [own if m == me else view(m, sequence, (me - (me > m)) * share, shape, dtype) for m in rows])
        return bad

    def broadcast_bytes(self, root: int, data: bytes | None) -> bytes:
        """The bytes that the member with index `root` gives, on every member."""
        length, done, room = 0, 0, self.slot - LINE
        out = bytearray()
        while True:
            sequence = self.sequence + 1
            if data is not None and self.me == root:
                length = len(data)
                view = self.view(root, sequence, 0, (1,), torch.int64)
                view[0] = length
                chunk = data[done : done + room]
                if chunk:
                    source = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
                    self.view(root, sequence, LINE, (len(chunk),), torch.uint8).copy_(source)
            self.barrier()
            if self.me != root:
                length = int(self.view(root, sequence, 0, (1,), torch.int64)[0])
                here = min(room, length - done)
                out += self.view(root, sequence, LINE, (here,), torch.uint8).numpy().tobytes()
            done += room
            if done >= length:
                return bytes(data) if data is not None and self.me == root else bytes(out)
