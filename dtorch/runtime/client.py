"""The client's half of one pool: refs, plans, uploads, fetches, and what became of failures.

A :class:`Client` owns a pool of executors and the ring they read. `dispatch` writes operator records through it;
everything that is not the hot path goes through its methods. It knows specs and refs, never user-facing tensors.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import DeviceMeshError, PoolError
from ..executor.pool import adopt, stop_early
from ..future import TensorFuture, VoidFutureCollect
from ..gpus import count as gpu_count
from ..mesh import DeviceMesh
from ..placement import Replicate
from ..spec import TensorSpec, contiguous_stride
from . import config
from .arena import Arena
from .blocking import on_block
from .command import (
    FIRST_PLAN,
    FREE,
    LENGTH_SHIFT,
    LOST_WITH_POOL,
    ClearErrors,
    DefineMesh,
    FetchPlan,
    Reply,
    Seed,
    SendRandom,
    Settle,
    SyncRandom,
    Threads,
    UploadPlan,
    decode,
    encode,
)
from .failures import Failures
from .ring import Writer
from .scheduler import Pressure
from .shared import DEAD, EXECUTOR_READ, EXECUTOR_UPLOADED, executor_line
from .slots import Slots
from .waiting import Waiting, in_event_loop

__all__ = [
    "FREE_BATCH",
    "Client",
    "Ref",
    "client",
    "close",
    "current_client",
    "freed",
    "next_ref",
    "on_close",
    "ref_type",
]

log = logging.getLogger("dtorch")

# Refs that died, to be told to the executors. Filled by __del__, which may run at any time.
freed: deque[int] = deque()
next_ref: Callable[[], int] = itertools.count(1).__next__

# Deaths are told in batches of so many.
FREE_BATCH = 16
LARGE = 1 << 20


class Ref(int):
    """The name of a value on the executors; the value is dropped there when this dies."""

    __slots__ = ()

    def __del__(self, _drop: Callable[[int], None] = freed.append) -> None:
        _drop(+self)


class LargeRef(Ref):
    """A ref of a value that is worth telling of at once: its death fills the batch up with refs of nothing."""

    __slots__ = ()

    def __del__(self, _drop: Callable[[Any], None] = freed.extend) -> None:
        _drop((+self, *_FILL))


_FILL = (0,) * (FREE_BATCH - 1)
_FREE_RECORDS = [struct.Struct(f"<{1 + n}Q").pack_into for n in range(256)]


def ref_type(spec: TensorSpec) -> type[Ref]:
    """The kind of ref for values of `spec`."""
    return LargeRef if spec.numel * spec.dtype.itemsize >= LARGE else Ref


class Plan:
    """What the hot path needs of a defined plan.

    Attributes:
        pack: ``pack(buffer, offset, header, *words)`` of the whole record.
        states: control words with the states of the executors concerned, to see at a glance that none sleeps.
    """

    __slots__ = ("executors", "header", "id", "nwords", "pack", "states")

    def __init__(self, id: int, layout: str, executors: tuple[int, ...]) -> None:
        packer = struct.Struct("<Q" + layout)
        self.id, self.executors = id, executors
        self.nwords = packer.size // 8
        self.header = id | self.nwords << LENGTH_SHIFT
        self.pack = packer.pack_into
        self.states = tuple(64 + 16 * e + 1 for e in executors)


class Client:
    """One pool, seen from the program that uses it. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.config = config.current()
        self.pool = adopt(self.config)
        # GPUs have the last executors, CPUs the first: see executor.device.
        self.gpus = min(gpu_count(), self.config.max_executors - 1)
        self.accelerators = self.config.max_executors - self.gpus
        if self.gpus:
            self.pool.options_of = self._options_of
        self.state = self.pool.state
        self.control = self.state.control
        self.ring_bytes = self.state.ring_bytes
        self.blocking = self.config.blocking
        self.arena = Arena(self.state)
        self.waiting = Waiting(
            self.state,
            on_wake=self.look,
            on_block=self._on_block,
            over_bound=lambda: self.writer.pressure() is not Pressure.NONE,
        )
        self.writer = Writer(self.state, self.config, in_loop=in_event_loop, while_waiting=self.check)
        self.failures = Failures(self)
        self.pid = os.getpid()
        self.closed = False
        # Refs below are of pools that have ended, or of the process that forked this one.
        self.first_ref = next_ref()
        self._error: PoolError | None = None
        self._plan_ids = itertools.count(FIRST_PLAN)
        self._lock = threading.RLock()
        self._meshes: dict[DeviceMesh, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self._uploads: dict[TensorSpec, Plan] = {}
        self._fetches: dict[Any, Plan] = {}
        self._in_upload: deque[tuple[int, Any]] = deque()
        self._cpus = 0  # how many executors of CPUs there are
        self._consumed: tuple[int, ...] = ()  # of every executor, the word that says which uploads it has taken
        self.slots = Slots(self.state)
        self._tokens = itertools.count()
        self._replies: dict[tuple[int, int], Any] = {}
        # Held until messages are taken in, not only read: who looks next must find what another thread has read.
        self._drain_lock = threading.RLock()
        # How many random draws the generator of each executor has seen; they agree while the numbers do.
        self._random: dict[int, int] = {}
        self._random_latest = 0
        # The generators of CPUs and of GPUs have nothing to do with each other: the latest of either.
        self._random_newest = {False: 0, True: 0}
        self._seeded: int | None = None
        self._random_lock = threading.RLock()
        self._regions: dict[tuple[int, ...], int] = {}

    # -- executors and meshes -----------------------------------------------------------------------------------

    def ensure(self, n: int) -> None:
        """Executors 0 to n - 1 exist, or are on their way: commands are written meanwhile, and whoever waits for a
        value learns of a start that failed. So no event loop is held up by it."""
        if n <= self._cpus:
            return
        with self._lock:
            if n <= self._cpus:
                return
            self._add(range(self._cpus, n), n)
            self._cpus = n
            self.send(Threads(self.pool.threads_for(n)))

    def _ensure_gpus(self, executors: Iterable[int]) -> None:
        """The executors of GPUs `executors` exist, or are on their way."""
        with self._lock:
            new = [e for e in executors if e not in self.writer.readers]
            if not new:
                return
            first = all(e < self.accelerators for e in self.writer.readers)
            self.arena.keep(self.config.pinned_bytes)
            self._add(new, self._cpus)
            if first and self._seeded is not None:
                self.send(Seed(self._seeded, tuple(new)))
                self._random.update(dict.fromkeys(new, self._random_newest[True]))

    def _add(self, new: Sequence[int], n: int) -> None:
        """Have executors `new` read the ring and started; `n` are CPUs' then."""
        for e in new:
            self.writer.add_reader(e)
        try:
            self.pool.request(n, [e for e in new if e >= self.accelerators])
        except BaseException:
            for e in new:
                self.writer.remove_reader(e)
            raise
        for e in new:
            self._random[e] = -1 if self._random_newest[e >= self.accelerators] else 0
        self._consumed = tuple(
            executor_line(e) + (EXECUTOR_UPLOADED if e >= self.accelerators else EXECUTOR_READ)
            for e in self.writer.readers
        )

    def _options_of(self, executor: int) -> dict[str, Any]:
        options: dict[str, Any] = {"accelerators": self.accelerators}
        if executor >= self.accelerators:
            device = f"cuda:{executor - self.accelerators}"
            options |= {"device": device, "pinned": self.config.pinned_bytes, "threads": 1}
        return options

    def start(self, n: int) -> None:
        """As :meth:`ensure`, and wait until they are ready."""
        self.ensure(n)
        self.pool.ensure(n)

    def send(self, message: object, *, sync: bool = False) -> None:
        """Publish a control message to every executor."""
        self.check()
        self.writer.send_control(encode(message), sync=sync)

    def mesh(self, mesh: DeviceMesh) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(id, host of every rank, the executors concerned) of `mesh`, defined on the executors."""
        found = self._meshes.get(mesh)
        if found is None:
            with self._lock:
                found = self._meshes.get(mesh)
                if found is not None:
                    return found
                hosts = self.hosts(mesh)
                if max(hosts) < self.accelerators:
                    self.ensure(max(hosts) + 1)
                else:
                    self._ensure_gpus(sorted(set(hosts)))
                id = len(self._meshes) + 1
                self.send(DefineMesh(id, hosts))
                found = self._meshes[mesh] = (id, hosts, tuple(sorted(set(hosts))))
        return found

    def mesh_of(self, id: int) -> DeviceMesh | None:
        """The mesh that the executors know as `id`."""
        return next((mesh for mesh, known in tuple(self._meshes.items()) if known[0] == id), None)

    def hosts(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """The executor of every rank of `mesh`."""
        if self.config.same_device:
            if max(mesh.ids) >= self.config.same_device_count:
                raise DeviceMeshError(
                    f"{mesh!r} needs device {max(mesh.ids)}, and the simulation has {self.config.same_device_count}; "
                    f"set DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE={max(mesh.ids) + 1}"
                )
            host = self.accelerators if mesh.device_type == "cuda" and self.gpus else 0
            return (host,) * mesh.nranks
        if mesh.device_type != "cpu" and self.gpus:
            return tuple(self.accelerators + d for d in mesh.ids)
        if mesh.device_type != "cpu":
            raise DeviceMeshError(
                f'{mesh!r}: no CUDA device was found here; use a "cpu" mesh, or set '
                "DTORCH_DTENSOR_IN_SAME_DEVICE=1 to run every rank on one device"
            )
        total = min(self.config.cpu_executors or config.available_cores(), self.accelerators)
        return tuple(d % total for d in mesh.ids)

    def region(self, members: tuple[int, ...]) -> int:
        """The place in collective memory of the group `members`."""
        return self._regions.setdefault(members, len(self._regions))

    # -- plans --------------------------------------------------------------------------------------------------

    def plan_id(self) -> int:
        """A fresh plan id."""
        return next(self._plan_ids)

    def issue(self, plan: Plan, words: Iterable[int | float]) -> int:
        """Publish one record of `plan`; its place in the ring. The general form of what `dispatch` writes inline."""
        writer = self.writer
        with writer.lock:
            head = writer.head
            end = head + plan.nwords
            if end > writer.limit:
                head = writer.make_room(plan.nwords)
                end = head + plan.nwords
            plan.pack(self.state.ring_bytes, (head & writer.mask) << 3, plan.header, *words)
            self.failures.note(head, sys._getframe(1))
            writer.issued += 1
            writer.head = self.control[0] = end
            if freed:
                self.write_frees()
        for s in plan.states:
            if self.control[s]:
                writer.wake(plan.executors)
                break
        return head

    def write_frees(self) -> None:
        """Publish the refs that died. The caller holds the writer's lock."""
        writer = self.writer
        while freed:
            n = min(len(freed), 255)
            ids = [freed.popleft() for _ in range(n)]
            head = writer.head
            if head + n + 1 > writer.limit:
                head = writer.make_room(n + 1)
            header = FREE | (n + 1) << LENGTH_SHIFT
            _FREE_RECORDS[n](self.ring_bytes, (head & writer.mask) << 3, header, *ids)
            writer.issued += 1
            writer.head = self.control[0] = head + n + 1

    def flush(self) -> None:
        """Tell the executors what died, and have them look."""
        if freed:
            with self.writer.lock:
                self.write_frees()
        self.writer.wake(self.writer.readers, sync=True)

    # -- values in ----------------------------------------------------------------------------------------------

    def upload(self, value: torch.Tensor, spec: TensorSpec) -> Ref:
        """Copy `value` (a plain CPU tensor of `spec`'s shape and dtype) to the executors; the ref there.

        Partial placements are not made here: see `factories`.
        """
        plan = self._uploads.get(spec)
        if plan is None:
            plan = self._define_upload(spec)
        ref = ref_type(spec)(next_ref())
        if spec.numel == 0:
            self.issue(plan, (ref, 0))
            return ref
        self._reclaim()
        nbytes = spec.numel * spec.dtype.itemsize
        block = self.arena.alloc(nbytes)
        stride = contiguous_stride(spec.shape)
        self.arena.view(block, spec.dtype, spec.shape, stride).copy_(value.detach())
        self._in_upload.append((self.issue(plan, (ref, block.offset)), block))
        return ref

    def _define_upload(self, spec: TensorSpec) -> Plan:
        mesh, _, executors = self.mesh(spec.mesh)
        ranks = range(spec.mesh.nranks)
        plan = Plan(self.plan_id(), "2Q", executors)
        self.send(
            UploadPlan(
                plan.id,
                mesh,
                spec.shape,
                contiguous_stride(spec.shape),
                spec.dtype,
                tuple(spec.region(r) for r in ranks),
                tuple(spec.local_stride(r) for r in ranks),
            )
        )
        self.pool.name_plan(plan.id, f"an upload of {spec.describe()}")
        self._uploads[spec] = plan
        return plan

    def _reclaim(self) -> None:
        """Take back the blocks of uploads that every executor has consumed."""
        pending = self._in_upload
        if not pending:
            return
        control = self.control
        slowest = min((control[word] for word in self._consumed), default=0)
        while pending:
            try:
                at, block = pending.popleft()
            except IndexError:
                return
            if at >= slowest:
                pending.appendleft((at, block))
                return
            self.arena.free(block)

    # -- values out ---------------------------------------------------------------------------------------------

    def fetch(self, ref: Ref, spec: TensorSpec, *, data: bool = True, rank: int | None = None) -> TensorFuture[Any]:
        """A future of the value of `ref` on the client, or with `data` False of None once it exists.

        `spec` must not be Partial where `data` is wanted. With `rank`, the piece of that rank alone.
        """
        self.refuse_lost(ref)
        key = (spec, data, rank)
        plan = self._fetches.get(key)
        if plan is None:
            plan = self._define_fetch(spec, data, rank)
        shape = spec.shape if rank is None else spec.local_shape(rank)
        stride = (spec.stride if _dense(spec) else contiguous_stride(spec.shape)) if rank is None else None
        return self._future(plan, ref, shape, stride or contiguous_stride(shape), spec.dtype, data)

    def _define_fetch(self, spec: TensorSpec, data: bool, rank: int | None) -> Plan:
        mesh, hosts, _ = self.mesh(spec.mesh)
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
        plan = Plan(self.plan_id(), "4Q", executors)
        self.send(FetchPlan(plan.id, mesh, shape, stride, spec.dtype, ranks, regions, data))
        self.pool.name_plan(plan.id, f"a fetch of {spec.describe()}" if data else f"a look at {spec.describe()}")
        self._fetches[spec, data, rank] = plan
        return plan

    def _future(
        self, plan: Plan, ref: Ref, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, data: bool
    ) -> TensorFuture[Any]:
        self._reclaim()
        numel = math.prod(shape)
        block = self.arena.alloc(numel * dtype.itemsize) if data and numel else None
        ticket = self.slots.take(plan.executors)
        base = self.state.slot_word(ticket.slot, 0)
        self.issue(plan, (ref, base, ticket.generation, block.offset if block else 0))
        self.writer.wake(plan.executors, sync=True)

        def free_block() -> None:
            if block is not None:
                self.arena.free(block)

        def is_done() -> bool:
            return ticket.is_done() or self.closed

        def resolve() -> torch.Tensor | None:
            if self.closed or not ticket.answered():
                # Not done, and yet resolved: the pool has ended.
                self.slots.give(ticket, free_block)
                self.check()
            if ticket.failed():
                error = self.failures.of_slot(base, ticket.generation)
                self.slots.give(ticket, free_block)
                raise error
            self.slots.give(ticket)
            if not data:
                return None
            if block is None:
                return torch.empty_strided(shape, stride, dtype=dtype)
            return self.arena.tensor(block, dtype, shape, stride)

        def abandon() -> None:
            self.slots.give(ticket, free_block)

        return TensorFuture(is_done, resolve, self.waiting, abandon)

    def ask(self, message_for: Callable[[int], object], executor: int) -> Any:
        """Send a message with a token, which `executor` answers; waits for the answer."""
        token = next(self._tokens)
        self.send(message_for(token), sync=True)
        return self._answers([(executor, token)])[0]

    def ask_all(self, message_for: Callable[[int], object], executors: tuple[int, ...]) -> list[Any]:
        """Send one message with a token, which all `executors` answer; their answers in that order."""
        token = next(self._tokens)
        self.send(message_for(token), sync=True)
        return self._answers([(e, token) for e in executors])

    def _answers(self, keys: list[tuple[int, int]]) -> list[Any]:
        while not all(key in self._replies for key in keys):
            self.drain()
            self.check()
            time.sleep(0.0002)
        return [self._replies.pop(key) for key in keys]

    # -- replies and failures -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take in what executors have told. What was told before this began is known when it returns."""
        with self._drain_lock:
            for executor, reader in self.pool.replies().items():
                for data in reader.drain():
                    message = decode(data)
                    if isinstance(message, Reply):
                        self._replies[executor, message.token] = message.value
                    else:
                        self.failures.add(message)

    def look(self) -> None:
        """Whatever a waiter may need to learn between two looks at its status word; never raises."""
        if not self.closed:
            if not self.pool.check():
                self.writer.refuse()
            self.drain()

    def check(self) -> None:
        """Raise if the pool is closed or an executor died."""
        if self.closed:
            raise self._error or PoolError("the pool was shut down; the next use of dtorch starts a fresh one")
        if self.control[DEAD] or not self.pool.check():
            self.writer.refuse()
            self.drain()
            raise self._death()

    def _death(self) -> PoolError:
        """Why the pool has ended. The word may be seen a moment before the reason is read."""
        deadline = time.monotonic() + 0.5
        while True:
            error = self.pool.error()
            if error is not None:
                return error
            if time.monotonic() > deadline:
                return PoolError("the pool has ended; dtorch.restart() starts a fresh one")
            time.sleep(0.002)

    def refuse_lost(self, ref: int) -> None:
        """Raise if `ref` is of a pool that has ended.

        Raises:
            TensorLostError: it is.
        """
        if ref < self.first_ref:
            raise self.failures.error(LOST_WITH_POOL)

    def clear_errors(self) -> None:
        """Values that writes have not reached, their input having failed, stand again where every rank kept them."""
        self.drain()
        readers = self.writer.readers
        answers = self.ask_all(ClearErrors, readers)
        kept_by: dict[int, set[int]] = {}
        meshes: dict[int, int] = {}
        for executor, answer in zip(readers, answers, strict=True):
            for ref, mesh, whole in answer:
                meshes[ref] = mesh
                kept_by.setdefault(ref, set()).update((executor,) if whole else ())
        holders = {id: executors for id, _, executors in tuple(self._meshes.values())}
        kept = tuple(ref for ref, by in kept_by.items() if by.issuperset(holders[meshes[ref]]))
        self.send(Settle(kept, tuple(kept_by.keys() - set(kept))))

    def _on_block(self) -> None:
        if not self.blocking:
            on_block()

    # -- random numbers -----------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Every generator starts again from `seed`."""
        self.ensure(1)
        self.send(Seed(seed))
        self._seeded = seed
        self._random_latest += 1
        self._random_newest = dict.fromkeys(self._random_newest, self._random_latest)
        self._random = dict.fromkeys(self.writer.readers, self._random_latest)

    def begin_draw(self, executors: tuple[int, ...]) -> None:
        """The generators of `executors` are brought to the latest state, and draw together with the next command.

        Until :meth:`end_draw` no other thread's draw can come between.
        """
        self._random_lock.acquire()
        kind = executors[0] >= self.accelerators
        latest = self._random_newest[kind]
        versions = self._random
        stale = tuple(e for e in executors if versions[e] != latest)
        if stale:
            root = self.random_root(kind)
            members = tuple(sorted({root, *stale}))
            self.send(SyncRandom(root, members, self.region(members)))
            for e in stale:
                versions[e] = latest
        self._random_latest = self._random_newest[kind] = latest = self._random_latest + 1
        for e in executors:
            versions[e] = latest

    def random_kinds(self) -> tuple[bool, ...]:
        """The kinds of generators there are: those of CPUs (False), and those of GPUs (True) once a GPU is used."""
        self.ensure(1)
        return tuple(sorted({e >= self.accelerators for e in self.writer.readers}))

    def draws(self, gpu: bool) -> int:
        """A number that changes with every draw of the kind."""
        return self._random_newest[gpu]

    def random_root(self, gpu: bool) -> int:
        """An executor whose generator has seen all draws of its kind."""
        return next(
            e for e, v in self._random.items() if v == self._random_newest[gpu] and (e >= self.accelerators) == gpu
        )

    def end_draw(self) -> None:
        """The command that draws was issued."""
        self._random_lock.release()

    def random_state(self, gpu: bool = False) -> bytes:
        """The generator's state, as torch's generator of the kind gives it."""
        self.ensure(1)
        root = self.random_root(gpu)
        return self.ask(lambda token: SendRandom(root, token), root)

    def set_random_state(self, state: bytes, gpu: bool = False) -> None:
        """Every generator of the kind continues from `state`."""
        self.ensure(1)
        members = tuple(e for e in self.writer.readers if (e >= self.accelerators) == gpu)
        self.send(SyncRandom(0, members, None, state))
        self._random_latest = self._random_newest[gpu] = self._random_latest + 1
        self._random.update(dict.fromkeys(members, self._random_latest))

    def wait_here(self) -> None:
        """``DTORCH_BLOCKING=1``: wait for all that was issued, and fail where it stands."""
        self.sync().get()
        self.drain()
        self.failures.raise_first()

    # -- the end ------------------------------------------------------------------------------------------------

    def sync(self) -> VoidFutureCollect:
        """Done when every executor has run all that was issued before."""
        spec_futures = []
        for e in self.writer.readers:
            gpu = e >= self.accelerators
            mesh = DeviceMesh("cuda" if gpu else "cpu", [e - self.accelerators if gpu else e])
            plan = self._fetches.get(("sync", e))
            if plan is None:
                id, _, _ = self.mesh(mesh)
                plan = Plan(self.plan_id(), "4Q", (e,))
                self.send(FetchPlan(plan.id, id, (), (), torch.float32, (0,), ((),), False))
                self._fetches["sync", e] = plan
            ref = self.upload(torch.zeros(()), TensorSpec.of((), (), torch.float32, mesh, (Replicate(),)))
            spec_futures.append(self._future(plan, ref, (), (), torch.float32, False))
        return VoidFutureCollect(spec_futures)

    def close(self) -> None:
        """End the executors; idempotent."""
        if self.closed:
            return
        if self.pid == os.getpid():
            self._error = self.pool.error()
            self.closed = True
            try:
                self.drain()
            except Exception:
                log.debug("replies could not be read at exit", exc_info=True)
            self.pool.shutdown()
            self.failures.summary()

    def forked(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self._error = PoolError(
            f"this value belongs to process {self.pid}, which forked this one ({os.getpid()}): executors cannot be "
            "shared by two clients. New tensors made here get a pool of their own; take what you need of old ones "
            "with t.to_torch() before the fork"
        )
        self.closed = True


def _dense(spec: TensorSpec) -> bool:
    return spec.numel > 0 and spec.local_stride(0) is not None and not spec.is_contiguous


_current: Client | None = None
_start_lock = threading.Lock()
_closing: list[Callable[[], None]] = []


def on_close(callback: Callable[[], None]) -> None:
    """Run `callback` whenever a pool ends: plan caches of that pool are void then."""
    _closing.append(callback)


def client() -> Client:
    """The pool in use, started on first use."""
    global _current
    found = _current
    if found is not None:
        return found
    if config.inside_executor:
        raise PoolError(
            "this code runs on an executor (a function given to from_local, say), where there are no dtorch tensors: "
            "use plain torch"
        )
    with _start_lock:
        if _current is None:
            _current = Client()
        return _current


def current_client() -> Client | None:
    """The pool in use, if one was started."""
    return _current


def close() -> None:
    """End the pool in use; the next use starts a fresh one."""
    global _current
    found, _current = _current, None
    for callback in _closing:
        callback()
    stop_early()
    if found is not None:
        found.close()


def _forked() -> None:
    """In a forked child no plan, pool or ref of the parent is used; the next use starts a pool of the child's own."""
    global _current, _start_lock
    found, _current = _current, None
    _start_lock = threading.Lock()
    freed.clear()
    if found is not None:
        found.forked()
        for callback in _closing:
            callback()


os.register_at_fork(after_in_child=_forked)
atexit.register(close)
