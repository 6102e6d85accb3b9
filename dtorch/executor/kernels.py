"""Local kernels that sharding rules name where no operator of torch does the local step. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import kernels_index, kernels_nn, kernels_portable, kernels_random

__all__ = ["filled", "filled_pair", "find", "first_index", "mean_piece", "norm_power", "product_slots", "trace_piece"]

for _family in (kernels_index, kernels_nn, kernels_portable, kernels_random):
    globals().update({_name: getattr(_family, _name) for _name in _family.__all__})

_HALF = (torch.float16, torch.bfloat16)


def find(name: str) -> Callable[..., Any]:
    """The kernel that a local call names as "dtorch.<name>"."""
    return globals()[name]


def filled(like: Tensor, shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `shape` full of `value`, on the device of `like` (and of its dtype, unless given)."""
    return torch.full(list(shape), value, dtype=dtype or like.dtype, device=like.device)


def filled_pair(like: Tensor, shape: Sequence[int], first: float, second: float) -> tuple[Tensor, Tensor]:
    """Two tensors as :func:`filled` makes them."""
    return filled(like, shape, first), filled(like, shape, second)


def mean_piece(x: Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """This piece's share of the mean over `dims`: its sum over the number of elements of the *whole*.

    Half precision is summed in float32: a sum of the piece could overflow where the mean does not.
    """
    result = dtype or x.dtype
    total = torch.sum(x, dim=list(dims), keepdim=keepdim, dtype=torch.float32 if result in _HALF else result)
    return (total / count).to(result)


def trace_piece(x: Tensor, row: int, column: int) -> Tensor:
    """The sum of that part of the diagonal that lies in a piece which begins at this row and column."""
    offset = row - column
    if not -x.shape[0] < offset < x.shape[1]:
        return x.new_zeros((), dtype=x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    return torch.diagonal(x, offset).sum()


def product_slots(x: Tensor, dim: int, slots: int, slot: int | None) -> Tensor:
    """Zeros with the product along `dim` of this piece in one slot of `slots`; an empty piece has none."""
    found = torch.prod(x, dim, keepdim=True)
    out = found.new_zeros([slots if d == dim else s for d, s in enumerate(x.shape)])
    if slot is not None:
        out.narrow(dim, slot, 1).copy_(found)
    return out


def first_index(
    x: Tensor, extreme: Tensor, dims: Sequence[int], keepdim: bool, offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """The least index, in the whole tensor, at which this piece equals `extreme`; past the end where it does not.

    Args:
        x: the piece.
        extreme: the extreme of the whole along `dims`, which it has with size 1. NaN is found where x is NaN.
        dims: reduced dims; with several, indices are row-major over all of them.
        keepdim: whether the result keeps `dims`.
        offsets: where the piece starts along each of `dims`.
        sizes: the size of the whole along each of `dims`.
    """
    past = 1
    for s in sizes:
        past *= s
    index, step = torch.zeros((), dtype=torch.int64, device=x.device), 1
    for d, start, size in reversed(list(zip(dims, offsets, sizes, strict=True))):
        along = torch.arange(start, start + x.shape[d], device=x.device) * step
        index = index + along.reshape([-1 if i == d else 1 for i in range(x.ndim)])
        step *= size
    hit = x == extreme
    if x.is_floating_point():
        hit = hit | (x.isnan() & extreme.isnan())
    found = torch.where(hit, index, past)
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims]
        return torch.full(shape, past, dtype=torch.int64, device=x.device)
    return found.amin(list(dims), keepdim)


def norm_power(x: Tensor, order: float, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The sum of ``|x| ** order`` over `dims`; half precision in float32."""
    dtype = torch.float32 if x.dtype in _HALF else None
    if x.numel() == 0:
        shape = [1 if i in dims else s for i, s in enumerate(x.shape) if keepdim or i not in dims]
        real = dtype or x.dtype.to_real()
        return torch.zeros(shape, dtype=real, device=x.device)
    return torch.linalg.vector_norm(x, order, list(dims), keepdim, dtype=dtype).pow(order)
