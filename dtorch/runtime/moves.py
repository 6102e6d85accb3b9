"""Values on the move: plain tensors in, values out, and from one placement to another. Below autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from ..future import TensorFuture
from ..mesh import DeviceMesh
from ..placement import Partial, Placement, Replicate, as_placements
from ..sharding.redistribute import plan_redistribute
from ..spec import TensorSpec, contiguous_stride
from .client import Client, client
from .command import RedistributePlan
from .copies import settled
from .dispatch import wrap
from .refs import Plan, PlanCache, next_ref, ref_type

if TYPE_CHECKING:
    from .._tensor import Tensor

__all__ = [
    "fetch",
    "fetch_now",
    "known",
    "lift",
    "plain_torch",
    "redistribute",
    "redistribute_many",
    "replicated",
    "to_plain",
]

# ref → value that was fetched already, for calls that would fetch it: see known().
_known: ContextVar[dict[int, torch.Tensor] | None] = ContextVar("dtorch_known", default=None)
_constants: dict[Any, Any] = {}
_CONSTANTS = 4096


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Replicate on every dim of `mesh`."""
    return (Replicate(),) * mesh.ndim


def lift(value: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any] | None = None) -> Tensor:
    """A plain tensor as a proxy on `mesh`: a copy, taken now."""
    # No TypeErrors: operators would turn them into "unsupported operand type(s) for @: 'Tensor' and 'Tensor'".
    if value.layout != torch.strided:
        raise RuntimeError(f"a tensor of layout {value.layout} cannot be distributed; write .to_dense() first")
    if value.is_quantized:
        raise RuntimeError("a quantized tensor cannot be distributed; write .dequantize() first")
    if value.is_nested:
        raise RuntimeError("a nested tensor cannot be distributed; write torch.nested.to_padded_tensor(t, 0.0) first")
    shape = tuple(value.shape)
    placed = as_placements(placements, mesh.ndim, len(shape))
    # A dense value keeps its memory order, so that views and random fills see what they would see in torch.
    stride = tuple(value.stride()) if value.numel() else contiguous_stride(shape)
    whole = TensorSpec.of(shape, stride, value.dtype, mesh, replicated(mesh))
    if whole.local_stride(0) is None:
        stride = contiguous_stride(shape)
        whole = TensorSpec.of(shape, stride, value.dtype, mesh, replicated(mesh))
    if any(type(p) is Partial for p in placed):
        # One rank's summand is the value, the others' are neutral; or, for avg, max, min, all hold it.
        full = wrap(whole, client().values.upload(value, whole))
        return redistribute(full, mesh, placed)
    spec = whole.with_placements(placed)
    return wrap(spec, client().values.upload(value, spec))


def lift_constant(value: torch.Tensor, mesh: DeviceMesh) -> Tensor:
    """As :func:`lift`, for a plain tensor that meets proxies; numbers in 0-dim tensors are uploaded once."""
    if value.requires_grad and torch.is_grad_enabled():
        # No TypeError, as above.
        raise RuntimeError(
            "a plain torch.Tensor that requires grad met a dtorch tensor: its gradient would be lost.\n"
            "  Write:  p = dtorch.distribute_tensor(p, mesh, placements)  before the call, or p.detach()"
        )
    if value.ndim:
        return lift(value, mesh)
    key = (client(), mesh, value.dtype, repr(value.item()))
    found = _constants.get(key)
    if found is None:
        if len(_constants) >= _CONSTANTS:
            _constants.clear()
        found = _constants[key] = lift(value, mesh)
    # A proxy of its own: nobody can write to the constant through it, but metadata is per proxy.
    return wrap(found._spec, found._ref)


class _Move(Plan):
    """A redistribution's plan, and how it communicates."""

    __slots__ = ("bytes_moved", "kinds")

    bytes_moved: int
    kinds: tuple[str, ...]


_moves: PlanCache[Any, _Move] = PlanCache()


def forget() -> None:
    """Drop plans and constants of a pool that has ended."""
    _moves.clear()
    _constants.clear()


def _define(c: Client, pairs: tuple[tuple[TensorSpec, TensorSpec], ...]) -> _Move:
    source, _, a = c.mesh(pairs[0][0].mesh)
    target, _, b = c.mesh(pairs[0][1].mesh)

    def executor_of(mesh: DeviceMesh, rank: int) -> int:
        return c.mesh(mesh)[1][rank]

    plans = [plan_redistribute(src, dst, executor_of, c.region) for src, dst in pairs]
    executors = tuple(sorted({*a, *b}))
    n = len(pairs)
    move = _Move(c.plan_id(), f"{2 * n}Q", executors)
    programs: dict[int, tuple[Any, ...]] = {}
    for e in executors:
        parts = [p.programs.get(e) for p in plans]
        if all(p is not None for p in parts):
            programs[e] = tuple(parts)
    text = ", ".join(f"{s.describe()} -> {list(d.placements)}" for s, d in pairs[:3])
    text = f"redistribute({text})"
    c.send(RedistributePlan(move.id, source, target, programs, n, text))
    c.pool.name_plan(move.id, text, source, exchange=True)
    move.bytes_moved = sum(p.bytes_moved for p in plans)
    move.kinds = tuple(k for p in plans for k in p.kinds)
    return move


def redistribute(t: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """`t` on `mesh` with `placements` (resolved), always as a value of its own."""
    spec = t._spec
    target = TensorSpec.of(spec.shape, spec.stride, spec.dtype, mesh, placements)
    return redistribute_many([(t, target)])[0]


def redistribute_many(pairs: list[tuple[Tensor, TensorSpec]]) -> list[Tensor]:
    """Several tensors of one mesh to one mesh, in one command: moves of one kind share an exchange."""
    pairs = [(settled(t), target) for t, target in pairs]
    key = tuple((t._spec, target) for t, target in pairs)
    c = client()  # first: where it is a fresh one, no plan is left
    move = _moves.get(key)
    if move is None:
        move = _define(c, key)
        _moves.keep(key, move, c.config.plan_cache, c.drop_plans)
    ids = [next_ref() for _ in pairs]
    at = c.issue(move, [*ids, *(t._ref for t, _ in pairs)])
    for observe in observers:
        observe(move.kinds, move.bytes_moved)
    if c.blocking:
        c.wait_here(at)
    return [wrap(target, ref_type(target)(i)) for i, (_, target) in zip(ids, pairs, strict=True)]


# Called with (kinds, bytes) of every redistribution that is issued.
observers: list[Any] = []


def fetch(t: Tensor) -> TensorFuture[torch.Tensor]:
    """A future of the global value, on the client."""
    t = settled(t)
    spec = t._spec
    if spec.is_partial:
        placed = tuple(Replicate() if type(p) is Partial else p for p in spec.placements)
        t = redistribute(t, spec.mesh, placed)
    return client().values.fetch(t._ref, t._spec)


def fetch_now(t: Tensor) -> torch.Tensor:
    """The global value, on the client; waits.

    Where that stops an event loop it is told however soon the value is there: whether it is must not depend on a race.
    """
    client().waiting.on_block()
    return fetch(t).get()


def plain_torch() -> AbstractContextManager[Any]:
    """Inside, plain torch computes as everywhere: torch calls a dispatch handler with conjugate and negative bits
    ignored, where ``x.mul_(x.conj())`` multiplies by x."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        exclude = exclude.remove(key)  # type: ignore[attr-defined]
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


@contextlib.contextmanager
def known(values: dict[int, torch.Tensor]) -> Iterator[None]:
    """Inside, a call that needs the value of one of these refs takes it as given here and does not wait for it."""
    token = _known.set(values)
    try:
        yield
    finally:
        _known.reset(token)


def to_plain(value: Any, cls: type) -> Any:
    """`value` with the global values of its proxies in their place; waits."""
    if type(value) is cls:
        known = _known.get()
        found = known.get(value._ref) if known else None
        return fetch_now(value) if found is None else found
    if type(value) is list or type(value) is tuple:
        return type(value)(to_plain(v, cls) for v in value)
    return value
