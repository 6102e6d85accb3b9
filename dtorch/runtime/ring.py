"""The command ring: one writer, every executor a reader. (What comes back: reply.py.)

A command record is whole 8-byte words in one piece:

    word 0      plan id | length of the record in words << 32
    word 1 …    whatever the plan's message layout says

Plan ids below 16 mean something to every reader: ``WRAP`` fills the rest of a lap, because no record straddles the
end; ``FREE`` is followed by refs to drop; ``CONTROL`` by a byte length and that many bytes, padded to whole words.
A reader that does not know a record (or is no part of its mesh) steps over it by its length.

Indexes count words since the start and only grow; ``index & mask`` is the place. The writer publishes by one store
of the write index; readers publish how far they are in their own line. Nothing is copied twice and nobody waits,
unless a bound is reached.

**Waking.** "Publish, then read the other side's sleep flag" loses wake-ups on x86: both may read the old value. So a
lock is acquired and released between the two (the writer's own lock, which it needs anyway, serves), and every sleep
has a time limit besides. On x86 stores are seen in the order they were made; elsewhere readers rely on the lock too.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable

from ..errors import ExecutorDiedError, PoolError, RunAheadError
from .command import CONTROL, FIRST_PLAN, FREE, WRAP
from .config import Config
from .linger import Linger
from .reply import ReplyReader, ReplyWriter, reply_memfd
from .scheduler import Pressure, failure, headroom, pressure, run_ahead, should_wake
from .shared import (
    ASLEEP,
    DEAD,
    DOZING,
    EXECUTOR_DONE,
    EXECUTOR_READ,
    EXECUTOR_STATE,
    RUNNING,
    WAITING,
    WRITE,
    SharedState,
    executor_line,
)

__all__ = [
    "CONTROL",
    "FIRST_PLAN",
    "FREE",
    "WRAP",
    "Notifier",
    "Reader",
    "ReplyReader",
    "ReplyWriter",
    "Writer",
    "reply_memfd",
]

_YIELDS = 20  # never a pure spin: it would hold the very core the other side needs
_LINGER = 100  # µs
_DOZES = 3
_DOZE_MS = 1
_RECHECK_MS = 200
_COALESCE = 16  # completions per wake-up of the client, while there is more to do


def _nothing() -> None:
    pass


def _never() -> bool:
    return False


class Writer:
    """The client's end of the command ring.

    The hot path writes records inline, under :attr:`lock`::

        with writer.lock:
            head = writer.head
            end = head + n
            if end > writer.limit:              # a lap ends, or a bound is near
                head = writer.make_room(n)
                end = head + n
            p = head & writer.mask
            ring[p] = plan_id | n << 32; ring[p + 1] = …
            writer.head = control[WRITE] = end
            writer.issued += 1
        writer.wake(executors)                  # only after the lock was released: that is the fence

    Attributes:
        words: length of the ring, a power of two; ``mask`` is one less.
        head: next word to write. Invariant: every word in [slowest reader, head) is a whole record.
        limit: :attr:`head` may not pass this without :meth:`make_room`.
        issued: records published, wrap markers not counted; what the run-ahead bounds count.
        lock: held around every write.
        readers: executors that read the ring.
        while_waiting: called again and again while a bound makes a call wait; may raise to end the wait.
        while_unlocked: called as often with the lock let go: for draining replies, which executors may wait for.
    """

    def __init__(
        self,
        state: SharedState,
        config: Config,
        *,
        in_loop: Callable[[], bool] = _never,
        while_waiting: Callable[[], None] = _nothing,
        while_unlocked: Callable[[], None] = _nothing,
    ) -> None:
        self.state = state
        self.control = state.control
        self.ring = state.ring_words
        self.words = len(self.ring)
        self.mask = self.words - 1
        self.head = 0
        self.limit = 0
        self.issued = 0
        self.lock = threading.Lock()
        self.readers: tuple[int, ...] = ()
        self.while_waiting = while_waiting
        self.while_unlocked = while_unlocked
        self._in_loop = in_loop
        self._soft = config.run_ahead_soft
        self._hard = config.run_ahead_hard
        self._refused = False

    def add_reader(self, executor: int) -> None:
        """Let `executor` read from here on. Call before it starts, or it may miss records."""
        with self.lock:
            line = executor_line(executor)
            self.control[WRITE] = self.head
            self.control[line + EXECUTOR_READ] = self.head
            self.control[line + EXECUTOR_DONE] = self.issued
            self.control[line + EXECUTOR_STATE] = RUNNING
            self.readers = (*self.readers, executor)
            self.limit = self.head  # computed anew, with this reader in it

    def remove_reader(self, executor: int) -> None:
        """Stop waiting for `executor`, which has gone."""
        with self.lock:
            self.readers = tuple(e for e in self.readers if e != executor)

    def refuse(self) -> None:
        """The pool has died: whoever writes next learns of it by :meth:`make_room`, which raises."""
        # Without the lock: a thread that holds it may be the one that learns of the death.
        self._refused = True
        self.limit = 0

    def behind(self) -> int:
        """How many commands the slowest executor has still to consume."""
        return run_ahead(self.issued, [self.control[executor_line(e) + EXECUTOR_DONE] for e in self.readers])

    def pressure(self) -> Pressure:
        """What the present run-ahead asks of callers. Executors that lag are woken where it asks for anything."""
        asked = pressure(self.behind(), self._soft, self._hard)
        if asked is not Pressure.NONE:
            # One that no command concerned may simply be asleep.
            self.wake(self.readers, sync=True)
        return asked

    def make_room(self, nwords: int) -> int:
        """Make sure a record of `nwords` may be written, ending the lap if it does not fit; the head to write at.

        The caller holds :attr:`lock`. Waits while a bound is reached, and lets go of the lock meanwhile: a thread that
        runs an event loop is to raise, not to wait for this one.

        Raises:
            ValueError: no ring of this size can hold the record.
            RunAheadError: a bound is reached inside a running event loop.
            PoolError: the pool died meanwhile.
        """
        if self._refused:
            self.while_waiting()
            self._refuse_if_dead()
        if nwords > self.words // 2:
            raise ValueError(
                f"a command of {8 * nwords} bytes does not fit a ring of {8 * self.words} bytes (at most half of it); "
                f"raise it: dtorch.configure(ring_bytes={1 << (16 * nwords - 1).bit_length()})"
            )
        tries = 0
        while True:
            # Anew each time: other threads write while this one waits.
            head = self.head
            lap_end = (head | self.mask) + 1
            skipped = lap_end - head if head + nwords > lap_end else 0
            slowest, behind = self._slowest(), self.behind()
            full = head + skipped + nwords - slowest > self.words
            if not full and pressure(behind, self._soft, self._hard) is not Pressure.HARD:
                break
            self._wait_for_room(tries, full, behind)
            tries += 1
        if skipped:
            self.ring[head & self.mask] = WRAP | skipped << 32
            head = self.head = lap_end
            lap_end += self.words
        self.limit = min(lap_end, headroom(head, slowest, self.words, behind, self._hard))
        if self._refused:
            self.limit = 0
        return head

    def begin(self, nwords: int) -> int:
        """Place in the ring of a record of `nwords` about to be written at :attr:`head`. The caller holds the lock."""
        head = self.head
        if head + nwords > self.limit:
            head = self.make_room(nwords)
        return head & self.mask

    def commit(self, new_head: int) -> None:
        """Publish one record that ends at `new_head`. The caller holds the lock, and wakes after releasing it."""
        self.issued += 1
        self.head = self.control[WRITE] = new_head

    def write_record(self, plan_id: int, words: Iterable[int]) -> None:
        """Write and publish a record of unsigned `words`. The caller holds the lock."""
        body = tuple(words)
        n = 1 + len(body)
        p = self.begin(n)
        ring = self.ring
        ring[p] = plan_id | n << 32
        for i, word in enumerate(body, p + 1):
            ring[i] = word
        self.commit(self.head + n)

    def write_bytes_record(
        self,
        plan_id: int,
        extra_words: tuple[int, ...],
        payload: bytes,
        before: Callable[[int], object] | None = None,
    ) -> None:
        """Write and publish a record of `extra_words`, a byte length and `payload`. The caller holds the lock.

        `before` is told the record's position, before anyone can read it.
        """
        start = 2 + len(extra_words)
        n = start + (len(payload) + 7 >> 3)
        p = self.begin(n)
        ring = self.ring
        ring[p] = plan_id | n << 32
        for i, word in enumerate((*extra_words, len(payload)), p + 1):
            ring[i] = word
        at = 8 * (p + start)
        self.state.ring_bytes[at : at + len(payload)] = payload
        if before is not None:
            before(self.head)
        self.commit(self.head + n)

    def send_control(
        self, payload: bytes, *, sync: bool = False, before: Callable[[int], object] | None = None
    ) -> None:
        """Write a CONTROL record for every executor and wake whom it concerns. Takes the lock itself."""
        with self.lock:
            self.write_bytes_record(CONTROL, (), payload, before)
        self.wake(self.readers, sync=sync)

    def wake(self, executors: Iterable[int], sync: bool = False) -> None:
        """Wake those of `executors` that would otherwise not look in time. Not under the lock.

        Args:
            executors: whom the last records concern.
            sync: someone is about to wait, so dozing ones are woken too.
        """
        control = self.control
        for e in executors:
            line = 64 + 16 * e
            state = control[line + EXECUTOR_STATE]
            if state and should_wake(state, control[WRITE] - control[line], sync):
                # Taken back before the write: were it after, it could hide that the executor slept again.
                control[line + EXECUTOR_STATE] = RUNNING
                fd = self.state.wake_fds.get(e)
                if fd is not None:  # gone once the pool is closed
                    os.eventfd_write(fd, 1)

    def _slowest(self) -> int:
        control = self.control
        return min((control[executor_line(e) + EXECUTOR_READ] for e in self.readers), default=self.head)

    def _wait_for_room(self, tries: int, full: bool, behind: int) -> None:
        """Give executors a moment to make room, the lock let go; the `tries`-th time."""
        self.while_waiting()
        self._refuse_if_dead()
        self.wake(self.readers, sync=True)
        if tries >= _YIELDS and self._in_loop():
            bound = "the command ring is full" if full else f"the hard run-ahead bound is {self._hard:,}"
            raise RunAheadError(
                f"{behind:,} commands were issued inside a running event loop without awaiting any ({bound}); "
                "await something now and then, for example:  await t.ready()"
            )
        self.lock.release()
        try:
            self.while_unlocked()
            if tries < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(0.001)
        finally:
            self.lock.acquire()

    def _refuse_if_dead(self) -> None:
        fault = failure(self.control[DEAD])
        if fault is not None:
            if fault.executor is None:
                raise PoolError("the pool is gone; start a new one with dtorch.restart()")
            raise ExecutorDiedError(f"executor {fault.executor} died; start a new pool with dtorch.restart()")


class Reader:
    """An executor's end of the command ring.

    Attributes:
        position: read index, as published last.
        idle: called once whenever all that was there is consumed, before looking again.
    """

    def __init__(
        self, state: SharedState, executor: int, wake_fd: int, *, idle: Callable[[], object] = _nothing
    ) -> None:
        self.state = state
        self.control = state.control
        self.ring = state.ring_words
        self.mask = len(self.ring) - 1
        self.idle = idle
        self._line = executor_line(executor)
        self.position = self.control[self._line + EXECUTOR_READ]
        self._wake_fd = wake_fd
        self._poll = select.poll()
        self._poll.register(wake_fd, select.POLLIN)
        self._fence = threading.Lock()
        self._linger = Linger(_LINGER)

    def _unread(self) -> bool:
        return self.control[WRITE] > self.position

    def poll(self) -> tuple[int, int] | None:
        """Indexes (start, end) of all unread records, wrap markers among them; ``None`` where there are none."""
        end = self.control[WRITE]
        return (self.position, end) if end > self.position else None

    def advance(self, position: int, records: int) -> None:
        """Give back everything before `position`, which held `records` records (wrap markers not counted)."""
        control, line = self.control, self._line
        control[line + EXECUTOR_DONE] += records
        self.position = control[line + EXECUTOR_READ] = position

    def wait(self, timeout: float | None = None) -> tuple[int, int] | None:
        """As :meth:`poll`, but waits: a few yields, some more where that has paid lately, up to three timed naps
        (dozing), then asleep until woken.

        Args:
            timeout: seconds after which to return ``None``; ``None`` waits for ever.
        """
        self.idle()
        control, position = self.control, self.position
        for _ in range(_YIELDS):
            if control[WRITE] > position:
                return position, control[WRITE]
            os.sched_yield()
        if self._linger.look(self._unread):
            return position, control[WRITE]
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for _ in range(_DOZES):
                if self._nap(DOZING, _DOZE_MS):
                    return position, control[WRITE]
            while True:
                limit = _RECHECK_MS
                if deadline is not None:
                    limit = min(limit, int((deadline - time.monotonic()) * 1000))
                    if limit < 0:
                        return None
                if self._nap(ASLEEP, limit):
                    return position, control[WRITE]
        finally:
            control[self._line + EXECUTOR_STATE] = RUNNING

    def _nap(self, state: int, limit_ms: int) -> bool:
        """Publish `state`, look again, and only then sleep; whether there is something to read."""
        control = self.control
        control[self._line + EXECUTOR_STATE] = state
        with self._fence:
            pass
        if control[WRITE] > self.position:
            return True
        if self._poll.poll(limit_ms):
            os.eventfd_read(self._wake_fd)
        return control[WRITE] > self.position


class Notifier:
    """An executor's way to tell the client's waiters: status words first, then one wake-up for many of them."""

    def __init__(self, state: SharedState) -> None:
        self.control = state.control
        self._done_fd = state.done_fd
        self._fence = threading.Lock()
        self._untold = 0

    def complete(self, index: int, word: int) -> None:
        """Set the status word at control `index`; waiters hear of it by the next :meth:`flush` at the latest."""
        self.control[index] = word
        self._untold += 1
        if self._untold >= _COALESCE:
            self.flush()

    def flush(self) -> None:
        """Wake the client's waiters if anything was completed since and anyone waits."""
        if self._untold:
            self._untold = 0
            self.ring()

    def ring(self) -> None:
        """Wake the client's waiters if anyone waits."""
        with self._fence:
            pass
        if self.control[WAITING]:
            os.eventfd_write(self._done_fd, 1)
