"""The memory that the client and all executors of one pool share, and where everything lies in it.

Four anonymous files (``memfd_create``; nothing in /dev/shm, nothing left behind when all processes die), passed by
descriptor. All are sparse: size is address space, only touched pages take memory.

    control      8-byte words, each written by one side only, read by any; see the constants below
    ring         the command ring: one writer (the client), read by every executor (ring.py)
    arena        tensor payloads; the client allocates, executors only map it (arena.py)
    collective   slots of the shared-memory collectives

and one eventfd, ``done``: executors write it after they finish something, nobody ever reads it (waiting.py).

A word is stored whole by ``memoryview.cast("Q")`` and nothing else: stores through ``struct`` may tear. Words that
different sides write are at least 64 bytes apart.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import ClassVar

from ..errors import PoolError
from .config import Config
from .limits import explain

__all__ = [
    "ABORT",
    "ASLEEP",
    "DEAD",
    "DEAD_POOL",
    "DONE",
    "DOZING",
    "ERROR",
    "EXECUTOR_CONTROL",
    "EXECUTOR_DONE",
    "EXECUTOR_PID",
    "EXECUTOR_PLAN",
    "EXECUTOR_READ",
    "EXECUTOR_READY",
    "EXECUTOR_STARTED",
    "EXECUTOR_STATE",
    "EXECUTOR_UPLOADED",
    "PENDING",
    "RUNNING",
    "SPOKEN",
    "WAITING",
    "WRITE",
    "SharedState",
    "executor_line",
    "map_words",
    "memfd",
]

# Words of the control file, by index.
WRITE = 0  # ring write index, in words, only ever growing
WAITING = 8  # how many waiters of the client sleep on the done eventfd
DEAD = 16  # 0, or 1 + index of the first executor that died, or DEAD_POOL
ABORT = 24  # nonzero frees every executor from collectives
MISC = 32  # reserved
SPOKEN = 33  # number of the last report that the warden has said itself, the client not having taken it
_LAYOUT = 40  # version, max_executors, slots: written once, at creation
_LINES = 64  # first executor's line
_LINE = 16  # words of one executor's line

DEAD_POOL = 1 << 32  # in DEAD: the warden, and so all, is gone

# Words of an executor's line, by offset. The executor writes them; the client only takes STATE back to RUNNING.
EXECUTOR_READ = 0  # ring read index, in words
EXECUTOR_STATE = 1  # RUNNING, DOZING or ASLEEP
EXECUTOR_DONE = 2  # records consumed, wrap markers not counted
EXECUTOR_UPLOADED = 3  # where a device copies on its own: uploads before this ring position have left the arena
EXECUTOR_PLAN = 8  # plan id it runs now, 0 for none (for the watchdog)
EXECUTOR_STARTED = 9  # monotonic_ns when that began
EXECUTOR_READY = 10  # 1 once it reads the ring
EXECUTOR_PID = 11
EXECUTOR_CONTROL = 12  # ring position of the control message it acts on, or has acted on last

RUNNING, DOZING, ASLEEP = 0, 1, 2

# State bits of a status word; the rest is the generation of the slot.
PENDING, DONE, ERROR = 0, 1, 2

_VERSION = 1


def executor_line(executor: int) -> int:
    """Index, in control words, of the line of `executor`."""
    return _LINES + _LINE * executor


def memfd(name: str, nbytes: int) -> int:
    """A descriptor of a new anonymous sparse file of `nbytes`, closed on exec unless passed on."""
    fd = os.memfd_create(f"dtorch-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def map_words(fd: int) -> tuple[mmap.mmap, memoryview]:
    """The whole file `fd` as shared memory, and the same as a view of aligned 8-byte words."""
    m = mmap.mmap(fd, os.fstat(fd).st_size)
    return m, memoryview(m).cast("Q")


class SharedState:
    """All shared memory of one pool, mapped. The client creates it; executors attach to the same descriptors.

    Attributes:
        control: the control file as words (format "Q").
        ring_words, ring_ints, ring_doubles, ring_bytes: the ring as formats "Q", "q", "d", "B".
        arena_map, collective_map: the mapped files.
        collective_fd, done_fd: descriptors for those who need them raw.
        max_executors, slots: bounds of this pool.
        slot_base, slot_stride: status word of executor `e` in slot `s` is
            ``control[slot_base + s * slot_stride + e]``, holding ``generation << 2 | state``.
        wake_fds: executor → its wake eventfd (client side; an executor knows only its own).
    """

    _FILES: ClassVar = ("control", "ring", "arena", "collective")

    def __init__(self, fds: dict[str, int], *, owner: bool = False) -> None:
        self._fds = dict(fds)
        self._owner = owner
        self._closed = False
        _, self.control = map_words(fds["control"])
        if self.control[_LAYOUT] != _VERSION:
            raise PoolError(
                f"shared memory of layout {self.control[_LAYOUT]} met dtorch of layout {_VERSION}: "
                "the client and its executors run different versions of dtorch; restart the program"
            )
        self.max_executors = self.control[_LAYOUT + 1]
        self.slots = self.control[_LAYOUT + 2]
        self.slot_base = executor_line(self.max_executors)
        self.slot_stride = self.max_executors
        self._ring_map, self.ring_words = map_words(fds["ring"])
        self.ring_bytes = memoryview(self._ring_map)
        self.ring_ints = self.ring_bytes.cast("q")
        self.ring_doubles = self.ring_bytes.cast("d")
        self.arena_map = mmap.mmap(fds["arena"], os.fstat(fds["arena"]).st_size)
        self.collective_map = mmap.mmap(fds["collective"], os.fstat(fds["collective"]).st_size)
        self.arena_fd = fds["arena"]
        self.collective_fd = fds["collective"]
        self.done_fd = fds["done"]
        self.wake_fds: dict[int, int] = {}

    @classmethod
    def create(cls, config: Config) -> SharedState:
        """Fresh shared memory for a pool of the client, bounded by `config`."""
        words = executor_line(config.max_executors) + config.slots * config.max_executors
        sizes = {
            "control": 8 * words,
            "ring": config.ring_bytes,
            "arena": config.arena_limit,
            "collective": config.collective_bytes,
        }
        fds: dict[str, int] = {}
        try:
            for name, nbytes in sizes.items():
                fds[name] = memfd(name, nbytes)
            fds["done"] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            with mmap.mmap(fds["control"], 8 * words) as m, memoryview(m) as raw, raw.cast("Q") as control:
                control[_LAYOUT + 1] = config.max_executors
                control[_LAYOUT + 2] = config.slots
                control[_LAYOUT] = _VERSION
            return cls(fds, owner=True)
        except OSError as error:
            for fd in fds.values():
                os.close(fd)
            raise PoolError(f"the pool's shared memory could not be made: {explain(error)}") from error

    @classmethod
    def attach(cls, fds: dict[str, int]) -> SharedState:
        """The shared memory behind descriptors that came from :meth:`fds` of another process."""
        return cls(fds)

    def fds(self) -> dict[str, int]:
        """Name → descriptor of all that another process needs to :meth:`attach`."""
        return dict(self._fds)

    def add_wake(self, executor: int) -> int:
        """The wake eventfd of `executor`, made on first use; to be sent along with the request to fork it."""
        if executor not in self.wake_fds:
            # Blocking, so that an executor's read waits; polled first where a timeout is wanted.
            self.wake_fds[executor] = os.eventfd(0, os.EFD_CLOEXEC)
        return self.wake_fds[executor]

    def wake_all(self) -> None:
        """Wake every sleeping executor and every waiter of the client, whatever they wait for."""
        for executor, fd in tuple(self.wake_fds.items()):
            self.control[executor_line(executor) + EXECUTOR_STATE] = RUNNING
            os.eventfd_write(fd, 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.done_fd, 1)

    def slot_word(self, slot: int, executor: int) -> int:
        """Index, in control words, of the status word of `executor` in `slot`."""
        return self.slot_base + slot * self.slot_stride + executor

    def close(self) -> None:
        """Unmap and close everything; safe to call again.

        Memory that still backs tensors of the user (results of the arena) stays mapped until they die, and the
        control words until the last one who might look at them does. When the client closes, waiters that are left
        see a dead pool.
        """
        if self._closed:
            return
        self._closed = True
        if self._owner:
            if not self.control[DEAD]:
                self.control[DEAD] = DEAD_POOL
            self.wake_all()
        for view in (self.ring_words, self.ring_ints, self.ring_doubles, self.ring_bytes):
            view.release()
        for m in (self._ring_map, self.arena_map, self.collective_map):
            # BufferError: something still looks at it; unmapped when that is collected.
            with contextlib.suppress(BufferError):
                m.close()
        # Out of reach before they are closed: their numbers may soon be files of the user.
        fds = (*self._fds.values(), *self.wake_fds.values())
        self.wake_fds.clear()
        self.arena_fd = self.collective_fd = self.done_fd = -1
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
