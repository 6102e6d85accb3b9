"""What an executor holds: ref → local shards, and what stands there when the value could not be made.

A ref of a mesh with one rank on this executor is one tensor; with several, a list of one tensor per rank, in rank
order. A failed value is a :class:`Poison`. Operators raise ``TypeError`` when they meet one, so that the hot path
never looks for it.
"""

from __future__ import annotations

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
    """

    sequence: int
    mesh: int = 0
    old: Any = field(default=None, repr=False)
    half: bool = False


def shards(value: Any) -> list[torch.Tensor]:
    """The local tensors of a stored value, in rank order."""
    return value if type(value) is list else [value]


def sharing(store: dict[int, Any], values: list[Any]) -> list[int]:
    """Refs of all values that lie in the memory of any of `values`, poisoned or not: a write to one is a write to all."""
    mine = {t.untyped_storage().data_ptr() for value in values for t in shards(value) if t.numel()}
    same = {id(value) for value in values}
    found: list[int] = []
    for ref, other in store.items():
        if type(other) is Poison:
            other = other.old
            if other is None:
                continue
        if id(other) in same or any(t.untyped_storage().data_ptr() in mine for t in shards(other)):
            found.append(ref)
    return found
