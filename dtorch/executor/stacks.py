"""Where executors are: each prints its Python stacks into one file that all of them have, one after the other.

faulthandler writes from a signal handler in C, so an executor answers from inside any kernel and any user function;
one that is stopped, or that the kernel does not let run, does not.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

__all__ = ["SIGNAL", "Stacks"]

# Not one of the few that programs like to handle themselves.
SIGNAL = signal.SIGRTMAX - 1
# Seconds an executor has for its answer, and between two looks whether that is whole.
_PATIENCE = 0.5
_LOOK = 0.02
# Executors that are asked in one round, and characters of each one's answer.
_MOST = 8
_LONGEST = 6000


class Stacks:
    """The warden's end.

    Attributes:
        fd: the file, to be kept open by executors.
        busy: a round is under way; call :meth:`step` now and then.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("dtorch-stacks", os.MFD_CLOEXEC)
        self.busy = False
        self._left: list[int] = []
        self._found: dict[int, str] = {}
        self._ask: Callable[[int], object] = int
        self._until = self._next = 0.0
        self._size = 0

    def close(self) -> None:
        """Give back the file."""
        os.close(self.fd)

    @property
    def wait(self) -> float:
        """Seconds until :meth:`step` has something to do."""
        return max(0.0, self._next - time.monotonic())

    def begin(self, executors: Iterable[int], ask: Callable[[int], object]) -> None:
        """Start a round among `executors`; ``ask(e)`` sends :data:`SIGNAL` to one."""
        self._left = list(executors)[:_MOST]
        self._found, self._ask, self.busy = {}, ask, True
        self._next_one()

    def _next_one(self) -> None:
        # The position in the file is common to all who have it.
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self._size = 0
        now = time.monotonic()
        self._until, self._next = now + _PATIENCE, now + _LOOK
        if self._left:
            self._ask(self._left[0])

    def step(self) -> dict[int, str] | None:
        """Go on with the round; once it is over, executor → its stacks, most recent call first."""
        if not self._left:
            self.busy = False
            return self._found
        now = time.monotonic()
        if now < self._next:
            return None
        size = os.fstat(self.fd).st_size
        whole = size and size == self._size
        if not whole and now < self._until:
            self._size, self._next = size, now + _LOOK
            return None
        text = _shortened(os.pread(self.fd, size, 0).decode(errors="replace").strip("\0\n"))
        if len(text) > _LONGEST:
            text = text[:_LONGEST] + "\n  …"
        self._found[self._left.pop(0)] = text or f"  (no answer within {_PATIENCE:g} s: it is stopped, or does not run)"
        self._next_one()
        return self.step()


def _shortened(text: str) -> str:
    """`text` without how the executor came to be, which is the same for all."""
    kept: list[str] = []
    skip = False
    for line in text.splitlines():
        skip = line.startswith("  ") and (skip or line.endswith(" in become_executor"))
        if not skip:
            kept.append(line)
    return "\n".join(kept)
