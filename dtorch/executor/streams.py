"""stdout and stderr as the Python of an executor sees them: each line begins with the rank that wrote it.

What is printed by other means (native code, a process that a user's function starts) goes by; the warden puts the
executor's number before that.
"""

from __future__ import annotations

import io
from collections.abc import Callable

__all__ = ["MARK", "RankedStream", "prefix", "tell_ranks"]

# How a line begins that says who wrote it: see output.py.
MARK = b"[rank"


def _nobody() -> tuple[int, ...]:
    return ()


# Whose command runs.
_ranks: Callable[[], tuple[int, ...]] = _nobody


def tell_ranks(ranks: Callable[[], tuple[int, ...]]) -> None:
    """From here on, ``ranks()`` says whose command runs in the calling thread."""
    global _ranks
    _ranks = ranks


class RankedStream(io.TextIOWrapper):
    """A text stream, line-buffered as a terminal's, whose lines begin with ``[rank 3]`` where the rank is known."""

    _fresh = True  # whether a line begins

    def write(self, text: str, /) -> int:
        if not text:
            return 0
        start = prefix(_ranks())
        if not start:
            super().write(text)
        else:
            # Progress bars begin their lines anew with a carriage return alone.
            for line in text.splitlines(keepends=True):
                super().write(start + line if self._fresh else line)
                self._fresh = line.endswith(("\n", "\r"))
        self._fresh = text.endswith(("\n", "\r"))
        return len(text)


def prefix(ranks: tuple[int, ...]) -> str:
    """What a line of `ranks` begins with."""
    if not ranks:
        return ""
    return f"[{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}] "
