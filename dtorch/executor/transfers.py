"""Copies between the arena and a device that works on its own: started now, finished later, never waited for.

On a CPU a copy is done when the call returns. A GPU is only told of it, so whatever follows the copy waits here as a
:class:`_Pending`, beside an event that was recorded behind the copy: a fetch sets its status word, an upload lets its
block go. :meth:`Transfers.poll` *queries* the events, between commands and while the executor would otherwise sleep;
nothing synchronises. Everything runs on one stream, so events complete in the order they were recorded.

How a block of the arena is known to be free again. The client frees the block of the upload at ring position `p` when
every executor's consumed word has passed `p`. For a CPU executor that word is its read index. An executor with
transfers has a word of its own, EXECUTOR_UPLOADED, which stays at the position of the oldest upload that is still
being copied, and follows the read index otherwise.

Where a copy cannot reach the arena at full speed, or where the piece is no single run of bytes there, it goes by way
of a *staging* buffer (pinned memory): gathered into it before an upload, scattered from it after a fetch.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..runtime.arena import view
from ..runtime.command import FetchPlan, OutLayout, UploadPlan
from ..runtime.ring import Reader
from ..runtime.shared import DONE, EXECUTOR_READ, EXECUTOR_UPLOADED, WRITE, SharedState, executor_line
from .store import Poison, shards

__all__ = ["Event", "Streams", "TransferReader", "Transfers"]

_YIELDS = 100
# Between two looks at an event: soon at first, later as often as anyone would notice.
_NAP, _LONG_NAP, _LONG_AFTER = 50e-6, 500e-6, 0.02

Region = tuple[tuple[int, int], ...]


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether the device has come so far; does not wait. Raises where the device is lost."""
        ...


class Streams(Protocol):
    """What transfers need of a device whose work is asynchronous."""

    def empty(self, layout: OutLayout) -> Tensor:
        """An uninitialised tensor on the device."""
        ...

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat host tensor that the device copies to and from without help of the CPU."""
        ...

    def reaches(self, start: int, end: int) -> bool:
        """Whether bytes `start` to `end` of the arena are such host memory."""
        ...

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Start copying flat tensors of one dtype and length, one of them on the host."""
        ...

    def record(self) -> Event:
        """The point behind all that was started until now."""
        ...


@dataclass(slots=True)
class _Pending:
    """What is to be done once `event` has come.

    Attributes:
        finish: is called then.
        position: of the upload's record in the ring, where the arena must be left alone until then.
        kept: tensors that the copy uses.
    """

    event: Event
    finish: Callable[[], object] | None
    position: int | None
    kept: Sequence[Tensor]


class Transfers:
    """The copies of one executor that are under way.

    Args:
        streams: the device.
        state: the shared memory of the pool.
        index: the executor.
        tell: wakes the client's waiters.
    """

    def __init__(self, streams: Streams, state: SharedState, index: int, tell: Callable[[], object]) -> None:
        self._streams, self._state, self._index, self._told = streams, state, index, tell
        self._control, self._words = state.control, state.ring_words
        line = executor_line(index)
        self._read, self._uploaded = line + EXECUTOR_READ, line + EXECUTOR_UPLOADED
        self._pending: deque[_Pending] = deque()
        # Ring positions of the uploads among them.
        self._uploads: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def poll(self) -> int:
        """Finish what the device has done by now, and say so; how many transfers that were."""
        pending, done = self._pending, 0
        while pending and pending[0].event.query():
            ended = pending.popleft()
            if ended.finish is not None:
                ended.finish()
            if ended.position is not None:
                self._uploads.popleft()
            done += 1
        self._control[self._uploaded] = self._uploads[0] if self._uploads else self._control[self._read]
        if done:
            self._told()
        return done

    def tell(self) -> None:
        """What the loop calls after some commands: finish what is done, and wake the client's waiters for the rest."""
        self.poll()
        self._told()

    def _start(self, finish: Callable[[], object] | None, position: int | None, kept: Sequence[Tensor]) -> None:
        if position is not None:
            self._uploads.append(position)
        self._pending.append(_Pending(self._streams.record(), finish, position, kept))

    def _position(self, p: int) -> int:
        """The ring position of the record at word `p`, which is being run."""
        read = self._control[self._read]
        return read + (p - read & len(self._words) - 1)

    # -- uploads ------------------------------------------------------------------------------------------------

    def upload(self, m: UploadPlan, ranks: Sequence[int], store: dict[int, Any]) -> Callable[[int], None]:
        """The function that runs records of `m` for this executor's `ranks`."""
        words, empty = self._words, 0 in m.shape

        def run(p: int) -> None:
            made: dict[Region, Tensor] = {}
            kept: list[Tensor] = []
            direct = False
            out: list[Tensor] = []
            for rank in ranks:
                region, stride = m.regions[rank], m.strides[rank]
                shape = tuple(n for _, n in region) if m.pieces is None else m.pieces[rank]
                local = self._streams.empty((shape, stride, m.dtype))
                if not empty and local.numel():
                    if region not in made:
                        source, reached = self._source(words[p + 2], m, region)
                        direct = direct or reached
                        kept.append(source)
                        made[region] = self._streams.empty(((source.numel(),), None, m.dtype))
                        self._streams.copy(made[region], source)
                    local.copy_(made[region].view(shape))
                out.append(local)
            if made:
                self._start(None, self._position(p) if direct else None, kept)
            store[words[p + 1]] = out[0] if len(out) == 1 else out

        return run

    def _source(self, offset: int, m: UploadPlan, region: Region) -> tuple[Tensor, bool]:
        """The piece `region` of the value at `offset`, flat, and whether it still lies in the arena."""
        piece = _narrow(view(self._state.arena_map, offset, m.dtype, m.shape, m.stride), region)
        if piece.is_contiguous():
            flat = piece.view(-1)
            start = offset + (flat.storage_offset() * m.dtype.itemsize)
            if self._streams.reaches(start, start + flat.nbytes):
                return flat, True
        staged = self._streams.staging(piece.numel(), m.dtype)
        staged.view(piece.shape).copy_(piece)
        return staged, False

    # -- fetches ------------------------------------------------------------------------------------------------

    def fetch(
        self,
        m: FetchPlan,
        jobs: Sequence[tuple[int, Region]],
        store: dict[int, Any],
        fail: Callable[[int, Poison], object],
    ) -> Callable[[int], None]:
        """The function that runs records of `m`.

        Args:
            jobs: (index among this executor's shards, region of the whole) of every piece.
            store: the executor's values.
            fail: answers for the record at a word whose value is poisoned.
        """
        words, control, index = self._words, self._control, self._index
        copies = m.data and 0 not in m.shape

        def run(p: int) -> None:
            value = store[words[p + 1]]
            if type(value) is Poison:
                fail(p, value)
                return
            word, status = words[p + 2] + index, words[p + 3] << 2 | DONE
            kept: list[Tensor] = []
            rest: list[Callable[[], object]] = []
            if copies:
                local = shards(value)
                whole = view(self._state.arena_map, words[p + 4], m.dtype, m.shape, m.stride)
                for k, region in jobs:
                    if local[k].numel():
                        self._down(local[k], _narrow(whole, region), words[p + 4], kept, rest)

            def finish() -> None:
                for scatter in rest:
                    scatter()
                control[word] = status

            self._start(finish, None, kept)

        return run

    def _down(
        self, source: Tensor, to: Tensor, offset: int, kept: list[Tensor], rest: list[Callable[[], object]]
    ) -> None:
        """Start copying `source` to `to`, which lies in the block at `offset`; what is left to do goes to `rest`."""
        numel, dtype = to.numel(), to.dtype
        start = offset + int(to.storage_offset()) * dtype.itemsize
        ready = source.resolve_conj().resolve_neg()
        if _dense(to) and self._streams.reaches(start, start + numel * dtype.itemsize):
            if ready.stride() != to.stride() or ready.dtype != dtype or not _dense(ready):
                ready = self._streams.empty((tuple(to.shape), tuple(to.stride()), dtype)).copy_(ready)
            flat = ready.as_strided((numel,), (1,))
            self._streams.copy(to.as_strided((numel,), (1,)), flat)
            kept.append(flat)
            return
        flat = ready.to(dtype).contiguous().view(-1)
        staged = self._streams.staging(numel, dtype)
        self._streams.copy(staged, flat)
        kept += (flat, staged)
        rest.append(lambda: to.copy_(staged.view(to.shape)))


def _narrow(t: Tensor, region: Region) -> Tensor:
    for dim, (start, length) in enumerate(region):
        t = t.narrow(dim, start, length)
    return t


def _dense(t: Tensor) -> bool:
    """Whether the elements of `t`, in some order of its dims, are one run of memory."""
    step = 1
    for size, stride in sorted(
        ((n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1), key=lambda pair: pair[1]
    ):
        if stride != step:
            return False
        step *= size
    return step == math.prod(t.shape)


class TransferReader(Reader):
    """A ring reader that looks after transfers: between batches, and instead of sleeping while some are under way."""

    def __init__(self, state: SharedState, executor: int, wake_fd: int, transfers: Transfers) -> None:
        super().__init__(state, executor, wake_fd)
        self._transfers = transfers

    def poll(self) -> tuple[int, int] | None:
        """See :meth:`Reader.poll`."""
        self._transfers.poll()
        return super().poll()

    def wait(self, timeout: float | None = None) -> tuple[int, int] | None:
        """See :meth:`Reader.wait`. Never sleeps long while the device is busy with transfers."""
        transfers, position = self._transfers, self.position
        tries, since = 0, 0.0
        while len(transfers):
            if self.control[WRITE] > position:
                return position, self.control[WRITE]
            if transfers.poll():
                tries = 0
                continue
            tries += 1
            if tries <= _YIELDS:
                os.sched_yield()
                since = time.monotonic()
            else:
                time.sleep(_NAP if time.monotonic() - since < _LONG_AFTER else _LONG_NAP)
        transfers.poll()
        return super().wait(timeout)
