"""``generator=``: the caller's own generator lies in this process, so it draws here, and what it drew is sent."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PlacementError
from ..placement import Partial, Placement, Replicate, Shard
from ..spec import TensorSpec
from . import dispatch as _dispatch
from .dispatch import dispatch
from .moves import lift, to_plain

__all__ = ["draw_here", "has_generator"]

# Fills that overwrite what they are given: its values need not be fetched.
_FILLS = frozenset("uniform normal exponential cauchy log_normal geometric random bernoulli".split())


def has_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a generator is among the arguments."""
    return any(type(v) is torch.Generator for v in (*kwargs.values(), *args))


def draw_here(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random operator with the caller's generator, which advances as it would in torch.

    The result is placed as the first tensor among the arguments, where it has its shape.
    """
    schema = func._schema
    stem = schema.name.partition("::")[2]
    cls = _dispatch._tensor  # pyright: ignore[reportPrivateUsage]
    proxies = [v for v in (*args, *kwargs.values()) if type(v) is cls]
    spec: TensorSpec = proxies[0]._spec
    inplace = schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write
    if not inplace:
        drawn = func(*(to_plain(a, cls) for a in args), **{k: to_plain(v, cls) for k, v in kwargs.items()})
        return lift(drawn, spec.mesh, _placed(spec, drawn, whole_last=stem == "multinomial"))
    if spec.is_partial:
        raise PlacementError(
            f"{stem}(generator=…) cannot write to {spec.describe()}: its ranks hold summands.\n"
            f"  Write:  t = t.redistribute(placements={[Replicate()] * spec.mesh.ndim}); t.{stem}(generator=…)"
        )
    target = proxies[0]
    if len(proxies) == 1 and stem.removesuffix("_") in _FILLS:
        # Draws depend on the strides, which are those of the global tensor.
        plain = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    else:
        plain = to_plain(target, cls).clone()
    rest = [to_plain(a, cls) for a in args[1:]]
    func(plain, *rest, **{k: to_plain(v, cls) for k, v in kwargs.items()})
    dispatch(None, torch.ops.aten.copy_.default, (), (target, lift(plain, spec.mesh, spec.placements)))
    return target


def _placed(spec: TensorSpec, drawn: torch.Tensor, whole_last: bool) -> tuple[Placement, ...]:
    """Placements for `drawn` like those of `spec`, where its dims are as long; summands become the whole."""

    def keep(p: Placement) -> bool:
        if type(p) is Partial:
            return False
        if type(p) is not Shard:
            return True
        inner = not whole_last or p.dim < drawn.ndim - 1
        return inner and p.dim < drawn.ndim and drawn.shape[p.dim] == spec.shape[p.dim]

    return tuple(p if keep(p) else Replicate() for p in spec.placements)
