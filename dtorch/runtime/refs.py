"""Refs, the names of values on the executors, and plans, what is known of a message that is sent often."""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from ..spec import TensorSpec
from .command import LENGTH_SHIFT

__all__ = ["FREE_BATCH", "FREE_RECORDS", "LargeRef", "Plan", "PlanCache", "Ref", "freed", "next_ref", "ref_type"]

# Refs that died, to be told to the executors. Filled by __del__, which may run at any time.
freed: deque[int] = deque()
next_ref: Callable[[], int] = itertools.count(1).__next__

# Deaths are told in batches of so many.
FREE_BATCH = 16
LARGE = 1 << 20


class Ref(int):
    """The name of a value on the executors; the value is dropped there when this dies."""

    __slots__ = ()

    def __del__(self, _drop: Callable[[int], None] = freed.append) -> None:
        _drop(+self)


class LargeRef(Ref):
    """A ref of a value that is worth telling of at once: its death fills the batch up with refs of nothing."""

    __slots__ = ()

    def __del__(self, _drop: Callable[[Any], None] = freed.extend) -> None:
        _drop((+self, *_FILL))


_FILL = (0,) * (FREE_BATCH - 1)
# pack_into of a FREE record, by the number of refs in it.
FREE_RECORDS = [struct.Struct(f"<{1 + n}Q").pack_into for n in range(256)]


def ref_type(spec: TensorSpec) -> type[Ref]:
    """The kind of ref for values of `spec`."""
    return LargeRef if spec.numel * spec.dtype.itemsize >= LARGE else Ref


class Plan:
    """What the hot path needs of a defined plan.

    Attributes:
        pack: ``pack(buffer, offset, header, *words)`` of the whole record.
        states: control words with the states of the executors concerned, to see at a glance that none sleeps.
    """

    __slots__ = ("executors", "header", "id", "nwords", "pack", "states")

    def __init__(self, id: int, layout: str, executors: tuple[int, ...]) -> None:
        packer = struct.Struct("<Q" + layout)
        self.id, self.executors = id, executors
        self.nwords = packer.size // 8
        self.header = id | self.nwords << LENGTH_SHIFT
        self.pack = packer.pack_into
        self.states = tuple(64 + 16 * e + 1 for e in executors)


K = TypeVar("K")
P = TypeVar("P", bound=Plan)


class PlanCache(dict[K, P]):
    """Plans by what they are for, a bounded number: where there are too many, the oldest quarter goes.

    The executors keep what goes until the next time: another thread may be about to issue one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._gone: tuple[int, ...] = ()

    def keep(self, key: K, plan: P, bound: int, drop: Callable[[tuple[int, ...]], object]) -> None:
        """Add `plan`; at most `bound` are kept, and `drop` is given ids of plans that nobody will issue again."""
        with self._lock:
            due: tuple[int, ...] = ()
            if len(self) >= bound:
                oldest = list(itertools.islice(tuple(self), 1 + len(self) // 4))
                due, self._gone = self._gone, tuple([self.pop(k).id for k in oldest])
            self[key] = plan
        if due:
            drop(due)

    def clear(self) -> None:
        """Forget all: the pool they were defined on has ended."""
        with self._lock:
            super().clear()
            self._gone = ()
