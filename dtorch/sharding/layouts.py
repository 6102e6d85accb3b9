"""Outputs of CPU kernels that are not as torch's meta kernels say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..spec import contiguous_stride
from .forms_nn import batch_norm
from .infer import by_meta, closed_form
from .rule import OutMeta, signature

__all__: list[str] = []

Outputs = tuple[OutMeta | None, ...]


@closed_form(
    "nll_loss2d_forward",
    "native_layer_norm_backward",
    "_log_softmax_backward_data",
)
def _packed(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs:
    """Contiguous, whatever the inputs are."""
    outs = by_meta(func, args, kwargs)
    return tuple([m and OutMeta(m.shape, contiguous_stride(m.shape), m.dtype) for m in outs])


@closed_form("normal")
def _normal(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs | None:
    """Of tensors of means or deviations: packed, and drawn in that order, whatever their strides."""
    if signature(func).inplace:
        return (OutMeta(args[0].shape, args[0].stride, args[0].dtype),)
    if not func._schema.overload_name.startswith(("Tensor", "float_Tensor")):
        return None
    return _packed(func, args, kwargs)


@closed_form("native_group_norm_backward")
def _group_norm_backward(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs:
    """The meta kernel refuses inputs that are not contiguous."""
    given = {**dict(zip(signature(func).arguments, args, strict=False)), **kwargs}
    x, channels = given["input"], (given["C"],)
    shapes = (x.shape, channels, channels)
    return tuple(
        OutMeta(shape, contiguous_stride(shape), x.dtype) if keep else None
        for shape, keep in zip(shapes, given["output_mask"], strict=True)
    )


_PARAMETERS = ("weight", "bias", "running_mean", "running_var")


@closed_form("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def _batch_norm(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs:
    """Contiguous or channels-last; in evaluation no statistics are saved."""
    found = batch_norm(func, args, kwargs)
    if found is not None:
        return found
    out, *saved = by_meta(func, args, kwargs)
    if out is not None and not (len(out.shape) in (4, 5) and out.stride[1] == 1 and out.shape[1] > 1):
        out = OutMeta(out.shape, contiguous_stride(out.shape), out.dtype)  # of other layouts only channels-last is kept
    given = {**dict(zip(signature(func).arguments, args, strict=False)), **kwargs}
    if not any([given.get(k) is not None and given[k].dtype == torch.float32 for k in _PARAMETERS]):
        # Statistics of half precision are float32 only where a parameter is.
        saved = [m and OutMeta(m.shape, m.stride, given["input"].dtype) for m in saved]
    if given.get("training", False):
        return (out, *saved)
    return (out, *[m and OutMeta((0,), (1,), m.dtype) for m in saved])


@closed_form("_batch_norm_with_update")
def _batch_norm_with_update(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs | None:
    """As in training, and an empty reserve, which the meta kernel forgets."""
    given = {**dict(zip(signature(func).arguments, args, strict=False)), **kwargs}
    found = _batch_norm(torch.ops.aten.native_batch_norm.default, (), {**given, "training": True})
    return found and (*found, OutMeta((0,), (1,), torch.uint8))


@closed_form("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
def _nothing(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs:
    """Fused optimizers write and return nothing; some have no meta kernel."""
    return (None,)


@closed_form("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs:
    """What is saved depends on the mode (0 sum, 1 mean, 2 max) and on whether a sum takes the fast way."""
    sig = signature(func)
    a: dict[str, Any] = {**sig.defaults, **dict(zip(sig.arguments, args, strict=False)), **kwargs}
    weight, indices, offsets, mode = a["weight"], a["indices"], a["offsets"], a["mode"]
    bags = offsets.shape[0] - bool(a["include_last_offset"])
    fast = weight.dtype in (torch.float32, torch.float16, torch.bfloat16) and weight.stride[1] == 1
    fast = fast and mode == 0 and a["padding_idx"] < 0
    index = indices.dtype if indices.dtype == offsets.dtype else torch.int64
    # (Without a backward to come, a sum leaves room for the last offset.)
    sizes = (offsets.shape[0] if mode == 0 and sig.stem == "_embedding_bag_forward_only" else bags,)
    width = weight.shape[1]
    saved = [(0,) if fast else indices.shape, sizes, (bags, width) if mode == 2 else sizes]
    return (
        OutMeta((bags, width), contiguous_stride((bags, width)), weight.dtype),
        *[OutMeta(tuple(shape), contiguous_stride(tuple(shape)), index) for shape in saved],
    )


@closed_form("multi_margin_loss_backward", "multilabel_margin_loss_backward", "fractional_max_pool3d_backward")
def _as_self(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs | None:
    """Gradients of self, of operators that have no meta kernel."""
    x = {**dict(zip(signature(func).arguments, args, strict=False)), **kwargs}.get("self")
    return (OutMeta(x.shape, contiguous_stride(x.shape), x.dtype),) if x is not None else None


@closed_form("histogram", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors")
def _histogram(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Outputs | None:
    """Counts per bin, and for one dim the bins' edges; there is no meta kernel."""
    sig = signature(func)
    a: dict[str, Any] = {**sig.defaults, **dict(zip(sig.arguments, args, strict=False)), **kwargs}
    x, bins, weight, bounds = a["self"], a["bins"], a["weight"], a.get("range")
    if x.dtype not in (torch.float32, torch.float64) or (weight is not None and weight.dtype != x.dtype):
        return None  # the kernel says what is wrong
    counts = [
        b if isinstance(b, int) else b.shape[0] - 1 for b in (bins if isinstance(bins, (list, tuple)) else [bins])
    ]
    many = sig.stem != "histogram"
    if min(counts) < 1 or (bounds and len(bounds) != 2 * len(counts)) or (many and x.shape[-1:] != (len(counts),)):
        return None
    if weight is not None and weight.shape != (x.shape[:-1] if many else x.shape):
        return None
    hist = OutMeta(tuple(counts), contiguous_stride(tuple(counts)), x.dtype)
    return (hist,) if many else (hist, OutMeta((counts[0] + 1,), (1,), x.dtype))
