"""The warden: the one process that imports torch, forks executors, and outlives none of those it serves.

It never runs an operator and has one thread, which is what makes its forks safe: a child forked after an OpenMP
region, or while another thread holds a lock, hangs sooner or later. Importing torch takes a second; forking from a
process that has imported it takes milliseconds.

Everything that failure needs is done here, not in the client, whose interpreter may be busy. When an executor dies
its peers are freed from collectives, everyone who waits is woken, and the client finds the reason and the last lines
of stderr in its socket. When the client dies the socket ends, and all executors with it. When the warden itself is
killed, the kernel kills the executors (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NoReturn

from ..runtime.limits import explain
from ..runtime.shared import ABORT, DEAD, DEAD_POOL, SharedState
from .child import Child, become_executor
from .messages import STREAMS, close_all, exit_reason, oom_kills, receive, send
from .output import LineReader, Nowhere, Sink, ToClient
from .stacks import SIGNAL
from .telling import Reports
from .watchdog import Watchdog

__all__ = ["serve"]

# Lines of stderr kept per executor for the report of its death.
KEPT_LINES = 20
# Bytes of stderr in such a report: a message must fit the socket's buffer.
_REPORT_BYTES = 8 << 10
# Seconds executors have to end by themselves once the client is gone.
_ORPHAN_GRACE = 0.5
# Seconds the client's terminal has to take the last output.
_OUTPUT_GRACE = 0.5


def serve(sock: socket.socket, start: dict[str, Any], fds: list[int]) -> None:
    """Import what executors need, tell the client, and serve it until it ends."""
    began = time.monotonic()
    with ended_by_hangup(sock):
        importlib.import_module("torch")
        module, _, name = start["entry"].partition(":")
        entry = getattr(importlib.import_module(module), name)
    for variable, value in start["environ"].items():
        # Was set for the imports alone: what executors start sees the user's own.
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
    threads = assert_one_thread()
    # What is here stays: the collector of a child need not touch it, and so not copy its pages.
    gc.collect()
    gc.freeze()
    warden = Warden(sock, entry, start, fds)
    warden.tell({"event": "hello", "threads": threads, "seconds": time.monotonic() - began})
    warden.run()


@contextlib.contextmanager
def ended_by_hangup(sock: socket.socket) -> Generator[None]:
    """Inside, this process ends as soon as the other end of `sock` is closed. Imports take a second, and many on a slow
    disk or a busy machine; nobody looks at the socket meanwhile."""
    poll = select.poll()
    poll.register(sock, 0)  # a hang-up is told of whatever was asked for

    def look(*_: object) -> None:
        if poll.poll(0):
            os._exit(0)

    before = signal.signal(signal.SIGIO, look)
    # What is being imported need not know how to go on after a signal.
    signal.siginterrupt(signal.SIGIO, False)
    flags = fcntl.fcntl(sock, fcntl.F_GETFL)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        look()  # it may have gone before anyone would have been told
        yield
    finally:
        fcntl.fcntl(sock, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, before)


def assert_one_thread(patience: float = 0.5) -> int:
    """The number of threads of this process, which is 1.

    Raises:
        RuntimeError: it stays above 1 for `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while (n := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > deadline:
            known = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
            raise RuntimeError(
                f"{n} threads after the imports ({known or 'started by a library, unknown to Python'}): executors "
                "cannot be forked safely from a process with threads. Something that is imported at start-up starts "
                "one (a .pth file in site-packages, or a library that torch loads); make it wait, or uninstall it"
            )
        time.sleep(0.01)
    return n


@dataclass(slots=True)
class _Executor:
    """One executor, as the warden sees it."""

    index: int
    pid: int
    pidfd: int
    stdout: LineReader
    stderr: LineReader


class Warden:
    """The event loop that forks, watches and reaps executors.

    Attributes:
        executors: those that run, by index.
        stopping: set once all are to end; no death is reported from then on.
    """

    def __init__(
        self, sock: socket.socket, entry: Callable[..., object], start: dict[str, Any], fds: list[int]
    ) -> None:
        self.sock = sock
        self.executors: dict[int, _Executor] = {}
        self.stopping = False
        self._entry = entry
        self._options: dict[str, Any] = start["options"]
        self._prefix: bool = start["prefix"]
        self._output: str = start["output"]
        n = len(STREAMS)
        out, err, self._client, names, claims = fds[:n]
        self._out, self._err = Sink(out), Sink(err)
        self._state = SharedState.attach(dict(zip(start["shared"], fds[n:], strict=True)))
        self._reports = Reports(
            self._state,
            Watchdog(self._state, names, start["watchdog"]),
            claims,
            ask=lambda e: self._signal(self.executors[e], SIGNAL) if e in self.executors else None,
            tell=self.tell,
            write=self._err.write,
        )
        self._outbox: deque[dict[str, Any]] = deque()
        self._paused: list[LineReader] = []
        self._waiting_sinks: set[int] = set()
        self._deadline: float | None = None
        self._oom_kills = oom_kills()
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._watch(sock.fileno(), self._on_message)
        self._watch(self._client, self._on_client_gone)

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the client is gone or has asked to stop, and every executor has ended."""
        while not (self.stopping and not self.executors):
            for fd, _ in self._epoll.poll(self._timeout()):
                # An earlier handler of this round may have closed it.
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler()
            self._flush_outbox()
            self._resume()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._signal_all(signal.SIGKILL)
                self._deadline = None
            self._reports.step(self._pids())
        # What the client does not take any more is said here.
        self._reports.speak()
        self._give_up_outbox()
        for sink in (self._out, self._err):
            sink.close(_OUTPUT_GRACE)

    def _timeout(self) -> float | None:
        due = self._reports.wait() if self.executors else None
        waits = [] if due is None else [due]
        if self._deadline is not None:
            waits.append(max(0.0, self._deadline - time.monotonic()))
        if self._outbox:
            waits.append(0.01)
        return min(waits, default=None)

    def _watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _pids(self) -> dict[int, int]:
        return {e.index: e.pid for e in self.executors.values()}

    # -- the client ---------------------------------------------------------------------------------------------

    def tell(self, message: dict[str, Any]) -> None:
        """Send to the client, now or when its buffer has room."""
        self._outbox.append(message)
        self._flush_outbox()

    def _flush_outbox(self) -> None:
        while self._outbox:
            try:
                send(self.sock, self._outbox[0], flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._outbox.clear()
                return
            self._outbox.popleft()

    def _give_up_outbox(self) -> None:
        """The end: what the client does not take within a moment goes to its streams, where it is lines."""
        deadline = time.monotonic() + _OUTPUT_GRACE
        self._flush_outbox()
        while self._outbox and time.monotonic() < deadline:
            time.sleep(0.005)
            self._flush_outbox()
        for message in self._outbox:
            if message["event"] == "lines":
                sink = self._out if message["stream"] == "stdout" else self._err
                sink.write("".join(line + "\n" for line in message["lines"]).encode())

    def _on_message(self) -> None:
        try:
            message, fds = receive(self.sock, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            n = len(self.executors)
            self.tell({"event": "refused", "executor": n, "error": explain(error, n + 1)})
            return
        if message is None:
            self._on_client_gone()
        elif message["op"] == "fork":
            self._fork_all(message, fds)
        elif message["op"] == "stop":
            self._stop(message["grace"])

    def _on_client_gone(self) -> None:
        # Both, or epoll goes on telling. The pidfd matters where a child of the client still holds the socket.
        self._unwatch(self.sock.fileno())
        self._unwatch(self._client)
        self._stop(_ORPHAN_GRACE)

    def _stop(self, grace: float) -> None:
        """End every executor: asked at once, killed after `grace` seconds."""
        self.stopping = True
        deadline = time.monotonic() + grace
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        control = self._state.control
        control[DEAD] |= DEAD_POOL
        control[ABORT] = 1
        self._state.wake_all()
        self._signal_all(signal.SIGTERM)

    # -- executors ----------------------------------------------------------------------------------------------

    def _fork_all(self, message: dict[str, Any], fds: list[int]) -> None:
        pids: list[tuple[int, int]] = []
        more: list[dict[str, Any]] = message.get("options", [])
        for k, index in enumerate(message["executors"]):
            wake, reply = fds[2 * k : 2 * k + 2]
            try:
                options = {**self._options, "threads": message["threads"], **(more[k] if more else {})}
                pids.append((index, self._fork(index, wake, reply, options, fds[2 * k + 2 :])))
            except OSError as error:
                self.tell({"event": "refused", "executor": index, "error": explain(error, index + 1)})
                close_all(fds[2 * k :])
                break
            os.close(reply)
        self.tell({"event": "forked", "executors": pids})

    def _fork(self, index: int, wake: int, reply: int, options: dict[str, Any], others: list[int]) -> int:
        """Fork one executor; its pid. `others` are descriptors of executors still to come."""
        out, out_end = os.pipe2(os.O_CLOEXEC)
        err, err_end = os.pipe2(os.O_CLOEXEC)
        warden = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            close_all((out, out_end, err, err_end))
            raise
        if pid == 0:
            try:
                self._be_child(
                    Child(
                        index,
                        warden,
                        self._state,
                        wake,
                        reply,
                        out_end,
                        err_end,
                        self._reports.stacks.fd,
                        self._prefix,
                        options,
                    ),
                    [out, err, *others],
                )
            finally:
                os._exit(1)  # never into the warden's own code
        close_all((out_end, err_end))
        self._state.wake_fds[index] = wake
        prefix = f"[executor {index}] " if self._prefix else ""
        stdout = LineReader(out, self._sink(index, "stdout"), prefix)
        stderr = LineReader(err, self._sink(index, "stderr"), prefix, KEPT_LINES)
        for reader in (stdout, stderr):
            self._watch(reader.fd, lambda reader=reader: self._on_output(reader))
        # Opened before the child can be reaped, so it cannot name a later process of the same number.
        executor = _Executor(index, pid, os.pidfd_open(pid), stdout, stderr)
        self.executors[index] = executor
        self._watch(executor.pidfd, lambda: self._on_exit(executor))
        return pid

    def _sink(self, executor: int, stream: str) -> Sink | Nowhere | ToClient:
        """Where the lines go that `executor` writes to `stream`."""
        sink = self._out if stream == "stdout" else self._err
        if self._output == "log":
            return ToClient(self.tell, lambda: len(self._outbox), executor, stream, sink)
        return sink if self._output == "forward" else Nowhere()

    def _be_child(self, child: Child, fds: list[int]) -> NoReturn:
        """In the forked child: let go of all that is the warden's, then run as an executor."""
        self._epoll.close()
        paused = [reader.fd for reader in self._paused]
        handled = [fd for fd in self._handlers if fd not in (self.sock.fileno(), self._client, *self._waiting_sinks)]
        self.sock.close()
        for sink in (self._out, self._err):
            sink.release()
        self._reports.release()
        wakes = list(self._state.wake_fds.values())
        self._state.wake_fds.clear()
        for fd in {self._client, *handled, *paused, *wakes, *fds}:
            os.close(fd)
        become_executor(child, self._entry)

    def _on_exit(self, executor: _Executor) -> None:
        for reader in (executor.stdout, executor.stderr):
            reader.drain()
        result = os.waitid(os.P_PIDFD, executor.pidfd, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        self._unwatch(executor.pidfd)
        os.close(executor.pidfd)
        del self.executors[executor.index]
        if self.stopping:
            return
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        # Told first: whoever sees the word finds the reason in the socket.
        self.tell(
            {
                "event": "died",
                "executor": executor.index,
                "pid": executor.pid,
                "reason": exit_reason(code, oom_kills() - self._oom_kills),
                "stderr": _shortened(executor.stderr.last_lines()),
            }
        )
        control = self._state.control
        if control[DEAD] == 0:
            control[DEAD] = executor.index + 1
        control[ABORT] = 1
        self._state.wake_all()
        # A futex wait in a collective ends at any signal, and then finds the abort word; this one does nothing else.
        self._signal_all(signal.SIGTERM)

    def _signal(self, executor: _Executor, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(executor.pidfd, number)

    def _signal_all(self, number: signal.Signals) -> None:
        for executor in self.executors.values():
            self._signal(executor, number)

    # -- output -------------------------------------------------------------------------------------------------

    def _on_output(self, reader: LineReader) -> None:
        if not reader.pump():
            self._unwatch(reader.fd)
            reader.close()
        elif reader.sink.full:
            # Unregistered, not masked: epoll tells of a hang-up whatever the mask.
            self._unwatch(reader.fd)
            self._paused.append(reader)

    def _resume(self) -> None:
        """Watch the sinks that hold something back, and read again for those that no longer do."""
        for sink in (self._out, self._err):
            if bool(sink.pending) != (sink.fd in self._waiting_sinks):
                if sink.pending:
                    self._watch(sink.fd, sink.flush, select.EPOLLOUT)
                    self._waiting_sinks.add(sink.fd)
                else:
                    self._unwatch(sink.fd)
                    self._waiting_sinks.discard(sink.fd)
        for reader in [r for r in self._paused if not r.sink.full]:
            self._paused.remove(reader)
            self._watch(reader.fd, lambda reader=reader: self._on_output(reader))


def _shortened(lines: tuple[str, ...]) -> list[str]:
    """The last of `lines` that fit a report."""
    kept: list[str] = []
    room = _REPORT_BYTES
    for line in reversed(lines):
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return kept[::-1]
