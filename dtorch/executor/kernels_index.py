"""Kernels that stand in for an operator where its rank holds a slice of the dim that is looked up.

A rank answers what falls into its slice and gives zero for the rest, so that the sum over ranks is the answer. An
index outside the *global* dim raises on every rank, with torch's message: masked away, it would read as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "embedding_slice",
    "eye_slice",
    "factory_slice",
    "gather_slice",
    "index_put_slice",
    "index_select_slice",
    "index_slice",
    "nll_loss_backward_slice",
    "nll_loss_slice",
    "scatter_add_slice",
    "scatter_slice",
]

Region = tuple[tuple[int, int], ...]


def _local(
    index: torch.Tensor,
    start: int,
    length: int,
    size: int,
    dim: int | None = None,
    *,
    error: type[Exception] = IndexError,
    wrap: bool = False,
) -> tuple[Any, torch.Tensor]:
    """(index into the slice, where it does not fall into the slice) of an index into a dim of `size`.

    An index out of range raises `error` in torch's words, which name `dim` where it is given.
    """
    if index.numel():
        inside = (index >= (-size if wrap else 0)) & (index < size)

        def message() -> str:
            if dim is None:
                return "index out of range in self"
            return f"index {index[~inside].flatten()[0].item()} is out of bounds for dimension {dim} with size {size}"

        _require(inside.all(), error, message)
    if wrap:
        index = torch.where(index < 0, index + size, index)
    index = index - start
    outside = (index < 0) | (index >= length)
    return index.masked_fill_(outside, 0), outside


def _require(holds: torch.Tensor, error: type[Exception], message: Callable[[], str]) -> None:
    """Raise unless `holds`. On a GPU it is asserted there, as torch's own lookups do: nothing waits for the answer."""
    if holds.is_cuda:
        torch._assert_async(holds)
    elif not bool(holds):
        raise error(message())


def _blank(out: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
    return out.masked_fill_(outside, 0)


def embedding_slice(weight: torch.Tensor, indices: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Rows `indices` of a table of `size` rows, of which `weight` holds those from `start` on; zeros elsewhere."""
    at, outside = _local(indices, start, weight.shape[0], size)
    if not weight.shape[0]:
        return weight.new_zeros([*indices.shape, weight.shape[1]])
    return _blank(torch.embedding(weight, at), outside.unsqueeze(-1))


def gather_slice(x: torch.Tensor, dim: int, index: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """``gather`` along a dim of `size` of which `x` holds the part from `start` on; zeros for the rest."""
    at, outside = _local(index, start, x.shape[dim], size, dim % x.ndim, error=RuntimeError)
    if not x.shape[dim]:
        return x.new_zeros(index.shape)
    return _blank(x.gather(dim, at), outside)


def index_select_slice(x: torch.Tensor, dim: int, index: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """``index_select`` along a dim of `size` of which `x` holds the part from `start` on; zeros for the rest."""
    dim %= x.ndim
    at, outside = _local(index, start, x.shape[dim], size)
    if not x.shape[dim]:
        return x.new_zeros([*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]])
    shape = [1] * x.ndim
    shape[dim] = -1
    return _blank(x.index_select(dim, at), outside.view(shape))


def index_slice(x: torch.Tensor, dim: int, index: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """``x[:, …, index]`` with one index tensor, at a dim of `size` of which `x` holds the part from `start` on."""
    at, outside = _local(index, start, x.shape[dim], size, dim, wrap=True)
    if not x.shape[dim]:
        return x.new_zeros([*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]])
    out = x[(slice(None),) * dim + (at,)]
    return _blank(out, outside.view([*outside.shape, *[1] * (x.ndim - dim - 1)]))


def index_put_slice(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    values: torch.Tensor,
    accumulate: bool,
    start: int,
    size: int,
    inplace: bool,
) -> torch.Tensor:
    """``index_put`` with one index tensor, at a dim of `size` of which `x` holds the part from `start` on."""
    at, outside = _local(index, start, x.shape[dim], size, dim, wrap=True)
    out = x if inplace else x.clone()
    inside = ~outside
    shape = [*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]]
    picked = values.broadcast_to(shape)[(slice(None),) * dim + (inside,)]
    return torch.ops.aten.index_put_(out, [None] * dim + [at[inside]], picked, accumulate)


def _scatter(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: Any, add: bool, start: int, size: int, inplace: bool
) -> torch.Tensor:
    at, outside = _local(index, start, x.shape[dim], size, dim % x.ndim, error=RuntimeError)
    inside = ~outside
    where: list[torch.Tensor] = list(inside.nonzero(as_tuple=True))
    where[dim] = at[inside]
    if isinstance(src, torch.Tensor):
        value = src[tuple(slice(n) for n in index.shape)][inside]
    else:
        value = torch.as_tensor(src, dtype=x.dtype)
    return (x if inplace else x.clone()).index_put_(tuple(where), value, add)


def scatter_slice(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: Any, start: int, size: int, inplace: bool
) -> torch.Tensor:
    """``scatter`` along a dim of `size` of which `x` holds the part from `start` on."""
    return _scatter(x, dim, index, src, False, start, size, inplace)


def scatter_add_slice(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, start: int, size: int, inplace: bool
) -> torch.Tensor:
    """``scatter_add`` along a dim of `size` of which `x` holds the part from `start` on."""
    return _scatter(x, dim, index, src, True, start, size, inplace)


def nll_loss_slice(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    start: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``nll_loss_forward`` with reduction none or sum, of `size` classes of which `x` holds those from `start` on."""
    mine = _class_target(x, target, ignore_index, start, size)
    if not x.shape[-1]:
        return x.new_zeros(target.shape if reduction == 0 else []), x.new_zeros([])
    return torch.ops.aten.nll_loss_forward(x, mine, weight, reduction, -1)


def nll_loss_backward_slice(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    start: int,
    size: int,
) -> torch.Tensor:
    """``nll_loss_backward`` of `size` classes of which `x` holds those from `start` on."""
    mine = _class_target(x, target, ignore_index, start, size)
    if not x.shape[-1]:
        return torch.zeros_like(x)
    return torch.ops.aten.nll_loss_backward(grad, x, mine, weight, reduction, -1, total_weight)


def _class_target(x: torch.Tensor, target: torch.Tensor, ignore_index: int, start: int, size: int) -> torch.Tensor:
    """Targets as indices into this rank's classes; -1 for all others and for `ignore_index`."""
    ignored = target == ignore_index
    bad = ((target < 0) | (target >= size)) & ~ignored
    _require(~bad.any(), IndexError, lambda: f"Target {int(target[bad][0])} is out of bounds.")
    mine = target - start
    return mine.masked_fill_(ignored | (mine < 0) | (mine >= x.shape[-1]), -1)


def factory_slice(operator: str, region: Region, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The `region` of what the factory `operator` (``"aten.linspace.default"``) makes.

    The whole is made and cut: a shifted start would round differently.
    """
    namespace, name, overload = operator.split(".")
    whole = getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs)
    for dim, (start, length) in enumerate(region):
        whole = whole.narrow(dim, start, length)
    return whole.clone(memory_format=torch.contiguous_format)


def eye_slice(region: Region, dtype: torch.dtype) -> torch.Tensor:
    """The `region` of an identity matrix."""
    (row, height), (column, width) = region
    out = torch.zeros(height, width, dtype=dtype)
    if height and width and -height < row - column < width:
        out.diagonal(row - column).fill_(1)
    return out
