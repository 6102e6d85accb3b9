"""What executors print, on its way to the client's own stdout and stderr: whole lines, never waited for.

The warden must notice a death even while the terminal is stopped with Ctrl-S, so nothing here blocks: a
:class:`Sink` keeps what its reader does not take yet, and when that is much, the pipes that feed it are no longer
read. The executors that print then wait, as any program would.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .streams import MARK

__all__ = ["LineReader", "Nowhere", "Sink", "ToClient"]

_READ = 1 << 16
# A line longer than this is passed on in pieces.
_LONGEST_LINE = 1 << 20
# Bytes kept for a slow reader before the pipes that feed it are left alone.
_FULL = 1 << 20
_KEPT_CHARACTERS = 400
# Bytes of lines in one message to the client, and messages that it may be behind.
_MESSAGE = 16 << 10
_WAITING = 64


class Sink:
    """One output of the client.

    Attributes:
        fd: descriptor to poll for writability while :attr:`pending` is not empty.
        pending: bytes accepted and not yet written.
    """

    def __init__(self, fd: int) -> None:
        """Take over `fd`, which shares its flags with the client and therefore must not be made non-blocking."""
        mode = os.fstat(fd).st_mode
        self._socket = socket.socket(fileno=os.dup(fd)) if stat.S_ISSOCK(mode) else None
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            try:
                # A pipe or terminal opened anew has flags of its own. A file would get a position of its own too,
                # but a file never makes its writer wait.
                own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                os.close(fd)
                fd = own
            except OSError:
                pass  # another user's pipe: written as it is
        self.fd = fd
        self.pending = bytearray()
        self._broken = False

    @property
    def full(self) -> bool:
        """Whether enough is pending for now."""
        return len(self.pending) >= _FULL

    def write(self, data: bytes | bytearray) -> None:
        """Pass on `data`, in order, at once or as the reader allows. Data for a reader that is gone is dropped."""
        if self._broken:
            return
        self.pending += data
        self.flush()

    def flush(self) -> None:
        """Write what the reader takes without waiting."""
        while self.pending and not self._broken:
            try:
                if self._socket is not None:
                    n = self._socket.send(self.pending, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                else:
                    n = os.write(self.fd, self.pending)
            except BlockingIOError:
                return
            except OSError:
                # `program | head`: the reader has gone, and the program goes on.
                self._broken = True
                self.pending.clear()
                return
            del self.pending[:n]

    def close(self, timeout: float) -> None:
        """Give the reader up to `timeout` seconds to take the rest."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        deadline = time.monotonic() + timeout
        while self.pending and (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            self.flush()
        self.release()

    def release(self) -> None:
        """Let go of the descriptors without writing anything more (a forked child has no business with them)."""
        os.close(self.fd)
        if self._socket is not None:
            self._socket.close()


class Nowhere:
    """Where lines go that nobody wants; their last ones are kept all the same, for the report of a death."""

    fd = -1
    full = False

    def write(self, data: bytes | bytearray) -> None:
        """Drop `data`."""


class ToClient:
    """Lines on their way to the client's loggers.

    The client reads them when it next looks. Past a bound the rest goes to the stream itself: executors that print
    never wait for the client's interpreter, and nothing is lost.
    """

    fd = -1

    def __init__(
        self,
        tell: Callable[[dict[str, Any]], object],
        waiting: Callable[[], int],
        executor: int,
        stream: str,
        sink: Sink,
    ) -> None:
        """`tell` sends a message, of which ``waiting()`` have not been taken; `sink` is the stream itself."""
        self._tell, self._waiting, self._sink = tell, waiting, sink
        self._executor, self._stream = executor, stream

    @property
    def full(self) -> bool:
        """Whether enough is pending for now."""
        return self._sink.full

    def write(self, data: bytes | bytearray) -> None:
        """Pass on the lines in `data`."""
        some: list[str] = []
        size = 0
        for line in data.splitlines():
            # No message is larger than a socket takes, whatever JSON makes of it.
            for start in range(0, len(line) or 1, _MESSAGE):
                piece = bytes(line[start : start + _MESSAGE])
                if size + len(piece) > _MESSAGE:
                    self._send(some)
                    some, size = [], 0
                some.append(piece.decode(errors="backslashreplace"))
                size += len(piece) + 1
        self._send(some)

    def _send(self, lines: list[str]) -> None:
        if self._waiting() >= _WAITING:
            self._sink.write("".join(line + "\n" for line in lines).encode())
        elif lines:
            self._tell({"event": "lines", "executor": self._executor, "stream": self._stream, "lines": lines})


class LineReader:
    """The reading end of an executor's stdout or stderr.

    Attributes:
        fd: non-blocking; to be polled.
        sink: where the lines go.
        closed: the pipe was at its end, and is closed.
    """

    def __init__(self, fd: int, sink: Sink | Nowhere | ToClient, prefix: str = "", keep: int = 0) -> None:
        """Put `prefix` before each line that does not say which rank wrote it; remember the last `keep` lines."""
        os.set_blocking(fd, False)
        self.fd = fd
        self.sink = sink
        self.closed = False
        self._prefix = prefix.encode()
        self._rest = bytearray()
        self._kept: deque[bytes] = deque(maxlen=keep)

    def pump(self) -> bool:
        """Pass on what has arrived, up to its last line end; False once the pipe is at its end."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return True
        if not data:
            if self._rest:
                self._pass_on(bytes(self._rest) + b"\n")
                self._rest.clear()
            return False
        # Progress bars end their lines with a carriage return alone.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self._rest += data
            if len(self._rest) < _LONGEST_LINE:
                return True
            data, end = b"", 0
        whole = bytes(self._rest) + data[:end]
        self._rest[:] = data[end:]
        self._pass_on(whole)
        return True

    def drain(self) -> None:
        """Pass on all that is there now, for an executor that has ended. A child of its own may still hold the pipe."""
        if self.closed:
            return
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        # A pipe holds 64 KiB unless told otherwise: the bound only matters if someone goes on writing.
        for _ in range(64):
            if not poll.poll(0) or not self.pump():
                break

    def close(self) -> None:
        """Close the pipe."""
        self.closed = True
        os.close(self.fd)

    def last_lines(self) -> tuple[str, ...]:
        """The last lines, oldest first, each cut to a readable length."""
        lines = [*self._kept, bytes(self._rest)] if self._rest else list(self._kept)
        return tuple(line.decode(errors="replace")[:_KEPT_CHARACTERS] for line in lines[-(self._kept.maxlen or 0) :])

    def _pass_on(self, lines: bytes) -> None:
        if self._kept.maxlen:
            self._kept.extend(line for line in lines.splitlines()[-self._kept.maxlen :] if line.strip())
        if self._prefix:
            lines = b"".join(
                line if line.startswith(MARK) else self._prefix + line for line in lines.splitlines(keepends=True)
            )
        self.sink.write(lines)
