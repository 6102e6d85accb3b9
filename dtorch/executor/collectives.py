"""How executors reach each other: shared memory, or gloo where that is asked for; NCCL between GPUs.

Groups of CPU executors use shared memory (or gloo), groups of GPU executors NCCL. Groups of both, and GPUs where torch
has no NCCL, go through shared memory by way of the host, which waits for the GPU's part.

The only user of torch's process groups. They are built directly on a private store, with no global world, so that
meshes can come and go; nothing listens on a public address.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..program import SLOT_BYTES, Cut, pad, region_bytes
from ..runtime.shared import ABORT
from .device import DeviceError
from .reducing import reducer
from .shm_collectives import Aborted, Group, narrow

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

__all__ = ["Comm", "GlooGroup", "HostGroup", "NcclGroup", "Solo"]

_TIMEOUT = timedelta(hours=24)
# Seconds that a peer's death may take to be told of.
_TOLD = 5.0

# Bytes by member, one behind the other in one piece of memory.
Pieces = tuple[Tensor, ...]


class State(Protocol):
    """What is needed of :class:`~dtorch.runtime.shared.SharedState`."""

    control: memoryview
    collective_fd: int
    max_executors: int


class Solo:
    """The group of one executor: nothing to share, nobody to wait for."""

    n, me = 1, 0

    def barrier(self, poison: int = 0) -> int:
        """Nonzero if this executor came with `poison`."""
        return poison

    def broadcast_bytes(self, root: int, data: bytes | None) -> bytes:
        """`data` itself."""
        if data is None:
            raise ValueError(f"broadcast_bytes(root={root}, data=None): the only member must give the data")
        return data


class GlooGroup(Group):
    """A group whose data travels by gloo, over loopback.

    Arrival, poison and abort still go through the words in shared memory, before each transfer: gloo alone would
    leave a peer waiting for half an hour after a death, and has no room for poison. Reductions are done here, in
    the order of the ranks, so the results have the same bits as those of :class:`Group`.

    What may fail is done before arrival, where peers can still be told: memory is allocated there. Whatever fails
    after it leaves them waiting for a transfer, so it raises :class:`DeviceError`, which ends this executor and with
    it the pool.

    Args are those of :class:`Group`.
    """

    backend = "gloo"
    # Any: torch's stubs lack its methods.
    _pg: Any = None
    _met_in = -1

    def exchange_rounds(self, rounds: int) -> int:
        """One: poison is told before anything is sent."""
        return 1

    def all_reduce_rounds(self, rows: Sequence[tuple[int, int]], count: int, dtype: torch.dtype) -> int:
        """One."""
        return 1

    def reduce_scatter_rounds(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """One."""
        return 1

    def exchange(
        self,
        writes: Sequence[tuple[Tensor, int, int, tuple[int, ...]]],
        reads: Sequence[tuple[int, int, int, Tensor]],
        rounds: int,
    ) -> int:
        """See :meth:`Group.exchange`."""
        # Both ends list the sections of a pair by their place in the slots, which is the same for both.
        sending = sorted(writes, key=lambda w: w[1:3])
        outgoing = [[_bytes(section) for section, _, _, readers in sending if j in readers] for j in range(self.n)]
        incoming = sorted(reads, key=lambda r: r[:3])
        sizes = [0] * self.n
        for member, _, _, out in incoming:
            sizes[member] += out.numel() * out.element_size()
        sends, got = self._packed([torch.cat(p) if p else torch.empty(0, dtype=torch.uint8) for p in outgoing], sizes)
        if self.barrier():
            return 1
        with self._fatal():
            self._all_to_all(sends, got)
            done = [0] * self.n
            for member, _, _, out in incoming:
                nbytes = out.numel() * out.element_size()
                out.copy_(_typed(got[member].narrow(0, done[member], nbytes), out.dtype, out.shape))
                done[member] += nbytes
        return 0

    def all_reduce(
        self, mine: Sequence[Tensor], out: Tensor, rows: Sequence[tuple[int, int]], op: str, divisor: int
    ) -> int:
        """See :meth:`Group.all_reduce`."""
        count, dtype = out.numel(), out.dtype
        part = -(-count // self.n)
        bounds = [(min(j * part, count), min((j + 1) * part, count)) for j in range(self.n)]
        heights = [sum(member == j for member, _ in rows) for j in range(self.n)]
        begin, end = bounds[self.me]
        width = (end - begin) * dtype.itemsize
        terms_of = [torch.cat([_bytes(x.narrow(0, a, b - a)) for x in mine]) for a, b in bounds]
        sends, got = self._packed(terms_of, [h * width for h in heights])
        # What this member reduces goes to all; its bytes are there once it has.
        own = _bytes(out.narrow(0, begin, end - begin))
        again, gathered = self._packed([own] * self.n, [(b - a) * dtype.itemsize for a, b in bounds])
        if self.barrier():
            return 1
        with self._fatal():
            self._all_to_all(sends, got)
            if width:
                terms = [_typed(got[m].narrow(0, r * width, width), dtype, (end - begin,)) for m, r in rows]
                reducer(dtype, op, divisor, len(rows))(out.narrow(0, begin, end - begin), terms)
            for copy in again:
                copy.copy_(own)
            self._all_to_all(again, gathered)
            for (a, b), piece in zip(bounds, gathered, strict=True):
                out.narrow(0, a, b - a).copy_(_typed(piece, dtype, (b - a,)))
        return 0

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
        """See :meth:`Group.reduce_scatter`."""
        dtype = out.dtype
        shape = shapes[self.me]
        size = prod(shape) * dtype.itemsize
        sends, got = self._packed([_bytes(narrow(x, cut)) for cut in cuts], [size] * self.n)
        if self.barrier():
            return 1
        with self._fatal():
            self._all_to_all(sends, got)
            if size:
                reducer(dtype, op, divisor, self.n)(out, [_typed(got[m], dtype, shape) for m in rows])
        return 0

    @staticmethod
    def _packed(sends: Sequence[Tensor], sizes: list[int]) -> tuple[Pieces, Pieces]:
        """`sends`, one tensor of bytes per member, in one piece of memory; and room for `sizes` bytes of each."""
        whole = torch.cat(list(sends))
        room = torch.empty(sum(sizes), dtype=torch.uint8)
        return whole.split([s.numel() for s in sends]), room.split(sizes)

    def _all_to_all(self, sends: Pieces, into: Pieces) -> None:
        """Give `sends` to the members, and put what they give here where `into` says. Both lie as :meth:`_packed` made
        them."""
        group = self._pg or self._connect()
        whole, room = (pieces[0].as_strided((sum(map(len, pieces)),), (1,), 0) for pieces in (sends, into))
        self._finish(group.alltoall_base(room, whole, [len(p) for p in into], [len(p) for p in sends]))

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """Inside, a failure leaves peers waiting."""
        try:
            yield
        except Aborted:
            raise
        except Exception as error:
            raise DeviceError(f"{self.backend}, between executors {self.members}: {error}") from error

    def _finish(self, work: Work) -> None:
        yields = 100
        while not work.is_completed():
            if yields:
                yields -= 1
                os.sched_yield()
            elif self._aborted():
                raise Aborted(f"a peer of executor {self.members[self.me]} died in a collective of {self.members}")
            else:
                time.sleep(50e-6)
        try:
            work.wait()
        except RuntimeError as error:
            # A peer's end may show here before the warden has told of it.
            deadline = time.monotonic() + _TOLD
            while not self._aborted() and time.monotonic() < deadline:
                time.sleep(0.001)
            if not self._aborted():
                raise
            raise Aborted(f"gloo, in a collective of executors {self.members}: {error}") from error

    def _connect(self) -> Any:
        path = None
        if self.me == 0:
            # Without a name, as all of the pool's memory: nothing is left of it, whoever is killed. It stays open, for
            # the path must never lead to another file.
            self._met_in = _private_file()
            path = f"/proc/{os.getpid()}/fd/{self._met_in}".encode()
        where = self.broadcast_bytes(0, path).decode()
        with _uninherited():
            group = self._pg = self._make(dist.FileStore(where, self.n))
            self._finish(group.alltoall_base(torch.empty(self.n), torch.zeros(self.n), [1] * self.n, [1] * self.n))
        self.barrier()
        return group

    def _make(self, store: dist.Store) -> Any:
        """A process group over `store`, which all members are about to make."""
        make: Any = dist.ProcessGroupGloo
        options = make._Options()
        options._devices = [make.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        return make(store, self.me, self.n, options)


def _private_file() -> int:
    """A file in memory that its owner alone may open."""
    fd = os.memfd_create("dtorch-store", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd


@contextlib.contextmanager
def _uninherited() -> Iterator[None]:
    """What the libraries open meanwhile is closed in programs that a user's function starts."""
    before = _open_now()
    yield
    for fd in _open_now() - before:
        with contextlib.suppress(OSError):  # closed by one of their threads
            os.set_inheritable(fd, False)


def _open_now() -> set[int]:
    """All descriptors, but not that of the listing itself."""
    return {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


# What NCCL reduces in the arithmetic that is promised. Narrow floats are summed in float32 and rounded once, booleans
# are ored: both by exchanging the terms.
_NATIVE = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))


class NcclGroup(GlooGroup):
    """A group of executors with a GPU each, whose data travels by NCCL: one communicator, made on first use.

    Members arrive in shared memory *before* they enqueue anything. An operator's failure is known on the host when it
    is enqueued, so a poisoned member is known to all before a transfer begins, and writes behind it are skipped as on
    CPUs. After arrival nothing waits for the GPU: transfers queue behind what the stream was given.

    A transfer that cannot be enqueued leaves its peers' GPUs waiting, and is fatal as with gloo.

    Args are those of :class:`Group`.
    """

    backend = "NCCL"

    def all_reduce(
        self, mine: Sequence[Tensor], out: Tensor, rows: Sequence[tuple[int, int]], op: str, divisor: int
    ) -> int:
        """See :meth:`Group.all_reduce`. From three members on, sums of numbers of 32 bits and more run in the order
        that NCCL chooses."""
        if out.dtype not in _NATIVE or len(mine) != 1 or len(rows) != self.n or not out.numel():
            return super().all_reduce(mine, out, rows, op, divisor)
        out.copy_(mine[0])
        if self.barrier():
            return 1
        options: Any = dist.AllreduceOptions()
        options.reduceOp = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        with self._fatal():
            self._finish((self._pg or self._connect()).allreduce([out], options))
        if divisor != 1:
            out.div_(divisor, rounding_mode=None if out.is_floating_point() else "floor")
        return 0

    def _finish(self, work: Work) -> None:
        # The stream waits, not the host.
        work.wait()

    def _make(self, store: dist.Store) -> Any:
        make: Any = dist.ProcessGroupNCCL
        options = make.Options()
        options._timeout = _TIMEOUT
        return make(store, self.me, self.n, options)


class HostGroup(Group):
    """A group some of whose members have tensors elsewhere than on the host: this member's go by way of it.

    On the wire it is a :class:`Group`, which is what members with CPU tensors use.
    """

    def exchange(
        self,
        writes: Sequence[tuple[Tensor, int, int, tuple[int, ...]]],
        reads: Sequence[tuple[int, int, int, Tensor]],
        rounds: int,
    ) -> int:
        """See :meth:`Group.exchange`."""
        landed = [_on_host(out) for _, _, _, out in reads]
        bad = super().exchange(
            [(section.cpu(), first, offset, readers) for section, first, offset, readers in writes],
            [(member, first, offset, to) for (member, first, offset, _), to in zip(reads, landed, strict=True)],
            rounds,
        )
        for (_, _, _, out), to in zip(reads, landed, strict=True):
            out.copy_(to)
        return bad

    def all_reduce(
        self, mine: Sequence[Tensor], out: Tensor, rows: Sequence[tuple[int, int]], op: str, divisor: int
    ) -> int:
        """See :meth:`Group.all_reduce`."""
        landed = _on_host(out)
        bad = super().all_reduce([x.cpu() for x in mine], landed, rows, op, divisor)
        out.copy_(landed)
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
        """See :meth:`Group.reduce_scatter`."""
        landed = _on_host(out)
        bad = super().reduce_scatter(x.cpu(), landed, rows, cuts, shapes, op, divisor)
        out.copy_(landed)
        return bad


def _on_host(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="cpu")


def _bytes(t: Tensor) -> Tensor:
    """The elements of `t` in row-major order, as bytes."""
    return t.contiguous().view(-1).view(torch.uint8)


def _typed(raw: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


class Comm:
    """Makes and keeps the groups that one executor belongs to.

    Args:
        state: the shared memory of the pool.
        me: this executor.
        mode: "shm" or "gloo".
        slot: bytes of a slot; the same on all executors, and what programs were planned for.
        accelerators: the first executor whose device is no CPU; all from there on have one.
        nccl: whether those reach each other by NCCL.
    """

    def __init__(
        self,
        state: State,
        me: int,
        mode: str = "shm",
        slot: int = SLOT_BYTES,
        *,
        accelerators: int = 1 << 30,
        nccl: bool = False,
    ) -> None:
        if mode not in ("shm", "gloo"):
            raise ValueError(f'Comm(mode={mode!r}): write "shm" or "gloo"')
        self.state, self.me, self.slot = state, me, slot
        self._mode, self._accelerators, self._nccl = mode, accelerators, nccl
        self._groups: dict[tuple[tuple[int, ...], int], Group] = {}
        self.ready: dict[int, Any] = {}  # of redistribution.run: id of a program → its fast path
        # Regions are of one size, that of the largest group, so that a number is enough to find one.
        self._stride = pad(region_bytes(state.max_executors, slot), 1 << 16)

    def group(self, members: tuple[int, ...], region: int) -> Group | Solo:
        """The group of the executors `members` (ascending), which meets in region number `region`.

        A number must always mean the same members: arrivals are counted from the first use on.
        """
        if len(members) == 1:
            return _SOLO
        return self.shared(members, region)

    def shared(self, members: tuple[int, ...], region: int) -> Group:
        """As :meth:`group`, of two members or more.

        Raises:
            DeviceError: the memory where its members meet cannot be had. They wait there for this one, which cannot
                tell them, so it must end.
        """
        key = (members, region)
        found = self._groups.get(key)
        if found is None:
            control = self.state.control
            place = region * self._stride
            try:
                found = self._groups[key] = self._kind(members)(
                    self.state.collective_fd, place, members, members.index(self.me), lambda: control[ABORT], self.slot
                )
            except (OSError, MemoryError) as error:
                raise DeviceError(f"no memory for collectives between executors {members}: {error}") from error
        return found

    def _kind(self, members: tuple[int, ...]) -> type[Group]:
        if members[-1] < self._accelerators:
            return Group if self._mode == "shm" else GlooGroup
        if members[0] >= self._accelerators and self._nccl:
            return NcclGroup
        return Group if self.me < self._accelerators else HostGroup


_SOLO = Solo()
