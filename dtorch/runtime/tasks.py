"""Tasks that are nobody's children; anyio has none. Whoever starts one sees to its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["call_later_here", "is_cancellation", "spawn"]


def _trio() -> Any:
    """trio, where the calling task is one of its own."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_task() else None


def spawn(
    run: Callable[[], Coroutine[Any, Any, None]],
    name: str,
    context: contextvars.Context,
    on_end: Callable[[], object],
) -> object:
    """Start a task in the running loop, in `context`. It is cancelled when the loop ends.

    Args:
        run: what it does; must raise nothing.
        on_end: called when it has ended, even if it was cancelled before it began.

    Returns:
        Something to keep until it has ended.
    """
    if trio := _trio():

        async def runs() -> None:
            try:
                await run()
            finally:
                on_end()

        return trio.lowlevel.spawn_system_task(runs, name=name, context=context)
    task = asyncio.get_running_loop().create_task(run(), name=name, context=context)
    task.add_done_callback(lambda _: on_end())
    return task


def is_cancellation(error: BaseException) -> bool:
    """Whether `error`, caught in the calling task, is that task's cancellation, and not a CancelledError of others:
    of a future that it awaited, or one that was simply raised."""
    if trio := _trio():
        return isinstance(error, trio.Cancelled)
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


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
