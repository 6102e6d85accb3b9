"""Rules of elementwise operators.

Shards pass every elementwise operator: torch's tag is trusted for that, but for the exceptions named below.
Partial passes where the operator is linear (sum, avg) or increasing on all of ℝ (max, min). ``sqrt`` and ``log``
do not qualify for the latter: their domain ends.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..spec import TensorSpec
from .matmul import broadcast_dims
from .rule import (
    UNTAGGED_POINTWISE,
    Call,
    Flow,
    Local,
    Num,
    Rule,
    fallback,
    is_positive,
    linear,
    names,
    partials,
    rule,
)

__all__: list[str] = []

# Tagged pointwise, but not elementwise: a verdict over the whole, or random numbers.
_NOT_POINTWISE = frozenset(
    "equal allclose is_same_size rrelu_with_noise rrelu rrelu_with_noise_backward rrelu_with_noise_functional "
    "bernoulli normal native_dropout dropout feature_dropout alpha_dropout".split()
)

# The sets of arguments in which an operator is linear, each set taken together.
_LINEAR: dict[str, tuple[tuple[str, ...], ...]] = {
    **{
        name: (("self",),)
        for name in "neg positive conj _conj real imag alias detach _neg_view deg2rad rad2deg lift_fresh lift "
        "clone _to_copy conj_physical _conj_physical resolve_conj resolve_neg".split()
    },
    "add": (("self", "other"),),
    "sub": (("self", "other"),),
    "rsub": (("self", "other"),),
    "mul": (("self",), ("other",)),
    "div": (("self",),),
    "where": (("self", "other"),),
    "lerp": (("self", "end"),),
    "addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "addcdiv": (("self", "tensor1"),),
    "masked_fill": (("self", "value"),),
    "copy": (("self", "src"),),
    "complex": (("real", "imag"),),
    "native_dropout_backward": (("grad_output",),),
    "ldexp": (("self",),),
    "polar": (("abs",),),
}
# Linear over the integers too, where sums wrap around as products and sums of the whole do.
_INTEGRAL = frozenset("add sub rsub mul neg clone where masked_fill positive alias copy lift_fresh detach lift".split())

_INCREASING = frozenset(
    "relu exp exp2 expm1 sigmoid tanh sinh asinh atan erf floor ceil round trunc sign sgn hardtanh hardsigmoid relu6 "
    "clone alias detach positive deg2rad rad2deg special_ndtr lift_fresh clamp clamp_min clamp_max".split()
)
# Increasing where these parameters are positive.
_INCREASING_IF = {
    "elu": ("alpha", "scale", "input_scale"),
    "leaky_relu": ("negative_slope",),
    "softplus": ("beta",),
    "hardshrink": ("lambd",),
    "softshrink": ("lambd",),
}
_DECREASING = frozenset({"neg", "erfc"})
_PICKS_ONE = frozenset({"maximum", "minimum", "fmax", "fmin"})

_ORDER = ("max", "min")
_KINDS = ("sum", "avg", "max", "min")


@cache
def _swapped(index: int) -> tuple[Flow, ...]:
    one = frozenset({index})
    return (Flow("max", one, "min"), Flow("min", one, "max"))


@fallback
def pointwise(call: Call) -> Rule | None:
    """Every dim is tied to the output's; broadcast dims to nothing."""
    sig, specs, stem = call.sig, call.specs, call.sig.stem
    if not (sig.pointwise or stem in UNTAGGED_POINTWISE) or stem in _NOT_POINTWISE or not specs:
        return None
    out = call.outs[0] if call.outs else None
    if out is None or stem[:4] in ("_for", "_fus") or torch.Tag.nondeterministic_seeded in call.func.tags:
        return None
    shape, tied = out.shape, names(len(out.shape))
    if any([o is None or o.shape != shape for o in call.outs]):
        return None
    ins = []
    for s in specs:
        if s.shape == shape:
            ins.append(tied)
            continue
        dims = broadcast_dims(s.shape, shape, tied)
        skip = len(shape) - s.ndim
        if skip < 0 or any([f and n != shape[skip + d] for d, (f, n) in enumerate(zip(dims, s.shape, strict=True))]):
            return None  # not a broadcast: a buffer or a table of some kind
        ins.append(dims)
    flows: tuple[Flow, ...] = ()
    constants: tuple[str, ...] = ()
    if any([s.is_partial for s in specs]) or call.sig.inplace or call.placements is not None:
        flows, constants = _flows(call)
    return Rule(tuple(ins), (tied,) * len(call.outs), flows=flows, local=_constants_on_lead(constants))


def _category(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "real"
    return "bool" if dtype == torch.bool else "integer"


def _where(call: Call) -> dict[str, int]:
    """The input index of each argument that is one tensor."""
    found, i = {}, 0
    for name, value in [*zip(call.sig.arguments, call.args, strict=False), *call.kwargs.items()]:
        if type(value) is TensorSpec:
            found[name] = i
            i += 1
    return found


def _flows(call: Call) -> tuple[tuple[Flow, ...], tuple[str, ...]]:
    """How Partial passes, and which number arguments one rank alone may contribute to a sum."""
    stem, specs, at = call.sig.stem, call.specs, _where(call)
    kinds = [_category(s.dtype) for s in specs]
    out = call.outs[0]
    assert out is not None
    result = _category(out.dtype)
    flows: list[Flow] = []
    constants: list[str] = []

    # sum and avg
    sets = _LINEAR.get(stem, ())
    if not sets and stem.endswith("_backward") and len(specs) > 1:
        sets = (tuple(call.sig.arguments[:1]),)  # a gradient formula is linear in the incoming gradient
    if stem == "div" and call.arg("rounding_mode") is not None:
        sets = ()
    for s in sets:
        ins = tuple([at[a] for a in s if a in at])
        mine = {kinds[i] for i in ins}
        if not ins or "bool" in mine or result == "bool":
            continue
        if mine == {"integer"}:
            one_dtype = len({specs[i].dtype for i in ins}) == 1
            if stem in _INTEGRAL and result == "integer" and (stem != "copy" or one_dtype):
                flows += partials(("sum",), ins)
            else:
                continue
        elif "integer" in mine or result == "integer":
            continue  # a conversion to integers is not linear
        elif result == "real" and "complex" in mine and stem not in ("real", "imag"):
            continue
        elif "complex" not in mine and any([torch.promote_types(specs[i].dtype, out.dtype) != out.dtype for i in ins]):
            continue  # summands would round, or overflow, before they are summed
        else:
            flows += partials(("sum", "avg"), ins)
        constants += [a for a in s if a not in at and call.arg(a) is not None]

    # max and min
    if "complex" not in kinds and result != "complex":
        flows += _ordered(call, stem, at, kinds, result)
    if stem in ("fill", "zero"):
        # What self held does not matter; the value counts once in a sum, and everywhere in avg, max and min.
        own = [Flow(k, frozenset(at.values())) for k in _KINDS if not (result == "bool" and k in ("sum", "avg"))]
        return tuple(own), ("value",) if "value" not in at and stem == "fill" else ()
    return tuple(flows), tuple(constants)


def _ordered(call: Call, stem: str, at: dict[str, int], kinds: list[str], result: str) -> list[Flow]:
    """How Partial max and min pass."""
    flows: list[Flow] = []
    n = len(kinds)
    if n == 1:
        if stem in _INCREASING or (
            stem in _INCREASING_IF and all([is_positive(call.arg(p)) for p in _INCREASING_IF[stem]])
        ):
            flows += partials(_ORDER, (0,))
        elif stem == "_to_copy" and result in ("real", kinds[0]):
            flows += partials(_ORDER, (0,))
        elif stem in _DECREASING and kinds[0] == "real":
            flows += _swapped(0)
        elif stem in ("mul", "div") and kinds[0] == "real" and call.arg("rounding_mode") is None:
            if is_positive(call.arg("other")):
                flows += partials(_ORDER, (0,))
    elif stem == "clamp":
        flows += partials(_ORDER, (0,))
    if stem in ("add", "sub", "rsub") and "bool" not in kinds and "integer" not in (set(kinds) - {result}):
        alpha = is_positive(call.arg("alpha", 1))
        up, down = ("other", "self") if stem == "rsub" else ("self", "other")
        if up in at:
            flows += partials(_ORDER, (at[up],))
        if down in at and alpha:
            flows += partials(_ORDER, (at[down],)) if stem == "add" else _swapped(at[down])
    if stem in _PICKS_ONE:
        for i in range(n):
            flows += partials(_ORDER, (i,))
        flows.append(Flow(stem[-3:], frozenset({0, 1})) if stem.startswith("f") else Flow(stem[:3], frozenset({0, 1})))
    if stem == "where" and n == 3:
        flows += partials(_ORDER, (1, 2), (1,), (2,))
    if stem == "masked_fill":
        flows += partials(_ORDER, (0,), *([(0, 2), (2,)] if n == 3 else []))
    if stem == "copy" and n == 2 and kinds[0] == kinds[1]:
        flows += partials(_ORDER, (0, 1))
    return flows


def _constants_on_lead(constants: tuple[str, ...]) -> Any:
    """In ``P + 2.0`` one rank alone adds the 2.0: the others add zero."""
    if not constants:
        return None

    def local(at: Local) -> None:
        if not at.lead():
            for name in constants:
                value = at.arg(name)
                at.set(name, value.kind(0) if isinstance(value, Num) else type(value)(0))

    return local


@rule("rrelu_with_noise_backward")
def rrelu_backward(call: Call) -> Rule | None:
    """Elementwise in gradient, input and the slopes that were drawn; linear in the gradient."""
    dims = names(call.specs[0].ndim)
    if any(s.shape != call.specs[0].shape for s in call.specs):
        return None
    return Rule((dims,) * len(call.specs), (dims,), flows=linear((0,)))
