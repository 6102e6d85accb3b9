"""What the warden has to say, on its way to the client's loggers or, should nobody listen there, to its stderr.

A report of the watchdog must come out while the client's interpreter is stuck in a long call of its own, and only
once. So with each goes a token, in an eventfd that both ends hold: whoever takes it speaks. The client does so when it
next looks, which everyone who waits does five times a second; the warden when that has not happened in time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from ..runtime.shared import SPOKEN, SharedState
from .stacks import Stacks
from .watchdog import Watchdog, text_of

__all__ = ["Reports", "take_token"]

# Seconds the client has to take a report.
_PATIENCE = 1.0


def take_token(claims: int) -> bool:
    """Whether the token in the eventfd `claims` was there, and is now the caller's."""
    try:
        os.eventfd_read(claims)
    except BlockingIOError:
        return False
    return True


class Reports:
    """The watchdog's findings, one at a time: found, completed by stacks, sent, and spoken by one side or the other.

    Args:
        state: the pool's shared memory.
        watchdog: what finds.
        claims: the eventfd of tokens.
        ask: sends an executor the signal to print its stacks.
        tell: sends a message to the client.
        write: writes text to the client's stderr.
    """

    def __init__(
        self,
        state: SharedState,
        watchdog: Watchdog,
        claims: int,
        ask: Callable[[int], object],
        tell: Callable[[dict[str, Any]], object],
        write: Callable[[bytes], object],
    ) -> None:
        self.stacks = Stacks()
        self._state, self._watchdog, self._claims = state, watchdog, claims
        self._ask, self._tell, self._write = ask, tell, write
        self._number = 0
        self._found: dict[str, Any] | None = None  # waits for stacks
        self._sent: dict[str, Any] | None = None  # waits for someone to take the token
        self._until = 0.0

    def release(self) -> None:
        """In a forked child: let go of what is the warden's. The file of stacks stays open."""
        self._watchdog.close()
        os.close(self._claims)

    def wait(self) -> float | None:
        """Seconds until there is something to do; None: nothing ever."""
        waits = [self._watchdog.period] if self._watchdog.period else []
        if self.stacks.busy:
            waits.append(self.stacks.wait)
        if self._sent is not None:
            waits.append(max(0.0, self._until - time.monotonic()))
        return min(waits, default=None)

    def step(self, pids: dict[int, int]) -> None:
        """Do what is due. `pids`: executor → pid of all that run."""
        if self.stacks.busy:
            stacks = self.stacks.step()
            if stacks is not None and self._found is not None:
                self._send({**self._found, "stacks": {str(e): text for e, text in stacks.items()}})
        elif self._sent is not None:
            if time.monotonic() >= self._until:
                self.speak()
        else:
            self._found = self._watchdog.look(pids)
            if self._found is not None:
                self.stacks.begin([s["executor"] for s in self._found["stuck"] if s["answers"]], self._ask)

    def _send(self, message: dict[str, Any]) -> None:
        self._number += 1
        self._found, self._sent = None, {**message, "event": "stuck", "number": self._number}
        self._until = time.monotonic() + _PATIENCE
        os.eventfd_write(self._claims, 1)
        self._tell(self._sent)

    def speak(self) -> None:
        """Say what the client has not taken, if there is such."""
        message, self._sent = self._sent, None
        # Should it still be read there: it is said.
        if message is not None:
            with contextlib.suppress(OSError):
                if take_token(self._claims):
                    self._state.control[SPOKEN] = message["number"]
                    self._write(text_of(message).encode() + b"\n")
