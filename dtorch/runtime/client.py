"""The pool in use: started on first use, ended with the process, and replaced after a death where that is asked for.

Everybody else gets the :class:`Client` to work with from here.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

import torch

from ..errors import PoolError
from ..executor.pool import stop_early
from . import config
from .pool_client import Client
from .refs import freed
from .restarting import Budget, Restoration, hooks, restoring
from .shared import DEAD
from .waiting import in_event_loop

__all__ = ["Client", "client", "close", "current_client", "detach", "in_use", "on_close", "replace", "restart"]

log = logging.getLogger("dtorch")

# What torch's generators say of their seed while nobody has given one.
_UNSEEDED = 67280421310721
_current: Client | None = None
_start_lock = threading.Lock()
_restart_lock = threading.Lock()
_closing: list[Callable[[], None]] = []
_budget = Budget()


def on_close(callback: Callable[[], None]) -> None:
    """Run `callback` whenever a pool ends: plan caches of that pool are void then."""
    _closing.append(callback)


def client() -> Client:
    """The pool in use, started on first use.

    Where it has died and is to be replaced, a fresh one; returns when hooks have set the program's state anew.

    Raises:
        ExecutorDiedError: it has died, and stays so.
        PoolRestartingError: hooks run, and the calling thread runs an event loop, which must not wait for them.
        PoolError: a hook has failed.
    """
    found = _current
    if found is not None and found.restoration is None and not found.control[DEAD]:
        return found
    return _usable()


def in_use() -> Client:
    """The pool in use, as it is: be it dead, or held by hooks. Started on first use.

    For waits for what was issued, which died with a dead pool, and for questions about the pool.
    """
    return _current or _start()


def _usable() -> Client:
    while True:
        found = _current or _start()
        held = found.restoration
        mine = restoring.get()
        if held is not None and held.is_mine:
            return found
        if held is None:
            # A hook ends with its pool, and runs again on the next.
            if (mine is not None and mine.is_running) or not (found.control[DEAD] and found.may_be_replaced()):
                if found.control[DEAD]:
                    found.check()
                return found
            replace(found)
        elif held.error is not None:
            held.refuse()
        elif in_event_loop():
            held.run_in_loop()
            held.refuse_in_loop()
        else:
            held.run_or_wait()


def _start() -> Client:
    """A new pool, unless there is one."""
    global _current
    with _start_lock:
        if _current is None:
            _current = _new(held=False)
        return _current


def _new(*, held: bool) -> Client:
    if config.inside_executor:
        raise PoolError(
            "this code runs on an executor (a function given to from_local, say), where there are no dtorch tensors: "
            "use plain torch"
        )
    made = Client()
    if torch.initial_seed() != _UNSEEDED:
        # torch.manual_seed was called before there was anything of dtorch's to seed.
        made.draws.start_from(torch.initial_seed())
    if held and hooks():
        made.restoration = Restoration(made.restored)
    return made


def replace(dead: Client) -> None:
    """Have a fresh pool take the place of `dead`, unless one has, or too many have died of late.

    Starts it and returns: neither its start nor the end of the dead one is waited for.
    """
    global _current
    with _start_lock:
        if _current is not dead:
            return
        options = config.current()
        if not _budget.take(options.max_restarts, options.restart_window):
            dead.refuse_for_good()
            log.error("%s", dead._death())
            return
        error = dead._death()
        why = next(iter(dead.pool.deaths()), error)
        for callback in _closing:
            callback()
        _current = fresh = _new(held=True)
        with contextlib.suppress(PoolError):  # whoever uses it is told
            fresh.pool.prestart()
    n = 0 if fresh.restoration is None else len(hooks())
    log.warning("%s\nA fresh pool takes its place, and %d on_restart hook%s run", why, n, "" if n == 1 else "s")
    # Its executors may be inside kernels, and take a second to end.
    threading.Thread(target=dead.close, name="dtorch-close").start()


def restart() -> None:
    """End the pool in use, if any, and start a fresh one; waits until an executor is ready and hooks have run.

    Where the calling thread runs an event loop, hooks run in that, and are not waited for.

    Raises:
        PoolError: it could not start, or a hook has failed.
        RuntimeError: called by a hook.
    """
    mine = restoring.get()
    if mine is not None and mine.is_running:
        raise RuntimeError("restart() inside an on_restart hook: it runs because of a restart")
    global _current
    # Hooks are not waited for under this lock: they may run in a loop whose thread waits for the lock.
    with _restart_lock:
        _budget.clear()
        with _start_lock:
            old = detach()
            _current = fresh = _new(held=True)  # before anyone comes who would start one without hooks
        if old is not None:
            old.close()
        fresh.start(1)
    if fresh.restoration is not None and in_event_loop():
        fresh.restoration.run_in_loop()
    else:
        client()


def current_client() -> Client | None:
    """The pool in use, if one was started."""
    return _current


def detach() -> Client | None:
    """Take the pool in use, if any, out of use: the caller closes it, and the next use starts a fresh one."""
    global _current
    found, _current = _current, None
    for callback in _closing:
        callback()
    return found


def close(*, settle: bool = True) -> None:
    """End the pool in use; the next use starts a fresh one. See :meth:`Client.close`."""
    found = detach()
    stop_early()
    if found is not None:
        found.close(settle=settle)


def _forked() -> None:
    """In a forked child no plan, pool or ref of the parent is used; the next use starts a pool of the child's own."""
    global _current, _start_lock, _restart_lock
    found, _current = _current, None
    _start_lock, _restart_lock = threading.Lock(), threading.Lock()
    freed.clear()
    if found is not None:
        found.forked()
        for callback in _closing:
            callback()


def _close_at_exit() -> None:
    # A program that Ctrl-C has ended waits for nothing, and Ctrl-C during the wait asks for the end that is coming.
    interrupted = issubclass(getattr(sys, "last_type", None) or Exception, KeyboardInterrupt)
    with contextlib.suppress(KeyboardInterrupt):
        close(settle=not interrupted)


os.register_at_fork(after_in_child=_forked)
atexit.register(_close_at_exit)
