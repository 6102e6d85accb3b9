"""Who waits for values, and where: asked of the interpreter when there is something to tell, noted by nobody before.

A thread that waits has a frame of :meth:`Waiting.wait_thread` on its stack; a task that waits is suspended in a chain
of coroutines that ends in dtorch. The line to name is the last one of the user's own on the way there.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..executor.watchdog import text_of
from .failures import is_internal, is_ours, site_of, user_frame
from .waiting import Waiting

if TYPE_CHECKING:
    from .client import Client

__all__ = ["report", "waiters"]

_LISTED = 8


def report(client: Client, message: dict[str, Any]) -> str:
    """What the watchdog found (`executor.watchdog`), with the lines that issued the commands and those that wait."""
    sites: dict[int, str] = {}
    for s in message["stuck"]:
        found = {client.failures.site(p) for p in s["positions"]} - {""}
        sites[s["executor"]] = " or ".join(sorted(found))
    return text_of(message, sites, waiters(client.waiting))


def waiters(waiting: Waiting) -> list[str]:
    """Where values are waited for now: ``train.py:12 in step``, each with how many wait there if they are several."""
    sites = Counter(_site(f) for f in (*_threads(), *_tasks(waiting.loops())))
    listed = [site if n == 1 else f"{site} ({n} times)" for site, n in sites.most_common(_LISTED)]
    return [*listed, f"{len(sites) - _LISTED} more places"] if len(sites) > _LISTED else listed


def _site(frame: FrameType) -> str:
    return site_of(frame.f_code, frame.f_lasti)


def _threads() -> Iterator[FrameType]:
    here = threading.get_ident()
    code = Waiting.wait_thread.__code__
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = sys._getframe() if thread == here else top
        while frame is not None:
            if frame.f_code is code:
                user = user_frame(frame)
                if user is not frame:
                    yield user
                break
            frame = frame.f_back


def _tasks(loops: Iterable[asyncio.AbstractEventLoop]) -> Iterator[FrameType]:
    for loop in loops:
        # Tasks of a loop in another thread may come and go meanwhile.
        with contextlib.suppress(RuntimeError):
            for task in asyncio.all_tasks(loop):
                yield from _suspended(task.get_coro())
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        found = [trio.lowlevel.current_root_task()]
        for task in found:
            found += [t for nursery in task.child_nurseries for t in nursery.child_tasks]
            yield from _suspended(task.coro)


def _suspended(coroutine: Any) -> Iterator[FrameType]:
    """The last frame of the user's in a chain of coroutines, if the chain goes on into dtorch."""
    last: FrameType | None = None
    inside = False
    while coroutine is not None:
        frames = (getattr(coroutine, n, None) for n in ("cr_frame", "gi_frame", "ag_frame"))
        frame = next((f for f in frames if f is not None), None)
        if frame is not None:
            if is_ours(frame.f_code.co_filename):
                inside = True
            elif not is_internal(frame.f_code.co_filename) and not inside:
                last = frame
        inner = (getattr(coroutine, n, None) for n in ("cr_await", "gi_yieldfrom", "ag_await"))
        coroutine = next((a for a in inner if a is not None), None)
    if inside and last is not None:
        yield last
