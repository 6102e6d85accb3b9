"""``torch.utils.checkpoint``: recompute a part of the forward in the backward, with the same random numbers.

Dropout draws from the executors' generators. A checkpoint asks for their state before its forward, without waiting; if
the forward drew any, the recomputation starts from that state and puts the later one back afterwards (which waits for
the executors, once a checkpoint). torch's own checkpoint does so too, but cannot tell whether its forward drew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Sequential
from torch.utils import checkpoint as _checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..runtime.client import client
from ..runtime.draws import AskedState, own_state, set_own_state

__all__ = ["checkpoint", "checkpoint_sequential", "set_checkpoint_early_stop"]


class _SameDraws:
    """A function that draws, each time it is called again, the random numbers that it drew at first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # Of CPUs (False) and of GPUs (True), where it drew of those.
        self._before: dict[bool, AskedState] = {}
        self._own = own_state()
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        c = client()
        if not self._called:
            self._called, before = True, {gpu: AskedState(c, gpu) for gpu in c.draws.kinds()}
            try:
                return self._function(*args, **kwargs)
            finally:
                self._before = {gpu: asked for gpu, asked in before.items() if c.draws.count(gpu) != asked.draws}
        own, after = own_state(), {gpu: c.draws.state(gpu) for gpu in self._before}
        set_own_state(self._own)
        for gpu, asked in self._before.items():
            c.draws.set_state(asked.read(), gpu)
        try:
            return self._function(*args, **kwargs)
        finally:
            set_own_state(own)
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
    return _checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, preserve_rng_state=False, **kwargs)


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
