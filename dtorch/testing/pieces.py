"""Cutting tensors into the pieces of a placement by hand, and putting pieces together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..placement import Partial, Placement, Replicate, Shard
from ..spec import chunk_sizes

__all__ = ["Mismatch", "Placements", "combine", "dense", "distribute", "same"]

Placements = tuple[Placement, ...]


def _chunk(t: torch.Tensor, dim: int, n: int) -> list[torch.Tensor]:
    return list(torch.split(t, list(chunk_sizes(t.shape[dim], n)), dim))


def _summands(t: torch.Tensor, kind: str, n: int, g: torch.Generator) -> list[torch.Tensor]:
    """`n` tensors, all different, whose `kind` is `t`."""
    if n == 1:
        return [t]
    if kind in ("sum", "avg"):
        if t.is_floating_point() or t.is_complex():
            real = t.real.dtype if t.is_complex() else t.dtype
            parts = [torch.randn(t.shape, generator=g, dtype=real).to(t.dtype) * (i + 1) for i in range(n - 1)]
        else:
            parts = [torch.randint(-5, 9, t.shape, generator=g).to(t.dtype) for _ in range(n - 1)]
        return [*parts, (t if kind == "sum" else t * n) - sum(parts)]
    who = torch.randint(0, n, t.shape, generator=g)
    if t.dtype == torch.bool:
        return [torch.where(who == i, t, torch.tensor(kind == "min")) for i in range(n)]
    sign = -1 if kind == "max" else 1

    def gap() -> torch.Tensor:
        return (torch.rand(t.shape, generator=g) * 3 + 1).to(t.dtype)

    return [torch.where(who == i, t, t + sign * gap()) for i in range(n)]


def distribute(t: torch.Tensor, placements: Placements, shape: Sequence[int], g: torch.Generator) -> list[torch.Tensor]:
    """The pieces in rank order."""
    if not shape:
        return [t]
    p, n = placements[0], shape[0]
    if isinstance(p, Shard):
        parts = _chunk(t, p.dim, n)
    elif isinstance(p, Partial):
        parts = _summands(t, p.reduce_op, n, g)
    else:
        parts = [t] * n
    return [x for part in parts for x in distribute(part, placements[1:], shape[1:], g)]


def dense(t: torch.Tensor) -> torch.Tensor:
    """A private copy whose dims lie in the order of the original's strides, packed."""
    order = sorted(range(t.ndim), key=lambda d: (t.stride(d), t.shape[d]))
    stride, step = [0] * t.ndim, 1
    for d in order:
        stride[d] = step
        step *= max(t.shape[d], 1)
    out = torch.empty_strided(t.shape, stride, dtype=t.dtype)
    out.copy_(t)
    return out


class Mismatch(AssertionError):
    """The pieces do not combine to what torch computes on the whole."""


def combine(pieces: list[torch.Tensor], placements: Placements, shape: Sequence[int]) -> torch.Tensor:
    """The value that pieces in rank order stand for."""
    if not shape:
        return pieces[0]
    n, k, p = shape[0], len(pieces) // shape[0], placements[0]
    parts = [combine(pieces[i * k : (i + 1) * k], placements[1:], shape[1:]) for i in range(n)]
    if isinstance(p, Shard):
        want = list(chunk_sizes(sum(q.shape[p.dim] for q in parts), n))
        if [q.shape[p.dim] for q in parts] != want:
            raise Mismatch(f"pieces of dim {p.dim} are {[q.shape[p.dim] for q in parts]}, not {want}")
        return torch.cat(parts, p.dim)
    if len({q.shape for q in parts}) > 1:
        raise Mismatch(f"shapes differ under {p}: {[tuple(q.shape) for q in parts]}")
    if isinstance(p, Replicate):
        for q in parts[1:]:
            if not same(q, parts[0]):
                raise Mismatch("replicas differ")
        return parts[0]
    stack = torch.stack(parts)
    if stack.dtype == torch.bool:
        stack = stack.to(torch.uint8)
    kind = p.reduce_op  # type: ignore[attr-defined]
    if kind in ("sum", "avg"):
        out = stack.sum(0) / n if kind == "avg" else stack.sum(0)
    else:
        out = stack.amax(0) if kind == "max" else stack.amin(0)
    return out.to(parts[0].dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes and dtypes, values equal up to summation order."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        tol = 1e-7 if a.dtype in (torch.float64, torch.complex128) else 2e-3
        return torch.allclose(a, b, rtol=tol, atol=tol, equal_nan=True)
    return torch.equal(a, b)
