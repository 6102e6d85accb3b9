"""The warden as its client holds it: a process, a socket, and what it says should it fail to start."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import PoolError
from ..runtime.limits import explain
from .messages import Death, close_all, exit_reason, receive, send
from .names import Names

__all__ = ["WardenProcess", "has_ended", "is_open", "occupy_standard_streams"]

# What the warden's environment has in place of the user's (None: nothing), while it imports. OpenBLAS would start a
# thread when numpy is imported, and PYTHONINSPECT would keep a failed warden waiting for input.
WARDEN_ENVIRON: dict[str, str | None] = {"OPENBLAS_NUM_THREADS": "1", "PYTHONINSPECT": None}
_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")
_CAPTURED_BYTES = 16 << 10
_CAPTURED_LINES = 20


class WardenProcess:
    """A running warden.

    Attributes:
        pid: its process id.
        pidfd: readable once it has ended.
        sock: our end of the socket pair.
        names: what plans and meshes are called, for the watchdog.
        claims: the eventfd of tokens, see telling.py.
    """

    def __init__(self, start: dict[str, Any], shared: dict[str, int]) -> None:
        """Start the process, and send it `start` and the descriptors `shared`. Returns before it imports anything.

        Raises:
            PoolError: no interpreter, or no process.
            OSError: too many open files.
        """
        _refuse_impossible()
        if not sys.executable:
            raise PoolError(
                "the pool needs a Python interpreter to start its executors with, and sys.executable is empty (an "
                "embedded interpreter?); set it first: sys.executable = '/usr/bin/python3'"
            )
        environ = dict(os.environ)
        for name, value in WARDEN_ENVIRON.items():
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
        # torch reads this once, when it first allocates: fresh large tensors on huge pages are touched twice as fast.
        environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        with contextlib.ExitStack() as undo:
            # Each is let go if one after it cannot be had.
            self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            undo.callback(self.sock.close)
            with theirs:
                self._captured = os.memfd_create("dtorch-warden-stderr", os.MFD_CLOEXEC)
                undo.callback(os.close, self._captured)
                self._names_fd = os.memfd_create("dtorch-names", os.MFD_CLOEXEC)
                undo.callback(os.close, self._names_fd)
                self.names = Names(self._names_fd)
                self.claims = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
                undo.callback(os.close, self.claims)
                self._process = self._start(theirs.fileno(), environ)
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.pid = self._process.pid
            self.pidfd = os.pidfd_open(self.pid)
            undo.callback(os.close, self.pidfd)
            self._poll = select.poll()
            self._poll.register(self.pidfd, select.POLLIN)
            self._send_start(start, shared)
            undo.pop_all()

    def _start(self, socket_fd: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [sys.executable, "-S", _MAIN, str(socket_fd)],
                stdin=subprocess.DEVNULL,
                # Its own words, not its executors': for the error, should it fail.
                stdout=self._captured,
                stderr=self._captured,
                env=environ,
                pass_fds=(socket_fd,),
                # In a directory that was removed under the client, torch's libraries cannot be loaded.
                cwd=None if _has_directory() else "/",
                # Out of the terminal's reach: Ctrl-C is the client's alone.
                start_new_session=True,
            )
        except OSError as error:
            raise PoolError(f"the pool could not start: {sys.executable} cannot be run: {explain(error)}") from error

    def _send_start(self, start: dict[str, Any], shared: dict[str, int]) -> None:
        message = {
            **start,
            "op": "start",
            # Whatever else is in there, the import system does not look at it either.
            "path": [_absolute(entry) for entry in list[object](sys.path) if isinstance(entry, str)],
            "environ": {name: os.environ.get(name) for name in WARDEN_ENVIRON},
            "shared": list(shared),
        }
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        client = os.pidfd_open(os.getpid())
        try:
            # The outputs of the process, not of sys.stdout. A daemon may have closed them, and what was opened since
            # under their numbers is something else: Python knows which were there when it started.
            streams = [
                fd if at_start is not None and is_open(fd) else null
                for fd, at_start in ((1, sys.__stdout__), (2, sys.__stderr__))
            ]
            self.send(message, [*streams, client, self._names_fd, self.claims, *shared.values()])
        finally:
            close_all((null, client))

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message. To a warden that has gone it goes nowhere: its pidfd tells why, not a broken pipe."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(self.sock, message, fds)

    def messages(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived; does not wait."""
        while True:
            try:
                message, _ = receive(self.sock, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if message is None:
                return
            yield message

    def has_ended(self) -> bool:
        """Whether the process has ended; does not wait."""
        return bool(self._poll.poll(0))

    def death(self) -> Death:
        """How the process ended, once it has."""
        size = os.fstat(self._captured).st_size
        said = os.pread(self._captured, _CAPTURED_BYTES, max(0, size - _CAPTURED_BYTES)).decode(errors="replace")
        lines = [line for line in said.splitlines() if line.strip()]
        try:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            reason = "has ended; how, this program's handler of SIGCHLD has learned, or nobody where it is ignored"
        else:
            reason = exit_reason(self._process.wait())
        return Death(None, self.pid, reason, tuple(lines[-_CAPTURED_LINES:]))

    def end(self, timeout: float) -> list[dict[str, Any]]:
        """Ask all processes to end; kill executors after half of `timeout` seconds, and the warden after all of it.
        Returns what it said meanwhile."""
        said: list[dict[str, Any]] = []
        try:
            self.send({"op": "stop", "grace": timeout / 2})
            # Not Popen.wait(timeout): that sleeps up to 50 ms between two looks.
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            poll.register(self.sock, select.POLLIN)
            deadline = time.monotonic() + timeout
            while (left := deadline - time.monotonic()) > 0:
                found = dict(poll.poll(left * 1000))
                said += self.messages()
                if self.pidfd in found:
                    break
                if found.get(self.sock.fileno(), 0) & select.POLLHUP:
                    poll.unregister(self.sock)
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self._process.wait()
            os.close(self.pidfd)
            self._close_files()
        return said

    def forget(self) -> None:
        """In a forked child of the client: let go of all descriptors. While a child holds the socket, the warden would
        not notice by it that the client has ended."""
        self._close_files()
        os.close(self.pidfd)
        self._process.returncode = 0  # no child of this process, so nothing to wait for or warn about

    def _close_files(self) -> None:
        self.sock.close()
        close_all((self._captured, self._names_fd, self.claims))


def is_open(fd: int) -> bool:
    """Whether `fd` is an open descriptor."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def occupy_standard_streams() -> None:
    """Put ``/dev/null`` where stdin, stdout or stderr is closed.

    Else the next file that is opened gets the number, and whatever a library writes to "stderr" goes into it: into
    the command ring, say. Programs that are started still find these closed.
    """
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(fd)


def _refuse_impossible() -> None:
    """Raise where no pool can start, whatever is tried."""
    if not os.path.exists("/proc/self/task"):
        raise PoolError(
            "the pool could not start: /proc is not mounted here, and its processes are watched there; mount it: "
            "mount -t proc proc /proc"
        )
    if not os.path.isfile(_MAIN):
        raise PoolError(
            f"the pool could not start: {_MAIN} is no file, and executors start from it. dtorch cannot run from an "
            "archive: unpack it, or install it: pip install dtorch"
        )


def _has_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _absolute(entry: str) -> str:
    """An entry of ``sys.path`` as the import system has resolved it, before a change of directory maybe."""
    finder = sys.path_importer_cache.get(entry)
    return getattr(finder, "path", entry) if entry and not os.path.isabs(entry) else entry


def has_ended(pid: int) -> bool:
    """Whether process `pid`, which need not be a child of this one, runs no longer."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # no descriptor is left, say: nothing is known
        return False
