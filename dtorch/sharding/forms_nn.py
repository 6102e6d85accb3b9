"""Closed forms of losses and normalisations, whose meta kernels are Python and take a millisecond."""

from __future__ import annotations

from typing import Any

import torch

from ..spec import TensorSpec
from .forms import Args, Func, Kwargs, _bind, _packed
from .infer import Outputs, broadcast, by_meta, closed_form, dense_stride
from .rule import OutMeta, signature

__all__ = ["batch_norm"]


def _alike(x: TensorSpec, *others: Any) -> bool:
    """Whether all that are tensors have the dtype of `x`, a real one."""
    return x.dtype.is_floating_point and all([t is None or t.dtype == x.dtype for t in others])


# ---- losses of elements -------------------------------------------------------------------------------

_LIKE_INPUT = ("binary_cross_entropy", "binary_cross_entropy_backward")


@closed_form(
    *"mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss".split()
)
def loss(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """A number; or, with no reduction, one for each element."""
    a = _bind(func, args, kwargs)
    x, target = a["self"], a["target"]
    scales = [t for t in (a.get("weight"), a.get("pos_weight")) if t is not None]
    if signature(func).has_out or x.shape != target.shape or not _alike(x, target, *scales):
        return None
    if any([broadcast([t.shape, x.shape]) != x.shape for t in scales]):
        return None
    if a["reduction"] != 0:
        return (_packed((), x.dtype),) if a["reduction"] in (1, 2) else None
    if signature(func).stem in _LIKE_INPUT:
        return (OutMeta(x.shape, dense_stride(x), x.dtype),)
    packed = all([t.is_contiguous for t in (x, target, *scales)])
    return (_packed(x.shape, x.dtype),) if packed else None


@closed_form("binary_cross_entropy_backward", "soft_margin_loss_backward")
def loss_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """As the input."""
    a = _bind(func, args, kwargs)
    x, weight = a["self"], a.get("weight")
    if not _gradient_fits(a) or (weight is not None and (weight.dtype, weight.shape) != (x.dtype, x.shape)):
        return None
    if signature(func).stem in _LIKE_INPUT:
        return (OutMeta(x.shape, dense_stride(x), x.dtype),)
    packed = all([t.is_contiguous for t in (a["grad_output"], x, a["target"])])
    return (_packed(x.shape, x.dtype),) if packed else None


@closed_form("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
def packed_loss_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs:
    """Contiguous, whatever the inputs are; the meta kernel does not know."""
    a = _bind(func, args, kwargs)
    if _gradient_fits(a):
        return (_packed(a["self"].shape, a["self"].dtype),)
    return tuple([m and _packed(m.shape, m.dtype) for m in by_meta(func, args, kwargs)])


def _gradient_fits(a: dict[str, Any]) -> bool:
    grad, x, target = a["grad_output"], a["self"], a["target"]
    return _alike(x, grad, target) and x.shape == target.shape and grad.shape in ((), x.shape)


# ---- norms --------------------------------------------------------------------------------------------


@closed_form("native_group_norm")
def group_norm(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """The output, and mean and inverse deviation of every group."""
    x, weight, bias, n, channels, pixels, groups = args[:7]
    if not x.is_contiguous or not x.dtype.is_floating_point or not x.numel or groups <= 0 or channels % groups:
        return None
    given = [t for t in (weight, bias) if t is not None]
    # Half precision with parameters of float32 saves float32; torch's meta kernel does not know.
    mixed = (
        x.dtype in (torch.float16, torch.bfloat16) and bool(given) and all([t.dtype == torch.float32 for t in given])
    )
    if x.numel != n * channels * pixels or any([t.shape != (channels,) for t in given]):
        return None
    if not mixed and not _alike(x, *given):
        return None
    saved = _packed((n, groups), torch.float32 if mixed else x.dtype)
    return _packed(x.shape, x.dtype), saved, saved


def batch_norm(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """Of a contiguous input; saved statistics are empty in evaluation. For :mod:`.layouts`, which has the rest."""
    a = _bind(func, args, kwargs)
    x = a["input"]
    rows = [a.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    if x.ndim < 2 or not x.is_contiguous or not _alike(x, *rows) or not x.numel or x.dtype.itemsize < 4:
        return None
    # Of one channel or one pixel torch cannot tell whether channels come last.
    if x.ndim > 3 and (x.shape[1] == 1 or all([s == 1 for s in x.shape[2:]])):
        return None
    channels = x.shape[1:2]
    if any([t is not None and t.shape != channels for t in rows]):
        return None
    saved = _packed(channels if a.get("training", False) else (0,), x.dtype)
    return _packed(x.shape, x.dtype), saved, saved


# ---- convolutions -------------------------------------------------------------------------------------


@closed_form("convolution")
def convolution(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """Of tensors that are contiguous, or whose channels come last, and not transposed."""
    a = _bind(func, args, kwargs)
    x, weight, bias, spatial = a["input"], a["weight"], a["bias"], a["input"].ndim - 2
    lists = [a[k] if len(a[k]) == spatial else list(a[k]) * spatial for k in ("stride", "padding", "dilation")]
    last = _channels_last(x)
    if not (last or x.is_contiguous) or a["transposed"] or any([len(v) != spatial for v in lists]):
        return None
    if not _convolves(x, weight, a["groups"]):
        return None
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        return None
    size = []
    for n, k, stride, pad, dilation in zip(x.shape[2:], weight.shape[2:], *lists, strict=True):
        if stride < 1 or pad < 0 or dilation < 1:
            return None
        size.append((n + 2 * pad - dilation * (k - 1) - 1) // stride + 1)
    if min(size) < 1:
        return None
    n, c = x.shape[0], weight.shape[0]
    if last:  # torch's meta kernel says contiguous here, and no CPU kernel is
        h, w = size
        return (OutMeta((n, c, h, w), (h * w * c, 1, w * c, c), x.dtype),)
    return (_packed((n, c, *size), x.dtype),)


def _channels_last(x: TensorSpec) -> bool:
    """Whether `x` [n, c, h, w] lies as [n, h, w, c], and not as [n, c, h, w] too."""
    if x.ndim != 4:
        return False
    _, c, h, w = x.shape
    return c > 1 and h * w > 1 and x.stride == (h * w * c, 1, w * c, c)


def _convolves(x: TensorSpec, weight: TensorSpec, groups: int) -> bool:
    if x.ndim < 3 or x.ndim != weight.ndim or groups < 1 or not x.numel or not weight.numel:
        return False
    fits = x.shape[1] == weight.shape[1] * groups and weight.shape[0] % groups == 0
    return fits and _alike(x, weight) and weight.is_contiguous


@closed_form("convolution_backward")
def convolution_backward(func: Func, args: Args, kwargs: Kwargs) -> Outputs | None:
    """As input, weight and bias, where asked for."""
    a = _bind(func, args, kwargs)
    grad, x, weight, mask = a["grad_output"], a["input"], a["weight"], a["output_mask"]
    if a["transposed"] or not x.is_contiguous or not grad.is_contiguous or not _alike(x, grad):
        return None
    if not _convolves(x, weight, a["groups"]):
        return None
    if grad.ndim != x.ndim or grad.shape[:2] != (x.shape[0], weight.shape[0]) or not grad.numel:
        return None
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple([_packed(s, x.dtype) if keep else None for s, keep in zip(shapes, mask, strict=True)])
