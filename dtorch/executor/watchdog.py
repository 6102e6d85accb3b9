"""Who is stuck, in which command, since when, and who waits for it.

An executor publishes its read index after every command. One whose index stands still while there is more to read is
at work on a record at that index or a little after it; if it has been for long, that is worth telling. Nothing is
asked of the executor's hot path, nor of the client, whose interpreter may be busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..runtime.shared import (
    EXECUTOR_PID,
    EXECUTOR_PLAN,
    EXECUTOR_READ,
    EXECUTOR_READY,
    WAITING,
    WRITE,
    SharedState,
    executor_line,
)
from .doings import Doing, Doings
from .names import Names

__all__ = ["Stuck", "Watchdog", "text_of"]


@dataclass(frozen=True, slots=True)
class Stuck:
    """An executor that has been at one thing for long.

    Attributes:
        executor, pid: which.
        doing: what it is in.
        ranks: for which ranks, with their devices; "" where that says nothing.
        seconds: since when.
        positions: where in the ring the command may be.
        answers: whether it can print its stacks.
    """

    executor: int
    pid: int
    doing: str
    ranks: str
    seconds: float
    positions: tuple[int, ...] = ()
    answers: bool = True


@dataclass(slots=True)
class _Stand:
    """Where an executor was seen to stand, since when, and at what age that is told next."""

    at: object
    since: float
    tell: float


class Watchdog:
    """Watches the read indexes of one pool.

    Attributes:
        period: seconds between two looks; 0 where nothing is watched.
    """

    def __init__(self, state: SharedState, names: int, limit: float) -> None:
        """Report a command after `limit` seconds (0: never), then each time its age has doubled.

        `names` is the file of :class:`Names`.
        """
        self.period = min(1.0, limit / 4)
        self._state = state
        self._fd = names
        self._names = Names(names)
        self._doings = Doings(state, self._names)
        self._limit = limit
        self._next = 0.0
        self._stands: dict[int, _Stand] = {}

    def close(self) -> None:
        """Give back the file of names."""
        os.close(self._fd)

    def look(self, pids: dict[int, int], now: float | None = None) -> dict[str, Any] | None:
        """What there is to tell of the executors `pids` (index → pid) at `now`, a monotonic time in seconds: a message
        for :func:`text_of`, as JSON can say it. None: nothing."""
        now = time.monotonic() if now is None else now
        if not self.period or now < self._next:
            return None
        self._next = now + self.period
        self._follow(pids, now)
        if not self._stands:
            return None
        doing = {e: self._doings.of(e) for e in self._stands}
        # Who waits for peers is not the one to blame, unless all do; then whoever is furthest behind is.
        guilty = [e for e in sorted(self._stands) if not doing[e].exchange]
        if not guilty:
            first = min(self._read(e) for e in self._stands)
            guilty = [e for e in sorted(self._stands) if self._read(e) == first]
        told = [e for e in guilty if now - self._stands[e].since >= self._stands[e].tell]
        if not told:
            return None
        stuck: list[Stuck] = []
        for e in told:
            seconds = now - self._stands[e].since
            self._stands[e].tell = 2 * seconds
            what = doing[e]
            answers = self._state.control[executor_line(e) + EXECUTOR_PID] == pids[e]
            stuck.append(
                Stuck(e, pids[e], what.text, self._names.ranks(what.mesh, e), seconds, what.positions, answers)
            )
        return {
            "stuck": [asdict(s) for s in stuck],
            "others": self._others(told, doing, pids),
            "waiting": self._state.control[WAITING],
        }

    def _follow(self, pids: dict[int, int], now: float) -> None:
        """Note where every executor stands."""
        control = self._state.control
        written = control[WRITE]
        for executor in [e for e in self._stands if e not in pids]:
            del self._stands[executor]
        for executor in pids:
            line = executor_line(executor)
            position = control[line + EXECUTOR_READ]
            ready = control[line + EXECUTOR_READY]
            at = (position, control[line + EXECUTOR_PLAN]) if ready else None
            stand = self._stands.get(executor)
            if ready and position >= written:
                self._stands.pop(executor, None)
            elif stand is None or stand.at != at:
                self._stands[executor] = _Stand(at, now, self._limit)

    def _read(self, executor: int) -> int:
        return self._state.control[executor_line(executor) + EXECUTOR_READ]

    def _others(self, told: list[int], doing: dict[int, Doing], pids: dict[int, int]) -> list[str]:
        """What the others do meanwhile."""
        others: list[str] = []
        for e in [e for e in sorted(self._stands) if e not in told]:
            verb = "waits for its peers in" if doing[e].exchange else "stands at"
            others.append(f"executor {e} {verb} {doing[e].text}")
        idle = [e for e in sorted(pids) if e not in self._stands]
        if idle:
            others.append(f"{_list(idle)} {'is' if len(idle) == 1 else 'are'} done with all that was issued")
        return others


def text_of(message: Mapping[str, Any], sites: Mapping[int, str] | None = None, waiters: Sequence[str] = ()) -> str:
    """What :meth:`Watchdog.look` found, in words.

    Args:
        message: that, with "stacks", executor (as text) → stacks, where they are known.
        sites: executor → the line that issued its command.
        waiters: who waits for values.
    """
    said: list[str] = []
    stuck: list[dict[str, Any]] = message["stuck"]
    for s in stuck:
        ranks = f" on {s['ranks']}" if s["ranks"] else ""
        text = f"executor {s['executor']} (pid {s['pid']}) has been in {s['doing']}{ranks} for {s['seconds']:.0f} s"
        site = (sites or {}).get(s["executor"])
        said.append(text + (f", issued at {site}" if site else ""))
    text = f"dtorch: {'; '.join(said)}."
    others: list[str] = list(message["others"])
    if waiters:
        others.append(f"values are waited for at {', '.join(waiters)}")
    elif message["waiting"]:
        n = message["waiting"]
        others.append(f"the client waits for results ({n} waiter{'s' if n > 1 else ''})")
    if others:
        text += " Meanwhile " + "; ".join(others) + "."
    stacks: dict[str, str] = message.get("stacks", {})
    for s in stuck:
        stack = stacks.get(str(s["executor"]))
        if stack:
            who = "it" if len(stuck) == 1 else f"executor {s['executor']}"
            start = " " if len(stuck) == 1 else "\n"
            text += f"{start}Where {who} is, most recent call first:\n{stack}"
    return text


def _list(executors: list[int]) -> str:
    return ("executor " if len(executors) == 1 else "executors ") + ", ".join(map(str, executors))
