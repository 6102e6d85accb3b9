"""The client's half of the pool: start the warden, ask it for executors, learn of ready and of death.

    pool = Pool(config)
    pool.prestart()         # optional: the warden imports torch while the client does
    pool.ensure(2)          # executors 0 and 1 read the ring
    pool.check()            # now and then while waiting: has someone died?
    pool.shutdown()

There is one warden process per pool (warden.py), which the pool holds by launch.py and talks to by messages.py. All
waiting is done by looking: :meth:`Pool._progress` takes in what has arrived and says whether the executors are ready,
and :meth:`Pool.ensure` and :meth:`Pool.ensure_async` are two ways to sleep between two looks. No lock is held while
waiting, so a thread, a loop and a signal handler may wait at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import anyio

from ..errors import ExecutorDiedError, PoolError
from ..runtime import config as _config
from ..runtime.config import Config, available_cores
from ..runtime.limits import explain
from ..runtime.reply import ReplyReader, reply_memfd
from ..runtime.shared import (
    ABORT,
    DEAD,
    DEAD_POOL,
    EXECUTOR_READ,
    EXECUTOR_READY,
    SPOKEN,
    WRITE,
    SharedState,
    executor_line,
)
from .doings import Doings
from .launch import WardenProcess, has_ended, occupy_standard_streams
from .messages import FORK_BATCH, Death
from .names import PlanName
from .telling import take_token
from .watchdog import text_of

log = logging.getLogger("dtorch")

__all__ = ["Death", "Pool", "adopt", "prestart", "stop_early"]

# Events may be taken in by another waiter, so nobody sleeps longer than this between two looks.
_RECHECK = 0.02
_RECHECK_DEATH = 0.5
_SILENCE = 2.0  # seconds that the warden may take to tell of a death
_RESTART = "dtorch.restart() starts a fresh pool"


class Pool:
    """A warden and its executors. All methods may be called from any thread.

    Attributes:
        config: the bounds it was made with.
        state: the shared memory; executors' wake eventfds are in ``state.wake_fds``.
        options_of: gives the options that one executor has beside all others'; None for none.
        text_of: puts a report of the watchdog into words, for the log.
    """

    def __init__(
        self,
        config: Config,
        *,
        entry: str = "dtorch.executor.loop:run",
        options: dict[str, Any] | None = None,
        prefix: bool | None = None,
    ) -> None:
        """Make the shared memory; no process is started yet.

        Args:
            config: bounds, time limits, and the options executors are given.
            entry: "module:function" that an executor runs.
            options: more options for the entry, as JSON can say them.
            prefix: begin every line that an executor prints with its rank or, where that is not known, with
                "[executor i]"; None: as `config` says.
        """
        self.config = config
        occupy_standard_streams()
        self.state = SharedState.create(config)
        self._entry = entry
        self._options = {"collectives": config.collectives, **(options or {})}
        self._prefix = config.executor_prefix if prefix is None else prefix
        # What the warden said that is to be logged; see speak.
        self._news: deque[dict[str, Any]] = deque()
        self.text_of: Callable[[dict[str, Any]], str] = text_of
        self.options_of: Callable[[int], dict[str, Any]] | None = None
        # Reentrant: a signal handler, or __del__ of a tensor, may come in anywhere.
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._closed = False
        self._warden: WardenProcess | None = None
        self._wanted = 0
        # Executors beside the first ones, by index: see request.
        self._extra: tuple[int, ...] = ()
        self._pids: dict[int, int] = {}
        self._replies: dict[int, ReplyReader] = {}
        self._deaths: list[Death] = []
        self._warden_death: Death | None = None
        self._met = False  # whether anyone was told how the pool has ended
        self._refused: str | None = None
        self._due: float | None = None  # when the executors that were requested must be ready
        self._hello: dict[str, Any] | None = None
        # Executors that had ended untold at the last look, and when to look next.
        self._untold: set[int] = set()
        self._next_look = 0.0

    # -- starting -----------------------------------------------------------------------------------------------

    def prestart(self) -> None:
        """Start the warden, unless it runs, and return at once: it takes a second to import torch.

        Raises:
            PoolError: no process could be started, or the pool is closed.
        """
        with self._lock:
            self._running()

    def _running(self) -> WardenProcess:
        """The warden, started on first use. The caller holds the lock."""
        self._refuse_if_unusable()
        if self._warden is None:
            start = {
                "entry": self._entry,
                "options": self._options,
                "prefix": self._prefix,
                "output": self.config.executor_output,
                "watchdog": self.config.watchdog,
            }
            try:
                self._warden = WardenProcess(start, self.state.fds())
            except OSError as error:
                raise PoolError(f"the pool could not start: {explain(error)}") from error
            _live.add(self)
        return self._warden

    def request(self, n: int, extra: Iterable[int] = ()) -> None:
        """Ask for executors 0 to n - 1, and those with the indexes `extra`, and return at once. Whoever waits for them
        learns by :meth:`check` of a start that failed or takes too long.

        Raises:
            PoolError: more than ``max_executors``; the pool cannot be used.
        """
        with self._lock:
            self._extra = tuple(sorted({*self._extra, *extra}))
            self._request(n, self._running())
            self._due = time.monotonic() + self.config.start_timeout

    def ensure(self, n: int) -> None:
        """Make executors 0 to n - 1 exist, and wait until they read the ring.

        Executors that exist already are left alone. Let the ring's writer add the new ones as readers first, or they
        may miss what is written while they start.

        Raises:
            ExecutorDiedError: one ended while it started, or earlier.
            PoolError: more than ``max_executors``; the warden failed, with what it said; not ready in time
                (``start_timeout``); the pool is closed, or belongs to the parent of this process.
        """
        deadline = time.monotonic() + self.config.start_timeout
        with self._watch(n) as epoll:
            while not self._progress(n):
                self._refuse_if_late(n, deadline)
                epoll.poll(_RECHECK)
                self.speak()

    async def ensure_async(self, n: int) -> None:
        """As :meth:`ensure`, from a coroutine of asyncio or trio; the loop runs on meanwhile. May be cancelled."""
        deadline = time.monotonic() + self.config.start_timeout
        with self._watch(n) as epoll:
            while not self._progress(n):
                self._refuse_if_late(n, deadline)
                epoll.poll(0)
                with anyio.move_on_after(_RECHECK):
                    await anyio.wait_readable(epoll.fileno())
                self.speak()

    async def wait_for_death(self) -> None:
        """Return when something has died, or the pool was closed. May be cancelled."""
        while self._warden is None and not self._closed:  # noqa: ASYNC110
            await anyio.sleep(_RECHECK_DEATH)
        with self._lock, _epoll() as epoll:
            warden = self._warden
            if warden is None or not self.check():
                return
            for fd in (warden.sock.fileno(), warden.pidfd):
                epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            fd = os.dup(epoll.fileno())
        try:
            # Others may take in the news first, so that none arrives here.
            while self.check():
                with anyio.move_on_after(_RECHECK_DEATH):
                    await anyio.wait_readable(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _watch(self, n: int) -> Generator[select.epoll]:
        """An epoll of one's own that wakes when there may be progress. Edges only: what stays readable, such as the
        socket after its end or the done eventfd, which nobody reads, wakes once."""
        with _epoll() as epoll:
            with self._lock:
                warden = self._running()
                self._request(n, warden)
                for fd in (warden.sock.fileno(), warden.pidfd, self.state.done_fd):
                    epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            yield epoll

    def _request(self, n: int, warden: WardenProcess) -> None:
        """Ask the warden for the executors that are missing of the first `n` and the extra ones."""
        if n > self.config.max_executors:
            raise PoolError(
                f"{n} executors were asked for, and a pool has at most {self.config.max_executors}; raise it before "
                f"the pool starts: dtorch.configure(max_executors={n}), or DTORCH_MAX_EXECUTORS={n}"
            )
        new = [e for e in self._awaited(n) if e not in self._replies]
        threads = self.threads_for(n)
        for start in range(0, len(new), FORK_BATCH):
            batch = list(new[start : start + FORK_BATCH])
            fds: list[int] = []
            rings: list[int] = []
            try:
                for executor in batch:
                    ring = reply_memfd(self.config.reply_bytes)
                    rings.append(ring)
                    self._replies[executor] = ReplyReader(ring)
                    fds += (self.state.add_wake(executor), ring)
                message: dict[str, Any] = {"op": "fork", "executors": batch, "threads": threads}
                if self.options_of is not None:
                    message["options"] = [self.options_of(executor) for executor in batch]
                warden.send(message, fds)
            except OSError as error:
                for executor in batch:
                    self._replies.pop(executor, None)
                raise PoolError(
                    f"executors {batch[0]} to {batch[-1]} could not be started: {explain(error, n)}"
                ) from error
            finally:
                for ring in rings:
                    os.close(ring)

        self._wanted = max(self._wanted, n)

    def _awaited(self, n: int) -> list[int]:
        return [*range(n), *(e for e in self._extra if e >= n)]

    def _progress(self, n: int) -> bool:
        """Take in what has arrived; whether executors 0 to n - 1 are ready.

        Raises:
            PoolError: they never will be.
        """
        with self._lock:
            if not self.check():
                raise self.error() or PoolError("the pool cannot be used")
            return all(self._is_ready(e) for e in self._awaited(n))

    def _is_ready(self, executor: int) -> bool:
        # An executor may be faster than the warden, which has still to tell its pid.
        return executor in self._pids and self.state.control[executor_line(executor) + EXECUTOR_READY] == 1

    def _refuse_if_late(self, n: int, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise PoolError(self._lateness(n))

    def _lateness(self, n: int) -> str:
        late = [e for e in self._awaited(n) if not self._is_ready(e)]
        stage = "its warden still imports torch" if self._hello is None else f"of {n} executors, {late} are not ready"
        return (
            f"the pool has not started within {self.config.start_timeout:g} s: {stage}. On a slow disk or a busy "
            "machine give it longer: dtorch.configure(start_timeout=600), or DTORCH_START_TIMEOUT=600"
        )

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[int]:
        """Executors that are ready and have not died."""
        self.check()
        if self._closed or self._owner != os.getpid() or self._warden_death is not None:
            return []
        dead = {d.executor for d in self._deaths}
        return [e for e in sorted(self._replies) if e not in dead and self._is_ready(e)]

    @property
    def pids(self) -> dict[int, int]:
        """Executor → pid, of all that were ever started."""
        self.check()
        return dict(self._pids)

    @property
    def warden_pid(self) -> int | None:
        """The warden's pid, once it was started."""
        return None if self._warden is None else self._warden.pid

    @property
    def hello(self) -> dict[str, Any] | None:
        """What the warden said when its imports were done ("threads", "seconds"); None before that."""
        return self._hello

    def replies(self) -> dict[int, ReplyReader]:
        """The reply rings of all executors, by index."""
        return dict(self._replies)

    def threads_for(self, n: int) -> int:
        """How many torch threads each of `n` executors uses: a lone one as many as the client's torch would, several
        an equal share of the cores."""
        # Not imported here: prestart is for clients that have not got that far. Nor trusted to be whole by then.
        get_num_threads = getattr(sys.modules.get("torch"), "get_num_threads", available_cores)
        alone: int = get_num_threads()
        return alone if n <= 1 else max(1, min(alone, available_cores() // n))

    def name_plan(self, plan: int, text: str, mesh: int = 0, *, exchange: bool = False) -> None:
        """Tell the watchdog what plan `plan` does, for its reports; one short write.

        Args:
            plan, text: which, and what it does.
            mesh: id of the mesh whose ranks run it.
            exchange: whether executors wait for each other in it.
        """
        with self._lock:
            if self._warden is not None and not self._closed:
                self._warden.names.add_plan(plan, PlanName(text, mesh, exchange))

    def name_mesh(self, mesh: int, device_type: str, ids: Sequence[int], hosts: Sequence[int]) -> None:
        """Tell the watchdog which devices and executors the ranks of mesh `mesh` have."""
        with self._lock:
            if self._warden is not None and not self._closed:
                self._warden.names.add_mesh(mesh, device_type, ids, hosts)

    def doing(self, executor: int) -> str:
        """What `executor` does now, as far as that can be seen from outside."""
        with self._lock:
            if self._warden is None or self._closed:
                return ""
            control = self.state.control
            if control[executor_line(executor) + EXECUTOR_READ] >= control[WRITE]:
                return ""
            return Doings(self.state, self._warden.names).of(executor).text

    def speak(self) -> None:
        """Log what the warden has said and nobody has logged yet; not under a lock, for handlers may do anything."""
        while self._news:
            try:
                message = self._news.popleft()
            except IndexError:  # another thread was faster
                return
            if message["event"] == "lines":
                index, stream = message["executor"], message["stream"]
                level = logging.INFO if stream == "stdout" else logging.WARNING
                to = logging.getLogger(f"dtorch.executor.{index}")
                for line in message["lines"]:
                    to.log(level, "%s", line, extra={"executor": index, "stream": stream})
            elif self._may_speak(message["number"]):
                log.warning("%s", self.text_of(message))

    def _may_speak(self, number: int) -> bool:
        with self._lock:
            if self._warden is None or self._closed or self.state.control[SPOKEN] >= number:
                return False
            return take_token(self._warden.claims)

    def deaths(self) -> list[Death]:
        """Executors that have died, first death first; whatever the warden has told by now. Does not wait."""
        self.check()
        return list(self._deaths)

    def has_died(self) -> bool:
        """Whether executors, or the warden, have ended at nobody's wish; not if they could not start to begin with."""
        self.check()
        if self._closed or self._owner != os.getpid():
            return False
        if self._deaths:
            return True
        # One that ends by itself before it has said hello will do so again; one that was killed need not.
        return self._warden_death is not None and (self._hello is not None or self._warden_death.by_signal)

    def unmet_death(self) -> Death | None:
        """The death that has ended the pool, if nobody was told of it."""
        if self._met or self.check() or self._owner != os.getpid():
            return None
        return self._deaths[0] if self._deaths else self._warden_death

    def check(self) -> bool:
        """Look, without waiting, whether anything has died; True while all is well.

        Whoever waits for executors calls this at least every 0.2 s. Deaths of executors are noticed by the warden,
        which sets the dead word and wakes everyone itself; that of the warden is noticed here, and here alone.
        """
        with self._lock:
            if self._closed or self._owner != os.getpid():
                return False
            if self._warden is not None and self._warden_death is None:
                ended = self._warden.has_ended()  # looked at first: what it said last is then there to be read
                try:
                    self._take_in(self._warden)
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    self.give_up(f"what the warden of the executors says cannot be read ({error!r})")
                if ended:
                    self._warden_death = self._warden.death()
                    self._declare_dead()
                self._look_at_start()
                self._look_at_silence(self._warden.pid)
            return not (self._deaths or self._warden_death or self._refused)

    def _look_at_start(self) -> None:
        """Give up on executors that were requested and are late, or will never be: their waiters find a dead pool."""
        if self._due is None or self._warden_death is not None:
            return
        if all(self._is_ready(e) for e in self._awaited(self._wanted)):
            self._due = None
            return
        if self._refused is None and time.monotonic() >= self._due:
            self._refused = self._lateness(self._wanted)
        if self._refused is not None:
            self._due = None
            self._declare_dead()

    def _look_at_silence(self, warden: int) -> None:
        """Notice an executor that has ended where the warden, which is to tell of it, says nothing for seconds."""
        now = time.monotonic()
        if now < self._next_look or self._deaths or self._warden_death is not None:
            return
        self._next_look = now + _SILENCE
        before, self._untold = self._untold, {e for e, pid in self._pids.items() if has_ended(pid)}
        for e in sorted(before & self._untold):
            reason = f"has ended, and process {warden}, which is to say how, does not answer: it is stopped, or starved"
            self._deaths.append(Death(e, self._pids[e], reason, ()))
        if self._deaths:
            self._declare_dead()

    def error(self) -> PoolError | None:
        """What to raise where a live pool is needed; None while all is well."""
        if self.check():
            return None
        try:
            self._refuse_if_unusable()
        except PoolError as error:
            return error
        return PoolError(f"the pool cannot be used; {_RESTART}")

    def _refuse_if_unusable(self) -> None:
        """Raise what :meth:`error` returns, by what is known."""
        if self._owner != os.getpid():
            raise PoolError(
                f"this process ({os.getpid()}) was forked from the one that started the pool ({self._owner}), and "
                "executors cannot be shared by two clients. Here, dtorch.restart() starts a pool of its own"
            )
        if self._closed:
            raise PoolError(f"the pool is shut down; {_RESTART}")
        self._met = self._met or bool(self._deaths or self._warden_death)
        if self._deaths:
            raise ExecutorDiedError(f"{self._deaths[0]}\nThe pool has ended with it; {_RESTART}")
        if self._warden_death is not None:
            if self._hello is None:
                raise PoolError(self._start_failure(self._warden_death))
            raise PoolError(f"{self._warden_death}\nAll executors ended with it; {_RESTART}")
        if self._refused is not None:
            raise PoolError(self._refused)

    def _start_failure(self, death: Death) -> str:
        said = death.stderr
        # The last line of a traceback is what it is about; the rest follows for whoever wants it.
        what = said[-1].strip() if said else "it said nothing"
        text = f"the pool could not start: its first process ({sys.executable}, pid {death.pid}) {death.reason}: {what}"
        return text + ("\nIts stderr:\n" + "\n".join("    " + line for line in said) if len(said) > 1 else "")

    def _take_in(self, warden: WardenProcess) -> None:
        for message in warden.messages():
            event = message["event"]
            if event == "hello":
                self._hello = message
            elif event == "forked":
                self._pids.update(message["executors"])
            elif event == "refused":
                self._refused = f"executor {message['executor']} could not be forked: {message['error']}; {_RESTART}"
            elif event in ("stuck", "lines"):
                self._news.append(message)
            elif event == "died":
                self._deaths.append(
                    Death(message["executor"], message["pid"], message["reason"], tuple(message["stderr"]))
                )

    def give_up(self, reason: str) -> None:
        """End the pool, for `reason`, unless it has ended. All who wait or come to use it are told."""
        with self._lock:
            if self._closed or self._owner != os.getpid() or self._refused is not None:
                return
            self._refused = f"{reason}. The pool has ended; {_RESTART}"
            self._declare_dead()

    def _declare_dead(self) -> None:
        control = self.state.control
        control[DEAD] |= DEAD_POOL
        control[ABORT] = 1
        self.state.wake_all()

    # -- ending -------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float = 2.0) -> None:
        """End all processes and give back the shared memory; safe to call again.

        Executors end at once unless they are inside a kernel; those are killed after half of `timeout` seconds, and
        everything is after all of it. Waiters see a dead pool. In a forked child nothing is touched.
        """
        with self._lock:
            if self._closed or self._owner != os.getpid():
                self._closed = True
                return
            self._closed = True
            _live.discard(self)
            warden = self._warden
            if warden is not None:
                self._declare_dead()
        try:
            if warden is not None:
                # Of its reports, it has itself said what was not taken.
                self._news.extend(m for m in warden.end(timeout) if m["event"] == "lines")
                self.speak()
        finally:
            for ring in self._replies.values():
                ring.close()
            self.state.close()

    def restart(self) -> Pool:
        """A fresh pool like this one, whose warden is on its way; this one is shut down (in a forked child: left to
        its owner)."""
        self.shutdown()
        fresh = Pool(self.config, entry=self._entry, options=self._options, prefix=self._prefix)
        fresh.options_of = self.options_of
        fresh.prestart()
        return fresh

    def _after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        if self._warden is not None:
            self._warden.forget()


def _epoll() -> select.epoll:
    try:
        return select.epoll()
    except OSError as error:
        raise PoolError(f"the pool cannot be waited for: {explain(error)}") from error


# Pools whose warden runs. They stay here, alive, until they are shut down.
_live: set[Pool] = set()


@atexit.register
def _shutdown_all() -> None:
    for pool in list(_live):
        pool.shutdown()


_early: Pool | None = None
# Whether a pool was started early, or is needed no longer. Threads that name dtorch's first attribute at once are one.
_prestarted = False
_early_lock = threading.Lock()


def _forked() -> None:
    global _early_lock
    _early_lock = threading.Lock()
    for pool in _live:
        pool._after_fork_in_child()
    _live.clear()


os.register_at_fork(after_in_child=_forked)


def prestart() -> None:
    """Start a pool's warden before anyone needs it, once; a failure shows when the pool is used."""
    global _early, _prestarted
    with _early_lock:
        if _prestarted or _config.inside_executor:
            return
        options = _config.current()
        with contextlib.suppress(PoolError):
            _prestarted = True
            _early = Pool(options)
            _early.prestart()


def _take_early() -> Pool | None:
    global _early, _prestarted
    with _early_lock:
        _prestarted = True
        found, _early = _early, None
        return found


def stop_early() -> None:
    """End the pool that was started early, if nobody has come to use it."""
    found = _take_early()
    if found is not None:
        found.shutdown()


def adopt(options: Config) -> Pool:
    """The pool that was started early, if its options are `options`; else a new one."""
    found = _take_early()
    if found is not None:
        if found.config == options and found.error() is None:
            return found
        found.shutdown()
    return Pool(options)
