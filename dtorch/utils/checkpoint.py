"""``torch.utils.checkpoint``: recomputes a part of the forward in the backward; works on dtorch tensors as it is."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as _checkpoint
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

__all__ = ["checkpoint", "checkpoint_sequential", "set_checkpoint_early_stop"]


def __getattr__(name: str) -> Any:
    return getattr(_checkpoint, name)
