"""Writes by way of a copy, under ``auto_redistribute``.

Tensors that are written are never moved: who else holds them, or a view of them, expects them where they are. So an
operator that cannot write them where they lie writes to copies that lie right, and those are copied back, with
communication, into the tensors themselves.

Copies that stand for views (see `copies`) are written themselves, and then what they are copies of.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PlacementError
from ..placement import Partial, Placement, Replicate
from ..sharding.rule import signature
from . import dispatch as _dispatch
from .copies import Standing, bare, refresh, refuse_write, settled, written
from .dispatch import dispatch
from .moves import redistribute
from .plans import may_move
from .trees import flat, map_call
from .variants import stem

__all__ = ["can_write_back", "write_back", "write_through"]

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


def write_through(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, which writes to copies that stand for views: what these view is written as well.

    Raises:
        PlacementError: nothing may be moved here, or it writes to other tensors too: they might share memory.
    """
    sig = signature(func)
    given = dict(zip(sig.arguments, args, strict=False)) | kwargs
    targets = flat([given[name] for name in sig.arguments if name in sig.written and name in given], [])
    if not may_move() or (len(targets) > 1 and not sig.stem.startswith("_foreach_")):
        for t in targets:
            refuse_write(stem(func), t)
    if len(targets) > 1:
        return _one_by_one(func, given, len(targets))
    return _written_through(func, args, kwargs, targets[0], alone=True)


def _one_by_one(func: Any, given: dict[str, Any], n: int) -> None:
    """An operator on lists, element by element: those that are written later may view what was written before."""
    schema = func._schema.arguments
    lists = {a.name for a in schema if str(a.type).startswith("List[")}
    for i in range(n):
        one = {name: [value[i]] if name in lists else value for name, value in given.items()}
        args = tuple(one[a.name] for a in schema if a.name in one and not a.kwarg_only)
        kwargs = {a.name: one[a.name] for a in schema if a.name in one and a.kwarg_only}
        _written_through(func, args, kwargs, one["self"][0], alone=False)


def _written_through(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, alone: bool) -> Any:
    standing: Standing | None = target._spec.copied
    own = target if standing is None else refresh(target, to_write=True)

    def value(t: Any) -> Any:
        return own if t is target else settled(t) if type(t) is _dispatch._tensor else t

    args, kwargs = map_call(args, kwargs, value)
    result = dispatch(None, func, (), args, kwargs)
    if standing is not None:
        _scatter(own, standing)
    written(target, alone=alone)
    return _originals(result, {id(own): target})


def _scatter(value: Any, standing: Standing | None) -> None:
    """Write `value` into what it stands for a view of, and so on to the base."""
    while standing is not None:
        parent = bare(standing.parent)
        if standing.near is None:
            dispatch(None, _copy, (), (parent, dispatch(None, torch.ops.aten.conj_physical.default, (), (value,))))
        elif not standing.aliases:
            mesh, placements = parent._spec.mesh, parent._spec.placements
            near = redistribute(parent, mesh, standing.near)
            dispatch(None, _copy, (), (standing.of(near), value))
            dispatch(None, _copy, (), (parent, redistribute(near, mesh, placements)))
        value, standing = parent, standing.up
