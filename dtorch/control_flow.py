"""Choices: ``cond`` and ``while_loop``, whose branches torch compiles, and ``where``.

Here the predicate is read, which waits as ``if t.sum() > 0`` does, and Python decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["cond", "where", "while_loop"]


def _truth(name: str, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.dtype is not torch.bool or value.numel() != 1:
            raise RuntimeError(
                f"{name}: expected a bool or a boolean tensor of one element, got {value.dtype} {tuple(value.shape)}"
            )
        return bool(value.item())
    if not isinstance(value, bool):
        raise RuntimeError(f"{name}: expected a bool or a boolean tensor of one element, got {value!r}")
    return value


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """As ``torch.cond``: ``true_fn(*operands)`` or ``false_fn(*operands)``.

    Raises:
        RuntimeError: `pred` is neither a bool nor a boolean tensor of one element.
    """
    return (true_fn if _truth("cond", pred) else false_fn)(*operands)


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any) -> Any:
    """As ``torch.while_loop``: carry `carried_inputs` through `body_fn` while ``cond_fn(*carried)`` holds.

    Raises:
        RuntimeError: `cond_fn` returns neither a bool nor a boolean tensor of one element.
    """
    carried = tuple(carried_inputs)
    while _truth("while_loop", cond_fn(*carried)):
        out = body_fn(*carried)
        carried = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    return carried


def where(condition: Any, *choices: Any, **named: Any) -> Any:
    """As ``torch.where``; numpy arrays among its arguments are constants."""
    given = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (condition, *choices)]
    return torch.where(*given, **{k: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for k, x in named.items()})
