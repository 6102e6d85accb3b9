"""Where autograd meets placements: redistribution is differentiable, and a leaf's gradient lies as the leaf does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

from .mesh import DeviceMesh
from .placement import Partial, Placement, Replicate
from .runtime import moves

if TYPE_CHECKING:
    from ._tensor import Tensor

__all__ = ["redistribute", "watch_leaf"]


class _Redistribute(torch.autograd.Function):
    """A move changes no value: the gradient moves back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
        ctx.source = (t._spec.mesh, t._spec.placements)
        return moves.redistribute(t, mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        mesh, placements = ctx.source
        # A summand's gradient is the sum's, whole on every rank.
        placements = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
        return redistribute(grad, mesh, placements), None, None


def redistribute(t: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """`t` on `mesh` with `placements` (resolved); differentiable."""
    if t.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(t, mesh, placements)  # type: ignore[no-any-return,no-untyped-call]
    return moves.redistribute(t, mesh, placements)


# Leaves whose gradients arrived in a placement of their own, by graph task (a backward that raised leaves its entry).
_waiting: dict[int, list[weakref.ref[Tensor]]] = {}


def watch_leaf(leaf: Tensor) -> None:
    """Have gradients of `leaf` arrive with its placements."""
    if leaf._watched:
        return
    leaf._watched = True
    me = weakref.ref(leaf)

    def arrived(grad: Tensor) -> Tensor | None:
        found = me()
        if found is None:
            return None
        want = found._spec
        if not hasattr(grad, "_spec"):
            # The leaf went into a plain tensor, from which a plain gradient came.
            return moves.lift(grad.detach(), want.mesh, want.placements)
        if grad._spec.placements == want.placements and grad._spec.mesh is want.mesh:
            return None
        if torch.is_grad_enabled() or found.grad is not None:
            # A gradient that will be differentiated, or added to another in place, must be right at once.
            return redistribute(grad, want.mesh, want.placements)
        task = torch._C._current_graph_task_id()
        leaves = _waiting.get(task)
        if leaves is None:
            # Tasks end before others begin, but for nested ones: what is far older has raised.
            for old in [t for t in _waiting if t < task - 1000]:
                del _waiting[old]
            leaves = _waiting[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _move(task))  # type: ignore[attr-defined]
        leaves.append(me)
        return None

    leaf.register_hook(arrived)


def _move(task: int) -> None:
    """At the end of a backward: one command moves every gradient that waits."""
    by_meshes: dict[Any, list[tuple[Tensor, Any]]] = {}
    for ref in _waiting.pop(task, ()):
        leaf = ref()
        if leaf is None or leaf.grad is None:
            continue
        grad, want = cast("Tensor", leaf.grad), leaf._spec
        if grad._spec.placements == want.placements and grad._spec.mesh is want.mesh:
            continue
        target = grad._spec.with_placements(want.placements, want.mesh)
        by_meshes.setdefault((grad._spec.mesh, want.mesh), []).append((leaf, target))
    for pairs in by_meshes.values():
        with torch.no_grad():
            moved = moves.redistribute_many([(leaf.grad, target) for leaf, target in pairs])  # type: ignore[misc]
        for (leaf, _), grad in zip(pairs, moved, strict=True):
            leaf.grad = grad
