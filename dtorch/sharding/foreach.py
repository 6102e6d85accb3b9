"""Rules of operators on lists of tensors: the base operator's rule, element by element.

Elements need not agree: a list may hold sharded and replicated parameters side by side. Where every element's local
call is what the list operator would do, the list operator runs once on the local pieces; otherwise (a constant that
only one rank may add) the elements run one after another.

Numbers in the lists ride in the message: they never decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..errors import PlacementError
from ..spec import TensorSpec
from .infer import Outputs, closed_form, infer
from .normalization import reduced
from .plan import LocalCall, Plan
from .rule import Call, Each, In, OutMeta, Recipe, Rule, names, rule, signature, untied

__all__: list[str] = []

aten = torch.ops.aten

# ---- the elements as calls -------------------------------------------------------------------------------


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, TensorSpec) for v in value)


def _inputs(call: Call, j: int) -> list[int]:
    """The indices in ``call.specs`` of element `j` of every list, and of the tensors shared by all."""
    found, at = [], 0
    for value in (*call.args, *call.kwargs.values()):
        if _is_tensors(value):
            found.append(at + j)
            at += len(value)
        elif isinstance(value, TensorSpec):
            found.append(at)
            at += 1
    return found


def _element(value: Any, j: int) -> Any:
    return value[j] if isinstance(value, (list, tuple)) else value


_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"
).split()
_BINARY = "add sub mul div pow maximum minimum clamp_max clamp_min copy".split()
_TERNARY = "addcmul addcdiv lerp".split()

# Base operators whose number forms go by another name.
_NUMBER_FORM = {"maximum": "clamp_min", "minimum": "clamp_max"}
_OVERLOADS = {"List": ("Tensor", "Tensor_Tensor", "default"), "Tensor": ("Tensor",)}
_NUMBER_OVERLOADS = ("Scalar", "Tensor_Scalar", "default")


@cache
def _base(func: Any) -> Any:
    """The operator on one element, or None."""
    sig, overload = signature(func), func._schema.overload_name
    stem = sig.stem.removeprefix("_foreach_")
    if overload == "Tensor" and stem in ("addcmul", "addcdiv"):
        return None
    numbers = overload in ("Scalar", "ScalarList") and stem not in ("addcmul", "addcdiv")
    if numbers or sig.inplace:
        # There is no maximum of a number, and none in place.
        stem = _NUMBER_FORM.get(stem, stem)
    packet = getattr(aten, f"{stem}_" if sig.inplace else stem, None)
    choices = _NUMBER_OVERLOADS if numbers else _OVERLOADS.get(overload, ("default",))
    return next((getattr(packet, c) for c in choices if packet is not None and c in packet.overloads()), None)


def _own(spec: TensorSpec) -> tuple[OutMeta, ...]:
    return (OutMeta(spec.shape, spec.stride, spec.dtype),)


@rule(
    *(f"_foreach_{name}" for name in (*_UNARY, *_BINARY, *_TERNARY)),
    free=("scalar", "scalars", "alpha", "value", "weight", "exponent"),
)
def foreach(call: Call) -> Each | None:
    """One call of the base operator per element."""
    base, lists = _base(call.func), call.arg("self")
    if base is None:
        return None
    parts = []
    for j, (args, kwargs) in enumerate(_elements(call.func, base, call.args, call.kwargs, len(lists))):
        outs = _own(lists[j]) if call.sig.inplace else (call.outs[j],)
        parts.append(Call(base, args, kwargs, outs, mesh=call.mesh))
    return Each(tuple(parts), lambda plans: _join(call, parts, plans))


def _elements(
    func: Any, base: Any, args: Sequence[Any], kwargs: dict[str, Any], count: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of `base` for each element."""
    names_of, keyword = signature(base).index, {a.name for a in base._schema.arguments if a.kwarg_only}
    given = [
        ("value" if name == "scalars" and "value" in keyword else name, value)
        for name, value in zip(signature(func).arguments, args, strict=False)
    ]
    plain = [value for name, value in given if name not in keyword]
    named = [(name, value) for name, value in given if name in keyword]
    named += [(k, v) for k, v in kwargs.items() if k in names_of]
    return [(tuple([_element(v, j) for v in plain]), {k: _element(v, j) for k, v in named}) for j in range(count)]


@closed_form(*(f"_foreach_{name}" for name in (*_UNARY, *_BINARY, *_TERNARY)))
def outputs(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs | None:
    """What the base operator gives for each element; where one is refused, the meta kernel has torch's words."""
    base = _base(func)
    if base is None or not args or not isinstance(args[0], (list, tuple)) or not args[0]:
        return None
    if any([_is_tensors(a) and len(a) != len(args[0]) for a in (*args, *kwargs.values())]):
        return None
    seen: dict[Any, Outputs] = {}
    found: list[Any] = []
    for given, named in _elements(func, base, args, kwargs, len(args[0])):
        key = tuple([v if type(v) is TensorSpec else type(v) for v in (*given, *named.values())])
        one = seen.get(key)
        if one is None:
            try:
                one = seen[key] = infer(base, given, named)
            except Exception:
                return None
        found += one
    return (None,) if signature(func).inplace else tuple(found)


# ---- fused optimizers ------------------------------------------------------------------------------------


@rule(
    "_fused_adam",
    "_fused_adamw",
    "_fused_sgd",
    "_fused_adagrad",
    free=("lr", "beta1", "beta2", "weight_decay", "eps", "momentum", "dampening", "lr_decay"),
)
def fused(call: Call) -> Rule | Each | None:
    """Elementwise in parameter, gradient and state; the step and what is shared are whole."""
    params = call.arg("self")
    if not call.sig.inplace or not params:
        return None
    if len(params) == 1:
        shape, dims = params[0].shape, names(params[0].ndim)
        owners = call.owners()
        ins = tuple(
            dims
            if s.shape == shape and name not in ("state_steps", "lr", "grad_scale", "found_inf")
            else untied(s.ndim)
            for s, name in zip(call.specs, owners, strict=True)
        )
        return Rule(ins, (None,) * len(call.outs), why="Parameter, gradient and state must have the same placements.")
    parts = []
    for j in range(len(params)):
        args = tuple([a[j]] if _is_tensors(a) else a for a in call.args)
        kwargs = {k: [v[j]] if _is_tensors(v) else v for k, v in call.kwargs.items()}
        parts.append(Call(call.func, args, kwargs, call.outs, mesh=call.mesh))
    return Each(tuple(parts), lambda plans: _join(call, parts, plans))


# ---- norms -----------------------------------------------------------------------------------------------


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """2-norms: the roots of the sums of squares, all of them added up over the ranks in one exchange."""
    tensors = args[0]
    wide = [
        aten._to_copy.default(t, dtype=torch.float32) if t.dtype in (torch.float16, torch.bfloat16) else t
        for t in (reduced(t) for t in tensors)
    ]
    squares = [aten.sum.default(aten.mul.Tensor(t, t)) for t in wide]
    norms = aten.unbind.int(aten.sqrt.default(reduced(aten.stack.default(squares))))
    return [
        n if n.dtype == t.dtype else aten._to_copy.default(n, dtype=t.dtype)
        for n, t in zip(norms, tensors, strict=True)
    ]


def _norm_by_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    tensors, order, *_ = [*args, kwargs.get("ord", 2)]
    dtype = kwargs.get("dtype") or (args[2] if len(args) == 3 else None)
    return [reduced(aten.linalg_vector_norm.default(reduced(t), order, dtype=dtype)) for t in tensors]


@rule("_foreach_norm")
def norm(call: Call) -> Recipe:
    """A norm of shards is no sum of norms: each rank adds its squares, and the root is taken of the sum."""
    order = call.arg("ord", 2)
    tensors = call.arg("self")
    alike = len({t.dtype for t in tensors}) == 1 and not tensors[0].dtype.is_complex
    # Only 2-norms of one dtype share an exchange; others go one by one.
    return Recipe(_norms if order == 2 and alike and call.arg("dtype") is None else _norm_by_norm)


# ---- GradScaler ------------------------------------------------------------------------------------------


def _unscaled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Every rank looks at its pieces; the flag is of all of them, and reaches all of them, in one exchange."""
    tensors, found_inf, inverse = args
    if not tensors:
        return
    finite = [aten.all.default(aten.isfinite.default(reduced(t))) for t in tensors]
    spoilt = aten._to_copy.default(aten.logical_not.default(reduced(aten.stack.default(finite))), dtype=found_inf.dtype)
    aten.copy_.default(found_inf, aten.maximum.default(found_inf, aten.amax.default(spoilt)))
    for t in tensors:
        aten.mul_.Tensor(t, inverse)


@rule("_amp_foreach_non_finite_check_and_unscale")
def unscale(call: Call) -> Recipe:
    """Gradients are multiplied where they lie; whether any was infinite or nan concerns all ranks."""
    return Recipe(_unscaled)


# ---- the plans of the elements, joined --------------------------------------------------------------------


def _template(value: Any, at: list[int]) -> Any:
    if isinstance(value, TensorSpec):
        at[0] += 1
        return In(at[0] - 1)
    return type(value)(_template(v, at) for v in value) if isinstance(value, (list, tuple)) else value


def _unedited(call: Call) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The local call that a rule has not touched."""
    at = [0]
    return (
        call.sig.op,
        tuple(_template(a, at) for a in call.args),
        {k: _template(v, at) for k, v in call.kwargs.items()},
    )


def _renumbered(value: Any, inputs: Sequence[int]) -> Any:
    if isinstance(value, In):
        return In(inputs[value.index])
    return type(value)(_renumbered(v, inputs) for v in value) if isinstance(value, (list, tuple)) else value


def _join(call: Call, parts: Sequence[Call], plans: list[Plan]) -> Plan:
    """One plan that runs the local calls of all `plans`, on each rank its own."""
    places = [_inputs(call, j) for j in range(len(parts))]
    needs: dict[int, Any] = {}
    moves: dict[int, Any] = {}
    for inputs, plan in zip(places, plans, strict=True):
        for i, need in zip(inputs, plan.needs, strict=True):
            if needs.setdefault(i, need) != need:
                raise PlacementError(
                    f"{call.sig.op}: its elements need {call.specs[i].describe()}, which they share, in different "
                    "placements; call the operator on each group of elements by itself"
                )
        moves.update({inputs[i]: to for i, to in plan.moves})
    plain = [_unedited(p) for p in parts]
    calls: list[LocalCall] = []
    seen: dict[tuple[int, ...], int] = {}
    which = []
    for rank in range(call.mesh.nranks):
        key = tuple(plan.which[rank] for plan in plans)
        if key not in seen:
            seen[key] = len(calls)
            calls.append(_join_calls(call, places, [p.calls[k] for p, k in zip(plans, key, strict=True)], plain))
        which.append(seen[key])
    return Plan(
        outs=(None,) * len(call.outs) if call.sig.inplace else tuple(o for p in plans for o in p.outs),
        needs=tuple(needs[i] for i in range(len(call.specs))),
        moves=tuple(sorted(moves.items())),
        frees=tuple(sorted({i[k] for i, p in zip(places, plans, strict=True) for k in p.frees})),
        calls=tuple(calls),
        which=tuple(which),
    )


def _join_calls(call: Call, places: list[list[int]], locals_: list[LocalCall], plain: list[Any]) -> LocalCall:
    pre: list[Any] = [None] * len(call.specs)
    for inputs, local in zip(places, locals_, strict=True):
        for i, move in zip(inputs, local.pre or (), strict=False):
            pre[i] = move
    func, args, kwargs = _unedited(call)
    if any((c.func, c.args, c.kwargs) != p for c, p in zip(locals_, plain, strict=True)):
        func, kwargs = "dtorch.one_by_one", {}
        steps = [
            [c.func, _renumbered(list(c.args), i), [[k, _renumbered(v, i)] for k, v in c.kwargs.items()]]
            for c, i in zip(locals_, places, strict=True)
        ]
        args = (steps, not call.sig.inplace)
    outs = (None,) * len(call.outs) if call.sig.inplace else tuple(o for c in locals_ for o in c.outs)
    any_pre = any(m is not None for m in pre)
    return LocalCall(func, args, kwargs, tuple(pre) if any_pre else None, False, outs)
