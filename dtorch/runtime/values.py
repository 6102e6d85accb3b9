"""Values between the program and the executors: uploads, fetches, and the futures of both."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PoolError, RunAheadError
from ..future import TensorFuture, VoidFutureCollect
from ..mesh import DeviceMesh
from ..placement import Replicate
from ..spec import TensorSpec, contiguous_stride
from .arena import Block
from .command import FetchPlan, UploadPlan
from .refs import Plan, PlanCache, Ref, next_ref, ref_type
from .shared import DEAD
from .slots import Ticket
from .waiting import in_event_loop

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Values"]


class Values:
    """Uploads and fetches of one client. All methods may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._uploads: PlanCache[TensorSpec, Plan] = PlanCache()
        self._piecewise: PlanCache[TensorSpec, Plan] = PlanCache()
        self._fetches: PlanCache[Any, _FetchPlan] = PlanCache()
        # (place in the ring, block) of uploads that some executor may not have taken yet, oldest first
        self._in_upload: deque[tuple[int, Block]] = deque()
        self._upload_lock = threading.Lock()
        # Bytes of those blocks; some of the arena is left for results, which relieve it.
        self._upload_bytes = 0
        self._upload_limit = client.arena.limit // 8 * 7

    # -- values in ----------------------------------------------------------------------------------------------

    def upload(self, value: torch.Tensor, spec: TensorSpec) -> Ref:
        """Copy `value` (a plain CPU tensor of `spec`'s shape and dtype) to the executors; the ref there.

        Partial placements are not made here: see `factories`.
        """
        plan = self._uploads.get(spec)
        if plan is None:
            plan = self._define_upload(spec)
        if spec.numel == 0:
            return self._send(plan, spec, None)
        block = self._block(spec.numel * spec.dtype.itemsize, upload=True)
        stride = contiguous_stride(spec.shape)
        self._client.arena.view(block, spec.dtype, spec.shape, stride).copy_(value.detach())
        return self._send(plan, spec, block)

    def upload_pieces(self, pieces: Sequence[torch.Tensor], spec: TensorSpec) -> Ref:
        """Copy each rank's piece (a plain CPU tensor of its local shape), whatever the placements, Partial too."""
        plan = self._piecewise.get(spec)
        if plan is None:
            plan = self._define_upload(spec, tuple(tuple(p.shape) for p in pieces))
        counts = [p.numel() for p in pieces]
        if not any(counts):
            return self._send(plan, spec, None)
        block = self._block(sum(counts) * spec.dtype.itemsize, upload=True)
        flat = self._client.arena.view(block, spec.dtype, (sum(counts),), (1,))
        for to, piece in zip(flat.split(counts), pieces, strict=True):
            to.view(piece.shape).copy_(piece.detach())
        return self._send(plan, spec, block)

    def _block(self, nbytes: int, *, upload: bool) -> Block:
        """A block of the arena; where uploads that are on their way fill it, executors are given time to take them.

        Raises:
            MemoryError: results that the program holds fill it, or `nbytes` are more than it can hold.
            RunAheadError: uploads fill it, and an event loop runs here.
            PoolError: the pool died meanwhile.
        """
        self.reclaim()
        client = self._client
        while True:
            if upload and self._upload_bytes + nbytes > self._upload_limit and self._wait_for_room():
                continue
            try:
                return client.arena.alloc(nbytes)
            except MemoryError:
                if nbytes > client.arena.limit or not self._wait_for_room():
                    raise

    def _wait_for_room(self) -> bool:
        """Wait until executors have given back something of the arena; False where nothing is on its way."""
        client = self._client
        client.check()
        # Results that nobody waits for any longer lie there until they have come.
        tombstones = client.slots.sweep()
        try:
            place, _ = self._in_upload[0]
        except IndexError:
            if not tombstones:
                return False
            place = -1
        if in_event_loop():
            raise RunAheadError(
                f"{self._upload_bytes:,} bytes of uploads are on their way and fill the arena of "
                f"{client.arena.limit:,}, inside a running event loop.\n"
                "  Write:  await dtorch.aio.ready_to_send()  before each upload, or take batches from "
                "dtorch.aio.prefetch(…)"
            )

        def has_moved() -> bool:
            if client.closed or client.control[DEAD]:
                return True
            return self._taken() > place if place >= 0 else client.slots.sweep() < tombstones

        client.waiting.wait_thread(has_moved)
        self.reclaim()
        return True

    def _send(self, plan: Plan, spec: TensorSpec, block: Block | None) -> Ref:
        """Issue an upload of what lies in `block`, or of nothing."""
        ref = ref_type(spec)(next_ref())
        at = self._client.issue(plan, (ref, 0 if block is None else block.offset))
        if block is not None:
            with self._upload_lock:
                self._in_upload.append((at, block))
                self._upload_bytes += block.capacity
        return ref

    def _define_upload(self, spec: TensorSpec, pieces: tuple[tuple[int, ...], ...] | None = None) -> Plan:
        mesh, _, executors = self._client.mesh(spec.mesh)
        ranks = range(spec.mesh.nranks)
        plan = Plan(self._client.plan_id(), "2Q", executors)
        if pieces is None:
            shape, regions = spec.shape, tuple(spec.region(r) for r in ranks)
            strides = tuple(spec.local_stride(r) for r in ranks)
        else:
            counts = [math.prod(p) for p in pieces]
            starts = itertools.accumulate(counts, initial=0)
            shape, strides = (sum(counts),), (None,) * len(pieces)
            regions = tuple(((start, n),) for start, n in zip(starts, counts, strict=False))
        self._client.send(
            UploadPlan(plan.id, mesh, shape, contiguous_stride(shape), spec.dtype, regions, strides, pieces)
        )
        self._client.pool.name_plan(plan.id, f"an upload of {spec.describe()}", mesh)
        self._keep(self._uploads if pieces is None else self._piecewise, spec, plan)
        return plan

    def reclaim(self) -> None:
        """Take back the blocks of uploads that every executor has consumed."""
        pending = self._in_upload
        if not pending:
            return
        taken = self._taken()
        with self._upload_lock:
            while pending and pending[0][0] < taken:
                _, block = pending.popleft()
                self._upload_bytes -= block.capacity
                self._client.arena.free(block)

    def _taken(self) -> int:
        """Place in the ring before which every executor has taken all uploads."""
        control = self._client.control
        return min((control[word] for word in self._client.consumed), default=0)

    def uploads_lag(self) -> bool:
        """Whether uploads that are on their way fill more than half of the arena."""
        half = self._client.arena.limit // 2
        if self._upload_bytes <= half:
            return False
        self.reclaim()
        return self._upload_bytes > half

    # -- values out ---------------------------------------------------------------------------------------------

    def fetch(self, ref: Ref, spec: TensorSpec, *, data: bool = True, rank: int | None = None) -> TensorFuture[Any]:
        """A future of the value of `ref` on the client, or with `data` False of None once it exists.

        `spec` must not be Partial where `data` is wanted. With `rank`, the piece of that rank alone.
        """
        self._client.refuse_lost(ref)
        key = (spec, data, rank)
        plan = self._fetches.get(key)
        if plan is None:
            plan = self._define_fetch(spec, data, rank)
        return self._future(plan, ref)

    def _define_fetch(self, spec: TensorSpec, data: bool, rank: int | None) -> _FetchPlan:
        mesh, hosts, _ = self._client.mesh(spec.mesh)
        shape, stride = spec.shape, spec.stride if _dense(spec) else contiguous_stride(spec.shape)
        regions: tuple[Any, ...]
        if rank is not None:
            shape = spec.local_shape(rank)
            stride = contiguous_stride(shape)
            ranks: tuple[int, ...] = (rank,)
            regions = (tuple((0, n) for n in shape),)
        elif data:
            # One rank of every set of replicas: those at coordinate 0.
            whole = [i for i, p in enumerate(spec.placements) if type(p) is Replicate]
            ranks = tuple(r for r, c in enumerate(spec.mesh.coordinates) if all(c[i] == 0 for i in whole))
            regions = tuple(spec.region(r) for r in ranks)
        else:
            ranks = tuple(range(spec.mesh.nranks))
            regions = tuple(spec.region(r) for r in ranks)
        executors = tuple(sorted({hosts[r] for r in ranks}))
        plan = _FetchPlan(self._client.plan_id(), executors, shape, stride, spec.dtype, data)
        self._client.send(FetchPlan(plan.id, mesh, shape, stride, spec.dtype, ranks, regions, data))
        self._client.pool.name_plan(
            plan.id, f"a fetch of {spec.describe()}" if data else f"a look at {spec.describe()}", mesh
        )
        self._keep(self._fetches, (spec, data, rank), plan)
        return plan

    def _keep(self, plans: PlanCache[Any, Any], key: object, plan: Plan) -> None:
        plans.keep(key, plan, self._client.config.plan_cache, self._client.drop_plans)

    def _future(self, plan: _FetchPlan, ref: Ref) -> TensorFuture[Any]:
        client = self._client
        block = self._block(plan.nbytes, upload=False) if plan.nbytes else None
        ticket = client.slots.take(plan.executors)
        fetch = _Fetch(client, plan, block, ticket)
        fetch.at = client.issue(plan, (ref, fetch.base, ticket.generation, block.offset if block else 0))
        if not client.waiting.crowded():
            client.writer.wake(plan.executors, sync=True)
        return TensorFuture(fetch.is_done, fetch.resolve, client.waiting, fetch.abandon)

    def sync(self) -> VoidFutureCollect:
        """Done when every executor has run all that was issued before."""
        spec_futures = []
        for e in self._client.writer.readers:
            gpu = e >= self._client.accelerators
            mesh = DeviceMesh("cuda" if gpu else "cpu", [e - self._client.accelerators if gpu else e])
            plan = self._fetches.get(("sync", e))
            if plan is None:
                id, _, _ = self._client.mesh(mesh)
                plan = _FetchPlan(self._client.plan_id(), (e,), (), (), torch.float32, False)
                self._client.send(FetchPlan(plan.id, id, (), (), torch.float32, (0,), ((),), False))
                self._keep(self._fetches, ("sync", e), plan)
            ref = self.upload(torch.empty_strided((), ()), TensorSpec.of((), (), torch.float32, mesh, (Replicate(),)))
            spec_futures.append(self._future(plan, ref))
        return VoidFutureCollect(spec_futures, self._client.waiting)  # of no executors yet: done


class _FetchPlan(Plan):
    """The plan of a fetch, and what its values are."""

    __slots__ = ("data", "dtype", "nbytes", "shape", "stride")

    def __init__(
        self,
        id: int,
        executors: tuple[int, ...],
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        data: bool,
    ) -> None:
        super().__init__(id, "4Q", executors)
        self.shape, self.stride, self.dtype, self.data = shape, stride, dtype, data
        self.nbytes = math.prod(shape) * dtype.itemsize if data else 0


class _Fetch:
    """One value on its way to the client."""

    __slots__ = ("at", "base", "block", "client", "plan", "ticket")

    def __init__(self, client: Client, plan: _FetchPlan, block: Block | None, ticket: Ticket) -> None:
        self.client, self.plan, self.block, self.ticket = client, plan, block, ticket
        self.base = client.state.slot_word(ticket.slot, 0)
        self.at = 0  # its place in the ring, once it is issued

    def is_done(self) -> bool:
        return self.ticket.is_done() or self.client.closed

    def waited_for(self) -> str:
        """What is on its way, from where, and what is done there meanwhile."""
        plan, client = self.plan, self.client
        what = f"{str(plan.dtype).removeprefix('torch.')}{list(plan.shape)}"
        site = client.failures.site(self.at)
        said = [f"{what}, asked for at {site}" if site else what]
        for e in self.ticket.unanswered():
            doing = client.pool.doing(e)
            said.append(f"executor {e} has not answered" + (f", it is at {doing}" if doing else ""))
        return "; ".join(said)

    def resolve(self) -> torch.Tensor | None:
        client, ticket, plan = self.client, self.ticket, self.plan
        if client.closed or not ticket.answered():
            # Not done, and yet resolved: the pool has ended.
            client.slots.give(ticket, self._free_block)
            client.check()
        try:
            failed = ticket.failed()
        except PoolError as corrupt:
            client.give_up(str(corrupt))
            raise
        if failed:
            error = client.failures.of_slot(self.base, ticket.generation)
            client.slots.give(ticket, self._free_block)
            raise error
        client.slots.give(ticket)
        if not plan.data:
            return None
        if self.block is None:
            return torch.empty_strided(plan.shape, plan.stride, dtype=plan.dtype)
        return client.arena.tensor(self.block, plan.dtype, plan.shape, plan.stride)

    def abandon(self) -> None:
        """Nobody waits for it any longer."""
        self.client.slots.give(self.ticket, self._arrived)

    def _arrived(self) -> None:
        """The answer to an abandoned fetch is there."""
        self._free_block()
        if self.ticket.failed():
            self.client.failures.unread(self.base, self.ticket.generation)

    def _free_block(self) -> None:
        if self.block is not None:
            self.client.arena.free(self.block)


def _dense(spec: TensorSpec) -> bool:
    return spec.numel > 0 and spec.local_stride(0) is not None and not spec.is_contiguous
