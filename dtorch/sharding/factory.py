"""Rules of operators that make tensors from no values: zeros, arange, eye, …, and the `_like` and `new_` families.

Factories take the placements they are asked for. Those that fill make their piece; those with a formula (arange,
linspace) make the whole and keep their piece, because a shifted start would round differently.
"""

from __future__ import annotations

from typing import Any

import torch

from ..spec import TensorSpec
from .rule import Call, Flow, Local, Num, Rule, names, rule, untied

__all__ = ["ignores_partial", "local_region", "packed_stride"]

_KINDS = ("sum", "avg", "max", "min")

# Partial as asked for, from no input at all: every kind is right for one value on all ranks, but for sum, where one
# rank alone has it.
_AS_ASKED = tuple(Flow(kind, frozenset()) for kind in _KINDS)


def ignores_partial(model: TensorSpec) -> tuple[Flow, ...]:
    """Flows of an operator that looks at nothing but the shape of input 0: Partial there is Replicate in the output."""
    kinds = ("max", "min") if model.dtype is torch.bool else _KINDS
    return tuple(Flow(kind, frozenset({0}), "same") for kind in kinds)


def local_region(local: Local, o: int = 0) -> tuple[tuple[int, int], ...]:
    """(offset, length) per dim of this rank's piece of output `o`."""
    meta, dims = local.call.outs[o], local.rule.outs[o]
    assert meta is not None and dims is not None
    return tuple(local.span(size, f) for size, f in zip(meta.shape, dims, strict=True))


def packed_stride(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims lie in memory in the order of the strides `like`."""
    out, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def _zero(value: Any) -> int | float:
    kind = value.kind if isinstance(value, Num) else type(value)
    return kind(0)


@rule("zeros", "ones", "empty", "full", "empty_strided", free=("fill_value",))
def filled(call: Call) -> Rule:
    """One value everywhere, or none."""
    meta = call.outs[0]
    assert meta is not None

    def local(local: Local) -> None:
        shape = local.out_shape()
        local.set("size", list(shape))
        if call.stem == "empty_strided":
            local.set("stride", list(packed_stride(shape, meta.stride)))
        if call.stem in ("ones", "full") and not local.lead():
            if call.stem == "ones":
                local.func = "aten.zeros.default"
            else:
                local.set("fill_value", _zero(local.arg("fill_value")))

    return Rule((), (names(len(meta.shape)),), flows=_AS_ASKED, local=local)


@rule("arange", "linspace", "logspace", "tril_indices", "triu_indices", "scalar_tensor", free=("s",))
def formula(call: Call) -> Rule | None:
    """The whole, by torch's own formula, then the piece."""
    if call.specs:
        return None
    meta = call.outs[0]
    assert meta is not None

    def local(local: Local) -> None:
        if any(f and local.sharded(f) for f in local.rule.outs[0] or ()):
            local.use("dtorch.factory_slice", call.sig.op, local_region(local), *local.args, **local.kwargs)

    return Rule((), (names(len(meta.shape)),), local=local)


@rule("eye")
def eye(call: Call) -> Rule:
    """Ones where the global row is the global column."""
    meta = call.outs[0]
    assert meta is not None

    def local(local: Local) -> None:
        if local.sharded("o0") or local.sharded("o1"):
            local.use("dtorch.eye_slice", local_region(local), meta.dtype)

    return Rule((), (names(2),), local=local)


@rule("zeros_like", "ones_like", "full_like", "empty_like", free=("fill_value",))
def like(call: Call) -> Rule:
    """Placed as the model is, except that nothing is Partial: ``ones_like`` of a Partial tensor is one, not a share."""
    dims = names(call.specs[0].ndim)
    return Rule((dims,), (dims,), flows=ignores_partial(call.specs[0]))


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", free=("fill_value",))
def new(call: Call) -> Rule:
    """Replicate: the size is the caller's own.

    Only new_empty and new_empty_strided of the very shape of self are placed as self is: autograd copies gradients
    into those.
    """
    x, meta = call.specs[0], call.outs[0]
    assert meta is not None
    dims = names(x.ndim)
    if not call.stem.startswith("new_empty") or x.shape != meta.shape:
        return Rule(
            (dims,),
            (untied(len(meta.shape)),),
            reduce=dict.fromkeys(dims, "same"),
            flows=ignores_partial(call.specs[0]),
        )

    def local(local: Local) -> None:
        shape = local.out_shape()
        local.set("size", list(shape))
        if call.stem == "new_empty_strided":
            local.set("stride", list(packed_stride(shape, meta.stride)))

    # What is copied into a gradient's place is the gradient, Partial or not.
    flows = (
        tuple(Flow(k, frozenset({0})) for k in _KINDS)
        if call.stem == "new_empty_strided"
        else ignores_partial(call.specs[0])
    )
    return Rule((dims,), (dims,), flows=flows, local=local)
