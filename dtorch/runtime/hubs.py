"""One event loop's half of waiting: all its tasks that wait, behind one reader. See waiting.py for the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

import anyio

from .linger import Linger

if TYPE_CHECKING:
    from .waiting import Waiting

__all__ = ["CROWD", "RECHECK", "AnyioHub", "AsyncioHub", "Ready"]

Ready = Callable[[], bool]

_PASSES = 20  # through an otherwise idle event loop, before it sleeps
CROWD = 4  # waiting in one loop: from there on one wake-up for all
RECHECK = 0.2  # seconds any sleep is limited to


class AsyncioHub:
    """All that waits in one asyncio loop: one reader, and one timer, while anything is pending.

    Invariant: this loop is counted in the waiting count exactly while :attr:`_pending` is not empty.
    """

    def __init__(self, waiting: Waiting, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.closed = False
        self._waiting = waiting
        self._pending: dict[asyncio.Future[None], Ready] = {}
        self._watched: dict[asyncio.Future[None], Callable[[], None]] = {}
        self._guard: AsyncGenerator[None, None] | None = None  # while anything is watched
        self._passing = self._announcing = False
        self._linger = Linger(0)  # counts passes, not time
        self._epoll = waiting.epoll()
        loop.add_reader(self._epoll.fileno(), self._on_readable)
        loop.call_later(RECHECK, self._on_timer)

    def __del__(self) -> None:
        # The loop was closed under its waiters. Their coroutines may be finalized after this: counted out once.
        if self._pending:
            self._pending.clear()
            self._waiting.lose()

    async def wait(self, ready: Ready) -> None:
        if not self._pending and not self._passing:
            self._waiting.on_wait()
            # Alone here: a few passes cost less than a sleep and a wake-up. With company they would cost the others.
            if self._linger.pays() and await self._pass(ready):
                return
        else:
            self._announce()
        future = self._add(ready)
        try:
            if not ready():
                await future
        except GeneratorExit:
            self._drop(future)
            raise
        finally:
            self._remove(future)

    async def _pass(self, ready: Ready) -> bool:
        """Go through the loop some times, as long as nobody else waits here; whether it became ready."""
        self._passing = True
        try:
            for _ in range(_PASSES):
                await asyncio.sleep(0)
                if ready():
                    self._linger.paid(True)
                    return True
                if self._pending:
                    return False
            self._linger.paid(False)
            return False
        finally:
            self._passing = False

    def _announce(self) -> None:
        """Say that someone waits: at once where few do, else when all tasks of this pass have issued their work.

        An executor that runs as soon as there is one command has to be woken for the next one again.
        """
        if len(self._pending) < CROWD:
            self._waiting.on_wait()
        elif not self._announcing:
            self._announcing = True
            self.loop.call_soon(self._announced)

    def _announced(self) -> None:
        self._announcing = False
        self._waiting.on_wait()

    def watch(self, ready: Ready, callback: Callable[[], None]) -> None:
        self._announce()
        if self._guard is None:
            self._guard = _until_the_loop_ends(weakref.WeakMethod(self._hand_over))
            with contextlib.suppress(StopIteration):  # it has begun: the loop knows of it
                anext(self._guard).send(None)
        future = self._add(ready)
        self._watched[future] = callback
        future.add_done_callback(self._call_back)
        if ready():
            self._remove(future)
            future.set_result(None)

    def _call_back(self, future: asyncio.Future[None]) -> None:
        callback = self._watched.pop(future, None)
        if callback is not None:
            callback()

    def _hand_over(self) -> None:
        """The loop is about to end: what is still watched goes to the helper thread."""
        for future, callback in list(self._watched.items()):
            ready = self._pending.get(future)
            if ready is not None:
                del self._watched[future]
                self._remove(future)
                self._waiting.helper.watch(ready, callback)

    def _add(self, ready: Ready) -> asyncio.Future[None]:
        future = self.loop.create_future()
        if not self._pending:
            self._waiting.enter()
        self._pending[future] = ready
        return future

    def _remove(self, future: asyncio.Future[None]) -> None:
        if self._pending.pop(future, None) is not None and not self._pending:
            self._waiting.leave()

    def _drop(self, future: asyncio.Future[None]) -> None:
        """As :meth:`_remove`, for a coroutine that is finalized: in any thread, in the midst of anything."""
        if self._pending.pop(future, None) is not None and not self._pending:
            self._waiting.lose()

    def _scan(self) -> None:
        for future, ready in list(self._pending.items()):
            try:
                done = ready()
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
                done = True
            if done:
                if not future.done():
                    future.set_result(None)
                self._remove(future)

    def _on_readable(self) -> None:
        self._epoll.poll(0)
        self._waiting.on_wake()
        self._scan()

    def _on_timer(self) -> None:
        if self._pending:
            self._waiting.on_wake()
            self._scan()
        if self._pending or self._passing:
            self.loop.call_later(RECHECK, self._on_timer)
        else:
            self._close()

    def _close(self) -> None:
        self.closed = True
        if self._guard is not None:
            with contextlib.suppress(StopIteration):
                self._guard.aclose().send(None)
        self.loop.remove_reader(self._epoll.fileno())
        self._epoll.close()


async def _until_the_loop_ends(call: weakref.WeakMethod[Callable[[], None]]) -> AsyncGenerator[None, None]:
    """What calls back when the loop that it was begun in closes its asynchronous generators, as at its end."""
    try:
        yield
    finally:
        if (method := call()) is not None:
            method()


class _Waiter:
    """One task that waits in an :class:`AnyioHub`."""

    __slots__ = ("done", "error", "event", "ready")

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.event = anyio.Event()
        self.done = False
        self.error: BaseException | None = None

    def look(self) -> None:
        try:
            self.done = self.ready()
        except BaseException as error:
            self.error, self.done = error, True
        if self.done:
            self.event.set()


class AnyioHub:
    """All that waits in one event loop that is not asyncio's.

    anyio allows one waiter per descriptor, and nothing may outlive the tasks that wait; so one of them leads: it
    waits for the epoll and looks on behalf of all. When it is done or cancelled it hands over to another.

    Invariants: this loop is counted in the waiting count exactly while :attr:`_pending` is not empty; whenever a
    task suspends here, one of the pending leads or has been told to.
    """

    def __init__(self, waiting: Waiting, token: object) -> None:
        self.token = token
        self._pending: dict[_Waiter, None] = {}
        self._leader: _Waiter | None = None
        self._epoll = waiting.epoll()

    async def wait(self, waiting: Waiting, ready: Ready) -> None:
        me = _Waiter(ready)
        if not self._pending:
            waiting.enter()
        self._pending[me] = None
        finalized = False  # with its loop: then no lock may be taken
        try:
            waiting.on_wait()
            me.look()
            while not me.done:
                if self._leader is None:
                    await self._lead(waiting, me)
                else:
                    await me.event.wait()
                    me.event = anyio.Event()
        except GeneratorExit:
            finalized = True
            raise
        finally:
            del self._pending[me]
            if not self._pending:
                (waiting.lose if finalized else waiting.leave)()
            elif self._leader is None:
                next(iter(self._pending)).event.set()
        if me.error is not None:
            raise me.error

    async def _lead(self, waiting: Waiting, me: _Waiter) -> None:
        self._leader = me
        try:
            while not me.done:
                with anyio.move_on_after(RECHECK):
                    await anyio.wait_readable(self._epoll.fileno())
                self._epoll.poll(0)
                waiting.on_wake()
                for waiter in list(self._pending):
                    if not waiter.done:
                        waiter.look()
        finally:
            self._leader = None
