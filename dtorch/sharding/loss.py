"""Rules of losses.

A mean over sharded elements is a sum over *global* counts: elementwise losses leave it Partial. The mean of nll_loss
is over weights that only the targets tell, so it has a recipe: sum, add up loss and weight over the ranks (two numbers,
one exchange), divide. That is the operator, and runs without asking.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..spec import TensorSpec
from .normalization import reduced
from .rule import Call, Dims, Flow, Local, Recipe, Rule, linear, names, rule, untied

__all__: list[str] = []

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2

# ---- elementwise losses ----------------------------------------------------------------------------------


def _broadcast(specs: tuple[TensorSpec, ...]) -> tuple[tuple[int, ...], Dims, tuple[Dims, ...]]:
    """(shape, its factors, the factors of each tensor) of tensors broadcast together."""
    shape = tuple(torch.broadcast_shapes(*[s.shape for s in specs]))
    tied, n = names(len(shape)), len(shape)
    ins = tuple(
        tuple(
            "" if size == 1 and shape[n - s.ndim + d] != 1 else tied[n - s.ndim + d] for d, size in enumerate(s.shape)
        )
        for s in specs
    )
    return shape, tied, ins


@rule(
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    free=("beta", "delta"),
)
def elementwise_loss(call: Call) -> Rule:
    """One number per element, or their sum or mean, which are Partial where the elements are sharded."""
    shape, tied, ins = _broadcast(call.specs)
    reduction = call.arg("reduction", MEAN)
    if reduction == NONE:
        return Rule(ins, (tied,))

    def local(local: Local) -> None:
        if reduction == MEAN and any(local.sharded(f) for f in tied):
            local.set("reduction", SUM)
            local.use("dtorch.over_count", call.sig.op, math.prod(shape), *local.args, **local.kwargs)

    return Rule(ins, ((),), reduce=dict.fromkeys(tied, "sum"), local=local)


@rule(
    "mse_loss_backward",
    "smooth_l1_loss_backward",
    "huber_loss_backward",
    "binary_cross_entropy_backward",
    "soft_margin_loss_backward",
    free=("beta", "delta"),
)
def elementwise_loss_backward(call: Call) -> Rule | None:
    """Linear in the gradient; the mean's is over the global count."""
    if call.overload:
        return None
    shape, tied, ins = _broadcast(call.specs[1:])
    _, _, (grad, *_) = _broadcast((call.specs[0], *call.specs[1:]))
    if call.specs[0].ndim and call.specs[0].shape != shape:
        return None

    def local(local: Local) -> None:
        if call.arg("reduction") == MEAN and any(local.sharded(f) for f in tied):
            local.set("reduction", SUM)
            local.use("dtorch.first_over_count", call.sig.op, math.prod(shape), *local.args, **local.kwargs)

    return Rule((grad, *ins), (tied,), flows=linear((0,)), local=local)


# ---- nll_loss --------------------------------------------------------------------------------------------


def _mean_recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
    total, weight = func(bound["self"], bound["target"], bound["weight"], SUM, bound["ignore_index"])
    total, weight = aten.unbind.int(reduced(aten.stack.default([total, weight])))
    return aten.div.Tensor(total, weight), weight


def _has_slice_kernel(x: TensorSpec) -> bool:
    return x.ndim <= 2


def _class_slice(kernel: str, call: Call, x: TensorSpec) -> Any:
    def edit(local: Local) -> None:
        if local.sharded("c"):
            size = x.shape[-1]
            start, _ = local.span(size, "c")
            local.use(kernel, *[local.arg(a) for a in call.sig.arguments], start, size)

    return edit


def _nll_dims(x: TensorSpec) -> tuple[Dims, Dims]:
    """Factors of the input, (n, c) or (n, c, h, w), and of the target."""
    if x.ndim > 2:
        return ("n", "", "h", "w"), ("n", "h", "w")
    return ("n", "c")[2 - x.ndim :], ("n",)[2 - x.ndim :]


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call) -> Rule:
    """Log-probabilities and targets to the loss and the total weight; sharded classes answer for their own targets."""
    x, reduction = call.specs[0], call.arg("reduction")
    logs, target = _nll_dims(x)
    classes = "c" if _has_slice_kernel(x) else ""
    ins = (logs, target, (classes,)) if call.arg("weight") is not None else (logs, target)
    flows = tuple(Flow(kind, frozenset({0}), (kind, "same")) for kind in ("sum", "avg"))
    if reduction == NONE and x.ndim > 1:
        reduce: dict[str, Any] = {**dict.fromkeys(target, (None, "same")), "c": ("sum", "same")}
        outs: tuple[Dims, ...] = (target, ())
    else:
        reduce = dict.fromkeys((*target, "c"), ("sum", "sum")) if reduction != MEAN else {}
        outs = ((), ())
    return Rule(
        ins,
        outs,
        reduce=reduce,
        flows=flows,
        local=_class_slice("dtorch.nll_loss_slice", call, x) if reduction != MEAN else None,
        recipe=Recipe(_mean_recipe) if reduction == MEAN and not any(s.is_partial for s in call.specs) else None,
    )


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Rule | None:
    """The total weight is that of the whole batch, so every rank's piece comes out as it should."""
    if call.overload:
        return None
    grad, x = call.specs[:2]
    logs, target = _nll_dims(x)
    weight = [("c" if _has_slice_kernel(x) else "",)] if call.arg("weight") is not None else []
    ins = (target if grad.ndim else untied(0), logs, target, *weight, ())
    local = _class_slice("dtorch.nll_loss_backward_slice", call, x) if _has_slice_kernel(x) else None
    return Rule(ins, (logs,), flows=linear((0,)), local=local)


# ---- margins over classes --------------------------------------------------------------------------------

_CLASSES_WHY = "The dim of the classes must be whole on every rank."


def _per_sample(call: Call, o: int) -> tuple[Dims, Dims, str | None]:
    """Factors of [n, c], of the loss, and how it is summed."""
    rows: Dims = ("n",) if call.specs[o].ndim == 2 else ()
    none = call.arg("reduction", MEAN) == NONE
    return rows, rows if none else (), None if none else "sum"


@rule("multi_margin_loss", "multilabel_margin_loss_forward", free=("p", "margin"))
def margin_loss(call: Call) -> Rule:
    """One number per sample, or their sum, or mean over the global batch."""
    rows, out, kind = _per_sample(call, 0)
    x: Dims = (*rows, "")[: call.specs[0].ndim]
    target = x if call.stem.startswith("multilabel") else rows
    ins = (x, target or untied(call.specs[1].ndim), *[untied(s.ndim) for s in call.specs[2:]])
    batch = call.specs[0].shape[0] if rows else 1

    def local(local: Local) -> None:
        if call.arg("reduction", MEAN) == MEAN and local.sharded("n"):
            local.set("reduction", SUM)
            local.use("dtorch.over_count", call.sig.op, batch, *local.args, **local.kwargs)

    outs = (out, x)[: len(call.outs)]
    return Rule(ins, outs, reduce={"n": (kind, None)[: len(outs)]}, local=local, why=_CLASSES_WHY)


@rule("multi_margin_loss_backward", "multilabel_margin_loss_backward", free=("p", "margin"))
def margin_loss_backward(call: Call) -> Rule:
    """Linear in the gradient; the mean's is over the global batch."""
    grad, x, _, *rest = call.specs
    rows: Dims = ("n",) if x.ndim == 2 else ()
    many = call.stem.startswith("multilabel")
    dims: Dims = (*rows, "")[: x.ndim]
    target = dims if many else rows or untied(call.specs[2].ndim)
    ins = (rows if grad.ndim else (), dims, target, *[target if many else untied(s.ndim) for s in rest])

    def local(local: Local) -> None:
        if call.arg("reduction", MEAN) == MEAN and local.sharded("n"):
            local.set("reduction", SUM)
            local.use("dtorch.first_over_count", call.sig.op, x.shape[0], *local.args, **local.kwargs)

    return Rule(ins, (dims,), flows=linear((0,)), local=local, why=_CLASSES_WHY)
