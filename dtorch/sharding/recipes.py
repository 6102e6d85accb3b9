"""Recipes: operators that communicate inside, composed of other operators and ``redistribute``.

A recipe takes what the operator takes, with distributed tensors: anything that torch dispatches on and that has
``placements`` and ``redistribute(placements=...)``. What it moves is as small as its result.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..placement import Replicate
from ..spec import cut
from .rule import dims_of, signature

__all__ = [
    "arg_extreme",
    "distance",
    "extreme_with_index",
    "log_sum_exp",
    "moments",
    "product",
    "reduced",
    "vector_norm",
    "verdict",
]

aten: Any = torch.ops.aten

# Local steps that torch has no operator for. Executors run the functions of the same names in
# dtorch.executor.kernels; here they only need shapes.
_library = torch.library.Library("dtorch", "FRAGMENT")
_library.define("first_index(Tensor self, Tensor extreme, int[] dim, bool keepdim) -> Tensor")
_library.define("product_slots(Tensor self, int dim, int[] starts) -> Tensor")
_library.define("norm_power(Tensor self, float ord, int[] dim, bool keepdim) -> Tensor")

HALF = (torch.float16, torch.bfloat16)


def _reduced_shape(x: torch.Tensor, dim: list[int], keepdim: bool) -> list[int]:
    return [1 if d in dim else s for d, s in enumerate(x.shape) if keepdim or d not in dim]


def _first_index_meta(x: torch.Tensor, extreme: torch.Tensor, dim: list[int], keepdim: bool) -> torch.Tensor:
    return aten.empty.memory_format(_reduced_shape(x, dim, keepdim), dtype=torch.int64, device=x.device)


def _norm_power_meta(x: torch.Tensor, ord: float, dim: list[int], keepdim: bool) -> torch.Tensor:
    dtype = torch.float32 if x.dtype in HALF else x.dtype.to_real()
    return aten.empty.memory_format(_reduced_shape(x, dim, keepdim), dtype=dtype, device=x.device)


def _product_slots_meta(x: torch.Tensor, dim: int, starts: list[int]) -> torch.Tensor:
    dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    shape = [len(starts) if d == dim else s for d, s in enumerate(x.shape)]
    return aten.empty.memory_format(shape, dtype=dtype, device=x.device)


_library.impl("product_slots", _product_slots_meta, "Meta")
_library.impl("first_index", _first_index_meta, "Meta")
_library.impl("norm_power", _norm_power_meta, "Meta")
ours: Any = torch.ops.dtorch


def reduced(t: Any) -> Any:
    """`t` with every Partial reduced to Replicate, and everything else as it is."""
    return t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults filled in."""
    sig = signature(func)
    return {**sig.defaults, **dict(zip(sig.arguments, args, strict=False)), **kwargs}


def _cast(t: Any, dtype: torch.dtype) -> Any:
    return t if t.dtype == dtype else aten._to_copy.default(t, dtype=dtype)


def _drop(t: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    return t if keepdim else aten.squeeze.dims(t, list(dims))


def moments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """var, std, var_mean and std_mean: two passes, the mean of all and the squares around it."""
    a = _bind(func, args, kwargs)
    x, keepdim = a["self"], a["keepdim"]
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise RuntimeError("std and var only support floating point and complex dtypes")
    dims = dims_of(a["dim"], x.ndim)
    correction = 1 if a["correction"] is None else a["correction"]
    count = math.prod([x.shape[d] for d in dims])
    result = x.dtype.to_real()
    if x.dtype in HALF:
        x = _cast(x, torch.float32)
    mean = aten.div.Tensor(reduced(aten.sum.dim_IntList(x, list(dims), True)), count)
    apart = aten.sub.Tensor(x, mean)
    if x.dtype.is_complex:
        apart = aten.abs.default(apart)
    squares = reduced(aten.sum.dim_IntList(aten.mul.Tensor(apart, apart), list(dims), True))
    out = aten.div.Tensor(squares, max(count - correction, 0))
    stem = signature(func).stem
    if stem.startswith("std"):
        out = aten.sqrt.default(out)
    out = _cast(_drop(out, dims, keepdim), result)
    if not stem.endswith("_mean"):
        return out
    return out, _cast(_drop(mean, dims, keepdim), a["self"].dtype)


def _starts(size: int, cutting: list[int]) -> list[int]:
    """Where the pieces that are not empty begin, of a dim that mesh dims of these sizes cut in turn."""
    pieces = [(0, size)]
    for n in cutting:
        pieces = [(o + cut(length, n, i)[0], cut(length, n, i)[1]) for o, length in pieces for i in range(n)]
    return sorted({o for o, length in pieces if length})


def product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """prod: every rank puts the product of its piece into a slot of its own, and all slots are multiplied."""
    a = _bind(func, args, kwargs)
    x = a["self"]
    dims = dims_of(a.get("dim"), x.ndim)
    if a["dtype"] is not None:
        x = _cast(x, a["dtype"])
    for d in dims:
        cutting = [n for p, n in zip(x.placements, x.device_mesh.shape, strict=True) if p.is_shard(d)]
        if cutting:
            x = reduced(ours.product_slots.default(x, d, _starts(x.shape[d], cutting)))
    if "dim" in a:
        return aten.prod.dim_int(x, a["dim"], a["keepdim"], dtype=a["dtype"])
    return aten.prod.default(x, dtype=a["dtype"])


def log_sum_exp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """logsumexp: the max over all ranks first, so that no rank overflows."""
    a = _bind(func, args, kwargs)
    x = a["self"]
    dims, dtype = dims_of(a["dim"], x.ndim), x.dtype
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    x = _cast(x, torch.float32 if dtype in HALF else dtype)
    top = reduced(aten.amax.default(x, list(dims), True))
    top = aten.where.self(aten.isinf.default(top), aten.zeros_like.default(top), top)  # inf - inf would be nan
    total = reduced(aten.sum.dim_IntList(aten.exp.default(aten.sub.Tensor(x, top)), list(dims), True))
    out = aten.add.Tensor(aten.log.default(total), top)
    return _cast(_drop(out, dims, a["keepdim"]), dtype)


def _extreme(stem: str, x: Any, dims: tuple[int, ...]) -> Any:
    op = aten.amax if stem in ("max", "argmax") else aten.amin
    return reduced(op.default(x, list(dims), True))


def arg_extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """argmax and argmin: the extreme of all, then the least index at which it stands."""
    a, stem = _bind(func, args, kwargs), signature(func).stem
    x = a["self"]
    if x.dtype == torch.bool or x.dtype.is_complex:
        raise RuntimeError(f"{stem}(): does not support {'complex' if x.dtype.is_complex else 'bool'} input")
    dims = dims_of(a["dim"], x.ndim)
    found = _extreme(stem, x, dims)
    return reduced(ours.first_index.default(x, found, list(dims), a["keepdim"]))


def extreme_with_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max and min along a dim: values and the least index of each."""
    a = _bind(func, args, kwargs)
    x, keepdim = a["self"], a["keepdim"]
    dims = dims_of(a["dim"], x.ndim)
    found = _extreme(signature(func).stem, x, dims)
    index = reduced(ours.first_index.default(x, found, list(dims), keepdim))
    return _drop(found, dims, keepdim), index


def vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A p-norm: the root of the summed powers, never a sum of norms."""
    a = _bind(func, args, kwargs)
    x, order = a["self"], a["ord"] if "ord" in a else a["p"]
    order = 2.0 if order is None else float(order)
    dims = dims_of(a.get("dim"), x.ndim)
    if a.get("dtype") is not None:
        x = _cast(x, a["dtype"])
    total = reduced(ours.norm_power.default(x, order, list(dims), bool(a.get("keepdim", False))))
    root = aten.sqrt.default(total) if order == 2 else aten.pow.Tensor_Scalar(total, 1.0 / order)
    return _cast(root, x.dtype.to_real())


def distance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """dist: the p-norm of the difference."""
    a = _bind(func, args, kwargs)
    apart = reduced(aten.sub.Tensor(a["self"], a["other"]))
    return reduced(aten.linalg_vector_norm.default(apart, a["p"]))


def verdict(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """equal and allclose: a verdict of every rank on its pieces, and one on all of them."""
    a = _bind(func, args, kwargs)
    x, y = a["self"], a["other"]
    if signature(func).stem == "equal":
        if x.shape != y.shape:
            return False
        hits = aten.eq.Tensor(x, y)
    else:
        hits = aten.isclose.default(x, y, a["rtol"], a["atol"], a["equal_nan"])
    return bool(aten.all.default(hits))
