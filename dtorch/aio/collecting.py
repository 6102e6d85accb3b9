"""Several values at once: all are asked for before any is waited for."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable
from typing import Any

import anyio

from .._tensor import Tensor
from ..future import TensorFuture
from ..runtime import modes, moves
from ..runtime.tasks import is_cancellation

__all__ = ["as_completed", "gather"]

_GLANCE = 16


async def gather(*things: Any, return_exceptions: bool = False) -> list[Any]:
    """The values of tensors, futures and awaitables, in their order.

    Tensors and futures cost one wait together, however many they are. Coroutines and other awaitables run at once,
    each in a task of its own, and none of these outlives this call.

    Args:
        things: dtorch tensors, their futures, coroutines and awaitables, mixed as you like. What is anything else, a
            plain tensor or a number, say, is its own value.
        return_exceptions: errors stand among the values instead of being raised, ``CancelledError`` included where
            an awaitable was cancelled by itself or by others.

    Raises:
        TypeError: one of `things` is a generator.
        BaseException: the error of the first that fails. Awaitables still running are cancelled then.
    """
    for i, thing in enumerate(things):
        if isinstance(thing, Generator) and not _awaitable(thing):
            raise TypeError(
                f"gather() takes values one by one, and number {i} is a generator of some.\n"
                "  Write:  await dtorch.aio.gather(*generator)"
            )
    values: list[Any] = [_asked(thing) for thing in things]
    futures = [v for v in values if isinstance(v, TensorFuture)]
    running = [i for i, v in enumerate(values) if not isinstance(v, TensorFuture) and _awaitable(v)]
    if not running:
        await _all(futures, return_exceptions)
    else:
        await _run(values, futures, running, return_exceptions)
    return [_value(v, return_exceptions) if isinstance(v, TensorFuture) else v for v in values]


def as_completed(*things: Any) -> AsyncIterator[tuple[int, Any]]:
    """Iterate over ``(number, value)`` of tensors and futures as they arrive; `number` counts the arguments.

        async for i, loss in dtorch.aio.as_completed(*losses): ...

    One that failed raises from its turn; whoever catches that may go on with the others by iterating on.

    A tensor is asked for here, and executors run what was issued in its order: one that was made before long work
    arrives after that work. Where it is to come first, ask for it before: ``t.to_torch_async()`` gives a future.

    Args:
        things: dtorch tensors and their futures, or one iterable of these. A coroutine is no such thing: start tasks.

    Raises:
        TypeError: one of `things` is something else.
        RuntimeError: two tasks wait for one iterator at once; from the turn of the second.
    """
    if len(things) == 1 and not isinstance(things[0], (Tensor, TensorFuture)) and isinstance(things[0], Iterable):
        things = tuple(things[0])
    for i, thing in enumerate(things):
        if not isinstance(thing, (Tensor, TensorFuture)):
            raise TypeError(
                f"as_completed() takes dtorch tensors and futures; number {i} is a {type(thing).__name__}.\n"
                "  Write:  asyncio.as_completed(…), or a task group, for coroutines"
            )
    return _AsCompleted([_asked(thing) for thing in things])


def _asked(thing: Any) -> Any:
    """A future of `thing`, if it is a tensor of dtorch's."""
    return moves.fetch(thing) if isinstance(thing, Tensor) else thing


def _awaitable(thing: Any) -> bool:
    return inspect.isawaitable(thing)


def _value(future: TensorFuture[Any], return_exceptions: bool) -> Any:
    error = future.exception(0) if return_exceptions else None
    return future.get(0) if error is None else error


async def _all(futures: list[TensorFuture[Any]], return_exceptions: bool) -> None:
    """Wait until all are there, or one has failed and errors are to be raised; in one wait."""
    waiting = deque(futures)
    failed: list[TensorFuture[Any]] = []

    def is_done() -> bool:
        # In their order, which is the executors' as well; and a few of the others, for one that has failed meanwhile.
        while waiting and waiting[0].is_ready():
            seen(waiting.popleft())
        for _ in range(min(_GLANCE, len(waiting))):
            if waiting[0].is_ready():
                seen(waiting.popleft())
            else:
                waiting.rotate(-1)
        return not waiting or bool(failed)

    def seen(future: TensorFuture[Any]) -> None:
        if not return_exceptions and future.exception() is not None:
            failed.append(future)

    if futures:
        await TensorFuture(is_done, lambda: None, futures[0]._waiting)
    if failed:
        failed[0].get(0)


async def _run(
    values: list[Any], futures: list[TensorFuture[Any]], running: list[int], return_exceptions: bool
) -> None:
    """Await the awaitables among `values` in tasks, in place, and `futures` beside them."""
    failure: list[BaseException] = []

    async def one(places: list[int]) -> None:
        try:
            value = await modes.carry(values[places[0]], wanted)
        except BaseException as error:
            group_of_such = isinstance(error, BaseExceptionGroup) and not isinstance(error, Exception)
            if is_cancellation(error) or group_of_such or isinstance(error, GeneratorExit):
                raise  # of this task, not of what it awaits
            value = error
            if not return_exceptions or not isinstance(error, (Exception, asyncio.CancelledError)):
                failure.append(error)
                group.cancel_scope.cancel()
        for i in places:
            values[i] = value

    async def rest() -> None:
        try:
            await _all(futures, return_exceptions)
        except Exception as error:
            failure.append(error)
            group.cancel_scope.cancel()

    # One that is given twice is awaited once.
    places: dict[int, list[int]] = {}
    for i in running:
        places.setdefault(id(values[i]), []).append(i)
    # Each awaitable runs under the modes of the caller, as it would if it were awaited right here.
    wanted = modes.current()
    suspended = modes.suspend()
    try:
        async with anyio.create_task_group() as group:
            for where in places.values():
                group.start_soon(one, where)
            group.start_soon(rest)
    finally:
        modes.resume(suspended)
    if failure:
        raise failure[0]


class _AsCompleted:
    """The iterator of :func:`as_completed`."""

    def __init__(self, futures: list[TensorFuture[Any]]) -> None:
        self._left = dict(enumerate(futures))
        self._ready: list[int] = []
        self._asked = False  # whether a task is in __anext__

    def __aiter__(self) -> _AsCompleted:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        if self._asked:
            raise RuntimeError(
                "this as_completed() is waited for by another task already; one iterator serves one task.\n"
                "  Write:  async for i, value in dtorch.aio.as_completed(*futures): …  in each task"
            )
        if not self._ready:
            if not self._left:
                raise StopAsyncIteration
            first = next(iter(self._left.values()))
            self._asked = True
            try:
                await TensorFuture(self._look, lambda: None, first._waiting)
            finally:
                self._asked = False
        i = self._ready.pop(0)
        return i, self._left.pop(i).get(0)

    def _look(self) -> bool:
        self._ready = [i for i, future in self._left.items() if future.is_ready()]
        return bool(self._ready)
