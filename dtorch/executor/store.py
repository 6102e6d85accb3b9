"""What an executor holds: ref → local shards, and what stands there when the value could not be made.

A ref of a mesh with one rank on this executor is one tensor; with several, a list of one tensor per rank, in rank
order. A failed value is a :class:`Poison`. Operators raise ``TypeError`` when they meet one, so that the hot path
never looks for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Poison", "shards", "sharing"]


@dataclass(slots=True, eq=False)
class Poison:
    """A value that was not made.

    Attributes:
        sequence: the command to blame, by its position in the ring, or one of the LOST numbers of `runtime.command`.
        mesh: id of the mesh of a value that a write has not reached.
        old: that value, as it was before the write.
        half: whether the write may have reached part of it.
        forget: called with the sequence when this is dropped.
    """

    sequence: int
    mesh: int = 0
    old: Any = field(default=None, repr=False)
    half: bool = False
    forget: Callable[[int], None] | None = field(default=None, repr=False)

    def __del__(self) -> None:
        if self.forget is not None:
            self.forget(self.sequence)


def shards(value: Any) -> list[torch.Tensor]:
    """The local tensors of a stored value, in rank order."""
    return value if type(value) is list else [value]


def sharing(store: dict[int, Any], values: list[Any]) -> list[int]:
    """Refs of all values that lie in the memory of any of `values`, poisoned or not.

    A write to one is a write to all. All that is stored is looked at, so little is asked of each.
    """
    memories = [t.untyped_storage() for value in values for t in shards(value)]
    spans = sorted({(m.data_ptr(), m.data_ptr() + m.nbytes()) for m in memories})
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    low, high = starts[0], max(ends)
    # What is empty on this executor lies nowhere.
    same = {id(value) for value in values}
    found: list[int] = []
    for ref, value in store.items():
        if type(value) is Poison:
            value = value.old
            if value is None:
                continue
        for t in value if type(value) is list else (value,):
            at = t.data_ptr()
            if (low <= at < high and at < ends[bisect_right(starts, at) - 1]) or (not at and id(value) in same):
                found.append(ref)
                break
    return found
