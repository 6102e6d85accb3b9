"""The client's half of one pool: refs, plans, uploads, fetches, and what became of failures.

A :class:`Client` owns a pool of executors and the ring they read. `dispatch` writes operator records through it;
everything that is not the hot path goes through its methods. It knows specs and refs, never user-facing tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import DeviceMeshError, PoolError
from ..executor.pool import adopt
from ..gpus import count as gpu_count
from ..mesh import DeviceMesh
from ..spec import TensorSpec
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
    DropPlans,
    Renew,
    Reply,
    Seed,
    Settle,
    Threads,
    decode,
    encode,
)
from .draws import Draws
from .failures import Failures
from .hung import report
from .operators import Operators
from .refs import FREE_RECORDS, Plan, freed, next_ref
from .restarting import Restoration
from .ring import Writer
from .shared import DEAD, EXECUTOR_READ, EXECUTOR_UPLOADED, executor_line
from .slots import Slots
from .values import Values
from .waiting import Waiting, in_event_loop, in_flight

__all__ = ["Client"]

log = logging.getLogger("dtorch")

# Meshes that are named in the report of a death.
_MESHES_TOLD = 4
# Seconds that work issued last may go on for when a pool is closed.
SETTLE = 1.0
# Seconds that executors which are still starting are waited for besides.
STARTING = 20.0


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
        # How far behind the slowest executor was, when so many commands were issued.
        self._behind = (0, 0)
        self.arena = Arena(self.state)
        self.waiting = Waiting(
            self.state,
            on_wait=lambda: self.writer.wake(self.writer.readers, sync=True),
            on_wake=self.look,
            on_block=self._on_block,
            over_bound=self.over_bound,
        )
        self.writer = Writer(
            self.state, self.config, in_loop=in_event_loop, while_waiting=self.check, while_unlocked=self.look
        )
        self.failures = Failures(self)
        self.pool.text_of = lambda message: report(self, message)
        self.pid = os.getpid()
        self.closed = False
        # Refs below are of pools that have ended, or of the process that forked this one.
        self.first_ref = next_ref()
        # Those among them that have been given a value here.
        self._renewed: set[int] = set()
        self._error: PoolError | None = None
        # While hooks have to run before anyone else uses this pool, or where one of them has failed.
        self.restoration: Restoration | None = None
        self._final = ""  # why no pool takes the place of this one, though one should
        self._plan_ids = itertools.count(FIRST_PLAN)
        self._lock = threading.RLock()
        self._meshes: dict[DeviceMesh, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self._cpus = 0  # how many executors of CPUs there are
        self.consumed: tuple[int, ...] = ()  # of every executor, the word that says which uploads it has taken
        self.slots = Slots(self.state)
        self._tokens = itertools.count()
        self._replies: dict[tuple[int, int], Any] = {}
        # Held until messages are taken in, not only read: who looks next must find what another thread has read.
        self._drain_lock = threading.RLock()
        self.values = Values(self)
        self.draws = Draws(self)
        self.operators = Operators(self)
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
            new = range(self._cpus, n)
            self._add(new, n)
            if not self._cpus:
                self._seed_first(new)
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
            if first:
                self._seed_first(new)

    def _seed_first(self, new: Sequence[int]) -> None:
        """Executors `new` are the first of their kind: no other's generator stands where theirs should."""
        if self.draws.seeded is not None:
            self.send(Seed(self.draws.seeded, tuple(new)))
            self.draws.add(new, seeded=True)

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
        self.draws.add(new)
        self.consumed = tuple(
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

    def send(self, message: object, *, sync: bool = False) -> int:
        """Publish a control message to every executor; its place in the ring."""
        self.check()
        frame = sys._getframe(1)
        places: list[int] = []

        def place(at: int) -> None:
            places.append(at)
            self.failures.note(at, frame)

        self.writer.send_control(encode(message), sync=sync, before=place)
        return places[0]

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
                self.pool.name_mesh(id, mesh.device_type, mesh.ids, hosts)
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

    def drop_plans(self, plans: tuple[int, ...]) -> None:
        """Executors forget `plans`, which no record will name again."""
        self.send(DropPlans(plans))

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
            FREE_RECORDS[n](self.ring_bytes, (head & writer.mask) << 3, header, *ids)
            writer.issued += 1
            writer.head = self.control[0] = head + n + 1

    def flush(self) -> None:
        """Tell the executors what died, and have them look."""
        if freed:
            with self.writer.lock:
                self.write_frees()
        self.writer.wake(self.writer.readers, sync=True)

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
            done = self.writer.issued - self.writer.behind() if self.failures.dropped else 0
            for executor, reader in self.pool.replies().items():
                try:
                    for data in reader.drain():
                        message = decode(data)
                        if isinstance(message, Reply):
                            self._replies[executor, message.token] = message.value
                        else:
                            self.failures.add(message)
                except Exception as error:
                    # Nothing behind it can be believed: not even that nothing failed.
                    self.give_up(f"what executor {executor} says cannot be read ({type(error).__name__}: {error})")
        if done:
            self.failures.tell_dropped(done)

    def give_up(self, reason: str) -> None:
        """End the pool, whose executors cannot be relied on; whoever waits for them learns why."""
        self.pool.give_up(reason)
        self.writer.refuse()

    def look(self) -> None:
        """Whatever a waiter may need to learn between two looks at its status word; never raises."""
        if not self.closed:
            if not self.pool.check():
                self.writer.refuse()
            self.drain()
            self.slots.glance()
        self.pool.speak()

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
                return self._told(error)
            if time.monotonic() > deadline:
                return PoolError("the pool has ended; dtorch.restart() starts a fresh one")
            time.sleep(0.002)

    def _told(self, error: PoolError) -> PoolError:
        """`error` of the pool, with what this side knows besides: which ranks a dead executor was."""
        head, _, rest = str(error).partition("\n")
        lines = [head]
        # Those of one device, if there are others, are mostly our own.
        meshes = sorted(tuple(self._meshes.items()), key=lambda known: -known[0].nranks)
        meshes = [known for known in meshes if known[0].nranks > 1] or meshes
        for death in self.pool.deaths():
            for mesh, (_, hosts, _) in meshes[:_MESHES_TOLD]:
                ranks = [str(rank) for rank, host in enumerate(hosts) if host == death.executor]
                if ranks:
                    what = "rank" if len(ranks) == 1 else "ranks"
                    lines.append(f"Executor {death.executor} was {what} {', '.join(ranks)} of {mesh!r}")
        return type(error)("\n".join([*lines, *filter(None, (rest, self._final))]))

    @property
    def is_dead(self) -> bool:
        """Whether executors, or the warden, have ended though nobody asked them to."""
        return self.control[DEAD] != 0 or not self.pool.check()

    def may_be_replaced(self) -> bool:
        """Whether a fresh pool is to take the place of this one, which is dead."""
        if config.current().on_executor_death != "restart" or self._final:
            return False
        return self.pool.has_died()

    def restored(self, restoration: Restoration, error: BaseException | None) -> None:
        """The hooks have run, or one of them has raised `error`."""
        if error is not None and not self.closed and not self.is_dead:
            restoration.error = error
            log.error("an on_restart hook failed, and the pool cannot be used", exc_info=error)
            return
        if error is not None:
            log.warning("on_restart hooks ended with %s: their pool has ended too", type(error).__name__)
        self.restoration = None

    def refuse_for_good(self) -> None:
        """Too many pools have died of late: this one stays."""
        c = config.current()
        self._final = (
            f"on_executor_death='restart' has started {c.max_restarts} pools within {c.restart_window:g} s "
            "(max_restarts, restart_window) and starts no more: mend what ends them, then dtorch.restart()"
        )

    def refuse_lost(self, ref: int) -> None:
        """Raise if `ref` is of a pool that has ended.

        Raises:
            TensorLostError: it is.
        """
        if self.is_lost(ref):
            raise self.failures.error(LOST_WITH_POOL)

    def is_lost(self, ref: int) -> bool:
        """Whether `ref` is of a pool that has ended, and has been given no value since."""
        return ref < self.first_ref and ref not in self._renewed

    def renew(self, ref: int, spec: TensorSpec) -> None:
        """Take a lost `ref` for one of this pool: the caller is about to write its whole value."""
        id, _, _ = self.mesh(spec.mesh)
        ranks = range(spec.mesh.nranks)
        # A number, no ref: a copy of one that dies, here or there, would take the value along.
        number = +ref
        self.send(Renew(number, id, tuple((spec.local_shape(r), spec.local_stride(r), spec.dtype) for r in ranks)))
        self._renewed.add(number)

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

    def over_bound(self) -> bool:
        """Whether more is in flight than this context allows, commands or uploads. Executors that lag are woken."""
        if self.values.uploads_lag():
            self.writer.wake(self.writer.readers, sync=True)
            return True
        bound = in_flight.get()
        if bound is None or bound > self.config.run_ahead_soft:
            bound = self.config.run_ahead_soft
        # No executor has fallen behind by more than was issued since they were looked at: mostly nobody need look.
        issued = self.writer.issued
        behind, then = self._behind
        if behind + issued - then < bound:
            return False
        behind = self.writer.behind()
        self._behind = (behind, issued)
        if behind < bound:
            return False
        self.writer.wake(self.writer.readers, sync=True)
        return True

    def wait_here(self, at: int | None = None) -> None:
        """``DTORCH_BLOCKING=1``: wait for all that was issued, and fail where it stands: with the failure of the
        command at `at`, never with another thread's."""
        self.values.sync().get()
        self.drain()
        if at is not None:
            self.failures.raise_of(at)

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, *, settle: bool = True) -> None:
        """End the executors; idempotent. Without `settle`, what was issued last is not waited for."""
        if self.closed or self.pid != os.getpid():
            return
        unmet = self.pool.unmet_death()
        try:
            if settle:
                self._settle()
        finally:
            # Ctrl-C may have ended the wait: then, too, nothing is left.
            error = self.pool.error()
            self._error = error and self._told(error)
            self.closed = True
            try:
                self.drain()
            except Exception:
                log.debug("replies could not be read at exit", exc_info=True)
            self.pool.shutdown()
            self.failures.summary()
            if unmet is not None:
                log.error("%s\nThe pool has ended with it; nothing needed it after that", unmet)

    def _settle(self) -> None:
        """Give what was issued last a moment to run: its failures would go unsaid, with nobody left to ask."""
        if not self.writer.readers or self.control[DEAD]:
            return
        with contextlib.suppress(PoolError):
            self.flush()
        began = now = time.monotonic()
        deadline = now + SETTLE
        while self.writer.behind() and not self.control[DEAD] and now < deadline and self.pool.check():
            time.sleep(0.001)
            now = time.monotonic()
            if now < began + STARTING and len(self.pool.alive) < len(self.writer.readers):
                # A short program ends before its executors have begun.
                deadline = now + SETTLE

    def forked(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self._error = PoolError(
            f"this value belongs to process {self.pid}, which forked this one ({os.getpid()}): executors cannot be "
            "shared by two clients. New tensors made here get a pool of their own; take what you need of old ones "
            "with t.to_torch() before the fork"
        )
        self.closed = True
