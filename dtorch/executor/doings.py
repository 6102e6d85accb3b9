"""What an executor does now, as far as shared memory shows it: nothing is asked of the executor itself."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from ..runtime import command
from ..runtime.shared import (
    EXECUTOR_CONTROL,
    EXECUTOR_PLAN,
    EXECUTOR_READ,
    EXECUTOR_READY,
    WRITE,
    SharedState,
    executor_line,
)
from .names import Names

__all__ = ["Doing", "Doings"]

_PLAN_MASK, _LENGTH_SHIFT = (1 << 32) - 1, 32
_CONTROL = 2
_FIXED = {0: "the end of a lap of the ring", 1: "freeing tensors", 2: "a control message"}
# Records an executor may have run since it last published its index.
_UNPUBLISHED = 16


@dataclass(frozen=True, slots=True)
class Doing:
    """One executor's command.

    Attributes:
        text: the call.
        mesh: id of its mesh; 0 for none.
        exchange: whether executors wait for each other in it.
        positions: where in the ring its record may be.
    """

    text: str
    mesh: int = 0
    exchange: bool = False
    positions: tuple[int, ...] = ()


class _Anything:
    """Stands for whatever a message carries that is of no interest here."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Anything:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    """Reads messages without making what they carry: a ref that dies frees its value, and a function is code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return getattr(command, global_name) if module_name == command.__name__ else _Anything


class Doings:
    """Reads the memory of one pool."""

    def __init__(self, state: SharedState, names: Names) -> None:
        self._state, self._names = state, names

    def of(self, executor: int) -> Doing:
        """What `executor` does."""
        control, ring = self._state.control, self._state.ring_words
        line = executor_line(executor)
        if not control[line + EXECUTOR_READY]:
            return Doing("its start")
        position = control[line + EXECUTOR_READ]
        plan = control[line + EXECUTOR_PLAN] or ring[position % len(ring)] & _PLAN_MASK
        if plan == _CONTROL:
            return self._message(control[line + EXECUTOR_CONTROL], position)
        positions = self._positions(position, plan)
        found = self._names.plan(plan)
        if found is None:
            return Doing(_FIXED.get(plan) or f"plan {plan}", positions=positions)
        return Doing(found.text, found.mesh, found.exchange, positions)

    def _positions(self, position: int, plan: int) -> tuple[int, ...]:
        """Where records of `plan` lie among those that an executor may be at, whose index stands at `position`."""
        ring, written = self._state.ring_words, self._state.control[WRITE]
        found: list[int] = []
        for _ in range(_UNPUBLISHED):
            if position >= written:
                break
            head = ring[position % len(ring)]
            if head & _PLAN_MASK == plan:
                found.append(position)
            position += max(1, head >> _LENGTH_SHIFT)
        return tuple(found)

    def _message(self, position: int, read: int) -> Doing:
        """The control message at `position`, if that is still to be read."""
        ring = self._state.ring_words
        p = position % len(ring)
        if position < read or ring[p] & _PLAN_MASK != _CONTROL:
            return Doing(_FIXED[_CONTROL])
        try:
            data = bytes(self._state.ring_bytes[8 * (p + 2) : 8 * (p + 2) + ring[p + 1]])
            message = _Reader(io.BytesIO(data)).load()
            text = getattr(message, "text", "") or type(message).__name__
        except Exception:  # of a stranger, or overwritten meanwhile
            return Doing(_FIXED[_CONTROL])
        if hasattr(message, "plan"):
            text = f"the definition of {text}"
        return Doing(text, getattr(message, "mesh", 0), positions=(position,))
