"""Waiting for a fresh pool after a death, and seeing to it that there is one.

With ``on_executor_death="restart"`` the next use after a death starts a fresh pool. Inside :func:`dtorch.aio.open` and
``lifespan`` nobody has to come first: a :class:`Keeper` does.
"""

from __future__ import annotations

import contextvars
import logging

import anyio
import anyio.to_thread

from ..errors import PoolError
from ..runtime import client as _client
from ..runtime import config, modes
from ..runtime.tasks import call_later_here, spawn

__all__ = ["Keeper", "recovered"]

log = logging.getLogger("dtorch")


async def recovered() -> None:
    """Wait until the pool can be used: until on_restart hooks have run, if they do or must.

    Where executors have died and ``on_executor_death="restart"`` is in force, it has a fresh pool started. Returns at
    once where all is well, where nothing was started yet, and in a hook.

    Raises:
        PoolError: the pool has ended and stays so, or a hook has failed.
    """
    suspended = modes.suspend()
    try:
        await _recovered()
    finally:
        modes.resume(suspended)


async def _recovered() -> None:
    while (found := _client.current_client()) is not None:
        held = found.restoration
        if held is not None and held.is_mine:
            return
        if held is None:
            if not found.is_dead:
                return
            if not found.may_be_replaced():
                found.check()
                return
            # Shared memory is made, and a process started: not for the loop.
            await anyio.to_thread.run_sync(_client.replace, found, limiter=anyio.CapacityLimiter(1))
            continue
        held.refuse()
        held.run_in_loop()
        over = anyio.Event()
        later = call_later_here()
        held.when_over(lambda over=over, later=later: later(over.set))
        await over.wait()


class Keeper:
    """Has a fresh pool take a dead one's place, promptly, for as long as a session is open."""

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None
        self._ended: anyio.Event | None = None
        self._task: object = None

    def start(self) -> None:
        """Begin, in the running loop, unless deaths are not to be followed by a restart."""
        if config.current().on_executor_death != "restart":
            return
        self._scope, ended = anyio.CancelScope(), anyio.Event()
        self._ended = ended
        self._task = spawn(self._run, "dtorch-keeper", contextvars.Context(), ended.set)

    async def stop(self) -> None:
        """End, and wait for that."""
        if self._scope is not None and self._ended is not None:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    async def _run(self) -> None:
        assert self._scope is not None
        with self._scope:
            while True:
                found = _client.current_client()
                if found is None:
                    await anyio.sleep(1)  # shut down by hand; whoever uses it next starts it
                    continue
                await found.pool.wait_for_death()
                try:
                    await recovered()
                    continue
                except PoolError as error:
                    log.error("the pool is not restarted: %s", error)
                except Exception:
                    log.exception("the pool is not restarted")
                while _client.current_client() is found:  # noqa: ASYNC110
                    await anyio.sleep(1)  # until someone restarts it by hand
