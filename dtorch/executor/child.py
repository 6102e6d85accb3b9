"""The first and last moments of an executor: from the warden's fork to its entry, and from there to its end."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from ..runtime.reply import ReplyWriter
from ..runtime.shared import DEAD, DEAD_POOL, EXECUTOR_PID, SharedState, executor_line
from .stacks import SIGNAL
from .streams import RankedStream

__all__ = ["Child", "become_executor"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Child:
    """What an executor is made of.

    Attributes:
        index: its number.
        warden: pid of the warden.
        state: the pool's shared memory, mapped.
        wake_fd: the eventfd that wakes it.
        reply_fd: its reply ring.
        stdout, stderr: writing ends of its output.
        stacks: the file to print stacks into, see stacks.py.
        prefix: whether lines say which rank wrote them.
        options: for the entry.
    """

    index: int
    warden: int
    state: SharedState
    wake_fd: int
    reply_fd: int
    stdout: int
    stderr: int
    stacks: int
    prefix: bool
    options: dict[str, Any]


def become_executor(child: Child, entry: Callable[..., object]) -> NoReturn:
    """Run `entry` as the executor `child` describes, in a freshly forked process, and end the process after it."""
    # The warden has one thread, so "parent dies" and "thread that forked ends" are the same.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != child.warden:
        os._exit(0)  # it died before the line above
    status = 1
    try:
        _connect_streams(child)
        _set_signals(child.state, child.stacks)
        with open("/proc/self/comm", "w") as comm:
            comm.write(f"dtorch-exec-{child.index}")
        state = child.state
        state.control[executor_line(child.index) + EXECUTOR_PID] = os.getpid()
        # A full reply ring waits for the client, which may be asleep.
        reply = ReplyWriter(child.reply_fd, full=lambda: os.eventfd_write(state.done_fd, 1))
        entry(child.index, state, child.wake_fd, reply, child.options)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads it any more, or a user's function closed it
        # Not through the interpreter's own end: exit handlers here are copies of the warden's.
        os._exit(status)


def _connect_streams(child: Child) -> None:
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd, target in ((null, 0), (child.stdout, 1), (child.stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    # Made anew: the warden's were files. Whole lines at once, as in a terminal; and no text is worth an error here.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        kind = RankedStream if child.prefix else io.TextIOWrapper
        stream = kind(
            open(fd, "wb", closefd=False),
            encoding=getattr(sys, name).encoding,
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_signals(state: SharedState, stacks: int) -> None:
    # SIGINT stays ignored: Ctrl-C is the client's.
    control = state.control

    def end(number: int, frame: FrameType | None) -> None:
        # Sent by the warden, to end the pool or, after a peer's death, only to interrupt a wait. From anyone else it
        # says nothing: the client decides when the pool ends.
        if control[DEAD] & DEAD_POOL:
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    # A crash in native code leaves a Python traceback among the last lines of stderr.
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(SIGNAL, file=stacks, all_threads=True)
