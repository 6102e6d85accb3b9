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
        sequence: the command that failed, by its position in the ring; None where a peer told of it in a collective.
        before: the collective's own number, where `sequence` is None: the failure came before it.
        old: the value that a write which was not done has left in place.
    """

    sequence: int | None
    before: int = 0
    old: Any = field(default=None, repr=False)


def shards(value: Any) -> list[torch.Tensor]:
    """The local tensors of a stored value, in rank order."""
    return value if type(value) is list else [value]


def sharing(store: dict[int, Any], value: Any) -> list[int]:
    """Refs of all values that lie in the memory of `value`: a write to one is a write to all."""
    mine = {t.untyped_storage().data_ptr() for t in shards(value) if t.numel()}
    return [
        ref
        for ref, other in store.items()
        if other is value
        or (type(other) is not Poison and any(t.untyped_storage().data_ptr() in mine for t in shards(other)))
    ]
