"""One call of a batched function on its way: as requests, which wait in a group, and are sent in a batch."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import anyio

from ..runtime.modes import Modes
from .rows import Pack

__all__ = ["Batch", "BatchMetrics", "Call", "Group", "Request", "twin"]


@dataclass(eq=False)
class BatchMetrics:
    """What became of the calls of one batched function, over all event loops.

    ``requests == refused + completed + failed + cancelled + pending``, at any time.

    Attributes:
        requests: calls made, refused ones included. A call of more than `max_size` rows counts once.
        refused: those that found the queue full.
        completed, failed: those that got their rows, or an error.
        cancelled: those whose caller was cancelled while they waited.
        pending: those that have no answer yet.
        queue_depth: how many requests wait to be sent; a call of more than `max_size` rows is several.
        batches: calls of the function.
        rows: rows in those.
        padding_rows: rows that were added to reach a size from a short list; not in `rows`.
    """

    requests: int = 0
    refused: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    pending: int = 0
    queue_depth: int = 0
    batches: int = 0
    rows: int = 0
    padding_rows: int = 0

    def __post_init__(self) -> None:
        # No field of the dataclass: asdict() is the counters.
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Add to counters by name; from any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """How a caller's batch is to be run: the function, with the instance it is a method of, and what held there."""

    function: Callable[..., Any]
    context: contextvars.Context
    modes: Modes


class Request:
    """Rows that wait for their batch.

    Invariant: `done` is set exactly when `result` or `error` is.
    """

    __slots__ = ("batch", "call", "done", "error", "group", "pack", "result", "since", "traceback")

    def __init__(self, pack: Pack, call: Call, since: float) -> None:
        self.pack, self.call, self.since = pack, call, since
        self.done = anyio.Event()
        self.group: Group | None = None  # while it waits to be sent
        self.batch: Batch | None = None  # from then on
        self.result: Any = None
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None

    def answer(self, result: Any) -> None:
        """Give its caller the rows."""
        if not self.done.is_set():
            self.result = result
            self.done.set()

    def fail(self, error: BaseException) -> None:
        """Give its caller `error`, which is then this caller's alone."""
        if not self.done.is_set():
            self.error, self.traceback = error, error.__traceback__
            self.done.set()

    def outcome(self) -> Any:
        """The rows, or raises what their batch raised."""
        if self.error is None:
            return self.result
        try:
            raise self.error.with_traceback(self.traceback)
        finally:
            # The traceback refers to this frame, and so to the error again.
            self.error = self.traceback = None


class Group:
    """Requests that may share a batch, oldest first."""

    __slots__ = ("requests", "rows")

    def __init__(self) -> None:
        self.requests: dict[Request, None] = {}
        self.rows = 0

    @property
    def since(self) -> float:
        """When its oldest request came."""
        return next(iter(self.requests)).since


class Batch:
    """Requests that were sent together, oldest first.

    Attributes:
        wanted: how many of them somebody waits for.
        scope: what the function runs in.
        begun: it runs, or has run.
        ended: set when it has.
    """

    __slots__ = ("begun", "ended", "requests", "scope", "wanted")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.wanted = len(requests)
        self.scope = anyio.CancelScope()
        self.begun = False
        self.ended = anyio.Event()
        for request in requests:
            request.batch = self


def twin(error: Exception) -> Exception:
    """`error` again, for another caller: a traceback grows where it is raised, and notes where it is caught."""
    made = _copy(error)
    if made is error:
        return error
    if notes := getattr(error, "__notes__", None):
        made.__notes__ = list(notes)
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


def _copy(error: Exception) -> Exception:
    """Another like `error`; itself where none can be made."""
    # A constructor may want what it does not keep: without it, then.
    for make in (copy.copy, _unconstructed):
        with contextlib.suppress(Exception):
            made = make(error)
            if made is not error and type(made) is type(error) and str(made) == str(error):
                return made
    return error


def _unconstructed(error: Exception) -> Exception:
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made
