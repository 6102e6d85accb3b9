"""What torch refuses of the tensors in ``t[...]``, before a mask is turned into positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["check_indices"]

_POSITIONS = (torch.int64, torch.int32)
_MASKS = (torch.bool, torch.uint8)


def check_indices(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    """Check the dtypes of `indices`, and that each mask has the shape of the dims of `target` that it stands for.

    Raises:
        IndexError: as torch does, in its words.
    """
    dim = 0
    for index in indices:
        if index is None or index.dtype in _POSITIONS:
            dim += 1
            continue
        if index.dtype not in _MASKS:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        for own, size in enumerate(index.shape):
            if dim + own >= target.ndim or target.shape[dim + own] != size:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {own} does not match the shape of the "
                    f"indexed tensor {list(target.shape)} at index {dim + own}"
                )
        dim += index.ndim
