"""Kernels that stand in for losses, normalizations and convolutions where a rank holds a piece of the batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = [
    "convolution",
    "convolution_backward",
    "first_over_count",
    "native_batch_norm_backward",
    "on_contiguous",
    "one_by_one",
    "over_count",
]


@cache
def _operator(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def one_by_one(steps: list[tuple[str, list[Any], list[tuple[str, Any]]]], returns: bool) -> list[Any] | None:
    """Each step's operator on its own arguments; `returns` says whether the results are wanted."""
    made = [_operator(name)(*args, **dict(kwargs)) for name, args, kwargs in steps]
    return made if returns else None


def on_contiguous(operator: str, *args: Any, **kwargs: Any) -> Any:
    """An operator that reads its inputs as if they were contiguous, which slices of them are not."""
    return _operator(operator)(*[a.contiguous() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)


def over_count(operator: str, count: int, *args: Any, **kwargs: Any) -> Any:
    """What `operator` gives (first), over the count of *global* elements: a rank's share of a mean."""
    found = _operator(operator)(*args, **kwargs)
    return (found[0] / count, *found[1:]) if isinstance(found, tuple) else found / count


def first_over_count(operator: str, count: int, grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`operator` of a gradient over the count of *global* elements: the backward of a mean, as that of a sum."""
    return _operator(operator)(grad / count, *args, **kwargs)


def convolution(shape: tuple[int, ...], x: torch.Tensor, weight: torch.Tensor, bias: Any, *args: Any) -> torch.Tensor:
    """``aten.convolution`` of pieces that may be empty, for which torch raises; `shape` is that of the output."""
    if x.numel() and weight.numel():
        return torch.ops.aten.convolution(x, weight, bias, *args)
    out = x.new_zeros(shape)
    return out if bias is None else out + bias.view(-1, *[1] * (x.ndim - 2))


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``aten.convolution_backward`` of pieces that may be empty, for which torch raises or forgets the bias."""
    if grad.numel() and x.numel() and weight.numel():
        return torch.ops.aten.convolution_backward(grad, x, weight, bias_sizes, *args)
    mask = args[-1]
    return (
        torch.zeros_like(x) if mask[0] else None,
        torch.zeros_like(weight) if mask[1] else None,
        grad.sum([0, *range(2, grad.ndim)]) if mask[2] else None,
    )


def native_batch_norm_backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor | None, ...]:
    """The operator kills its process where the batch is empty."""
    if x.numel():
        return torch.ops.aten.native_batch_norm_backward(grad, x, *args)
    channels = next((a for a in args if isinstance(a, torch.Tensor) and a.numel()), x).dtype
    return tuple(
        torch.zeros(shape, dtype=dtype) if keep else None
        for keep, shape, dtype in zip(
            args[-1], (x.shape, x.shape[1:2], x.shape[1:2]), (x.dtype, channels, channels), strict=True
        )
    )
