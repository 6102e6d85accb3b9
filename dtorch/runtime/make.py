"""Factories: operators with no tensor among their arguments, on a mesh and with placements of the caller's choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..mesh import DeviceMesh
from ..placement import Placement
from ..sharding.rule import Recipe
from . import dispatch as _dispatch
from .client import client
from .dispatch import operator
from .plans import decide, define, make_room

if TYPE_CHECKING:
    from .._tensor import Tensor

__all__ = ["make"]


def make(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Tensor:
    """The new tensor that ``func(*args, **kwargs)`` describes. `placements` are resolved."""
    op = operator(func)
    key: list[Any] = [mesh, placements]
    nums: list[Any] = []
    free = op.free
    for i, a in enumerate(args):
        _dispatch.scan(a, free is not None and free[i], key, [], nums)
    for name, a in kwargs.items():
        key.append(name)
        _dispatch.scan(a, name in op.free_names, key, [], nums)
    k = tuple(key)
    c = client()  # first: where it is a fresh one, no plan is left
    plan = op.plans.get(k)
    if plan is None:
        c.check()
        call, decided, numbers = decide(op, args, kwargs, _dispatch._tensor, mesh=mesh, placements=placements)
        if isinstance(decided, Recipe):
            raise TypeError(f"{func}: a factory cannot communicate")
        make_room(c, op)
        plan = op.plans[k] = define(c, op, call, decided, numbers)
    return _dispatch.publish(plan, nums)
