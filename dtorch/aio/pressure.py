"""How much work is in flight, and waiting until there is room for more.

A coroutine that issues operators never waits for them, so it can run ahead of the executors without end. Every dtorch
await pauses while more commands are in flight than the bound: ``open(in_flight=…)``, else the pool's
``run_ahead_soft``. A coroutine that awaits nothing else awaits :func:`ready_to_send`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import anyio.lowlevel

from ..runtime import modes, waiting
from ..runtime.client import client, current_client

__all__ = ["Pressure", "backlog", "in_flight", "ready_to_send"]

# Seconds for which a coroutine that is never held up keeps the loop for itself.
_TURN = 0.001


class _Turn(threading.local):
    ends = 0.0


_turn = _Turn()


@dataclass(frozen=True, slots=True)
class Pressure:
    """How much work is in flight.

    Attributes:
        in_flight: commands issued that the slowest executor has still to run.
        bound: how many there may be before awaits of this context pause.
        values: values asked for that have not arrived.
        pausing: how many awaits pause now because of the bound.
        pauses: how many have, since the pool started.
    """

    in_flight: int
    bound: int
    values: int
    pausing: int
    pauses: int


def backlog() -> Pressure:
    """How much work is in flight now; all zeros where no pool runs."""
    c = current_client()
    bound = waiting.in_flight.get()
    if c is None:
        return Pressure(0, bound or 0, 0, 0, 0)
    bound = c.config.run_ahead_soft if bound is None else min(bound, c.config.run_ahead_soft)
    return Pressure(max(0, c.writer.behind()), bound, c.slots.in_use(), c.waiting.pausing, c.waiting.pauses)


def in_flight() -> int:
    """Commands issued that the slowest executor has still to run."""
    return backlog().in_flight


async def ready_to_send() -> None:
    """Wait until fewer commands are in flight than the bound allows; at once where they are.

    A coroutine that calls it between operators also lets the other tasks of its loop run at least every millisecond.

    Raises:
        PoolError: the pool has ended.
    """
    c = client()
    suspended = None
    try:
        if c.over_bound():
            suspended = modes.suspend()
            await c.waiting.pause()
        elif time.monotonic() >= _turn.ends:
            suspended = modes.suspend()
            await anyio.lowlevel.checkpoint()
            _turn.ends = time.monotonic() + _TURN
    finally:
        if suspended is not None:
            modes.resume(suspended)
    c.check()
