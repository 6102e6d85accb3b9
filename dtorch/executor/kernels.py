"""Local kernels that sharding rules name where no operator of torch does the local step. Imports torch only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["filled"]


def filled(like: Tensor, shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `shape` full of `value`, on the device of `like` (and of its dtype, unless given)."""
    return torch.full(list(shape), value, dtype=dtype or like.dtype, device=like.device)
