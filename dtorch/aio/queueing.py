"""Requests that wait for their batch, in one event loop.

A request waits in a group of requests that may share a batch. When nothing runs, the group whose first request is
oldest is sent at once. While a batch runs, requests collect. A second batch, of the oldest again, is sent behind the
first as soon as any is full, or the oldest request has waited for `max_delay`, so that executors are never idle between
the two. More than that is never under way: under overload batches are full, and the queue fills up to its bound.

A task per event loop sends batches, for as long as there is anything to send or to wait for. It belongs to no caller:
a caller that is cancelled leaves its rows behind and disturbs nobody. A batch that nobody waits for any more is
cancelled, so that the next one has its place.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import math
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from ..errors import OverloadedError, PoolError
from ..runtime.tasks import spawn
from .requests import Batch, BatchMetrics, Call, Group, Request, twin
from .rows import Pack

__all__ = ["Queue"]

_log = logging.getLogger("dtorch")

_RUNNING = 2  # batches under way at once: one runs, and the next one's operators are queued behind it
_SMOOTHING = 0.3  # weight of the newest batch in the estimate of throughput
_MAX_RETRY_AFTER = 60.0  # seconds
_STUCK = 5.0  # seconds that a function has to end in when its batch is cancelled, before that is logged

# Queues whose task runs. asyncio keeps no strong reference to a task.
_alive: set[Queue] = set()


# The batches that the calling code is part of: of one function, of one that awaits it, and so on. The name makes it
# part of what calls must agree in to share a batch, so that it tells the truth for all of them.
_inside: contextvars.ContextVar[frozenset[_Run]] = contextvars.ContextVar("dtorch_batches", default=frozenset())


class _Run:
    """A batch that is computed; equal to any other of its queue, whose calls may share batches of other functions."""

    __slots__ = ("over", "queue")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.over = False  # what it has started may outlive it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Run) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash(self.queue)


class Limits(Protocol):
    """What a queue is told of the function it serves."""

    name: str
    max_size: int
    max_delay: float
    max_queue: int

    def answer(self, call: Call, packs: Sequence[Pack], metrics: BatchMetrics) -> Awaitable[list[Any]]:
        """The result of each of `packs`."""
        ...


class Queue:
    """The requests of one function in one event loop; touched by that loop's thread alone.

    Invariant: whenever a request waits or a batch runs, the task of :meth:`_run` has not ended; `_ended` is its event.
    """

    def __init__(self, limits: Limits, metrics: BatchMetrics) -> None:
        self.limits, self.metrics = limits, metrics
        self._groups: dict[Any, Group] = {}
        self._waiting = 0
        self._sent: dict[Request, None] = {}
        self._running = 0
        self._rate = 0.0  # requests a second, of late
        self._finished = 0.0  # when the last batch did
        self._changed = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._ended: anyio.Event | None = None  # of the task that sends; None where there is none
        self._task: object = None
        self._tasks: TaskGroup | None = None  # of that task

    # -- callers ------------------------------------------------------------------------------------------------

    def enter(self, context: contextvars.Context) -> None:
        """Whether a call from `context` can be answered.

        Raises:
            RuntimeError: it is made inside a batch of this queue, which would wait for itself.
        """
        inside = context.get(_inside)
        if not inside:
            return
        running = frozenset(run for run in inside if not run.over)
        if any(run.queue is self for run in running):
            name = self.limits.name
            raise RuntimeError(
                f"{name}: called inside itself, where its batch would wait for one that has to wait for it.\n"
                f"  Write:  await {name}.unbatched(...)  inside the function"
            )
        if running != inside:
            context.run(_inside.set, running)

    def admit(self, packs: Sequence[Pack], call: Call) -> list[Request]:
        """Queue the parts of one call.

        Raises:
            OverloadedError: there is no room for all of them.
        """
        name, limit = self.limits.name, self.limits.max_queue
        if len(packs) > limit:
            raise ValueError(
                f"{name}: {sum(p.rows for p in packs)} rows are {len(packs)} batches of "
                f"max_size={self.limits.max_size}, and never fit into max_queue={limit}"
            )
        if self._waiting + len(packs) > limit:
            seconds = self.retry_after()
            raise OverloadedError(
                f"{name}: {self._waiting} requests are waiting, and max_queue={limit}; try again in {seconds:.3g} s",
                seconds,
            )
        now = anyio.current_time()
        requests = [Request(pack, call, now) for pack in packs]
        for request in requests:
            group = self._groups.get(request.pack.key)
            if group is None:
                group = self._groups[request.pack.key] = Group()
            group.requests[request] = None
            group.rows += request.pack.rows
            request.group = group
            # For all others the task waits already: for a time, or for a batch to end.
            if len(group.requests) == 1 or group.rows >= self.limits.max_size:
                self._changed.set()
        self._waiting += len(requests)
        self.metrics.add(queue_depth=len(requests))
        if self._ended is None:
            self._ended = ended = anyio.Event()
            _alive.add(self)
            # Each batch brings a context of its own.
            self._task = spawn(self._run, f"batches of {name}", contextvars.Context(), lambda: self._over(ended))
        return requests

    def withdraw(self, request: Request) -> None:
        """Nobody waits for it any longer: take it out, if it has not been sent; else it may end its batch."""
        if request.group is not None:
            self._take(request)
        elif request.batch is not None and not request.done.is_set():
            batch = request.batch
            batch.wanted -= 1
            if not batch.wanted and batch.begun:
                batch.scope.cancel()
                assert self._tasks is not None
                self._tasks.start_soon(self._watch, batch)

    def retry_after(self) -> float:
        """Seconds until what waits now will have been sent, judged by the throughput of late."""
        if not self._rate:
            return 1.0
        return min(max(self._waiting / self._rate, self.limits.max_delay, 0.001), _MAX_RETRY_AFTER)

    def _take(self, request: Request) -> None:
        group = request.group
        assert group is not None
        del group.requests[request]
        group.rows -= request.pack.rows
        request.group = None
        self._waiting -= 1
        self.metrics.add(queue_depth=-1)
        if not group.requests:
            del self._groups[request.pack.key]

    # -- the task that sends ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            self._scope, self._tasks = tasks.cancel_scope, tasks
            while self._waiting or self._running:
                self._changed = anyio.Event()
                group, pause = self._next(anyio.current_time())
                if group is not None:
                    self._running += 1
                    tasks.start_soon(self._send, self._batch(group))
                    # It starts before the next one does: trio draws lots among tasks that start together.
                    await anyio.lowlevel.checkpoint()
                    continue
                with anyio.move_on_after(pause):
                    await self._changed.wait()
            # From here on a new request starts a new task.
            self._idle()

    def _over(self, ended: anyio.Event) -> None:
        """The task that sends has ended: by itself, or it was cancelled."""
        if self._ended is ended:
            self._abandon("the task that sends batches was cancelled, as at the end of a loop,")
            self._sent.clear()
            self._running = 0
            self._idle()
        ended.set()

    def _idle(self) -> None:
        self._ended = self._scope = self._task = self._tasks = None
        _alive.discard(self)

    def _next(self, now: float) -> tuple[Group | None, float]:
        """The group to send from now; or None, and how many seconds to wait at most unless something changes."""
        if not self._groups or self._running >= _RUNNING:
            return None, math.inf
        oldest = min(self._groups.values(), key=_since)
        due = oldest.since + self.limits.max_delay
        full = any(g.rows >= self.limits.max_size for g in self._groups.values())
        # Not the full one: whoever came first is sent first.
        return (oldest, 0) if full or not self._running or due <= now else (None, due - now)

    def _batch(self, group: Group) -> Batch:
        """Take the oldest requests of `group`, as many as fit."""
        batch: list[Request] = []
        rows = 0
        for request in list(itertools.islice(group.requests, self.limits.max_size)):
            rows += request.pack.rows
            if batch and rows > self.limits.max_size:
                break
            self._take(request)
            batch.append(request)
        self._sent.update(dict.fromkeys(batch))
        return Batch(batch)

    async def _send(self, batch: Batch) -> None:
        requests = batch.requests
        # What held where the oldest request was made holds for its batch; it is this task's own copy.
        for variable, value in requests[0].call.context.items():
            variable.set(value)
        run = _Run(self)
        _inside.set((_inside.get() - {run}) | {run})
        started = max(self._finished, requests[0].since)
        try:
            if not batch.wanted:  # its callers have gone before it began
                return
            batch.begun = True
            with batch.scope:
                results = await self.limits.answer(requests[0].call, [r.pack for r in requests], self.metrics)
                for request, result in zip(requests, results, strict=True):
                    request.answer(result)
        except Exception as error:
            for request in requests[1:]:
                request.fail(twin(error))
            requests[0].fail(error)
        except anyio.get_cancelled_exc_class():
            # Of this batch alone, by the function itself, or of all. Either way this task ends here.
            self._fail(requests, "its batch was cancelled")
        finally:
            run.over = True
            self._fail(requests, "its batch was broken off")
            batch.ended.set()
            self._running -= 1
            self._changed.set()
            for request in requests:
                self._sent.pop(request, None)
                request.batch = None  # which refers to it
            self._finished = anyio.current_time()
            if batch.wanted:
                rate = len(requests) / max(self._finished - started, 1e-6)
                self._rate = rate if not self._rate else self._rate + _SMOOTHING * (rate - self._rate)

    async def _watch(self, batch: Batch) -> None:
        """See to it that a function ends whose batch was cancelled, or say that it does not."""
        with anyio.move_on_after(_STUCK):
            await batch.ended.wait()
            return
        _log.warning(
            "%s: nobody waits for its batch any more, but it goes on %g s after it was cancelled; %d of at most %d "
            "batches are under way, and others wait for them",
            self.limits.name,
            _STUCK,
            self._running,
            _RUNNING,
        )

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> anyio.Event | None:
        """Fail all that waits and all that is under way; what is set when the task that sends has ended."""
        scope, ended = self._scope, self._ended
        self._abandon("dtorch.aio.open() was left")
        if scope is not None:
            scope.cancel()
        return ended

    def _abandon(self, reason: str) -> None:
        waiting = [request for group in self._groups.values() for request in group.requests]
        for request in waiting:
            self._take(request)
        self._fail([*self._sent, *waiting], reason)
        self._changed.set()

    def _fail(self, requests: Sequence[Request], reason: str) -> None:
        for request in requests:
            if not request.done.is_set():
                request.fail(PoolError(f"{self.limits.name}: {reason} before this request was answered"))


def _since(group: Group) -> float:
    return group.since
