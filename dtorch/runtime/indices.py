"""``t[...]`` with tensors: what torch refuses of them, and masks, which stand for positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .dispatch import dispatch
from .trees import is_proxy
from .variants import stem

__all__ = ["INDEXED", "by_mask", "check_indices", "fills", "has_mask", "positions"]

INDEXED = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put"})
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


def positions(given: list[Any]) -> list[Any]:
    """`given`, each plain mask in it as the positions it stands for: they are known here, and nobody waits for them."""
    indices: list[Any] = []
    for t in given:
        if t is not None and not is_proxy(t) and t.dtype in _MASKS:
            indices += t.nonzero().unbind(1)
        else:
            indices.append(t)
    return indices


def fills(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one value is written at the places of one mask, which takes no positions: see :func:`by_mask`."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return len(args) > 2 and len(args[1]) == 1 and has_mask(args) and args[2].ndim == 0 and not accumulate


def has_mask(args: tuple[Any, ...]) -> bool:
    """Whether a mask is among the indices of a call."""
    return any(t is not None and t.dtype in _MASKS for t in args[1])


def by_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing by a mask: the mask's positions are found first, and their number is then known.

    One value written at the places of one mask needs no positions, and so no communication.
    """
    target, given, *rest = args
    name = stem(func)
    if len(given) == 1 and name in ("index_put", "index_put_", "_unsafe_index_put") and rest[0].ndim == 0:
        accumulate = rest[1] if len(rest) > 1 else kwargs.get("accumulate", False)
        mask = given[0] if given[0].dtype == torch.bool else given[0].bool()
        if not accumulate and mask.shape == target.shape[: mask.ndim]:
            for _ in range(target.ndim - mask.ndim):
                mask = torch.ops.aten.unsqueeze.default(mask, -1)
            packet = torch.ops.aten.masked_fill_ if name.endswith("_") else torch.ops.aten.masked_fill
            value = (
                rest[0]
                if rest[0].dtype == target.dtype
                else torch.ops.aten._to_copy.default(rest[0], dtype=target.dtype)
            )
            return dispatch(None, packet.Tensor, (), (target, mask, value))
    indices: list[Any] = []
    for t in given:
        if t is not None and t.dtype in _MASKS:
            indices += list(torch.ops.aten.nonzero.default(t).unbind(1))
        else:
            indices.append(t)
    return dispatch(None, func, (), (target, indices, *rest), kwargs)
