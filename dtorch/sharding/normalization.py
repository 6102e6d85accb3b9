"""Rules of softmax and of layer, RMS, group and batch norm.

What is normalized over must be whole on every rank. Softmax over a sharded dim has a recipe for where communication
is allowed: it moves one number per row, not the rows.
"""

from __future__ import annotations

from typing import Any

import torch

from ..placement import Partial, Replicate
from .cat import without
from .rule import Call, Dims, Local, Recipe, Rule, linear, names, rule, untied

__all__ = ["reduced"]

aten = torch.ops.aten


def reduced(t: Any) -> Any:
    """`t` with its Partials summed up (or maximized, …), and everything else where it is."""
    return t.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in t.placements])


# ---- softmax ---------------------------------------------------------------------------------------------


def _shifted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(x - max, the sum of its exponentials)"""
    x, dim, half_to_float = [*args, *kwargs.values()][:3]
    x = aten._to_copy.default(x, dtype=torch.float32) if half_to_float else x
    x = aten.sub.Tensor(x, reduced(aten.amax.default(x, [dim], True)))
    return x, reduced(aten.sum.dim_IntList(aten.exp.default(x), [dim], True))


def _softmax_recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, total = _shifted(args, kwargs)
    return aten.div.Tensor(aten.exp.default(x), total)


def _log_softmax_recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, total = _shifted(args, kwargs)
    return aten.sub.Tensor(x, aten.log.default(total))


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def _softmax_backward_recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, out, dim, dtype = [*args, *kwargs.values()][:4]
    weighted = aten.mul.Tensor(grad, out)
    total = reduced(aten.sum.dim_IntList(weighted, [dim], True))
    return _cast(aten.sub.Tensor(weighted, aten.mul.Tensor(out, total)), dtype)


def _log_softmax_backward_recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, out, dim, dtype = [*args, *kwargs.values()][:4]
    total = reduced(aten.sum.dim_IntList(grad, [dim], True))
    return _cast(aten.sub.Tensor(grad, aten.mul.Tensor(aten.exp.default(out), total)), dtype)


_RECIPES = {
    "_softmax": _softmax_recipe,
    "_log_softmax": _log_softmax_recipe,
    "_softmax_backward_data": _softmax_backward_recipe,
    "_log_softmax_backward_data": _log_softmax_backward_recipe,
}


@rule("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "_safe_softmax")
def softmax(call: Call) -> Rule:
    """The dim of the softmax must be whole; the backward is linear in the gradient."""
    x = call.specs[0]
    dims = without(names(x.ndim), call.arg("dim") % x.ndim) if x.ndim else ()
    fn = _RECIPES.get(call.stem)
    return Rule(
        (dims,) * len(call.specs),
        (dims,),
        flows=linear((0,)) if "backward" in call.stem else (),
        recipe=Recipe(fn, strict=False) if fn and x.ndim and x.numel and not x.is_partial else None,
        why="The softmax dim must be whole on every rank.",
    )


# ---- layer norm, RMS norm --------------------------------------------------------------------------------

_WHOLE = "The normalized dims must be whole on every rank."


def _normalized(call: Call, x: int) -> tuple[Dims, Dims]:
    """Factors of the input and of its weight: the trailing dims, which are normalized over, are whole."""
    n, m = call.specs[x].ndim, len(call.arg("normalized_shape"))
    return (*names(n - m), *untied(m)), untied(m)


@rule("native_layer_norm", "_fused_rms_norm", free=("eps",))
def layer_norm(call: Call) -> Rule:
    """Every row by itself."""
    x, w = _normalized(call, 0)
    return Rule((x, *[w] * (len(call.specs) - 1)), (x, *[x] * (len(call.outs) - 1)), why=_WHOLE)


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(call: Call) -> Rule:
    """The gradients of weight and bias are sums over the rows."""
    x, w = _normalized(call, 1)
    statistics = 2 if call.stem.startswith("native") else 1
    ins = (x, x, *[x] * statistics, *[w] * (len(call.specs) - 2 - statistics))
    outs = tuple(None if m is None else d for m, d in zip(call.outs, (x, w, w), strict=False))
    reduce = {f: (None, "sum", "sum")[: len(outs)] for f in x if f}
    local = _dense_statistics if statistics == 2 else None
    return Rule(ins, outs, reduce=reduce, flows=linear((0,)), local=local, why=_WHOLE)


def _dense_statistics(local: Local) -> None:
    # The kernel reads mean and rstd as if they were contiguous.
    local.use("dtorch.on_contiguous", local.func, *local.args, **local.kwargs)


# ---- group norm ------------------------------------------------------------------------------------------


def _samples(local: Local) -> None:
    local.set("N", local.length(local.call.arg("N"), "n"))


@rule("native_group_norm", free=("eps",))
def group_norm(call: Call) -> Rule:
    """Every sample by itself."""
    x = ("n", *untied(call.specs[0].ndim - 1))
    why = "All but the batch dim must be whole on every rank."
    return Rule((x, *[("",)] * (len(call.specs) - 1)), (x, ("n", ""), ("n", "")), local=_samples, why=why)


@rule("native_group_norm_backward")
def group_norm_backward(call: Call) -> Rule:
    """The gradients of weight and bias are sums over the samples."""
    x, c = ("n", *untied(call.specs[1].ndim - 1)), ("",)
    outs = tuple(None if m is None else d for m, d in zip(call.outs, (x, c, c), strict=True))
    return Rule(
        (x, x, ("n", ""), ("n", ""), *[c] * (len(call.specs) - 4)),
        outs,
        reduce={"n": (None, "sum", "sum")},
        flows=linear((0,)),
        local=_samples,
        why="All but the batch dim must be whole on every rank.",
    )
