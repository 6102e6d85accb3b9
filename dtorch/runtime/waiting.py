"""How a waiter, in any thread or event loop, learns that something is ready.

Executors set status words in shared memory and then write the pool's ``done`` eventfd, but only if someone waits. The
eventfd is never read: a reader would take the news from the others. Instead every waiting thread, and every event
loop, has an epoll of its own that holds it edge-triggered, so each write reaches each of them once.

    1. look: ready? then no more is done
    2. raise the waiting count, under a lock whose release is the fence
    3. look again: an executor that did not see the count finished before this look
    4. sleep on the epoll, with a time limit, and look after every wake-up

A death is the dead word plus the same eventfd, so ``ready`` callables are looked at again then, and must say "ready"
to let their waiters find out.

There is no background thread. An event loop gets one reader while anything is pending in it, and none when it is
idle. Only :meth:`Waiting.watch` from a thread without an asyncio loop starts a helper, for as long as it has work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import anyio
import anyio.lowlevel

from . import hubs
from .ambient import Ambient
from .hubs import Ready
from .linger import Linger
from .shared import DEAD, WAITING, SharedState

__all__ = ["Ready", "Waiting", "Watcher", "in_event_loop", "in_flight"]

_YIELDS = 20  # of the core, before a thread sleeps
_LINGER = 100  # µs that a thread looks on before it sleeps, where that pays
_THROTTLE = 0.002  # seconds between looks at the run-ahead bound


in_flight: Ambient[int | None] = Ambient("dtorch_in_flight", None)
"""How many commands may be in flight before an await of this context pauses; ``None``: the pool's soft bound."""


def in_event_loop() -> bool:
    """Whether the calling thread is running an event loop (asyncio's, or any that anyio knows)."""
    if asyncio._get_running_loop() is not None:
        return True
    # Asked of trio itself, where it is in use: through anyio the answer "no" is an exception, a hundred times slower.
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


def _nothing() -> None:
    pass


def _never() -> bool:
    return False


class Watcher(Protocol):
    """Who calls back when something is ready."""

    def watch(self, ready: Ready, callback: Callable[[], None]) -> None:
        """Call `callback` once, when ``ready()``."""
        ...


class Waiting:
    """Everyone in this process who waits for executors of one pool.

    Args:
        state: the pool's shared memory.

    Attributes:
        on_wait: called when someone is about to wait for what is not ready; for waking executors that doze. In a
            crowded loop it is called once for all who began to wait in one pass.
        on_wake: called in the waiter's thread before it looks again; for draining replies.
        on_block: called when a thread is about to wait for something that is not ready; may warn or raise.
        over_bound: whether run-ahead is past the soft bound; waits last until it is not.
        pauses: how often an await has lasted longer because of that.
        pausing: how many of them do now.
        helper: calls back from a thread of its own; it never ends before what it watches.
    """

    def __init__(
        self,
        state: SharedState,
        *,
        on_wait: Callable[[], None] = _nothing,
        on_wake: Callable[[], None] = _nothing,
        on_block: Callable[[], None] = _nothing,
        over_bound: Callable[[], bool] = _never,
    ) -> None:
        self.on_wait = on_wait
        self.on_wake = on_wake
        self.on_block = on_block
        self.over_bound = over_bound
        self.pauses = self.pausing = 0
        self._control = state.control
        self._state = state
        self._lock = threading.Lock()
        # Invariant: the WAITING word holds the number of enter() without a leave(), once the lock is released.
        self._count = 0
        self._lost: deque[int] = deque()
        self._local = threading.local()
        self._hubs: weakref.WeakSet[hubs.AsyncioHub] = weakref.WeakSet()
        self.helper: Watcher = _Helper(self)

    @property
    def count(self) -> int:
        """How many threads and loops wait now."""
        with self._lock:
            self._count -= self._forget_lost()
            return self._count

    def wait_thread(self, ready: Ready, timeout: float | None = None) -> bool:
        """Block the calling thread until ``ready()``, at most `timeout` seconds; what ``ready()`` said last.

        A few yields first, which is all that a short operator takes, more where that has paid lately; then it sleeps.
        Ctrl-C ends it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not ready():
            self.on_block()
            self.on_wait()
            if not self._spin(ready, deadline) and not self._sleep(ready, deadline):
                return False
        while self._throttled() and not in_event_loop() and (deadline is None or time.monotonic() < deadline):
            self.on_wake()  # executors whose reply ring is full wait for that
            time.sleep(_THROTTLE)
        return True

    async def wait_loop(self, ready: Ready) -> None:
        """Suspend the calling task until ``ready()``. Cancelling it leaves nothing behind.

        Works in asyncio and loops of its interface (uvloop), and in trio.
        """
        if not ready():
            # In a trio run that is a guest of asyncio, an asyncio loop runs but no task of it.
            if _in_asyncio_task():
                await self._asyncio_hub().wait(ready)
            else:
                await self._anyio_hub().wait(self, ready)
        await self.pause()

    def crowded(self) -> bool:
        """Whether many already wait in the calling thread's asyncio loop: work for one more is told of with theirs."""
        known: Callable[[], hubs.AsyncioHub | None] | None = getattr(self._local, "asyncio", None)
        hub = known() if known is not None else None
        return hub is not None and len(hub._pending) >= hubs.CROWD

    async def pause(self) -> None:
        """Suspend the calling task while run-ahead is over its bound."""
        if not self._throttled():
            return
        self.pauses += 1
        self.pausing += 1
        try:
            # Executors do not tell how far they are, so this is looked at from time to time.
            while self._throttled():
                self.on_wake()  # executors whose reply ring is full wait for that
                await anyio.sleep(_THROTTLE)
        finally:
            self.pausing -= 1

    def loops(self) -> list[asyncio.AbstractEventLoop]:
        """The asyncio loops in which something waits."""
        return [hub.loop for hub in list(self._hubs) if hub._pending]

    def watch(self, ready: Ready, callback: Callable[[], None]) -> None:
        """Call `callback` once, when ``ready()``: from the running asyncio loop, else from a helper thread."""
        self.watcher().watch(ready, callback)

    def watcher(self) -> Watcher:
        """Who watches for the caller: the running asyncio loop, else a helper thread."""
        if asyncio._get_running_loop() is None or not _in_asyncio_task():
            return self.helper
        return self._asyncio_hub()

    def enter(self) -> None:
        """Count a waiter. It must look again afterwards, before it sleeps."""
        with self._lock:
            self._count += 1 - self._forget_lost()
            self._control[WAITING] = self._count

    def leave(self) -> None:
        """Count a waiter out."""
        with self._lock:
            self._count -= 1 + self._forget_lost()
            self._control[WAITING] = self._count

    def lose(self) -> None:
        """Count a waiter out whose loop is gone, from a finalizer: takes no lock, and shows at the next enter()."""
        self._lost.append(1)

    def epoll(self) -> select.epoll:
        """A new epoll that wakes once for every write of the done eventfd."""
        poller = select.epoll()
        poller.register(self._state.done_fd, select.EPOLLIN | select.EPOLLET)
        return poller

    def prod(self) -> None:
        """Wake every waiter, so that it looks again."""
        with contextlib.suppress(OSError):  # closed: everyone was woken then
            os.eventfd_write(self._state.done_fd, 1)

    def _throttled(self) -> bool:
        return self.over_bound() and not self._control[DEAD]

    def _forget_lost(self) -> int:
        # Waiters whose loop was closed under them; their finalizers must not take the lock.
        lost = 0
        while self._lost:
            lost += self._lost.popleft()
        return lost

    def _spin(self, ready: Ready, deadline: float | None) -> bool:
        for _ in range(_YIELDS):
            os.sched_yield()
            if ready():
                return True
        if deadline is not None and deadline - time.monotonic() < _LINGER * 1e-6:
            return False
        linger: Linger | None = getattr(self._local, "linger", None)
        if linger is None:
            linger = self._local.linger = Linger(_LINGER)
        return linger.look(ready)

    def _sleep(self, ready: Ready, deadline: float | None) -> bool:
        poller: select.epoll | None = getattr(self._local, "epoll", None)
        if poller is None:
            poller = self._local.epoll = self.epoll()
        self.enter()
        try:
            while not ready():
                limit = hubs.RECHECK
                if deadline is not None:
                    limit = min(limit, deadline - time.monotonic())
                    if limit <= 0:
                        return False
                poller.poll(limit)
                self.on_wake()
            return True
        finally:
            self.leave()

    def _asyncio_hub(self) -> hubs.AsyncioHub:
        loop = asyncio.get_running_loop()
        known: Callable[[], hubs.AsyncioHub | None] | None = getattr(self._local, "asyncio", None)
        hub = known() if known is not None else None
        if hub is None or hub.loop is not loop or hub.closed:
            hub = hubs.AsyncioHub(self, loop)
            self._local.asyncio = weakref.ref(hub)  # the loop alone keeps it alive
            self._hubs.add(hub)
        return hub

    def _anyio_hub(self) -> hubs.AnyioHub:
        token = anyio.lowlevel.current_token()
        hub: hubs.AnyioHub | None = getattr(self._local, "anyio", None)
        if hub is None or hub.token != token:
            hub = self._local.anyio = hubs.AnyioHub(self, token)
        return hub


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


class _Helper:
    """A daemon thread that calls callbacks for those who have no loop; alive only while there are any."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = weakref.ref(waiting)
        self._lock = threading.Lock()
        # Invariant: a thread runs exactly while this is not empty (seen under the lock).
        self._watched: list[tuple[Ready, Callable[[], None]]] = []

    def watch(self, ready: Ready, callback: Callable[[], None]) -> None:
        waiting = self._waiting()
        assert waiting is not None  # whoever has something to watch for holds it
        with self._lock:
            self._watched.append((ready, callback))
            first = len(self._watched) == 1
        if first:
            threading.Thread(target=self._run, args=(waiting,), name="dtorch-callbacks", daemon=True).start()
        else:
            waiting.prod()

    def _run(self, waiting: Waiting) -> None:
        while True:
            waiting.wait_thread(lambda: any(_due(ready) for ready, _ in list(self._watched)))
            with self._lock:
                due = [w for w in self._watched if _due(w[0])]
            for _, callback in due:
                with contextlib.suppress(Exception):  # whoever registered it logs its own errors
                    callback()
            with self._lock:
                self._watched = [w for w in self._watched if not any(w is d for d in due)]
                if not self._watched:
                    return


def _due(ready: Ready) -> bool:
    """Whether to call back: a `ready` that raises has nothing left to wait for."""
    try:
        return ready()
    except Exception:
        return True
