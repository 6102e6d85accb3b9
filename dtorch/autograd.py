"""Where autograd meets placements: redistribution is differentiable, and a leaf's gradient lies as the leaf does.

To users it is ``torch.autograd``: ``dtorch.autograd.grad``, ``Function`` and all else of it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from .mesh import DeviceMesh
from .placement import Partial, Placement, Replicate
from .runtime import moves
from .sharding.redistribute import free

if TYPE_CHECKING:
    from ._tensor import Tensor
    from .spec import TensorSpec

__all__ = ["redistribute", "watch_leaf"]

# ``import dtorch.autograd.functional``: torch's modules are found below this one (aliases.py).
__path__: list[str] = []


def __getattr__(name: str) -> Any:
    return getattr(torch.autograd, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(torch.autograd)})


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


class _Late(NamedTuple):
    """A gradient that arrived in a placement of its own, and moves at the end of its backward.

    Attributes:
        leaf, grad: weakly: a gradient that autograd alone holds lives on in the leaf's ``.grad``, if anywhere.
        want: how the leaf lies.
        sum: what the leaf had gathered before, as ``.grad``; while summands are added to it, it is one itself.
        spec, ref, version: of `sum` before that.
    """

    leaf: weakref.ref[Tensor]
    grad: weakref.ref[Tensor]
    want: TensorSpec
    sum: Tensor | None = None
    spec: TensorSpec | None = None
    ref: Any = None
    version: int = 0


# By graph task (a backward that raised leaves its entry).
_waiting: dict[int, list[_Late]] = {}


def watch_leaf(leaf: Tensor) -> None:
    """Have gradients of `leaf` arrive with its placements."""
    if leaf._watched:
        return
    leaf._watched = True
    me = weakref.ref(leaf)

    def arrived(grad: Tensor | None) -> Tensor | None:
        found = me()
        if found is None or grad is None:
            return None
        want = found._spec
        if not hasattr(grad, "_spec"):
            if not torch._C._dispatch_keys(grad).has(torch._C.DispatchKey.CPU):
                return None  # vmap over gradients: the mesh is inside, and the batch knows of no placements
            # The leaf went into a plain tensor, from which a plain gradient came.
            return moves.lift(grad.detach(), want.mesh, want.placements)
        spec = grad._spec
        if spec.copied is not None:
            # A copy that stands for a view would refuse to be clipped in place.
            return redistribute(grad, want.mesh, want.placements)
        lies_well = spec.placements == want.placements and spec.mesh is want.mesh
        # Hooks of the user's run after this one, and may place it otherwise.
        hooked = len(found._backward_hooks or ()) > 1
        if lies_well and not hooked:
            return None
        if torch.is_grad_enabled():
            # A gradient that will be differentiated must be right at once.
            return redistribute(grad, want.mesh, want.placements)
        total = cast("Tensor | None", found.grad)
        if total is None or lies_well:
            late = _Late(me, weakref.ref(grad), want)
        elif not hooked and hasattr(total, "_spec") and _can_wait(total, spec, want):
            # Summands are added to it in place, so it is one as well until all are reduced together.
            late = _Late(me, weakref.ref(grad), want, total, total._spec, total._ref, total._version)
            with torch.no_grad():
                summand = moves.redistribute(total, spec.mesh, spec.placements)
            total._spec, total._ref = summand._spec, summand._ref
        else:
            return redistribute(grad, want.mesh, want.placements)
        task = torch._C._current_graph_task_id()
        entries = _waiting.get(task)
        if entries is None:
            # Tasks end before others begin, but for nested ones: what is far older has raised.
            for old in [t for t in _waiting if t < task - 1000]:
                del _waiting[old]
            entries = _waiting[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _move(task))  # type: ignore[attr-defined]
        entries.append(late)
        return None

    leaf.register_hook(arrived)


def _can_wait(total: Tensor, grad: TensorSpec, want: TensorSpec) -> bool:
    """Whether `total`, gathered before, becomes what a gradient of spec `grad` can be added to, for nothing."""
    have = total._spec
    return (
        have.mesh is grad.mesh is want.mesh
        and have.placements == want.placements
        and have.dtype == grad.dtype
        and free(have.placements, grad.placements)
    )


def _move(task: int) -> None:
    """At the end of a backward: one command moves every gradient that waits."""
    # Proxies of one value move together.
    found: dict[int, tuple[list[Tensor], TensorSpec]] = {}
    sums: list[tuple[Tensor, _Late]] = []
    for late in _waiting.pop(task, ()):
        leaf = late.leaf()
        if late.sum is not None:
            if late.sum._version == late.version:
                # torch.autograd.grad: nothing was added.
                late.sum._spec, late.sum._ref = late.spec, late.ref  # type: ignore[assignment]
            else:
                sums.append((late.sum, late))
        for grad in (late.grad(), late.sum, None if leaf is None else cast("Tensor | None", leaf.grad)):
            if grad is None or not hasattr(grad, "_spec"):
                continue
            if grad._spec.placements != late.want.placements or grad._spec.mesh is not late.want.mesh:
                holders = found.setdefault(grad._ref, ([], late.want))[0]
                if not any(grad is h for h in holders):
                    holders.append(grad)
    by_meshes: dict[Any, list[tuple[list[Tensor], TensorSpec]]] = {}
    for grads, want in found.values():
        by_meshes.setdefault((grads[0]._spec.mesh, want.mesh), []).append((grads, want))
    with torch.no_grad():
        for group in by_meshes.values():
            pairs = [(grads[0], grads[0]._spec.with_placements(want.placements, want.mesh)) for grads, want in group]
            for (grads, _), moved in zip(group, moves.redistribute_many(pairs), strict=True):
                for grad in grads:
                    grad._spec, grad._ref = moved._spec, moved._ref
        for total, late in sums:
            # Into the memory it had: it may be a view of a buffer, or have views.
            moved = total.detach()
            total._spec, total._ref = late.spec, late.ref  # type: ignore[assignment]
            torch.ops.aten.copy_.default(total, moved)
