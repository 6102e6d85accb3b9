"""Entries for executors in tests of the pool: small stand-ins for the executor's main loop."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from dtorch.runtime.reply import ReplyWriter
from dtorch.runtime.ring import CONTROL, Reader
from dtorch.runtime.shared import ABORT, EXECUTOR_READY, SharedState, executor_line

_libc = ctypes.CDLL(None, use_errno=True)


def obey(index: int, state: SharedState, wake_fd: int, reply: ReplyWriter, options: dict[str, Any]) -> None:
    """Run the actions that the client names in control records: ``[executor, action, *arguments]`` as JSON."""
    reader = Reader(state, index, wake_fd)
    state.control[executor_line(index) + EXECUTOR_READY] = 1
    os.eventfd_write(state.done_fd, 1)
    context = {"index": index, "state": state, "reply": reply, "options": options}
    while True:
        span = reader.wait()
        if span is None:
            continue
        pos, end = span
        while pos < end:
            place = pos & reader.mask
            head = state.ring_words[place]
            if head & 0xFFFFFFFF == CONTROL:
                start = 8 * (place + 2)
                payload = bytes(state.ring_bytes[start : start + state.ring_words[place + 1]])
                executor, action, *arguments = json.loads(payload)
                if executor in (index, -1):
                    ACTIONS[action](context, *arguments)
            pos += head >> 32
            reader.advance(pos, 1)


def late(index: int, state: SharedState, wake_fd: int, reply: ReplyWriter, options: dict[str, Any]) -> None:
    """Never ready."""
    time.sleep(1000)


def broken(index: int, state: SharedState, wake_fd: int, reply: ReplyWriter, options: dict[str, Any]) -> None:
    """Fails while it starts."""
    raise RuntimeError(f"no device for executor {index}")


def _answer(context: dict[str, Any], value: object) -> None:
    context["reply"].send(json.dumps(value).encode())
    os.eventfd_write(context["state"].done_fd, 1)


def _facts(context: dict[str, Any]) -> None:
    status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
    _answer(
        context,
        {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "parent": os.getppid(),
            "fds": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in open_fds()),
            "environ": {k: os.environ.get(k) for k in ("OPENBLAS_NUM_THREADS", "PYTHONINSPECT")},
            "threads": int(status["Threads"]),
            "options": context["options"],
            "path": sys.path,
            "name": open("/proc/self/comm").read().strip(),
            "modules": sorted(m for m in sys.modules if m.startswith(("dtorch", "user_", "sitecustomize"))),
        },
    )


def open_fds() -> list[int]:
    """Descriptors of this process, without the one that lists them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue
        found.append(int(name))
    return found


def _print(context: dict[str, Any], lines: int, width: int) -> None:
    """Lines from two threads, on both streams, in pieces that do not end where lines do."""

    def write(fd: int) -> None:
        data = b"".join(f"<{context['index']}.{fd}.{i}:{'x' * ((i * 7919) % width)}>\n".encode() for i in range(lines))
        for start in range(0, len(data), 1000):
            os.write(fd, data[start : start + 1000])

    other = threading.Thread(target=write, args=(1,))
    other.start()
    write(2)
    other.join()
    _answer(context, "printed")


def _say(context: dict[str, Any], stream: str, text: str) -> None:
    getattr(sys, stream).write(text)
    _answer(context, "said")


def _exit(context: dict[str, Any], status: int) -> None:
    sys.exit(status)


def _raise(context: dict[str, Any], text: str) -> None:
    raise ValueError(text)


def _segfault(context: dict[str, Any]) -> None:
    _libc.memset(8, 0, 8)


def _busy(context: dict[str, Any], seconds: float) -> None:
    """A kernel: no Python runs meanwhile, so no signal handler either."""
    _libc.usleep.restype = ctypes.c_int
    end = time.monotonic() + seconds
    _answer(context, "busy")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    _libc.usleep(int((end - time.monotonic()) * 1e6))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _collective(context: dict[str, Any]) -> None:
    """Wait in a futex as a collective does, until the abort word frees it; answers how long after it was set."""
    control = context["state"].control
    word = ctypes.c_uint32(0)
    _answer(context, "waiting")
    timeout = (ctypes.c_long * 2)(20, 0)
    while not control[ABORT]:
        _libc.syscall(202, ctypes.byref(word), 0, 0, ctypes.byref(timeout), None, 0)
    _answer(context, time.monotonic())


def _child(context: dict[str, Any]) -> None:
    """A process of the user's own that lives on and holds our streams."""
    child = subprocess.Popen(["sleep", "2"])
    _answer(context, child.pid)


ACTIONS = {
    "facts": _facts,
    "print": _print,
    "say": _say,
    "exit": _exit,
    "raise": _raise,
    "segfault": _segfault,
    "busy": _busy,
    "collective": _collective,
    "child": _child,
}
