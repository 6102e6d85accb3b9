"""Who is stuck, in which command, since when, and who waits for it.

An executor publishes its read index after every command. One whose index stands still while there is more to read is
at work on the record at that index; if it has been for long, that is worth a line on stderr. Nothing is asked of the
executor's hot path, nor of the client, whose interpreter may be busy.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ..runtime.shared import EXECUTOR_PLAN, EXECUTOR_READ, WAITING, WRITE, SharedState, executor_line

__all__ = ["Report", "Watchdog"]

_PLAN_MASK = (1 << 32) - 1
_FIXED = {0: "the end of a lap of the ring", 1: "freeing tensors", 2: "a control message"}


@dataclass(frozen=True, slots=True)
class Report:
    """Executors that hold up all others, and the text that says so."""

    stuck: tuple[int, ...]
    text: str


@dataclass(slots=True)
class _Stand:
    """Where an executor was seen to stand, since when, and at what age that is told next."""

    position: int
    since: float
    tell: float


class Watchdog:
    """Watches the read indexes of one pool.

    Attributes:
        period: seconds between two looks; 0 where nothing is watched.
    """

    def __init__(self, state: SharedState, names: int, limit: float) -> None:
        """Report a command after `limit` seconds (0: never), then each time its age has doubled.

        `names` is a file of lines ``plan id, space, text`` that the client appends to.
        """
        self.period = min(1.0, limit / 4)
        self._state = state
        self._names = names
        self._limit = limit
        self._next = 0.0
        self._stands: dict[int, _Stand] = {}

    def close(self) -> None:
        """Give back the file of names."""
        os.close(self._names)

    def look(self, pids: dict[int, int], now: float | None = None) -> list[Report]:
        """What there is to tell of the executors `pids` (index → pid) at `now`, a monotonic time in seconds."""
        now = time.monotonic() if now is None else now
        if not self.period or now < self._next:
            return []
        self._next = now + self.period
        control = self._state.control
        written = control[WRITE]
        for executor in [e for e in self._stands if e not in pids]:
            del self._stands[executor]
        for executor in pids:
            position = control[executor_line(executor) + EXECUTOR_READ]
            stand = self._stands.get(executor)
            if position >= written:
                self._stands.pop(executor, None)
            elif stand is None or stand.position != position:
                self._stands[executor] = _Stand(position, now, self._limit)
        if not self._stands:
            return []
        # Commands are in one order for all: whoever is furthest behind is waited for by the rest.
        first = min(stand.position for stand in self._stands.values())
        stuck = [e for e, stand in self._stands.items() if stand.position == first]
        told = [e for e in stuck if now - self._stands[e].since >= self._stands[e].tell]
        if not told:
            return []
        for executor in told:
            self._stands[executor].tell = 2 * (now - self._stands[executor].since)
        return [Report(tuple(told), self._text(told, pids, now))]

    def _text(self, told: list[int], pids: dict[int, int], now: float) -> str:
        who = ", ".join(f"executor {e} (pid {pids[e]})" for e in told)
        seconds = now - max(self._stands[e].since for e in told)
        verb = "has" if len(told) == 1 else "have all"
        text = f"dtorch: {who} {verb} been in {self._command(told[0])} for {seconds:.0f} s."
        behind = [f"executor {e} stands at {self._command(e)}" for e in sorted(self._stands) if e not in told]
        idle = [e for e in sorted(pids) if e not in self._stands]
        waiting = self._state.control[WAITING]
        if idle:
            behind.append(f"{_list(idle)} {'is' if len(idle) == 1 else 'are'} done with all that was issued")
        if waiting:
            behind.append(f"the client waits for results ({waiting} waiter{'s' if waiting > 1 else ''})")
        if behind:
            text += " Meanwhile " + "; ".join(behind) + "."
        return text + " Where it is, most recent call first:\n"

    def _command(self, executor: int) -> str:
        control, ring = self._state.control, self._state.ring_words
        plan = control[executor_line(executor) + EXECUTOR_PLAN]
        if not plan:
            plan = ring[control[executor_line(executor) + EXECUTOR_READ] % len(ring)] & _PLAN_MASK
        return self._name(plan) or _FIXED.get(plan) or f"plan {plan}"

    def _name(self, plan: int) -> str:
        wanted = f"{plan} ".encode()
        lines = os.pread(self._names, os.fstat(self._names).st_size, 0).splitlines()
        return next((line[len(wanted) :].decode(errors="replace") for line in lines if line.startswith(wanted)), "")


def _list(executors: list[int]) -> str:
    return ("executor " if len(executors) == 1 else "executors ") + ", ".join(map(str, executors))
