"""A forked child that stands in for an executor: it answers slots, and can delay, reply and die on demand."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from dtorch.future import TensorFuture
from dtorch.runtime.config import Config
from dtorch.runtime.ring import CONTROL, FIRST_PLAN, FREE, WRAP, Notifier, Reader, Writer
from dtorch.runtime.shared import DEAD, DONE, MISC, SharedState
from dtorch.runtime.slots import Slots, Ticket
from dtorch.runtime.waiting import Waiting

ANSWER = FIRST_PLAN  # [index of the status word, its value, delay in µs]
EXIT = FIRST_PLAN + 1
HOLD = 1 << 62  # as a delay: answer only once the pool's release() was called


def run(fds: dict[str, int], executor: int, wake_fd: int) -> None:
    """Read and answer commands until told to exit. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    state = SharedState.attach(fds)
    notifier = Notifier(state)
    reader = Reader(state, executor, wake_fd, idle=notifier.flush)
    ring, mask = state.ring_words, reader.mask
    while True:
        found = reader.wait()
        assert found is not None
        at, end = found
        records = 0
        while at < end:
            p = at & mask
            plan, n = ring[p] & 0xFFFFFFFF, ring[p] >> 32
            if plan == ANSWER:
                if ring[p + 3] == HOLD:
                    notifier.flush()
                    while not state.control[MISC]:
                        time.sleep(0.002)
                elif ring[p + 3]:
                    until = time.monotonic() + ring[p + 3] * 1e-6
                    while (left := until - time.monotonic()) > 0:
                        notifier.flush()
                        time.sleep(min(left, 0.05))
                notifier.complete(ring[p + 1], ring[p + 2])
            elif plan == EXIT:
                notifier.flush()
                os._exit(0)
            else:
                assert plan in (WRAP, FREE, CONTROL), plan
            records += plan != WRAP
            at += n
        reader.advance(at, records)


class EchoPool:
    """A client with one such executor."""

    def __init__(self, **options: Any) -> None:
        self.config = Config(**{"ring_bytes": 1 << 16, "arena_bytes": 1 << 20, "slots": 1 << 12, **options})
        self.state = SharedState.create(self.config)
        self.writer = Writer(self.state, self.config)
        self.waiting = Waiting(self.state)
        self.slots = Slots(self.state)
        self.writer.add_reader(0)
        wake_fd = self.state.add_wake(0)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                run(self.state.fds(), 0, wake_fd)
            finally:
                os._exit(1)

    def issue(self, delay_us: int = 0, value: int = DONE) -> Ticket:
        """Ask for an answer after `delay_us`; its slot."""
        ticket = self.slots.take((0,))
        index = self.state.slot_word(ticket.slot, 0)
        with self.writer.lock:
            self.writer.write_record(ANSWER, (index, ticket.pending | value, delay_us))
        self.writer.wake((0,), sync=True)
        return ticket

    def future(
        self, delay_us: int = 0, resolve: Callable[[], Any] = lambda: "value", abandoned: list[int] | None = None
    ) -> TensorFuture[Any]:
        """A future of such an answer, with the value of `resolve`."""
        ticket = self.issue(delay_us)

        def fetch() -> Any:
            self.slots.give(ticket)
            if not ticket.answered():
                raise RuntimeError("the executor died")
            return resolve()

        def abandon() -> None:
            self.slots.give(ticket, lambda: abandoned.append(ticket.slot) if abandoned is not None else None)

        return TensorFuture(ticket.is_done, fetch, self.waiting, abandon)

    def release(self) -> None:
        """Let all held answers, and those to come, go."""
        self.state.control[MISC] = 1

    def kill(self) -> None:
        """Kill the executor, and tell as the warden would."""
        os.kill(self.pid, signal.SIGKILL)
        self.state.control[DEAD] = 1
        self.state.wake_all()

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.state.close()
