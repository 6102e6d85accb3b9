"""TensorFuture: a value that is on its way, for threads and for coroutines alike.

A future knows three things: how to look whether its value is there, how to fetch it then, and where to wait. It
fetches once; the value (or the error) then stays with it, so it can be asked any number of times, from any thread
and any event loop. A future that is dropped before its value came is told to its maker, who frees the late value.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

from .errors import PoolError
from .runtime import modes
from .runtime.waiting import Waiting, Watcher

__all__ = ["TensorFuture", "VoidFutureCollect"]

T = TypeVar("T")

_log = logging.getLogger("dtorch")


def _nothing() -> None:
    pass


class TensorFuture(concurrent.futures.Future, Generic[T]):  # type: ignore[type-arg]
    """A value that executors are computing.

    ``value = await future`` in asyncio and trio, ``value = future.get()`` elsewhere. Also a
    :class:`concurrent.futures.Future`, so ``asyncio.wrap_future``, ``concurrent.futures.wait`` and ``as_completed``
    take it; but it cannot be cancelled: work that was issued is done, and cancelling an await only ends that wait.

    Args:
        is_done: whether :meth:`get` would not wait. Must also say so when the executors it needs have died.
        resolve: the value, or raises; called once, in the thread that asks first, after `is_done` said yes.
        waiting: where to wait.
        on_abandon: called if the future is dropped before `resolve` was called; must not wait.
    """

    _told = False  # whether anyone has asked for the error, where there is one

    def __init__(
        self,
        is_done: Callable[[], bool],
        resolve: Callable[[], T],
        waiting: Waiting,
        on_abandon: Callable[[], object] = _nothing,
    ) -> None:
        # The base class's own state is not made: every method below replaces its, at a tenth of the cost.
        self._is_done = is_done
        self._resolve: Callable[[], T] | None = resolve  # None once it was called
        self._waiting = waiting
        self._on_abandon = on_abandon
        self._lock = threading.Lock()
        self._settled = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._callbacks: list[tuple[Callable[[Any], object], asyncio.AbstractEventLoop | None]] | None = None
        # Who will call back; a loop that has ended is none any longer, but may still be here.
        self._watchers: weakref.WeakSet[Watcher] | None = None

    def get(self, timeout: float | None = None) -> T:
        """The value, waiting for it up to `timeout` seconds (``None``: for ever).

        Raises:
            TimeoutError: it is not there yet. The future stays usable.
            Exception: the computation failed; the same error at every call.
        """
        self._wait_until_done(timeout)
        return self._outcome()

    def result(self, timeout: float | None = None) -> T:
        """The same as :meth:`get`."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`get` would raise, or ``None``; waits as it does.

        Raises:
            TimeoutError: it is not there yet.
        """
        self._wait_until_done(timeout)
        self._settle()
        self._told = True
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (``None``: for ever); whether the value, or its error, is there."""
        return self._settled or self._waiting.wait_thread(self._is_done, timeout)

    def wait_for(self, timeout_ms: float) -> bool:
        """Wait up to `timeout_ms` milliseconds; whether the value, or its error, is there."""
        return self.wait(timeout_ms / 1000)

    def is_ready(self) -> bool:
        """Whether :meth:`get` would return or raise without waiting."""
        return self._settled or self._is_done()

    def done(self) -> bool:
        """The same as :meth:`is_ready`."""
        return self.is_ready()

    def running(self) -> bool:
        """Whether the value is still on its way."""
        return not self.is_ready()

    def cancel(self) -> bool:
        """``False``: work that was issued cannot be taken back. Drop the future to have its value freed."""
        return False

    def cancelled(self) -> bool:
        """``False``, see :meth:`cancel`."""
        return False

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call ``fn(self)`` once the value or its error is there; at once if it is.

        It is called from the asyncio loop that runs now, as long as that runs, else from a helper thread, or from
        whichever thread fetches the value first. What it raises is logged.
        """
        if not self._remember(fn, asyncio._get_running_loop()):
            self._call(fn)
        elif self._is_done():
            self._settle()
        else:
            self._watch(self._waiting.watcher())

    def remove_done_callback(self, fn: Callable[[Any], object]) -> int:
        """Do not call `fn`; how often it would have been called. With this ``asyncio.wait`` takes the future too."""
        with self._lock:
            kept = [c for c in self._callbacks or () if c[0] != fn]
            removed = len(self._callbacks or ()) - len(kept)
            self._callbacks = kept or None
        return removed

    def __copy__(self) -> TensorFuture[T]:
        return self  # two would free one value twice

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a future is of its process: it can be neither pickled nor copied.\n  Write:  await future")

    def __await__(self) -> Generator[Any, Any, T]:
        if not self._settled:
            # Done or not: this is also where a task that has issued too much pauses.
            suspended = modes.suspend()
            try:
                yield from self._waiting.wait_loop(self._is_done).__await__()
            finally:
                modes.resume(suspended)
        return self._outcome()

    def __repr__(self) -> str:
        if not self._settled:
            return f"<{type(self).__name__} {'ready' if self._is_done() else 'pending'}>"
        shown = "a value" if self._error is None else type(self._error).__name__
        return f"<{type(self).__name__} holding {shown}>"

    def __del__(self) -> None:
        # __init__ may not have come so far.
        if getattr(self, "_resolve", None) is not None:
            self._on_abandon()
        elif not self._told and type(getattr(self, "_error", None)) not in (type(None), PoolError):
            # A pool that was shut down, as at the end of a program, takes along what nobody asked for: no news.
            _log.error("a future was dropped whose error nobody asked for", exc_info=self._error)

    def _remember(self, fn: Callable[[Any], object], loop: asyncio.AbstractEventLoop | None = None) -> bool:
        """Whether `fn` will be called when the value is fetched, in `loop` while it runs; ``False``: it has been."""
        with self._lock:
            if self._settled:
                return False
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append((fn, loop))
            return True

    def _watch(self, watcher: Watcher) -> None:
        """Have `watcher` fetch the value when it is there. Each loop that asked does so: any of them may end."""
        with self._lock:
            if self._settled:
                return
            if self._watchers is None:
                self._watchers = weakref.WeakSet()
            elif watcher in self._watchers:
                return
            self._watchers.add(watcher)
        watcher.watch(self.is_ready, self._settle)

    def _wait_until_done(self, timeout: float | None) -> None:
        if not self._settled and not self._waiting.wait_thread(self._is_done, timeout):
            what = self.waited_for()
            raise TimeoutError(
                f"the value was not there after {timeout} s; it is still on its way, ask again"
                + (f". Waited for: {what}" if what else "")
            )

    def waited_for(self) -> str:
        """What is on its way, in words; "" where that is not known. Whoever resolves it may know."""
        known = getattr(getattr(self._resolve, "__self__", None), "waited_for", None)
        return "" if known is None else str(known())

    def _outcome(self) -> T:
        if not self._settled:
            self._settle()
        if self._error is not None:
            self._told = True
            # Each raise starts from the same traceback: it would grow by every place that asked.
            raise self._error.with_traceback(self._traceback)
        return self._value  # type: ignore[return-value]

    def _settle(self) -> None:
        """Fetch the value if nobody has, then call back."""
        with self._lock:
            if self._settled:
                return
            assert self._resolve is not None
            try:
                self._value = self._resolve()
            except Exception as error:  # a KeyboardInterrupt is the caller's, not the value's
                self._error, self._traceback = error, error.__traceback__
            self._resolve = None
            self._settled = True
            # What they refer to (tickets, blocks, proxies) is not needed any longer.
            self._is_done, self._on_abandon = _yes, _nothing
            callbacks, self._callbacks = self._callbacks, None
        for fn, loop in callbacks or ():
            if loop is not None and loop is not asyncio._get_running_loop() and loop.is_running():
                with contextlib.suppress(RuntimeError):  # it has just been closed
                    loop.call_soon_threadsafe(self._call, fn)
                    continue
            self._call(fn)

    def _call(self, fn: Callable[[Any], object]) -> None:
        try:
            fn(self)
        except Exception:
            _log.exception("a callback of %r raised", self)

    # concurrent.futures.wait and as_completed look at these three. While they hold the condition, the state must not
    # change: so it becomes FINISHED only under the condition, where those who wait are told, once.

    _finished = False

    @property
    def _state(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "FINISHED" if self._finished else "RUNNING"

    @property
    def _condition(self) -> threading.Condition:  # pyright: ignore[reportIncompatibleVariableOverride]
        mine = threading.Condition()
        condition = self.__dict__.setdefault("condition", mine)
        if condition is mine:
            self._remember(TensorFuture._tell_waiters)
        if not self._finished and self.is_ready():
            self._settle()
            self._tell_waiters()
        return condition

    @property
    def _waiters(self) -> list[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.__dict__.setdefault("waiters", _Waiters(self))

    def _tell_waiters(self) -> None:
        with self.__dict__["condition"]:
            if not self._finished:
                self._finished = True
                for waiter in self._waiters:
                    (waiter.add_result if self._error is None else waiter.add_exception)(self)


class _Waiters(list[Any]):
    """Who waits for a future in :mod:`concurrent.futures`; whoever is put here is about to block its thread."""

    def __init__(self, future: TensorFuture[Any]) -> None:
        super().__init__()
        self._future = weakref.ref(future)

    def append(self, waiter: Any) -> None:
        future = self._future()
        if future is not None and not future._finished:
            future._waiting.on_block()
            # Not the loop that runs here: it is about to be stopped.
            future._watch(future._waiting.helper)
        super().append(waiter)


def _yes() -> bool:
    return True


class VoidFutureCollect(TensorFuture[None]):
    """Several futures as one: done when all are, without a value; raises the first error among them, in their order.

    Args:
        futures: what to wait for, in any number.
        waiting: where to wait; needed only where `futures` may be empty.
    """

    def __init__(self, futures: Iterable[TensorFuture[Any]], waiting: Waiting | None = None) -> None:
        self.futures = tuple(futures)
        if waiting is None:
            if not self.futures:
                raise ValueError("VoidFutureCollect of no futures needs waiting=")
            waiting = self.futures[0]._waiting
        left = len(self.futures)

        def is_done() -> bool:
            # Those found done are not looked at again. Threads may race here: at worst one looks twice.
            nonlocal left
            n = left
            while n and self.futures[n - 1].is_ready():
                n -= 1
            left = n
            return n == 0

        super().__init__(is_done, self._collect, waiting)

    def waited_for(self) -> str:
        """The first of those that are on their way, and how many there are."""
        left = [future for future in self.futures if not future.is_ready()]
        if not left:
            return ""
        return f"{len(left)} of {len(self.futures)} values, the first: {left[0].waited_for()}"

    def _collect(self) -> None:
        errors = [error for future in self.futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
