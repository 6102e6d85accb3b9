"""Grad mode, inference mode and autocast belong to a thread in torch, but to a task in the user's mind.

A task that suspends inside ``with torch.no_grad():`` would leave its neighbours without gradients. So every await of
dtorch takes the task's modes down before it suspends and puts them up again after. Meanwhile the loop runs under its
*own* modes: torch's defaults, or those that :func:`adopt` was told of.

Awaits of others (``asyncio.sleep``) inside such a block are beyond reach; torch behaves there as it always did.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Awaitable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Modes", "Suspended", "adopt", "carry", "current", "resume", "suspend", "under"]

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Modes:
    """torch's modes of one thread.

    Attributes:
        grad: gradients are recorded.
        inference: tensors made now are inference tensors.
        autocast: (device type, enabled, dtype) of each; empty where no autocast is enabled.
        cache: autocast keeps casted weights.
    """

    grad: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()
    cache: bool = True


_DEFAULT = Modes()


class _Own(threading.local):
    modes: Modes = _DEFAULT


_own = _Own()


def current() -> Modes:
    """The modes of the calling thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if not torch._C._is_any_autocast_enabled():
        return _DEFAULT if grad and not inference else Modes(grad, inference)
    autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICE_TYPES)
    return Modes(grad, inference, autocast, torch.is_autocast_cache_enabled())


def adopt() -> None:
    """Take the calling thread's present modes as those its event loop has while tasks are suspended.

    For whoever runs a whole loop under ``torch.no_grad()`` and the like; to be called outside any such block of a
    task's own.
    """
    _own.modes = current()


@dataclass(frozen=True, slots=True)
class Suspended:
    """The modes a task had, and what undoes their taking down."""

    modes: Modes
    guard: Any


_ORDINARY = Suspended(_DEFAULT, None)


def suspend() -> Suspended:
    """Put the loop's own modes up in the calling thread; what :func:`resume` needs to put the task's back."""
    modes, own = current(), _own.modes
    if modes is own is _DEFAULT:
        return _ORDINARY
    guard = None
    if modes.inference != own.inference:
        # torch offers no setter. The guard remembers the whole state and restores it whatever happened between,
        # so guards of interleaved tasks need not nest.
        guard = torch._C._InferenceMode(own.inference)
        guard.__enter__()
    _apply(own)
    return Suspended(modes, guard)


def resume(suspended: Suspended) -> None:
    """Put a task's modes back."""
    if suspended.guard is not None:
        suspended.guard.__exit__(None, None, None)
    _apply(suspended.modes)


def _apply(modes: Modes) -> None:
    """Make `modes` those of the calling thread, except inference mode."""
    if torch.is_grad_enabled() != modes.grad:
        torch._C._set_grad_enabled(modes.grad)
    if modes.autocast:
        for device, enabled, dtype in modes.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(modes.cache)
    elif torch._C._is_any_autocast_enabled():
        for device in _DEVICE_TYPES:
            torch.set_autocast_enabled(device, False)


@types.coroutine
def carry(awaitable: Awaitable[Any], wanted: Modes) -> Generator[Any, Any, Any]:
    """Await `awaitable` under the modes `wanted`, and nothing else of the loop: they are down whenever it suspends,
    in awaits of others too."""
    own, guard = current(), None
    if wanted.inference != own.inference:
        guard = torch._C._InferenceMode(wanted.inference)
        guard.__enter__()
    _apply(wanted)
    try:
        steps = awaitable.__await__()
        sent: Any = None
        error: BaseException | None = None
        while True:
            try:
                if error is not None:
                    yielded = steps.throw(error)
                else:
                    yielded = next(steps) if sent is None else steps.send(sent)
            except StopIteration as stop:
                return stop.value
            suspended = suspend()
            try:
                sent, error = (yield yielded), None
            except BaseException as thrown:  # a cancellation, and the end of the loop: for the awaitable to see
                error = thrown
            finally:
                resume(suspended)
    finally:
        if guard is not None:
            guard.__exit__(None, None, None)
        _apply(own)


@contextlib.contextmanager
def under(wanted: Modes) -> Iterator[None]:
    """The modes `wanted` for a piece of code that does not suspend, in a helper thread, say."""
    with torch.inference_mode(wanted.inference) if wanted.inference else contextlib.nullcontext():
        before = current()
        _apply(wanted)
        try:
            yield
        finally:
            _apply(before)
