"""``torch.nn.parallel``: wrappers that placements make unnecessary; each says what to write instead."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

__all__ = ["DataParallel", "DistributedDataParallel"]

INSTEAD = (
    "a model is data-parallel by its placements. Put it on the mesh with model.to(mesh) and the batch with "
    "dtorch.distribute_tensor(x, mesh, [Shard(0)]); the gradients then arrive reduced"
)


class _Unneeded(Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: {INSTEAD}")


class DataParallel(_Unneeded):
    """Refused: see the module."""


class DistributedDataParallel(_Unneeded):
    """Refused: see the module."""
