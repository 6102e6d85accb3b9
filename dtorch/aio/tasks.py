"""Tasks that are nobody's children; anyio has none. Whoever starts one sees to its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["call_later_here", "spawn"]


def _trio() -> Any:
    """trio, where the calling task is one of its own."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_task() else None


def spawn(run: Callable[[], Coroutine[Any, Any, None]], name: str, context: contextvars.Context) -> object:
    """Start a task in the running loop, in `context`. `run` must raise nothing; keep what this returns until it ends.

    It is cancelled when the loop ends.
    """
    if trio := _trio():
        return trio.lowlevel.spawn_system_task(run, name=name, context=context)
    return asyncio.get_running_loop().create_task(run(), name=name, context=context)


def call_later_here() -> Callable[[Callable[[], object]], None]:
    """A function, for any thread and for ``__del__``, that has the loop that runs now call something soon.

    It does nothing once that loop has ended.
    """
    if trio := _trio():
        schedule, over = trio.lowlevel.current_trio_token().run_sync_soon, trio.RunFinishedError
    else:
        schedule, over = asyncio.get_running_loop().call_soon_threadsafe, RuntimeError

    def call(function: Callable[[], object]) -> None:
        with contextlib.suppress(over):
            schedule(function)

    return call
