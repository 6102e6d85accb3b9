"""Whether to look on for a while before going to sleep.

Putting a core to sleep and waking it again costs both sides some 20 µs, more on virtual machines. Whoever waits for
less than that had better look on. But whoever waits for long only wastes the core, and where both sides share one,
who looks on keeps the other from running. Which it is shows by trying: looking on that paid is done again; looking on
that did not is left out for a while, twice as long each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["Linger"]

_LONGEST_PAUSE = 64


class Linger:
    """One waiter's experience with looking on. For one thread.

    Args:
        microseconds: how long to look on.
    """

    __slots__ = ("_left_out", "_ns", "_pause")

    def __init__(self, microseconds: int) -> None:
        self._ns = microseconds * 1000
        self._pause = 0  # waits to leave out after the next failure, less one
        self._left_out = 0  # waits still to leave out

    def pays(self) -> bool:
        """Whether to look on in this wait."""
        if self._left_out:
            self._left_out -= 1
            return False
        return True

    def paid(self, found: bool) -> None:
        """Say what looking on has brought."""
        if found:
            self._pause = 0
        else:
            self._left_out = self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)

    def look(self, ready: Callable[[], bool]) -> bool:
        """Look on, where that pays, giving way to whoever wants the core; whether it became ready."""
        if not self.pays():
            return False
        end = time.monotonic_ns() + self._ns
        while time.monotonic_ns() < end:
            os.sched_yield()
            if ready():
                self.paid(True)
                return True
        self.paid(False)
        return False
