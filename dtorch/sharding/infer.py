"""Shapes, strides and dtypes of an operator's outputs, exactly as torch's CPU kernels give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..spec import TensorSpec
from .rule import Num, OutMeta, signature

__all__ = ["infer"]


def infer(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[OutMeta | None, ...]:
    """The outputs of a call, flat over the returns; None for an undefined tensor.

    Args:
        func: the operator.
        args, kwargs: TensorSpec in place of each tensor, Num in place of free numbers.

    Raises:
        Whatever torch raises for these arguments.
    """
    return by_meta(func, args, kwargs)


def _meta(value: Any) -> Any:
    kind = type(value)
    if kind is TensorSpec:
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if kind is Num:
        return value.value
    if kind is list or kind is tuple:
        return kind([_meta(v) for v in value])
    return value


def _flat(result: Any, out: list[OutMeta | None]) -> None:
    if isinstance(result, torch.Tensor):
        out.append(OutMeta(tuple(result.shape), tuple(result.stride()), result.dtype))
    elif isinstance(result, (list, tuple)):
        for r in result:
            _flat(r, out)
    elif result is None:
        out.append(None)


def by_meta(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[OutMeta | None, ...]:
    """Run the operator on meta tensors."""
    given = {k: _meta(v) for k, v in kwargs.items()}
    if "device" in signature(func).index:
        given.pop("pin_memory", None)
        given["device"] = "meta"
    out: list[OutMeta | None] = []
    _flat(func(*[_meta(a) for a in args], **given), out)
    return tuple(out)
