"""Rules of batch norm.

In evaluation every element is by itself. In training the statistics are those of the *whole* batch, so that a sharded
batch needs two small sums inside: that is the operator, as it is for any loss, and it runs without asking.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..placement import Replicate, Shard
from .normalization import reduced
from .rule import Call, Dims, Local, Recipe, Rule, linear, names, rule, untied

__all__: list[str] = []

aten = torch.ops.aten


def _channels(ndim: int) -> Dims:
    return ("", "c", *untied(ndim - 2))


def _statistics_stay(call: Call) -> bool:
    """Whether sharding the channels would leave the running statistics, which are written, where they are."""
    written = [s for s in (call.arg("running_mean"), call.arg("running_var")) if s is not None]
    for j in range(call.mesh.ndim):
        # What is Partial could become sharded by channels, too.
        if any(not isinstance(s.placements[j], Replicate) for s in call.specs) and not all(
            isinstance(s.placements[j], Shard) for s in written
        ):
            return False
    return True


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    free=("momentum", "eps"),
)
def batch_norm(call: Call) -> Rule:
    """Input [n, c, ...]; the running statistics are updated in place in training."""
    x = call.specs[0]
    training = call.arg("training")
    dims = _channels(x.ndim) if training else ("n", "c", *names(x.ndim - 2))
    ins = (dims, *[("c",)] * (len(call.specs) - 1))
    saved = ("c",) if training else ("",)
    whole = frozenset() if not training or _statistics_stay(call) else frozenset("c")
    return Rule(
        ins,
        (dims, saved, saved),
        whole=whole,
        # In evaluation nothing is saved.
        reduce={} if training else {f: (None, "same", "same") for f in ("c", *[d for d in dims if d])},
        recipe=Recipe(_recipe) if training and not any(s.is_partial for s in call.specs) else None,
        why="In training the batch must be whole, or the running statistics Replicate.",
    )


@rule("native_batch_norm_backward", free=("eps",))
def batch_norm_backward(call: Call) -> Rule:
    """In evaluation the gradients of weight and bias are sums over the batch; in training so is part of the input's."""
    x = call.specs[1]
    train = call.arg("train")
    dims = _channels(x.ndim) if train else ("n", "c", *names(x.ndim - 2))
    # In evaluation the saved statistics are empty.
    ins = (dims, dims, *[("c",) if s.numel else ("",) for s in call.specs[2:]])
    outs = tuple(None if m is None else d for m, d in zip(call.outs, (dims, ("c",), ("c",)), strict=True))
    reduce = {f: (None, "sum", "sum") for f in dims if f and f != "c"}
    partial = any(s.is_partial for s in call.specs)
    recipe = Recipe(_backward_recipe) if train and not partial else None
    return Rule(ins, outs, reduce=reduce, flows=linear((0,)), local=_survive_empty, recipe=recipe)


_UPDATING_WHY = "The batch must be whole, or the running statistics Replicate."


@rule("_batch_norm_with_update", free=("momentum", "eps"))
def batch_norm_with_update(call: Call) -> Rule:
    """Training alone, and a fourth output for backends that keep something of their own: empty on a CPU."""
    dims = _channels(call.specs[0].ndim)
    return Rule(
        (dims, *[("c",)] * (len(call.specs) - 1)),
        (dims, ("c",), ("c",), ("",)),
        whole=frozenset() if _statistics_stay(call) else frozenset("c"),
        reduce={"c": (None, None, None, "same")},
        why=_UPDATING_WHY,
    )


@rule("batch_norm_backward", free=("eps",))
def batch_norm_with_update_backward(call: Call) -> Rule:
    """Its backward; channels are free."""
    dims = _channels(call.specs[1].ndim)
    vectors = [("c",) if s.numel and s.shape == (call.specs[1].shape[1],) else untied(s.ndim) for s in call.specs[2:]]
    outs = tuple([None if m is None else d for m, d in zip(call.outs, (dims, ("c",), ("c",)), strict=True)])
    return Rule((dims, dims, *vectors), outs, flows=linear((0,)), why=_UPDATING_WHY)


def _survive_empty(local: Local) -> None:
    local.func = "dtorch.native_batch_norm_backward"


# ---- training with a sharded batch -----------------------------------------------------------------------


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}


def _row(t: Any, ndim: int) -> Any:
    return aten.view.default(t, [1, -1, *[1] * (ndim - 2)])


def _wide(t: Any) -> Any:
    """Half precision is summed in float32."""
    return aten._to_copy.default(t, dtype=torch.float32) if t.dtype in (torch.float16, torch.bfloat16) else t


def _recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    b = _bind(func, args, kwargs)
    given, eps, momentum = b["input"], b["eps"], b["momentum"]
    x, n = _wide(given), given.ndim
    count, dims = math.prod(given.shape) // given.shape[1], [0, *range(2, n)]
    mean = aten.div.Scalar(reduced(aten.sum.dim_IntList(x, dims)), count)
    centered = aten.sub.Tensor(x, _row(mean, n))
    var = aten.div.Scalar(reduced(aten.sum.dim_IntList(aten.mul.Tensor(centered, centered), dims)), count)
    inverse = aten.rsqrt.default(aten.add.Scalar(var, eps))
    out = aten.mul.Tensor(centered, _row(inverse, n))
    if b.get("weight") is not None:
        out = aten.mul.Tensor(out, _row(b["weight"], n))
    if b.get("bias") is not None:
        out = aten.add.Tensor(out, _row(b["bias"], n))
    unbiased = aten.mul.Scalar(var, count / (count - 1)) if count > 1 else var
    for running, now in ((b.get("running_mean"), mean), (b.get("running_var"), unbiased)):
        if running is not None:
            aten.mul_.Scalar(running, 1 - momentum)
            aten.add_.Tensor(running, now, alpha=momentum)
    return (out if out.dtype == given.dtype else aten._to_copy.default(out, dtype=given.dtype)), mean, inverse


def _backward_recipe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    b = _bind(func, args, kwargs)
    grad, x, n, mask = _wide(b["grad_out"]), _wide(b["input"]), b["input"].ndim, b["output_mask"]
    count, dims = math.prod(x.shape) // x.shape[1], [0, *range(2, n)]
    mean, inverse, weight = b["save_mean"], b["save_invstd"], b.get("weight")
    normalized = aten.mul.Tensor(aten.sub.Tensor(x, _row(mean, n)), _row(inverse, n))
    bias_grad = reduced(aten.sum.dim_IntList(grad, dims))
    weight_grad = reduced(aten.sum.dim_IntList(aten.mul.Tensor(grad, normalized), dims))
    scale = inverse if weight is None else aten.mul.Tensor(inverse, weight)
    along = aten.add.Tensor(_row(bias_grad, n), aten.mul.Tensor(normalized, _row(weight_grad, n)))
    out = aten.mul.Tensor(aten.sub.Tensor(grad, aten.div.Scalar(along, count)), _row(scale, n))
    if out.dtype != b["input"].dtype:
        out = aten._to_copy.default(out, dtype=b["input"].dtype)
    return tuple(t if keep else None for t, keep in zip((out, weight_grad, bias_grad), mask, strict=True))
