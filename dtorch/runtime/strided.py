"""``as_strided``: a view of memory, where the memory of a dtorch tensor is that of the whole, as torch would lay it.

The storage of a dtorch tensor begins with the tensor itself, as its ``storage_offset()`` of 0 says. So an offset counts
from there, for a view as well; torch's composites (``fill_diagonal_``) pass the 0 they saw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import PlacementError
from ..sharding.rule import signature
from ..spec import contiguous_stride
from .copies import Standing, mark, settled, version_of
from .dispatch import Again, dispatch, wrap
from .moves import redistribute, replicated
from .plans import may_move
from .trees import flat

if TYPE_CHECKING:
    from .._tensor import Tensor
    from ..spec import TensorSpec

__all__ = ["as_strided"]

_as_strided, _slice = torch.ops.aten.as_strided.default, torch.ops.aten.slice.Tensor


def as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The view of an argument's memory. Where its base must be moved it is a copy that stands for the view."""
    given = dict(zip(signature(func).arguments, args, strict=False)) | kwargs
    t, size, stride, offset = given["self"], given["size"], given["stride"], given.get("storage_offset") or 0
    if t._spec.copied is None and (t._spec.is_replicated or not may_move()):
        return _within(t, size, stride, offset) if offset else Again((t, size, stride), {})
    version = version_of(t)
    if may_move():
        t, begin = _base(t)
        offset += begin
    value = settled(t)
    spec = value._spec
    whole = replicated(spec.mesh)
    if spec.local_stride(0) is None and spec.numel and (not spec.is_replicated or t._spec.copied is not None):
        # What is gathered of a view with holes has none.
        stride, offset = _packed(spec, size, stride, offset)
    near = value if spec.is_replicated or not may_move() else redistribute(value, spec.mesh, whole)
    made = _within(near, size, stride, offset)
    if near is t:
        return made
    return mark(made, Standing(wrap(t._spec, t._ref), func, (size, stride, offset), {}, 0, whole, version))


def _within(t: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    """The view at `offset` of one that lies whole on every rank."""
    if offset:
        end = offset + (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else 0)
        line = dispatch(None, _as_strided, (), (t, [end], [1]))
        t = dispatch(None, _slice, (), (line, 0, offset, end))
    made: Tensor = dispatch(None, _as_strided, (), (t, size, stride))
    return made


def _base(t: Tensor) -> tuple[Tensor, int]:
    """What `t` is a view of, if it is a copy that stands for one, and where `t` begins in the memory of that."""
    chain: list[Standing] = []
    while t._spec.copied is not None and t._spec.copied.near is not None:
        chain.append(t._spec.copied)
        t = chain[-1].parent
    if not chain:
        return t, 0
    shape = torch.empty_strided(t._spec.shape, t._spec.stride, dtype=t.dtype, device="meta")
    for standing in reversed(chain):
        shape = flat([standing.func(shape, *standing.args, **standing.kwargs)], [])[standing.at]
    return t, int(shape.storage_offset())


def _packed(spec: TensorSpec, size: Any, stride: Any, offset: int) -> tuple[list[int], int]:
    """Strides and offset of the same elements, where those of `spec` lie in a row without holes.

    Raises:
        PlacementError: not all of them are elements of the tensor.
    """
    dims = sorted((d for d in range(spec.ndim) if spec.shape[d] > 1), key=lambda d: -spec.stride[d])
    packed = contiguous_stride(spec.shape)
    last = [0] * spec.ndim

    def place(distance: int, times: int) -> int:
        found = 0
        for d in dims:
            steps = min(distance // spec.stride[d], spec.shape[d] - 1) if spec.stride[d] else 0
            distance -= steps * spec.stride[d]
            last[d] += steps * times
            found += steps * packed[d]
        if distance and times:
            raise IndexError
        return found

    try:
        strides = [place(s, n - 1) for n, s in zip(size, stride, strict=True)]
        begin = place(offset, 1)
        if any(at >= n for at, n in zip(last, spec.shape, strict=True)):
            raise IndexError
    except IndexError:
        raise PlacementError(
            f"as_strided(size={list(size)}, stride={list(stride)}) of {spec.describe()}, a view with holes: it would "
            "see memory between the elements of the view, which other ranks hold.\n"
            "  Write:  as_strided of the tensor that is viewed; or x = x.redistribute(placements=[Replicate(), …]) "
            "before it is viewed"
        ) from None
    return strides, begin
