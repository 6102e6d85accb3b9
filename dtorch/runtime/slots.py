"""Slots: where executors say that a piece of work is done, and how the client knows it is the one it asked about.

A slot has one status word per executor, holding ``generation << 2 | state``. Generations of a slot only grow, so

    word > generation << 2

says that this use of the slot (or, never, a later one) is finished, and nothing has to be cleared before a slot is
used again. A completion is matched by slot and generation, never by order.

A slot nobody waits for any more but whose executors have not all answered is a *tombstone*: it is given out again,
and what came with it is freed, only after the late answers have arrived.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from ..errors import PoolError, RunAheadError
from .shared import DEAD, DONE, ERROR, SharedState

__all__ = ["Slots", "Ticket"]

_GLANCE = 4  # tombstones looked at whenever a slot is taken: more than one, so that they die out


def _nothing() -> None:
    pass


class Ticket:
    """One use of a slot.

    Attributes:
        slot: its number.
        generation: which use of the slot this is; with `slot`, what travels in the command.
        executors: who will answer.
        pending: status words up to this value mean "not yet".
    """

    __slots__ = ("_control", "_indexes", "executors", "generation", "pending", "slot")

    def __init__(self, state: SharedState, slot: int, generation: int, executors: tuple[int, ...]) -> None:
        self.slot = slot
        self.generation = generation
        self.executors = executors
        self.pending = generation << 2
        self._control = state.control
        base = state.slot_word(slot, 0)
        self._indexes = tuple([base + e for e in executors])

    def answered(self) -> bool:
        """Whether every executor has answered."""
        control, pending = self._control, self.pending
        for i in self._indexes:  # twice as fast as all()
            if control[i] <= pending:
                return False
        return True

    def is_done(self) -> bool:
        """Whether there is nothing to wait for: all have answered, or an executor died."""
        control, pending = self._control, self.pending
        for i in self._indexes:
            if control[i] <= pending:
                return control[DEAD] != 0
        return True

    def unanswered(self) -> tuple[int, ...]:
        """Executors that have not answered yet."""
        return tuple(e for e, i in zip(self.executors, self._indexes, strict=True) if self._control[i] <= self.pending)

    def failed(self) -> tuple[int, ...]:
        """Of those that answered, the executors that did so with an error.

        Raises:
            PoolError: a status word holds no answer to this: something has written over the memory of the pool.
        """
        done, control = self.pending | DONE, self._control
        for i in self._indexes:
            if control[i] != done:
                break
        else:
            return ()
        found: list[int] = []
        for e, i in zip(self.executors, self._indexes, strict=True):
            word = control[i]
            if word == self.pending | ERROR:
                found.append(e)
            elif word != done:
                raise PoolError(
                    f"executor {e} answered with {word:#x}, where {done:#x} or {self.pending | ERROR:#x} was due: "
                    "something has written over the memory that the pool shares"
                )
        return tuple(found)

    def settled(self) -> bool:
        """Whether every executor has answered this very use of the slot, as far as can be told."""
        answers = (self.pending | DONE, self.pending | ERROR)
        return all(self._control[i] in answers for i in self._indexes)


class Slots:
    """The client's bookkeeping of who uses which slot. Any thread may call anything."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._lock = threading.Lock()
        # Last freed, first used: the same few cache lines again and again.
        self._free: list[int] = []
        self._used = 0
        self._generations: dict[int, int] = {}
        self._returned: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._tombstones: deque[tuple[Ticket, Callable[[], None]]] = deque()

    def take(self, executors: Iterable[int]) -> Ticket:
        """A slot for work that `executors` will answer.

        Raises:
            RunAheadError: all slots are in use.
        """
        all_of_them = self._used >= self._state.slots
        self._free_answered(len(self._tombstones) if all_of_them else _GLANCE)
        with self._lock:
            if self._free:
                slot = self._free.pop()
            elif self._used < self._state.slots:
                slot = self._used
                self._used += 1
            else:
                raise RunAheadError(
                    f"{self._state.slots:,} results are awaited at once; await some before asking for more, or raise "
                    f"the bound before the pool starts: dtorch.configure(slots={2 * self._state.slots})"
                )
            generation = self._generations[slot] = self._generations.get(slot, 0) + 1
            return Ticket(self._state, slot, generation, tuple(executors))

    def give(self, ticket: Ticket, on_arrival: Callable[[], None] = _nothing) -> None:
        """Give a slot back, whether or not all have answered; never waits, so finalizers may call it.

        Args:
            ticket: the slot, which the caller does not use again.
            on_arrival: called (from some later :meth:`take` or :meth:`sweep`) once every executor has answered.
        """
        self._returned.append((ticket, on_arrival))

    def sweep(self) -> int:
        """Free what has been answered by now; how many tombstones are left."""
        self._free_answered(len(self._tombstones))
        return len(self._tombstones)

    def in_use(self) -> int:
        """How many values are asked for that have not arrived, or been taken."""
        with self._lock:
            return self._used - len(self._free) - len(self._returned) - len(self._tombstones)

    def glance(self) -> None:
        """Free some of what has been answered by now; in the time of a few looks."""
        self._free_answered(_GLANCE)

    def _free_answered(self, old: int) -> None:
        """Look at all that was given back since, and at `old` of the tombstones; free those answered, and say so."""
        if not self._returned and not self._tombstones:
            return
        due: list[tuple[Ticket, Callable[[], None]]] = []
        with self._lock:
            for _ in range(min(old, len(self._tombstones))):
                self._returned.append(self._tombstones.popleft())
            while self._returned:
                ticket, on_arrival = self._returned.popleft()
                if not ticket.settled():
                    self._tombstones.append((ticket, on_arrival))
                elif on_arrival is _nothing:
                    self._free.append(ticket.slot)
                else:
                    due.append((ticket, on_arrival))
        for ticket, on_arrival in due:
            # It may look at the answer: nobody else is given the slot before it has.
            try:
                on_arrival()
            finally:
                self._free.append(ticket.slot)
