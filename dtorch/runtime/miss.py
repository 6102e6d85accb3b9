"""A call that has no plan yet: it is decided, its plan remembered, and run.

What it takes may not be proxies of one mesh, lie where it must not, or be copies that stand for views.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..errors import PlacementError
from ..sharding.rule import Recipe, signature
from . import client as _client
from . import dispatch as _dispatch
from .client import client
from .copies import FREE, UNTRACKED, Standing, mark, settled, version_of
from .dispatch import DEFERRED, Operator, OperatorPlan, dispatch, wrap
from .generators import draw_here, has_generator
from .indices import INDEXED, by_mask, check_indices, fills, has_mask, positions
from .moves import fetch_now, forget, lift, lift_constant, redistribute, replicated
from .plans import decide, define, make_room, may_move, one_mesh
from .special import Special, into_plain, on_client
from .trees import flat, is_proxy, map_call, mapped, tensors_of
from .variants import stem
from .writeback import can_write_back, write_back, write_through

__all__ = ["miss"]

_client.on_close(forget)


def miss(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
    """Decide a call that dispatch has no plan for, remember the plan, and run the call.

    `key` is None where plain tensors are among the arguments.
    """
    func = op.func
    tensors = tensors_of(args, kwargs)
    proxies = [t for t in tensors if is_proxy(t)]
    if key is None:
        return _with_plain(op, args, kwargs, proxies)
    if any(t._spec.copied is not None for t in proxies):
        return _of_copies(func, args, kwargs)
    mesh = _common_mesh(proxies, func)
    if mesh is None:
        return _on_common_mesh(func, args, kwargs, proxies)
    if stem(func) in INDEXED:
        check_indices(args[0], args[1])
        if has_mask(args):
            return by_mask(func, args, kwargs)
    if has_generator(args, kwargs):
        return draw_here(func, args, kwargs)
    c = client()
    c.check()
    for t in proxies:
        c.refuse_lost(t._ref)
    make_room(c, op)
    try:
        call, decided, numbers = decide(op, args, kwargs, _dispatch._tensor)
    except NotImplementedError:
        if any(a.alias_info is not None for a in func._schema.arguments):
            raise
        # torch itself cannot tell the shape of the result without computing it (geqrf).
        plan = OperatorPlan(c, 0, "", ())
        plan.kind, plan.defer = DEFERRED, on_client
        op.plans[key] = plan
        return on_client(func, args, kwargs)
    except PlacementError as refused:
        if not may_move() or not can_write_back(func):
            raise
        return _written_back(op, func, args, kwargs, key, refused)
    if isinstance(decided, Recipe):
        recipe, run = decided, _laid(decided.fn, call.outs)
        plan = OperatorPlan(c, 0, "", ())
        plan.kind = DEFERRED
        if recipe.strict:
            plan.defer = run
        else:
            plan.defer = lambda f, a, k: run(f, a, k) if may_move() else _decide_again(op, a, k)
        op.plans[key] = plan
        return plan.defer(func, args, kwargs)
    if decided.moves:
        plan = OperatorPlan(c, 0, "", ())
        plan.kind = DEFERRED
        plan.defer = _mover(op, dict(decided.moves), _views(func))
        op.plans[key] = plan
        return plan.defer(func, args, kwargs)
    op.plans[key] = define(c, op, call, decided, numbers)
    return dispatch(None, func, (), args, kwargs)


def _writer_back(op: Operator, shards: bool) -> Special:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return write_back(func, args, kwargs, shards=shards) if may_move() else _decide_again(op, args, kwargs)

    return run


def _written_back(
    op: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, refused: PlacementError
) -> Any:
    """A call that cannot write where its targets lie: it writes to copies. Remembers how much had to be moved."""
    for shards in (False, True):
        try:
            result = write_back(func, args, kwargs, shards=shards)
        except PlacementError as e:
            if shards:
                raise refused from e
            continue
        plan = OperatorPlan(client(), 0, "", ())
        plan.kind, plan.defer = DEFERRED, _writer_back(op, shards)
        op.plans[key] = plan
        return result
    raise refused


def _decide_again(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that was allowed to move when it was decided, and is not now: raises PlacementError."""
    decide(op, args, kwargs, _dispatch._tensor)
    raise AssertionError("a call that needs moves was decided without them")


# Views by what they do, though their schemas do not say so. (`_unsafe_view` is one too, but only torch's composites
# call it, each on a result of its own making that nobody reads again: a write to the view is lost on nobody.)
_UNSAFE_VIEWS = frozenset({"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"})


def _counts(func: Any) -> bool:
    """Whether the operator's results, views in fact, count their writes themselves: torch does not call them views."""
    return stem(func) in _UNSAFE_VIEWS


def _views(func: Any) -> bool:
    """Whether the operator's results are views of an argument, the first."""
    if _counts(func):
        return True
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


def _of_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with copies that stand for views among its arguments: views of them are copies too."""
    sig = signature(func)
    given = dict(zip(sig.arguments, args, strict=False)) | kwargs
    if any(t._spec.copied is not None for t in flat([given.get(name) for name in sig.written], [])):  # type: ignore[attr-defined]
        return write_through(func, args, kwargs)
    viewed = args[0] if _views(func) else None
    version = UNTRACKED if viewed is None else FREE if _counts(func) else version_of(viewed)
    args, kwargs = map_call(args, kwargs, settled)  # type: ignore[arg-type]
    result = dispatch(None, func, (), args, kwargs)
    if viewed is None:
        return result
    # Where nothing more had to move, they are true views of the copy.
    return _marked(result, viewed, func, args, kwargs, args[0]._spec.placements, version)


def _marked(
    result: Any, base: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], near: Any, version: int
) -> Any:
    """`result` marked as copies that stand for what `func` views of `base`."""
    parent, at = wrap(base._spec, base._ref), itertools.count()

    def marked(t: Any) -> Any:
        inner = t._spec.copied
        where = near if inner is None else inner.near
        return mark(t, Standing(parent, func, args[1:], kwargs, next(at), where, version))

    return mapped(result, marked)


def _laid(run: Special, outs: tuple[Any, ...]) -> Special:
    """`run`, a recipe, with new results in the memory order that the operator itself gives them."""

    def laid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(func, args, kwargs)
        if any(signature(func).writes):
            return result
        strides = iter([m.stride for m in outs if m is not None])

        def lay(t: torch.Tensor) -> torch.Tensor:
            want = next(strides, t.stride())
            if all(n < 2 or a == b for n, a, b in zip(t.shape, t.stride(), want, strict=False)) or not t.numel():
                return t
            order = sorted(range(t.ndim), key=lambda d: -want[d])
            back = [order.index(d) for d in range(t.ndim)]
            aten = torch.ops.aten
            packed = aten.clone.default(aten.permute.default(t, order), memory_format=torch.contiguous_format)
            return aten.permute.default(packed, back)

        return mapped(result, lay)

    return laid


def _mover(op: Operator, moves: dict[int, Any], views: bool) -> Special:
    """Move the inputs as decided, then run the call on what came of it. A view of what moved is a copy."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not may_move():
            return _decide_again(op, args, kwargs)
        at = iter(range(1 << 30))

        def move(t: torch.Tensor) -> Any:
            placements = moves.get(next(at))
            return t if placements is None else redistribute(t, t._spec.mesh, placements)  # type: ignore[arg-type,attr-defined]

        base = args[0]
        args, kwargs = map_call(args, kwargs, move)
        result = dispatch(None, func, (), args, kwargs)
        if not views:
            return result
        version = FREE if _counts(func) else version_of(base)
        return _marked(result, base, func, args, kwargs, args[0]._spec.placements, version)

    return run


def _with_plain(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], proxies: list[Any]) -> Any:
    """Plain tensors among the arguments are constants, replicated; a plain target stays plain."""
    func = op.func
    if stem(func) in INDEXED and is_proxy(args[0]):
        check_indices(args[0], args[1])
        if not fills(args, kwargs):
            args = (args[0], positions(args[1]), *args[2:])
    written = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            flat([args[i] if i < len(args) else kwargs.get(a.name)], written)
    plain = [t for t in written if not is_proxy(t)]
    if plain and len(plain) == len(written):
        return into_plain(func, args, kwargs)
    meshes = [t._spec.mesh for t in proxies if t.ndim] or [t._spec.mesh for t in proxies]
    mesh = next((m for m in meshes if m.is_distributed), meshes[0])
    targets = {id(t): lift(t.detach(), mesh) for t in plain}

    def lifted(t: torch.Tensor) -> Any:
        return t if is_proxy(t) else targets[id(t)] if id(t) in targets else lift_constant(t, mesh)

    args, kwargs = map_call(args, kwargs, lifted)
    result = dispatch(None, func, (), args, kwargs)
    for t in plain:
        # Written beside proxies, as found_inf is beside the gradients that a GradScaler unscales.
        t.copy_(fetch_now(targets[id(t)]))
    return result


def _common_mesh(proxies: list[Any], func: Any) -> Any:
    mesh = proxies[0]._spec.mesh
    if all(t._spec.mesh is mesh for t in proxies):
        return mesh
    # A 0-dim tensor of a single device mixes with any mesh.
    others = [t for t in proxies if t.ndim or t._spec.mesh.is_distributed]
    if others and len(others) < len(proxies):
        one_mesh([t._spec for t in others], stem(func))
        return None
    return one_mesh([t._spec for t in proxies], stem(func))


def _on_common_mesh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], proxies: list[Any]) -> Any:
    mesh = next(t._spec.mesh for t in proxies if t.ndim or t._spec.mesh.is_distributed)

    def move(t: torch.Tensor) -> Any:
        return t if t._spec.mesh is mesh else redistribute(t, mesh, replicated(mesh))  # type: ignore[attr-defined,arg-type]

    args, kwargs = map_call(args, kwargs, move)
    return dispatch(None, func, (), args, kwargs)
