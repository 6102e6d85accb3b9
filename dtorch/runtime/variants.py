"""Operators in other dress: ``out=``, and views in place. Each is its functional form, and then more."""

from __future__ import annotations

from typing import Any

import torch

from . import dispatch as _dispatch
from .copies import mark
from .dispatch import dispatch
from .moves import redistribute, to_plain

__all__ = ["inplace_view", "out_variant", "stem"]


def stem(func: Any) -> str:
    """``add_`` of ``aten::add_.Tensor``."""
    return str(func._schema.name.partition("::")[2])


def inplace_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """t_, transpose_, squeeze_, …: the proxy becomes the view; other proxies of the value stay as they are."""
    # Another overload name may stand for the same arguments: transpose_.default, transpose.int.
    made = dispatch(None, _functional(func), (), args, kwargs)
    t = args[0]
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)
    t._spec, t._ref = made._spec, made._ref
    standing = t._spec.copied
    if standing is not None and standing.version >= 0 and not t.is_inference():
        # torch counts this as a write, when the call has returned.
        mark(t, standing.at_version(t._version + 1))
    return t


def out_variant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out=``: the functional form, copied into the target. The target keeps its placements."""
    schema = func._schema
    names = [a.name for a in schema.arguments if a.is_out]
    position = {a.name: i for i, a in enumerate(schema.arguments)}
    targets = [kwargs[n] if n in kwargs else args[position[n]] for n in names]
    rest = {k: v for k, v in kwargs.items() if k not in names}
    made = _functional(func)(*args, **rest)
    results = made if isinstance(made, (tuple, list)) else (made,)
    for target, result in zip(targets, results, strict=True):
        if not isinstance(target, torch.Tensor):
            for a, b in zip(target, result, strict=True):
                _copy_out(func, a, b)
        else:
            _copy_out(func, target, result)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _copy_out(func: Any, target: torch.Tensor, result: torch.Tensor) -> None:
    if type(target) is not _dispatch._tensor:
        target.resize_(result.shape).copy_(to_plain(result, _dispatch._tensor))
        return
    if target.shape != result.shape:
        raise RuntimeError(
            f"{func._schema.name}(out=): the target has shape {tuple(target.shape)}, the result "
            f"{tuple(result.shape)}; a dtorch tensor is not resized.\n  Write:  out = {stem(func)}(...)"
        )
    spec = target._spec  # type: ignore[attr-defined]
    if result._spec.placements != spec.placements:  # type: ignore[attr-defined]
        result = redistribute(result, spec.mesh, spec.placements)  # type: ignore[arg-type]
    dispatch(None, torch.ops.aten.copy_.default, (), (target, result))


def _functional(func: Any) -> Any:
    """The overload of the same operator that returns its result instead of writing it or becoming it."""
    wanted = [str(a.type) for a in func._schema.arguments if not a.is_out]
    packet = getattr(torch.ops.aten, stem(func).removesuffix("_"))
    for name in packet.overloads():
        found = getattr(packet, name)
        schema = found._schema
        if not any(a.is_out for a in schema.arguments) and [str(a.type) for a in schema.arguments] == wanted:
            return found
    raise NotImplementedError(f"{func}: out= is not supported for this operator; assign its result instead")
