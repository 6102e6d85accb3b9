"""Closed forms of views: strides are computed as ATen does (ATen/native/TensorShape.cpp, ATen/TensorUtils.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..spec import TensorSpec, contiguous_stride
from .infer import Outputs, closed_form
from .rule import OutMeta, signature

__all__: list[str] = []

Func = torch._ops.OpOverload
Args = Sequence[Any]
Kwargs = dict[str, Any]
Ints = tuple[int, ...]


def _arg(func: Func, args: Args, kwargs: Kwargs, i: int) -> Any:
    sig = signature(func)
    name = sig.arguments[i]
    return args[i] if i < len(args) else kwargs.get(name, sig.defaults.get(name))


def _view(x: TensorSpec, shape: Sequence[int], stride: Sequence[int]) -> Outputs:
    return (OutMeta(tuple(shape), tuple(stride), x.dtype),)


def view_stride(shape: Ints, stride: Ints, target: Ints) -> Ints | None:
    """Strides of a view of `shape` as `target`, as ``computeStride`` finds them; None where none exists."""
    if not shape:
        return (1,) * len(target)
    if 0 in shape:
        if shape == target:
            return stride
        out, step = [0] * len(target), 1
        for d in range(len(target) - 1, -1, -1):
            out[d] = step
            step *= max(target[d], 1)
        return tuple(out)
    out = [0] * len(target)
    d, base, have, seen = len(target) - 1, stride[-1], 1, 1
    for t in range(len(shape) - 1, -1, -1):
        have *= shape[t]
        if t == 0 or (shape[t - 1] != 1 and stride[t - 1] != have * base):
            while d >= 0 and (seen < have or target[d] == 1):
                out[d] = seen * base
                seen *= target[d]
                d -= 1
            if seen != have:
                return None
            if t > 0:
                base, have, seen = stride[t - 1], 1, 1
    return tuple(out) if d == -1 else None


@closed_form("view", "_unsafe_view")
def view(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, target = args[0], _target(func, args, kwargs)
    if target is None:
        return None
    stride = view_stride(x.shape, x.stride, target)
    return None if stride is None else _view(x, target, stride)


@closed_form("view_copy")
def view_copy(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """Packed, whatever the input's strides are: of what cannot be viewed it is a reshape."""
    target = _target(func, args, kwargs)
    return None if target is None else (OutMeta(target, contiguous_stride(target), args[0].dtype),)


def _target(func: Func, args: Args, kwargs: Kwargs) -> tuple[int, ...] | None:
    """The shape that is asked for, -1 filled in; None where it does not fit, or none is named."""
    x, size = args[0], _arg(func, args, kwargs, 1)
    if not isinstance(size, (list, tuple)):
        return None
    target, known = list(size), 1
    for s in target:
        known *= s if s != -1 else 1
    if -1 in target:
        if known <= 0 or x.numel % known or target.count(-1) > 1:
            return None
        target[target.index(-1)] = x.numel // known
    elif known != x.numel:
        return None
    return None if any([s < 0 for s in target]) else tuple(target)


@closed_form("t")
def t(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x = args[0]
    return _view(x, x.shape[::-1], x.stride[::-1]) if x.ndim <= 2 else None


@closed_form("transpose")
def transpose(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, a, b = args[0], _arg(func, args, kwargs, 1), _arg(func, args, kwargs, 2)
    n = x.ndim
    if not isinstance(a, int) or not n or not (-n <= a < n and -n <= b < n):
        return None
    order = list(range(n))
    order[a % n], order[b % n] = order[b % n], order[a % n]
    return _view(x, [x.shape[d] for d in order], [x.stride[d] for d in order])


@closed_form("permute")
def permute(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dims = args[0], _arg(func, args, kwargs, 1)
    n = x.ndim
    if len(dims) != n or any([not -n <= d < n for d in dims]) or len({d % n for d in dims}) != n:
        return None
    return _view(x, [x.shape[d] for d in dims], [x.stride[d] for d in dims])


@closed_form("unsqueeze")
def unsqueeze(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dim = args[0], _arg(func, args, kwargs, 1)
    n = x.ndim
    if not -n - 1 <= dim <= n:
        return None
    dim %= n + 1
    step = 1 if dim == n else x.shape[dim] * x.stride[dim]
    return _view(x, (*x.shape[:dim], 1, *x.shape[dim:]), (*x.stride[:dim], step, *x.stride[dim:]))


@closed_form("squeeze")
def squeeze(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, n = args[0], args[0].ndim
    if func._schema.overload_name == "":
        dims = list(range(n))
    else:
        given = _arg(func, args, kwargs, 1)
        dims = [given] if isinstance(given, int) else list(given)
        if any([not -max(n, 1) <= d < max(n, 1) for d in dims]) or len({d % max(n, 1) for d in dims}) != len(dims):
            return None
        dims = [d % max(n, 1) for d in dims]
    kept = [d for d in range(n) if not (d in dims and x.shape[d] == 1)]
    return _view(x, [x.shape[d] for d in kept], [x.stride[d] for d in kept])


@closed_form("expand")
def expand(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, size = args[0], list(_arg(func, args, kwargs, 1))
    n, lead = len(size), len(size) - x.ndim
    if lead < 0:
        return None
    if not x.ndim:
        return _view(x, size, [0] * n) if all([s >= 0 for s in size]) else None
    shape, stride = [0] * n, [0] * n
    for d in range(n - 1, -1, -1):
        have = x.shape[d - lead] if d >= lead else 1
        step = x.stride[d - lead] if d >= lead else shape[d + 1] * stride[d + 1]
        want = size[d]
        if want == -1 and d >= lead:
            want = have
        if want < 0 or (have not in (1, want)):
            return None
        shape[d], stride[d] = want, step if have == want else 0
    return _view(x, shape, stride)


@closed_form("slice")
def slice_(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dim, start, end, step = [_arg(func, args, kwargs, i) for i in range(5)]
    n = x.ndim
    if not n or not -n <= dim < n or step <= 0:
        return None
    dim %= n
    size = x.shape[dim]
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    shape, stride = list(x.shape), list(x.stride)
    shape[dim] = -(-(end - start) // step)
    stride[dim] *= step
    return _view(x, shape, stride)


@closed_form("select")
def select(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dim, i = [_arg(func, args, kwargs, k) for k in range(3)]
    n = x.ndim
    if not n or not -n <= dim < n or not -x.shape[dim] <= i < x.shape[dim]:
        return None
    dim %= n
    return _view(x, x.shape[:dim] + x.shape[dim + 1 :], x.stride[:dim] + x.stride[dim + 1 :])


@closed_form("split")
def split(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, size, dim = [_arg(func, args, kwargs, i) for i in range(3)]
    n = x.ndim
    if not n or not -n <= dim < n or not isinstance(size, int) or size <= 0 or not x.shape[dim]:
        return None
    dim %= n
    whole = x.shape[dim]
    lengths = [min(size, whole - at) for at in range(0, whole, size)]
    return tuple([OutMeta((*x.shape[:dim], k, *x.shape[dim + 1 :]), x.stride, x.dtype) for k in lengths])


@closed_form("unbind")
def unbind(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    x, dim = args[0], _arg(func, args, kwargs, 1)
    n = x.ndim
    if not n or not -n <= dim < n:
        return None
    dim %= n
    one = OutMeta(x.shape[:dim] + x.shape[dim + 1 :], x.stride[:dim] + x.stride[dim + 1 :], x.dtype)
    return (one,) * x.shape[dim]
