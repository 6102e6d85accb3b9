"""Writes to a tensor that lies where the operator cannot write it, under ``auto_redistribute``.

Tensors that are written are never moved: who else holds them, or a view of them, expects them where they are. So the
operator writes to copies that lie right, and those are copied back, with communication, into the tensors themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PlacementError
from ..placement import Partial, Placement, Replicate
from ..sharding.rule import signature
from . import dispatch as _dispatch
from .dispatch import dispatch
from .moves import redistribute

__all__ = ["can_write_back", "write_back"]

_copy = torch.ops.aten.copy_.default


def can_write_back(func: Any) -> bool:
    """Whether the operator writes to arguments, and does nothing else to them."""
    sig = signature(func)
    return bool(sig.written) and not sig.has_out and not sig.inplace_view


def _whole(placements: tuple[Placement, ...], *, shards: bool) -> tuple[Placement, ...]:
    """`placements` with Replicate for Partial, and for Shard too where `shards` says so."""
    return tuple([Replicate() if shards or type(p) is Partial else p for p in placements])


def write_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, shards: bool) -> Any:
    """Run `func` on copies of what it writes, with nothing Partial, or (`shards`) all Replicate; then copy back.

    Raises:
        PlacementError: it cannot run on those either, or they are no others.
    """
    sig = signature(func)
    copies: dict[int, torch.Tensor] = {}
    changed: list[tuple[Any, Any]] = []

    def copied(value: Any) -> Any:
        if type(value) is list or type(value) is tuple:
            return type(value)(copied(v) for v in value)
        if type(value) is not _dispatch._tensor:
            return value
        spec = value._spec
        placements = _whole(spec.placements, shards=shards)
        if placements == spec.placements:
            return value
        if id(value) not in copies:
            copies[id(value)] = redistribute(value, spec.mesh, placements)
            changed.append((value, copies[id(value)]))
        return copies[id(value)]

    new_args = tuple([copied(a) if n in sig.written else a for n, a in zip(sig.arguments, args, strict=False)])
    new_kwargs = {k: copied(v) if k in sig.written else v for k, v in kwargs.items()}
    if not changed:
        raise PlacementError(f"{sig.op}: nothing that it writes has to be copied")
    result = dispatch(None, func, (), new_args, new_kwargs)
    for target, copy in changed:
        dispatch(None, _copy, (), (target, redistribute(copy, target._spec.mesh, target._spec.placements)))
    return _originals(result, {id(copy): target for target, copy in changed})


def _originals(result: Any, targets: dict[int, Any]) -> Any:
    """`result` with the written tensors in the place of their copies."""
    if type(result) is list or type(result) is tuple:
        return type(result)(_originals(r, targets) for r in result)
    return targets.get(id(result), result)
