"""Random state, as ``torch.random``: one seed for the executors of all meshes and for this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .factories import get_rng_state, manual_seed, set_rng_state

__all__ = ["fork_rng", "get_rng_state", "initial_seed", "manual_seed", "seed", "set_rng_state"]


def seed() -> int:
    """Seed all generators with a number that is hard to guess, and return it."""
    found = torch.Generator().seed()
    manual_seed(found)
    return found


def initial_seed() -> int:
    """The seed last given to :func:`manual_seed`."""
    return torch.initial_seed()


@contextlib.contextmanager
def fork_rng(devices: Any = None, enabled: bool = True, **_: Any) -> Iterator[None]:
    """What is drawn inside leaves no trace: the generators are put back at the end. Waits at the start.

    Args:
        devices: accepted; the executors and this process are all forked.
        enabled: False does nothing.
    """
    if not enabled:
        yield
        return
    here, there = torch.get_rng_state(), get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(here)
        set_rng_state(there)


def __getattr__(name: str) -> Any:
    return getattr(torch.random, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(torch.random)})
