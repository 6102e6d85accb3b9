"""The lifetime of the executors as a block of code, and what holds inside it.

    async with dtorch.aio.open(mesh=mesh):
        ...                             # executors run, the loop was not held up while they started
    # no process is left, and nobody waits

Scripts need none of this: a pool starts on its first use and ends with the process. A server, or a program that is to
leave nothing behind while it goes on, says where its use begins and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import Token
from types import TracebackType
from typing import Any

import anyio
import anyio.to_thread

from .. import graph
from ..errors import ConfigError, PoolError
from ..executor.pool import stop_early
from ..mesh import DeviceMesh, as_mesh
from ..runtime import blocking, modes, waiting
from ..runtime import client as _client
from .batching import close_queues
from .pressure import Pressure, backlog
from .recovery import Keeper, recovered

__all__ = ["Session", "lifespan", "open", "strict"]

log = logging.getLogger("dtorch")

# Seconds the end of a pool may take. Its own steps have shorter limits; this is for what nobody thought of.
_CLOSING = 30.0

_lock = threading.Lock()
# How many sessions are open in this process; the pool in use ends with the last.
_sessions = 0


class _Holding:
    """Values that hold in the whole process while sessions are open, which may end in any order.

    The value put up last holds; when none is left, the one there was before the first is back.
    """

    def __init__(self) -> None:
        # Of each attribute: what it was before, then what the open sessions have put up, each in a cell of its own.
        self._values: dict[tuple[Any, str], list[list[Any]]] = {}

    def put(self, owner: Any, name: str, value: Any) -> Callable[[], None]:
        """Set the attribute `name` of `owner`; what takes that back."""
        cell = [value]
        with _lock:
            self._values.setdefault((owner, name), [[getattr(owner, name)]]).append(cell)
            setattr(owner, name, value)

        def take_back() -> None:
            with _lock:
                cells = self._values[owner, name]
                last = cells[-1] is cell
                cells[:] = [c for c in cells if c is not cell]
                if last:
                    setattr(owner, name, cells[-1][0])
                if len(cells) == 1:
                    del self._values[owner, name]

        return take_back


_holding = _Holding()


def _forked() -> None:
    """In a forked child no session is open: those of the parent have the parent's pool."""
    global _lock, _sessions
    _lock, _sessions = threading.Lock(), 0


os.register_at_fork(after_in_child=_forked)


class Session:
    """One open use of the executors; what :func:`open` returns.

    Sessions may be nested and may overlap, in one loop or in several: all share the pool, and the last to end ends
    it. A session that is left without an error first waits until all that was issued has run; one that is left by an
    exception or by cancellation ends at once.

    Attributes:
        mesh: the default mesh inside.
    """

    def __init__(self, mesh: DeviceMesh | None, in_flight: int | None, strict: bool, everywhere: bool) -> None:
        self._given, self._in_flight, self._strict, self._everywhere = mesh, in_flight, strict, everywhere
        self._undo: contextlib.ExitStack | None = None
        self._keeper = Keeper()
        self.mesh = mesh or graph.default_device_mesh()

    @property
    def pressure(self) -> Pressure:
        """How much work is in flight."""
        return backlog()

    async def __aenter__(self) -> Session:
        global _sessions
        if self._undo is not None:
            raise RuntimeError("this session is open already; dtorch.aio.open() makes another")
        with _lock:
            _sessions += 1
        try:
            await self._start()
        except BaseException:
            await self._leave()
            raise
        self._undo = contextlib.ExitStack()
        self._set()
        self._keeper.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: Any) -> None:
        undo, self._undo = self._undo, None
        assert undo is not None
        try:
            await self._keeper.stop()
            if kind is None:
                with contextlib.suppress(PoolError):  # it has ended already: there is nothing to wait for
                    await graph.Graph.sync_async()
        finally:
            undo.close()
            await self._leave()

    async def _start(self) -> None:
        """Start the executors of the mesh, and wait for them."""
        suspended = modes.suspend()
        try:
            await recovered()
            # Shared memory is made in this step, and that a pool has ended is found out: neither is for the loop.
            client = await anyio.to_thread.run_sync(_client.client)
            _, hosts, _ = await anyio.to_thread.run_sync(client.mesh, self.mesh)
            await anyio.to_thread.run_sync(_load)  # the executors start meanwhile
            cpus = [h for h in hosts if h < client.accelerators]
            await client.pool.ensure_async(max(cpus, default=-1) + 1)
        finally:
            modes.resume(suspended)

    def _set(self) -> None:
        """Put up what holds inside."""
        assert self._undo is not None
        enter = self._undo.callback
        if self._everywhere:
            default = graph.Graph.default_graph()
            enter(_holding.put(default, "_mesh", self.mesh))
            for ambient, value in ((waiting.in_flight, self._in_flight), (blocking.strict, self._strict or None)):
                if value is not None:
                    enter(_holding.put(ambient, "default", value))
            return
        if self._given is not None:
            enter(graph.reset_device_mesh, graph.set_device_mesh(self._given))
        if self._in_flight is not None:
            enter(waiting.in_flight.reset, waiting.in_flight.set(self._in_flight))
        if self._strict:
            enter(blocking.strict.reset, blocking.strict.set(True))

    async def _leave(self) -> None:
        """End this session, and the pool with it if it was the last."""
        global _sessions
        with _lock:
            _sessions -= 1
            if _sessions:
                return
            # From here on a new session gets a pool of its own, however long this one takes to end.
            client = _client.detach()

        closed = threading.Event()

        def close() -> None:
            try:
                stop_early()
                if client is not None:
                    client.close()
            except Exception:
                log.exception("the executors did not end as they should")
            finally:
                closed.set()

        async def ended() -> None:
            await anyio.to_thread.run_sync(closed.wait, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))

        suspended = modes.suspend()
        try:
            cancelled = await _uncancelled(close_queues)
            threading.Thread(target=close, name="dtorch-close", daemon=True).start()
            cancelled = await _uncancelled(ended) or cancelled
        finally:
            modes.resume(suspended)
        if not closed.is_set():
            log.error("the executors have not ended within %g s; they end with this process at the latest", _CLOSING)
        if cancelled is not None:
            raise cancelled


def _load() -> None:
    """Import what the first operator would, for a second, in the loop: torch looks whether a tensor is its DTensor."""
    # Thousands of objects that stay: a collection amid them would hold up all threads for a good part of a second.
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch.distributed.tensor")
        importlib.import_module("dtorch.factories")
    finally:
        if collects:
            gc.enable()


async def _uncancelled(step: Callable[[], Awaitable[None]]) -> asyncio.CancelledError | None:
    """Await ``step()`` to its end, for up to `_CLOSING` seconds. A task's own cancel(), which no scope shields from,
    has it awaited again; what it was cancelled with is for the caller to raise.
    """
    cancelled = None
    deadline = anyio.current_time() + _CLOSING
    while True:
        try:
            with anyio.CancelScope(deadline=deadline, shield=True):
                await step()
            return cancelled
        except asyncio.CancelledError as error:
            cancelled = error


def open(
    *, mesh: DeviceMesh | str | None = None, in_flight: int | None = None, strict: bool = False
) -> contextlib.AbstractAsyncContextManager[Session]:
    """Executors for the length of an ``async with``; they start without holding up the loop.

    Leaving it leaves no process and no pending wait, however it is left: by its end, which first waits for what was
    issued, by an exception, or by cancellation. Values fetched stay; tensors are lost with the executors, those that
    were made before it was entered as well. Whoever still waits for a value then gets a ``PoolError``.

    With ``on_executor_death="restart"`` a fresh pool takes the place of one whose executors die meanwhile, at once, and
    the hooks of :func:`dtorch.on_restart` run in this loop.

    Args:
        mesh: the default mesh inside, whose executors are started; the default is the default mesh there is.
        in_flight: commands that may be in flight before awaits inside pause; the default is ``run_ahead_soft``.
        strict: a call that would stop the event loop is an error inside, see :func:`strict`.

    These three hold in the task that enters it and in all that are started inside; other tasks never see them.

    Raises:
        ConfigError: `in_flight` is less than 1, or `strict` is no bool.
    """
    return _session(mesh, in_flight, strict, everywhere=False)


def lifespan(
    *, mesh: DeviceMesh | str | None = None, in_flight: int | None = None, strict: bool = False
) -> Callable[[Any], contextlib.AbstractAsyncContextManager[None]]:
    """As :func:`open`, for the ``lifespan=`` of FastAPI and Starlette: executors for the lifetime of an application.

        app = FastAPI(lifespan=dtorch.aio.lifespan(mesh=mesh))

    Requests are no children of the task that runs a lifespan, so `mesh`, `in_flight` and `strict` hold in the whole
    process meanwhile, wherever nothing else was set. Lifespans may overlap and end in any order: of those open, the
    one that was entered last counts.
    """

    @contextlib.asynccontextmanager
    async def run(app: Any) -> AsyncIterator[None]:
        async with _session(mesh, in_flight, strict, everywhere=True):
            yield

    return run


def _session(mesh: DeviceMesh | str | None, in_flight: int | None, strict: bool, everywhere: bool) -> Session:
    if in_flight is not None and (type(in_flight) is not int or in_flight < 1):
        raise ConfigError(f"in_flight={in_flight!r}: expected a whole number of at least 1")
    _check_bool("strict", strict)
    return Session(None if mesh is None else as_mesh(mesh), in_flight, strict, everywhere)


def _check_bool(name: str, value: object) -> None:
    if type(value) is not bool:
        raise ConfigError(f"{name}={value!r}: expected True or False")


class strict:  # a function to its callers, who may leave out the `with`
    """From here on in this task, and in tasks started from it, a call that would stop the loop raises.

    ``dtorch.aio.strict()`` alone holds until the task ends; ``with dtorch.aio.strict():`` until the end of the block.
    The error (``BlockingCallError``) names the awaitable form to write.

    Args:
        enabled: ``False`` allows such calls again; they warn, once per place.

    Raises:
        ConfigError: `enabled` is no bool.
    """

    def __init__(self, enabled: bool = True) -> None:
        _check_bool("enabled", enabled)
        self._token: Token[bool] = blocking.strict.set(enabled)

    def __enter__(self) -> strict:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        blocking.strict.reset(self._token)
