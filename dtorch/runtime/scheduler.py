"""Who is woken, who must wait, and what a failure means: decisions, with no clock, process or event loop.

Everything here is a function from values to values. The rest of the runtime reads the shared words, asks here, and
acts:

* An executor that is *asleep* is woken by any command; one that is *dozing* (it looks again within a millisecond by
  itself) only when much is unread or someone is about to wait; a *running* one never.
* Run-ahead is how many commands were issued that the slowest executor has not consumed. Past the soft bound every
  await pauses, and a blocking call from a thread without a running loop waits. Past the hard bound any call waits,
  except inside a running event loop, where waiting would stop the loop that has to make room: there it raises.
* A pool fails once, for good: the first death decides what is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from .shared import ASLEEP, DEAD_POOL, DOZING, RUNNING

__all__ = ["DOZE_WAKE_WORDS", "Failure", "Pressure", "failure", "headroom", "pressure", "run_ahead", "should_wake"]

# 64 commands of the commonest length (plan, two inputs, one output).
DOZE_WAKE_WORDS = 64 * 4
# No record is shorter: its head, and at least one word of what it is about.
SHORTEST_RECORD = 2


class Pressure(Enum):
    """What run-ahead asks of whoever issues or waits."""

    NONE = "none"  # go on
    SOFT = "soft"  # awaits pause; blocking calls outside a loop wait
    HARD = "hard"  # every call waits; inside a loop it raises


def should_wake(state: int, unread_words: int, sync: bool) -> bool:
    """Whether an executor in `state` with `unread_words` in the ring must be woken.

    Args:
        state: RUNNING, DOZING or ASLEEP, as the executor published it.
        unread_words: how far its read index is behind the write index.
        sync: someone is about to wait for the result.
    """
    if state == RUNNING or unread_words <= 0:
        return False
    if state == DOZING:
        return sync or unread_words >= DOZE_WAKE_WORDS
    return state == ASLEEP


def run_ahead(issued: int, consumed: Iterable[int]) -> int:
    """Commands that the slowest executor has still to consume; 0 without executors."""
    return max((issued - done for done in consumed), default=0)


def pressure(behind: int, soft: int, hard: int) -> Pressure:
    """What a run-ahead of `behind` commands asks for under the two bounds."""
    if behind >= hard:
        return Pressure.HARD
    return Pressure.SOFT if behind >= soft else Pressure.NONE


def headroom(head: int, slowest_read: int, ring_words: int, behind: int, hard: int) -> int:
    """The index up to which the ring may be written before bounds must be looked at again.

    Two bounds at once: nothing unread is overwritten, and no more than `hard` commands are ever behind, however
    short their records are. So the writer compares one number per command.
    """
    by_room = slowest_read + ring_words
    by_count = head + max(0, hard - behind) * SHORTEST_RECORD
    return min(by_room, by_count)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a pool ended: the executor that died first, or ``None`` where the warden (and so all) is gone."""

    executor: int | None


def failure(dead_word: int) -> Failure | None:
    """What the dead word says; ``None`` while all live."""
    if dead_word == 0:
        return None
    return Failure(None) if dead_word & DEAD_POOL else Failure(dead_word - 1)
