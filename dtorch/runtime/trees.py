"""The tensors among a call's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import dispatch as _dispatch

__all__ = ["flat", "is_proxy", "map_call", "mapped", "tensors_of"]


def flat(values: Any, into: list[torch.Tensor]) -> list[torch.Tensor]:
    """`into`, with the tensors in `values` added, in order."""
    for v in values:
        if isinstance(v, torch.Tensor):
            into.append(v)
        elif type(v) is list or type(v) is tuple:
            flat(v, into)
    return into


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All tensors among the arguments, in order."""
    return flat(kwargs.values(), flat(args, []))


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value`, each tensor in it changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(mapped(v, change) for v in value)
    return value


def map_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, each tensor in them changed."""
    return tuple(mapped(a, change) for a in args), {k: mapped(v, change) for k, v in kwargs.items()}


def is_proxy(t: Any) -> bool:
    """Whether `t` is a dtorch tensor."""
    return type(t) is _dispatch._tensor
