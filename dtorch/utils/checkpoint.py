"""``torch.utils.checkpoint``: recompute a part of the forward in the backward, with the same random numbers.

torch saves the state of the client's generator, but dropout draws from that of the executors. Here a checkpoint asks
for their state before its forward, without waiting; if the forward drew any, the recomputation starts from that state
and puts the later one back afterwards (which waits for the executors, once a checkpoint).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from torch.nn import Sequential
from torch.utils import checkpoint as _checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..errors import PoolError
from ..runtime.client import client
from ..runtime.command import SendRandom

__all__ = ["checkpoint", "checkpoint_sequential", "set_checkpoint_early_stop"]


class _AskedState:
    """The state that the generators of CPUs or of GPUs have at this point of the program; asked for now, read later."""

    # (executor, token) of states that nobody will read, whose replies are to be thrown away when they come.
    _unwanted: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self, gpu: bool) -> None:
        self._client = c = client()
        # Long programs ask often and read seldom: take in what came, so that no executor waits to be read.
        c.drain()
        for key in self._unwanted & c._replies.keys():
            del c._replies[key]
            self._unwanted.discard(key)
        self.draws = c.draws.count(gpu)
        self._key = (c.draws.root(gpu), next(c._tokens))
        self._state: bytes | None = None
        c.send(SendRandom(*self._key), sync=True)

    def read(self) -> bytes:
        """The state; waits until the executor that was asked has come so far."""
        c = self._client
        deadline = time.monotonic() + 60
        while self._state is None:
            c.drain()
            c.check()
            self._state = c._replies.pop(self._key, None)
            if self._state is None:
                if time.monotonic() > deadline:
                    raise PoolError("checkpoint: the state of the random generator did not arrive within 60 s")
                time.sleep(0.0002)
        return self._state

    def __del__(self) -> None:
        if getattr(self, "_state", b"") is None:
            self._unwanted.add(self._key)


class _SameDraws:
    """A function that draws, each time it is called again, the random numbers that it drew at first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # Of CPUs (False) and of GPUs (True), where it drew of those.
        self._before: dict[bool, _AskedState] = {}
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        c = client()
        if not self._called:
            self._called, before = True, {gpu: _AskedState(gpu) for gpu in c.draws.kinds()}
            try:
                return self._function(*args, **kwargs)
            finally:
                self._before = {gpu: asked for gpu, asked in before.items() if c.draws.count(gpu) != asked.draws}
        after = {gpu: c.draws.state(gpu) for gpu in self._before}
        for gpu, asked in self._before.items():
            c.draws.set_state(asked.read(), gpu)
        try:
            return self._function(*args, **kwargs)
        finally:
            for gpu, state in after.items():
                c.draws.set_state(state, gpu)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """As ``torch.utils.checkpoint.checkpoint``: run `function` now, keep only its inputs, run it again in backward.

    Args:
        function: what to run.
        args, kwargs: its arguments, and torch's other options.
        use_reentrant: as torch's; False is recommended.
        preserve_rng_state: dropout draws the same in the recomputation.
    """
    run = _SameDraws(function) if preserve_rng_state else function
    return _checkpoint.checkpoint(
        run, *args, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state, **kwargs
    )


def checkpoint_sequential(
    functions: Any, segments: int, input: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """As ``torch.utils.checkpoint.checkpoint_sequential``: a sequence of modules in `segments` checkpoints."""
    modules = list(functions.children() if isinstance(functions, Sequential) else functions)
    each = len(modules) // segments
    for segment in range(segments):
        last = segment == segments - 1
        part = modules[segment * each : None if last else (segment + 1) * each]
        input = _run(part, input) if last else checkpoint(_run, part, input, use_reentrant=use_reentrant, **kwargs)
    return input


def _run(modules: list[Callable[[Any], Any]], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def __getattr__(name: str) -> Any:
    return getattr(_checkpoint, name)
