"""Local kernels that sharding rules name where no operator of torch does the local step. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import kernels_index, kernels_nn, kernels_random

__all__ = ["filled", "find"]

for _family in (kernels_index, kernels_nn, kernels_random):
    globals().update({_name: getattr(_family, _name) for _name in _family.__all__})


def find(name: str) -> Callable[..., Any]:
    """The kernel that a local call names as "dtorch.<name>"."""
    return globals()[name]


def filled(like: Tensor, shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `shape` full of `value`, on the device of `like` (and of its dtype, unless given)."""
    return torch.full(list(shape), value, dtype=dtype or like.dtype, device=like.device)
