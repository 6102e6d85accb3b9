"""Batches on their way to the executors while the one before them is computed with.

A task pulls from the loader, and a worker thread loads and uploads, so that the loop is never held up. The task
belongs to the iterator that ``async for`` made: when the loop over it is left, by ``break``, an error or a
cancellation, the iterator is dropped, and its task ends with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import torch
from torch.utils import _pytree as pytree

from ..errors import PoolError
from ..factories import distribute_tensor
from ..graph import default_device_mesh, set_device_mesh
from ..mesh import DeviceMesh, as_mesh
from ..placement import Placement
from ..runtime import modes
from ..runtime.client import current_client
from ..runtime.tasks import call_later_here, is_cancellation, spawn
from .pressure import ready_to_send

__all__ = ["Prefetch", "prefetch"]

_log = logging.getLogger("dtorch")

_HERE = 1 << 18  # bytes that are uploaded faster than a thread is asked to
_END: Any = object()

# Loader -> what loads from it; those that are no key are left out.
_sources: weakref.WeakKeyDictionary[Any, weakref.WeakSet[_Source]] = weakref.WeakKeyDictionary()
_sources_lock = threading.Lock()


class Prefetch:
    """The batches of a loader, uploaded ahead; what :func:`prefetch` makes.

    ``async for`` over it begins the loader anew each time. ``async with`` gives an iterator that has ended, its thread
    included, when the block is left.
    """

    def __init__(self, loader: Any, mesh: DeviceMesh | str | None, placements: Any, depth: int) -> None:
        if type(depth) is not int or depth < 1:
            raise ValueError(f"prefetch(depth={depth!r}): expected a whole number of at least 1")
        if not hasattr(loader, "__aiter__") and not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(f"prefetch() takes an iterable or an async iterable of batches, not {loader!r}")
        self._loader, self._placements, self._depth = loader, placements, depth
        self._mesh = None if mesh is None else as_mesh(mesh)
        self._entered: BatchIterator | None = None

    def __aiter__(self) -> BatchIterator:
        place = functools.partial(_placed, placements=self._placements, mesh=self._mesh or default_device_mesh())
        return BatchIterator(_Source(self._loader, place, self._depth))

    async def __aenter__(self) -> BatchIterator:
        if self._entered is not None:
            raise RuntimeError("this prefetch() is entered already; make another")
        self._entered = aiter(self)
        return self._entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            await entered.aclose()

    def __len__(self) -> int:
        """How many batches the loader says it has."""
        return len(self._loader)


class BatchIterator:
    """One pass over the batches, for one task at a time. Dropping it ends what it loads ahead."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._taking = False

    def __aiter__(self) -> BatchIterator:
        return self

    async def __anext__(self) -> Any:
        """The next batch.

        Raises:
            Exception: what the loader raised instead of this batch; the batches before it have been given.
            RuntimeError: another task waits for the next batch already.
        """
        if self._taking:
            raise RuntimeError(
                "prefetch: another task waits for the next batch already, and one iterator serves one task.\n"
                "  Write:  one async for over it, which hands the batches on; or a prefetch() of its own for each task"
            )
        self._taking = True
        suspended = modes.suspend()
        try:
            return await self._source.take()
        finally:
            modes.resume(suspended)
            self._taking = False

    async def aclose(self) -> None:
        """Load no more, and wait until the element that is being loaded has been."""
        self._source.stop()
        with anyio.CancelScope(shield=True):
            await self._source.ended()

    def __del__(self) -> None:
        # __init__ may not have come so far.
        if (source := getattr(self, "_source", None)) is not None:
            source.stop()


class _Source:
    """What loads and uploads, for one iterator.

    Invariant: a batch in `_ready`, or the one that is being made, takes one of the `depth` places.
    """

    def __init__(self, loader: Any, place: Callable[[Any], Any], depth: int) -> None:
        self._loader: Any = loader
        self._place, self._depth = place, depth
        # (batch, None) or (None, error), in the loader's order
        self._ready: deque[tuple[Any, BaseException | None]] = deque()
        self._stopped = False
        self._idle = threading.Event()  # the worker thread does not load
        self._idle.set()
        self._over = False  # nothing more comes
        self._task: object = None
        self._soon: Callable[[Callable[[], object]], None] | None = None
        # Made in the loop that iterates.
        self._scope: anyio.CancelScope
        self._arrived: anyio.Event
        self._room: anyio.Event
        self._ended: anyio.Event

    async def take(self) -> Any:
        """The next batch, waiting for it."""
        if self._task is None:
            self._start()
        # Also where nothing is to be waited for: the task that loads gets its turn.
        await anyio.lowlevel.checkpoint()
        while True:
            while not self._ready:
                if self._over or self._stopped:
                    raise StopAsyncIteration
                self._arrived = anyio.Event()
                await self._arrived.wait()
            if self._ready[0][1] is None and current_client() is not None:
                # Before it is taken: whoever is cancelled here loses no batch.
                await ready_to_send()
            if self._ready:
                break
        batch, error = self._ready.popleft()
        self._room.set()
        if error is not None:
            try:
                raise error
            finally:
                del error
        return batch

    def stop(self) -> None:
        """Load no more and forget what was; from any thread."""
        self._stopped = True
        self._ready.clear()
        if self._soon is not None and not self._over:
            self._soon(self._scope.cancel)

    async def ended(self) -> None:
        """Wait for the task that loads, if it has begun."""
        if self._task is not None:
            await self._ended.wait()

    # -- the task that loads ------------------------------------------------------------------------------------

    def _start(self) -> None:
        # A loader makes its batches on the host, whatever mesh torch's factories are routed to around the loop.
        context = contextvars.copy_context()
        context.run(set_device_mesh, None)
        self._scope = anyio.CancelScope()
        self._arrived, self._room, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        self._soon = call_later_here()
        self._task = spawn(self._run, "prefetch", context, self._end)

    async def _run(self) -> None:
        try:
            with self._scope:
                await (self._pull_async() if hasattr(self._loader, "__aiter__") else self._pull())
            self._over = True
        except (Exception, asyncio.CancelledError) as error:
            if is_cancellation(error):
                raise
            self._put(None, _told(error))
            self._over = True

    def _end(self) -> None:
        if not self._over:
            self._put(None, PoolError("prefetch: loading was cancelled with its event loop"))
        self._over = True
        self._loader = None
        self._arrived.set()
        self._ended.set()

    async def _pull(self) -> None:
        thread = anyio.CapacityLimiter(1)
        iterator: Iterator[Any] | None = None
        others = self._others()

        def load() -> Any:
            nonlocal iterator
            self._idle.clear()
            try:
                if self._stopped:
                    return _END
                if iterator is None:
                    # A loader may begin anew with the iterator it gave before, as one with persistent workers does.
                    for other in others:
                        if other._stopped:
                            other._idle.wait()
                    iterator = iter(self._loader)
                try:
                    batch = next(iterator)
                except StopIteration:
                    return _END
                return _END if self._stopped else self._place(batch)
            finally:
                self._idle.set()

        def close() -> None:
            nonlocal iterator
            if inspect.isgenerator(iterator):
                iterator.close()
            iterator = None

        try:
            while True:
                await self._wait_for_room()
                batch = await anyio.to_thread.run_sync(load, limiter=thread)
                if batch is _END:
                    break
                self._put(batch)
        finally:
            # A loader may wait for its processes here.
            with anyio.CancelScope(shield=True):
                try:
                    await anyio.to_thread.run_sync(close, limiter=thread)
                except Exception:
                    _log.exception("the loader of a prefetch() raised as it was closed")

    def _others(self) -> list[_Source]:
        """What loads from the same loader, or was stopped and has not ended yet."""
        with _sources_lock:
            try:
                known = _sources.setdefault(self._loader, weakref.WeakSet())
            except TypeError:  # a list, say, gives an iterator of its own each time
                return []
            others = [source for source in known if not source._over]
            known.add(self)
            return others

    async def _pull_async(self) -> None:
        iterator = aiter(self._loader)
        try:
            while True:
                await self._wait_for_room()
                try:
                    batch = await anext(iterator)
                except StopAsyncIteration:
                    break
                if _nbytes(batch) <= _HERE:
                    self._put(self._place(batch))
                else:
                    self._put(await anyio.to_thread.run_sync(self._place, batch))
                del batch
        finally:
            if inspect.isasyncgen(iterator):
                with anyio.CancelScope(shield=True):
                    try:
                        await iterator.aclose()
                    except Exception:
                        _log.exception("the loader of a prefetch() raised as it was closed")

    async def _wait_for_room(self) -> None:
        while len(self._ready) >= self._depth:
            self._room = anyio.Event()
            await self._room.wait()

    def _put(self, batch: Any, error: BaseException | None = None) -> None:
        if not self._stopped:
            self._ready.append((batch, error))
            self._arrived.set()


def _told(error: BaseException) -> BaseException:
    """`error` of a loader, as the consumer gets it: those that mean something to its loop mean nothing of the kind."""
    if not isinstance(error, (StopIteration, StopAsyncIteration, asyncio.CancelledError)):
        return error
    told = RuntimeError(f"prefetch: the loader raised {error!r}")
    told.__cause__ = error
    return told


def prefetch(loader: Any, mesh: DeviceMesh | str | None = None, placements: Any = None, depth: int = 2) -> Prefetch:
    """Iterate over the batches of `loader`, placed on `mesh`; the next ones are loaded and uploaded meanwhile.

        async for x, y in dtorch.aio.prefetch(loader, mesh, [Shard(0), Replicate()]):
            loss = step(x, y)
            history.append(await loss)

    One iterator serves one task: a second one that asks it for a batch meanwhile gets a RuntimeError.

    Batches come in the loader's order, as it made them, with dtorch tensors in the place of tensors. An error of the
    loader comes in its place too. Leaving the loop by ``break``, an exception or a cancellation ends the loading:
    the element that is being made is finished and dropped, a generator is closed, and no upload stays.

    Args:
        loader: an iterable, such as torch's DataLoader, which is iterated over in a worker thread; or an async
            iterable. Of tensors, or of tuples, lists and dicts of them, nested as they like; what is no tensor stays.
        mesh: where tensors are placed; the default is the default mesh.
        placements: one per mesh dim, for all tensors; or a dict, list or tuple of such like the batch. ``None``
            means Replicate everywhere.
        depth: how many batches there may be beside the one in use: ready, or in the making.

    Raises:
        ValueError: `depth` is less than 1; at the first batch, if `placements` do not fit it.
        TypeError: `loader` cannot be iterated over.
    """
    return Prefetch(loader, mesh, placements, depth)


def _placed(batch: Any, placements: Any, mesh: DeviceMesh) -> Any:
    """`batch` with its tensors placed on `mesh`."""
    if isinstance(batch, torch.Tensor) and _for_all(placements):
        given = [placements] if isinstance(placements, Placement) else placements
        return distribute_tensor(batch, mesh, given)
    children, tree = pytree.tree_flatten(batch, is_leaf=lambda node: node is not batch)
    if tree.is_leaf() and not isinstance(batch, torch.Tensor):
        if not isinstance(batch, Mapping):
            return batch
        # What a tokenizer returns, say: a mapping with methods of its own.
        made: Any = copy.copy(batch)
        for key, value in _placed(dict(batch), placements, mesh).items():
            made[key] = value
        return made
    if _for_all(placements):
        rules, fits = [placements] * len(children), True
    elif isinstance(placements, Mapping):
        fits = isinstance(batch, Mapping) and placements.keys() == batch.keys()
        rules = [placements[key] for key in batch] if fits else []
    else:
        fits = isinstance(batch, (list, tuple)) and len(placements) == len(children)
        rules = list(placements)
    if not fits:
        raise ValueError(
            f"prefetch: placements={placements!r} are not like the batch, {pytree.tree_structure(batch)}.\n"
            "  Write:  one placement per mesh dim for all tensors, or a dict, list or tuple of such like the batch"
        )
    return pytree.tree_unflatten(
        [_placed(child, rule, mesh) for child, rule in zip(children, rules, strict=True)], tree
    )


def _for_all(placements: Any) -> bool:
    """Whether these are one tensor's placements, and so all tensors'."""
    if placements is None or isinstance(placements, Placement):
        return True
    if isinstance(placements, Mapping):
        return False
    if not isinstance(placements, (list, tuple)):
        raise ValueError(
            f"prefetch: placements={placements!r}; write one placement per mesh dim, as in [Shard(0)], or a dict, "
            "list or tuple of such like the batch"
        )
    return bool(placements) and all(isinstance(p, Placement) for p in placements)


def _nbytes(batch: Any) -> int:
    return sum(t.numel() * t.itemsize for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor))
