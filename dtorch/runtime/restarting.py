"""From a pool's death to the next use: the program's hooks, which set its state anew on a fresh pool.

A fresh pool that takes a dead one's place has nothing of the program's: its tensors are lost. Where hooks were
registered, the pool is *held* by a :class:`Restoration` until they have run: one thread or task runs them, and whoever
else comes waits for it (a thread), or is told to (a coroutine, whose call cannot wait without stopping its loop).

Hooks run apart from whoever happened to come first: in a context and, unless they are coroutines of a running loop, in
a thread of their own. So they see neither that caller's grad mode nor its strictness, nor do they run below autograd
where the caller was.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any

import anyio
import anyio.to_thread

from ..errors import PoolError, PoolRestartingError
from .tasks import spawn

__all__ = ["Budget", "RestartHook", "Restoration", "hooks", "on_restart", "restoring"]

log = logging.getLogger("dtorch")

_RECHECK = 0.2  # seconds that a thread waits before it looks for Ctrl-C

_registered: list[RestartHook] = []
# Set for the code of hooks: which restoration it is part of.
restoring: ContextVar[Restoration | None] = ContextVar("dtorch_restoring", default=None)


class RestartHook:
    """A registered hook; what :func:`on_restart` returns. Calling it calls the hook.

    Attributes:
        hook: the function.
    """

    def __init__(self, hook: Callable[[], Any]) -> None:
        self.hook = hook

    def __call__(self) -> Any:
        return self.hook()

    def remove(self) -> None:
        """Run it no more; safe to call again."""
        if self in _registered:
            _registered.remove(self)

    def __repr__(self) -> str:
        return f"<dtorch.on_restart({getattr(self.hook, '__qualname__', self.hook)!s})>"


def on_restart(hook: Callable[[], Any]) -> RestartHook:
    """Have `hook` set the program's state anew whenever a fresh pool takes another's place. Also a decorator.

        @dtorch.on_restart
        def reload():
            model.load_state_dict(torch.load("model.pt"))

    That is after ``dtorch.restart()``, and after a death under ``on_executor_death="restart"``; not after
    ``dtorch.shutdown()``. Hooks run in the order in which they were registered, before any other use of the fresh pool
    gets through. Calls from other threads wait meanwhile; calls in a running event loop raise ``PoolRestartingError``,
    and ``await dtorch.aio.recovered()`` waits.

    Tensors of the old pool are lost. A hook fills them again by writing them whole (``load_state_dict``, ``copy_``,
    ``reset_parameters``; an optimizer's ``load_state_dict``), or makes new ones. What a state dict does not hold
    (buffers registered with ``persistent=False``, gradients) has to be set as well.

    Args:
        hook: a function or an ``async def`` without arguments. In a running loop the latter runs in that loop, and a
            plain function in a thread, so that the loop goes on; elsewhere both run in a thread of their own. Threads
            that a hook starts are not known to be part of it, and wait for its end, unless they are given its context
            (``asyncio.to_thread`` and ``anyio.to_thread`` do that).

    A hook that raises leaves the pool unusable: every use raises ``PoolError`` from that error until the next
    ``dtorch.restart()``. Where executors died meanwhile, another fresh pool is started and the hooks run again.

    Raises:
        TypeError: `hook` cannot be called.
    """
    if not callable(hook):
        raise TypeError(f"on_restart({hook!r}): expected a function or an async def without arguments")
    handle = RestartHook(hook)
    _registered.append(handle)
    return handle


def hooks() -> tuple[RestartHook, ...]:
    """Those registered now, oldest first."""
    return tuple(_registered)


class Restoration:
    """The run of the hooks on one fresh pool.

    Args:
        ended: called with None or the error of a hook when they have run; before anyone who waits goes on.

    Attributes:
        error: why the pool cannot be used: a hook raised it.
    """

    def __init__(self, ended: Callable[[Restoration, BaseException | None], object]) -> None:
        self.error: BaseException | None = None
        self._ended = ended
        self._hooks = hooks()
        self._condition = threading.Condition()
        self._running = False
        self._listeners: list[Callable[[], object]] = []
        self._kept: object = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling code is part of a hook of this run."""
        return restoring.get() is self

    @property
    def is_running(self) -> bool:
        """Whether hooks run now."""
        return self._running

    def refuse(self) -> None:
        """Raise where a hook has failed."""
        if self.error is not None:
            raise PoolError(
                f"the executors were started anew, and an on_restart hook failed: {type(self.error).__name__}: "
                f"{self.error}\nMend it, then dtorch.restart() tries again"
            ) from self.error

    def run_or_wait(self) -> None:
        """Have the hooks run, unless they do, and wait until that has ended, however it did. For threads."""
        if self._claim():
            # A program that ends does not wait for it: its uses of the pool raise then.
            threading.Thread(target=self._run_in_thread, name="dtorch-restart", daemon=True).start()
        with self._condition:
            while self._running:
                # Not for ever at once: a signal that comes just before a lock is waited for is seen only after.
                self._condition.wait(_RECHECK)

    def run_in_loop(self) -> None:
        """Have the hooks run in a task of the running loop, unless they run already; does not wait."""
        if not self._claim():
            return
        context = Context()
        context.run(restoring.set, self)
        try:
            self._kept = spawn(self._run_in_task, "dtorch-restart", context, self._release)
        except BaseException:
            self._release()
            raise

    def when_over(self, call: Callable[[], object]) -> None:
        """Call `call`, in any thread, when the hooks are not running any longer; at once if they are not now."""
        with self._condition:
            if self._running:
                self._listeners.append(call)
                return
        call()

    def refuse_in_loop(self) -> None:
        """Raise what a call in an event loop gets that would have to wait here."""
        raise PoolRestartingError(
            "the executors were started anew after a death, and on_restart hooks still set the program's state: a call "
            "in a running event loop cannot wait for them.\n  Write:  await dtorch.aio.recovered()"
        )

    def _claim(self) -> bool:
        with self._condition:
            if self._running:
                return False
            self._running = True
            return True

    def _release(self) -> None:
        """The run is over; it may not have come to its end, and whoever waits then sees to another."""
        with self._condition:
            self._running = False
            listeners, self._listeners = self._listeners, []
            self._condition.notify_all()
        for call in listeners:
            call()

    def _run_in_thread(self) -> None:
        def run() -> None:
            restoring.set(self)
            for hook in self._hooks:
                result = hook()
                if inspect.isawaitable(result):
                    asyncio.run(_awaited(result))

        error: BaseException | None = None
        try:
            Context().run(run)
        except BaseException as e:
            error = e
        try:
            self._ended(self, error)
        finally:
            self._release()

    async def _run_in_task(self) -> None:
        error: Exception | None = None
        try:
            limiter = anyio.CapacityLimiter(1)  # the usual threads may all be waiting for this
            for hook in self._hooks:
                if inspect.iscoroutinefunction(hook.hook):
                    await hook()
                    continue
                result = await anyio.to_thread.run_sync(hook, limiter=limiter, abandon_on_cancel=True)
                if inspect.isawaitable(result):
                    await result
        except Exception as e:
            error = e
        self._ended(self, error)


async def _awaited(awaitable: Any) -> None:
    await awaitable


class Budget:
    """How often fresh pools may take the place of dead ones."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def take(self, most: int, window: float) -> bool:
        """Whether there may be one more, `most` in `window` seconds; it is counted then."""
        now = time.monotonic()
        while self._times and now - self._times[0] > window:
            self._times.popleft()
        if len(self._times) >= most:
            return False
        self._times.append(now)
        return True

    def clear(self) -> None:
        """Count anew."""
        self._times.clear()
