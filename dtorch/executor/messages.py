"""What the client's half of the pool and the warden say to each other, and how it travels.

A pair of connected sockets (``AF_UNIX``, ``SOCK_SEQPACKET``: whole messages, and an end that is noticed when either
process dies) carries JSON objects with descriptors beside them. The client sends

    start   once: search path, environment to restore, entry, options; descriptors STREAMS, then the shared memory
    fork    start executors; descriptors: each one's wake eventfd and reply ring
    stop    end all executors, at the latest after `grace` seconds

and the warden answers

    hello   imports are done: threads, seconds they took
    forked  executor → pid
    refused an executor could not be forked
    died    an executor ended: index, pid, reason, last lines of its stderr
    stuck   what the watchdog found (watchdog.py), for whoever takes the token (telling.py)
    lines   what an executor printed, where that is to be logged

This module needs nothing but the standard library: it is used before the client's search path is known.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FORK_BATCH", "STREAMS", "Death", "close_all", "exit_reason", "oom_kills", "receive", "send"]

# Descriptors at the head of the start message: the client's stdout and stderr, its pidfd, names of plans, tokens.
STREAMS = ("stdout", "stderr", "client", "names", "claims")
_BY_SIGNAL = "was ended by signal"
# Most executors in one fork message: two descriptors each, and the kernel takes at most 253 in a message.
FORK_BATCH = 64
# A socket's send buffer holds 208 KiB by default, and no message is larger.
_LONGEST = 1 << 18


@dataclass(frozen=True, slots=True)
class Death:
    """How a process of the pool ended.

    Attributes:
        executor: its index; None for the warden, whose end is the end of all.
        pid: its process id.
        reason: "ended with exit code 3", "was ended by signal SIGKILL (…)".
        stderr: the last lines it wrote to stderr, oldest first.
    """

    executor: int | None
    pid: int
    reason: str
    stderr: tuple[str, ...] = ()

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended it."""
        return self.reason.startswith(_BY_SIGNAL)

    def __str__(self) -> str:
        who = "the warden of the executors" if self.executor is None else f"executor {self.executor}"
        text = f"{who} (pid {self.pid}) {self.reason}"
        if self.stderr:
            text += "\nIts last lines on stderr:\n" + "\n".join(f"    {line}" for line in self.stderr)
        return text


def oom_kills() -> int:
    """How many processes the kernel has ended on this machine because memory ran out; 0 where it does not tell."""
    try:
        with open("/proc/vmstat") as f:
            return next((int(line.split()[1]) for line in f if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0


def exit_reason(returncode: int, oom: int = 0) -> str:
    """`returncode` as :mod:`subprocess` gives it (negative for a signal), in words that follow a name.

    `oom` is how many processes the kernel has ended meanwhile because memory ran out.
    """
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = str(-returncode)
    if -returncode == signal.SIGKILL and oom:
        name += (
            " (by the kernel because memory ran out, by its own count of such ends; `dmesg` says how much who had. Cut "
            "tensors into more shards, or give this machine or control group more memory)"
        )
    elif -returncode == signal.SIGKILL:
        name += " (killed by hand, or by the kernel because memory ran out)"
    return f"{_BY_SIGNAL} {name}"


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = (), flags: int = 0) -> None:
    """Send one message with `fds` beside it.

    Raises:
        OSError: the peer is gone, or (with MSG_DONTWAIT) its buffer is full.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message).encode()], rights, flags | socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, flags: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; ``(None, [])`` when the peer is gone.

    Raises:
        BlockingIOError: with MSG_DONTWAIT, nothing is there.
        OSError: the descriptors are more than this process may open; the message is lost.
    """
    # Not socket.recv_fds, which drops its flags (Python 3.11).
    space = socket.CMSG_SPACE((2 * FORK_BATCH + 16) * array("i").itemsize)
    try:
        data, ancillary, told, _ = sock.recvmsg(_LONGEST, space, flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None, []
    fds = array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    if not data:
        close_all(fds)
        return None, []
    if told & socket.MSG_CTRUNC:
        # The kernel drops those that have no room, and says nothing more.
        close_all(fds)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return json.loads(data), list(fds)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody else will."""
    for fd in fds:
        os.close(fd)
