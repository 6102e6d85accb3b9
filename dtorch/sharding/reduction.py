"""Rules of reductions.

A sharded dim that is reduced leaves Partial: sum, max or min of what the ranks found. Where no Partial of one
kind will do (variance, logsumexp, the index of the maximum, the 2-norm) there is a recipe: a local step, a small
reduction over the mesh, a local step. Such a recipe *is* the operator, in strict mode too.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..spec import TensorSpec
from .recipes import arg_extreme, extreme_with_index, log_sum_exp, moments, product, vector_norm, verdict
from .rule import Call, Dims, Flow, In, Local, Recipe, Reduce, Rule, dims_of, linear, names, partials, rule

__all__: list[str] = []

_MAX = (Flow("max", frozenset({0})),)
_MIN = (Flow("min", frozenset({0})),)


def _tied(call: Call) -> tuple[TensorSpec, tuple[int, ...], Dims, Dims]:
    """The input, the reduced dims, the factors of the input and those of the output."""
    x = call.specs[0]
    dims = dims_of(call.arg("dim"), x.ndim)
    ins = names(x.ndim)
    if call.arg("keepdim", False):
        return x, dims, ins, tuple(["" if d in dims else f for d, f in enumerate(ins)])
    return x, dims, ins, tuple([f for d, f in enumerate(ins) if d not in dims])


def _rule(call: Call, kind: Reduce, **fields: Any) -> Rule:
    _, dims, ins, out = _tied(call)
    reduce: dict[str, Reduce] = {} if kind is None else {ins[d]: kind for d in dims}
    return Rule((ins,), (out,) * len(call.outs), reduce=reduce, **fields)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@rule("sum", "nansum")
def sums(call: Call) -> Rule:
    """Sums of pieces add up."""
    out = call.outs[0]
    assert out is not None
    x = call.specs[0].dtype
    flows: tuple[Flow, ...] = ()
    if call.stem == "sum" and x != torch.bool and _is_float(out.dtype) >= _is_float(x):
        flows = linear((0,)) if _is_float(x) else partials(("sum",), (0,))
    return _rule(call, "sum", flows=flows)


@rule("mean")
def mean(call: Call) -> Rule:
    """Pieces may be uneven: each is summed and divided by the *global* count."""
    x, dims, ins, _ = _tied(call)
    count = math.prod([x.shape[d] for d in dims])

    def local(at: Local) -> None:
        if any([at.sharded(ins[d]) for d in dims]):
            at.use("dtorch.mean_piece", In(0), dims, bool(call.arg("keepdim", False)), count, call.arg("dtype"))

    return _rule(call, "sum", flows=linear((0,)) if _is_float(x.dtype) else (), local=local)


_VERDICTS = {"any": "max", "_is_any_true": "max", "all": "min", "_is_all_true": "min", "count_nonzero": "sum"}


@rule(*_VERDICTS)
def verdicts(call: Call) -> Rule:
    """any is the max of verdicts, all the min; counts add up."""
    kind = _VERDICTS[call.stem]
    passes = kind != "sum" and call.specs[0].dtype == torch.bool
    return _rule(call, kind, flows=(_MAX if kind == "max" else _MIN) if passes else ())


def _neutral(kind: str, dtype: torch.dtype) -> float:
    """What changes nothing under max ("max") or min ("min")."""
    if dtype.is_floating_point:
        return -math.inf if kind == "max" else math.inf
    if dtype == torch.bool:
        return float(kind == "min")
    info = torch.iinfo(dtype)
    return info.min if kind == "max" else info.max


def _answers_empty(x: TensorSpec, dims: tuple[int, ...], value: float) -> Any:
    """torch refuses the extreme of nothing; a rank with an empty piece answers the neutral element."""

    def local(at: Local) -> None:
        shape = at.in_shape(0)
        if any([shape[d] == 0 for d in dims]):
            out = at.call.outs[0]
            at.use("dtorch.filled", In(0), at.out_shape(0), value, out and out.dtype)

    return local


@rule("amax", "amin")
def extremes(call: Call) -> Rule:
    """The max of maxima, the min of minima."""
    return _extremes(call, "max" if call.stem == "amax" else "min")


def _extremes(call: Call, kind: str) -> Rule:
    x, dims, _, _ = _tied(call)
    local = _answers_empty(x, dims, _neutral(kind, x.dtype)) if not x.dtype.is_complex else None
    return _rule(call, kind, flows=_MAX if kind == "max" else _MIN, local=local)


@rule("max", "min")
def max_min(call: Call) -> Rule | None:
    """Of all elements: as amax. Along a dim, with indices: a recipe where that dim is sharded."""
    if len(call.outs) == 1:
        return _extremes(call, call.stem) if len(call.specs) == 1 else None
    return _whole_dim(call, Recipe(extreme_with_index))


@rule("aminmax")
def aminmax(call: Call) -> Rule:
    """Both extremes at once."""
    x, dims, _, _ = _tied(call)
    low, high = _neutral("min", x.dtype), _neutral("max", x.dtype)

    def local(at: Local) -> None:
        shape = at.in_shape(0)
        if any([shape[d] == 0 for d in dims]):
            at.use("dtorch.filled_pair", In(0), at.out_shape(0), low, high)

    return _rule(call, ("min", "max"), local=local)


def _whole_dim(call: Call, recipe: Recipe | None = None, **fields: Any) -> Rule:
    """The reduced dims must be whole; a recipe serves where they are not (but Partial always must be reduced)."""
    if call.specs[0].is_partial:
        recipe = None
    why = f"The dims that {call.stem.removeprefix('linalg_')} reduces must be whole on every rank."
    return _rule(call, None, recipe=recipe, why="" if call.specs[0].is_partial else why, **fields)


@rule("argmax", "argmin")
def argmax(call: Call) -> Rule:
    """A recipe along sharded dims: the index must be that of the whole tensor."""
    return _whole_dim(call, Recipe(arg_extreme))


@rule("var", "std", "var_mean", "std_mean")
def variance(call: Call) -> Rule | None:
    """A recipe along sharded dims: the mean of all first, then the squares around it."""
    return _whole_dim(call, Recipe(moments)) if call.overload == "correction" else None


@rule("logsumexp")
def logsumexp(call: Call) -> Rule:
    """A recipe along sharded dims: the max first, then the sum of what is left."""
    return _whole_dim(call, None if call.specs[0].dtype.is_complex else Recipe(log_sum_exp))


@rule("prod")
def prod(call: Call) -> Rule:
    """A recipe along sharded dims: products do not add up."""
    return _whole_dim(call, Recipe(product))


@rule("hash_tensor", "median", "nanmedian", "mode", "kthvalue")
def whole(call: Call) -> Rule:
    """Nothing to combine: the reduced dim must be whole."""
    if call.stem in ("mode", "kthvalue") or (call.stem in ("median", "nanmedian") and len(call.outs) == 2):
        x = call.specs[0]
        d = call.arg("dim", -1) % x.ndim if x.ndim else 0
        ins = tuple(["" if i == d else f for i, f in enumerate(names(x.ndim))])
        keep = call.arg("keepdim", False)
        out = ins if keep else ins[:d] + ins[d + 1 :]
        return Rule((ins,), (out, out), why=f"The dim of {call.stem} must be whole on every rank.")
    return _whole_dim(call)


@rule("linalg_vector_norm", "norm")
def norm(call: Call) -> Rule | None:
    """Norms of order 0 and 1 add up, infinite ones are extremes; for the others, powers add up: a recipe."""
    x, dims, ins, out = _tied(call)
    if call.stem == "norm":
        order = call.arg("p")
        order = 2.0 if order is None else order
    else:
        order = call.arg("ord", 2)
    if isinstance(order, (str, bool)) or not _is_float(x.dtype):
        return None
    kind = {math.inf: "max", -math.inf: "min", 1: "sum", 0: "sum"}.get(order)
    if kind is None:
        return _whole_dim(call, Recipe(vector_norm))
    reduce: dict[str, Reduce] = {ins[d]: kind for d in dims}
    local = None
    if kind in ("max", "min"):
        local = _answers_empty(x, dims, 0.0 if kind == "max" else math.inf)
    return Rule((ins,), (out,), reduce=reduce, local=local, why="A norm of a Partial is not the sum of norms.")


@rule("equal", "allclose", always=True)
def equal(call: Call) -> Recipe:
    """The value is a bool for the client, so the recipe waits for it."""
    return Recipe(verdict)


# ---- the local steps of recipes ---------------------------------------------------------------------


@rule("dtorch::first_index", always=True)
def first_index(call: Call) -> Rule:
    """``first_index(x, extreme, dim, keepdim)``: where in the whole tensor `x` first equals its extreme."""
    x, dims, ins, out = _tied(call)
    kept = tuple(["" if d in dims else f for d, f in enumerate(ins)])

    def local(at: Local) -> None:
        offsets = [at.span(x.shape[d], ins[d])[0] for d in dims]
        sizes = [x.shape[d] for d in dims]
        at.use("dtorch.first_index", In(0), In(1), dims, bool(call.arg("keepdim")), offsets, sizes)

    return Rule((ins, kept), (out,), reduce={ins[d]: "min" for d in dims}, local=local)


@rule("dtorch::product_slots", always=True)
def product_slots(call: Call) -> Rule:
    """``product_slots(x, dim, starts)``: zeros but for the slot of this rank, so that a sum puts the slots together."""
    x, dim = call.specs[0], call.arg("dim")
    ins = names(x.ndim)

    def local(at: Local) -> None:
        start, length = at.span(x.shape[dim], ins[dim])
        starts = call.arg("starts")
        at.use("dtorch.product_slots", In(0), dim, len(starts), starts.index(start) if length else None)

    out = tuple(["" if d == dim else f for d, f in enumerate(ins)])
    return Rule((ins,), (out,), reduce={ins[dim]: "sum"}, local=local)


@rule("dtorch::norm_power", always=True)
def norm_power(call: Call) -> Rule:
    """``norm_power(x, ord, dim, keepdim)``: the sum of ``|x| ** ord``, in float32 for half precision."""
    _, dims, _, _ = _tied(call)

    def local(at: Local) -> None:
        at.use("dtorch.norm_power", In(0), call.arg("ord"), dims, bool(call.arg("keepdim")))

    return _rule(call, "sum", local=local)
