"""Placements: how one dim of a mesh holds a tensor.

Small frozen classes of our own, equal to torch's of the same name, and so of the same hash;
:func:`as_placement` accepts both. Importing torch's would cost half a second at start.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Partial", "Placement", "Replicate", "Shard", "as_placement", "as_placements", "fitting"]

REDUCE_OPS = ("sum", "avg", "max", "min")


class Placement:
    """Base of :class:`Shard`, :class:`Replicate` and :class:`Partial`."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this cuts a tensor dim (the dim `dim`, where given)."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether every rank holds a summand (of the kind `reduce_op`, where given)."""
        return isinstance(self, Partial) and (reduce_op is None or self.reduce_op == reduce_op)


def _same_as_torch(ours: Placement, other: object) -> bool:
    return type(other).__module__.startswith("torch.") and _convert(other) == ours


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Shard(Placement):
    """The tensor is cut along `dim` into as many pieces as the mesh dim has ranks, as ``torch.chunk`` cuts.

    5 rows over 2 ranks are 3 and 2; 3 rows over 4 ranks are 1, 1, 1 and 0. A negative `dim` counts from the
    end and is resolved where the placement meets a tensor.
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not hasattr(self.dim, "__index__"):
            raise TypeError(f"Shard({self.dim!r}): dim is the index of a tensor dim, an int")
        object.__setattr__(self, "dim", operator.index(self.dim))

    def __eq__(self, other: object) -> bool:
        if type(other) is Shard:
            return self.dim == other.dim
        return _same_as_torch(self, other)

    def __hash__(self) -> int:
        return hash(self.dim)

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Replicate(Placement):
    """Every rank of the mesh dim holds the whole tensor."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Replicate or _same_as_torch(self, other)

    def __hash__(self) -> int:
        return -2

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Partial(Placement):
    """Every rank holds a summand; the value is their `reduce_op`: "sum", "avg", "max" or "min"."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise ValueError(
                f"Partial(reduce_op={self.reduce_op!r}): the reduce op must be one of {', '.join(REDUCE_OPS)}"
            )

    def __eq__(self, other: object) -> bool:
        if type(other) is Partial:
            return self.reduce_op == other.reduce_op
        return _same_as_torch(self, other)

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"


REPLICATE = Replicate()


def _convert(p: Any) -> Placement | None:
    name = type(p).__name__
    if name == "Shard":
        return Shard(int(p.dim))
    if name == "Replicate":
        return REPLICATE
    if name == "Partial" and p.reduce_op in REDUCE_OPS:
        return Partial(p.reduce_op)
    return None


def as_placement(p: Any) -> Placement:
    """`p` as one of our placements; torch's are converted.

    Raises:
        TypeError: `p` is no placement.
    """
    if isinstance(p, Placement):
        return p
    converted = _convert(p) if type(p).__module__.startswith("torch.") else None
    if converted is None:
        raise TypeError(f"{p!r} is not a placement: write Shard(dim), Replicate() or Partial(reduce_op)")
    return converted


def as_placements(placements: Sequence[Any] | Any | None, mesh_ndim: int, tensor_ndim: int) -> tuple[Placement, ...]:
    """One resolved placement per mesh dim: None is Replicate everywhere, a placement alone
    is a list of one, negative dims are counted from the end.

    Raises:
        ValueError: the number of placements is not `mesh_ndim`, a dim is out of range for a tensor of
            `tensor_ndim` dims, or Partial kinds that do not commute are mixed.
    """
    if placements is None:
        return (REPLICATE,) * mesh_ndim
    if not isinstance(placements, Sequence):
        placements = (as_placement(placements),)
    got = tuple(as_placement(p) for p in placements)
    if len(got) != mesh_ndim:
        raise ValueError(
            f"placements={list(got)}: {len(got)} given for a mesh of {mesh_ndim} dims; give one placement per mesh dim"
        )
    out = tuple(_resolved(p, tensor_ndim) if isinstance(p, Shard) else p for p in got)
    kinds = {p.reduce_op for p in out if isinstance(p, Partial)}
    if len(kinds) > 1 and kinds != {"sum", "avg"}:
        raise ValueError(f"placements={list(out)}: Partials of one tensor must be of one kind, or sum with avg")
    return out


def _resolved(p: Shard, tensor_ndim: int) -> Shard:
    """`p` with its dim counted from the front."""
    if 0 <= p.dim < tensor_ndim:
        return p
    if not -tensor_ndim <= p.dim < 0:
        if tensor_ndim == 0:
            raise ValueError(f"{p}: a tensor of 0 dims cannot be sharded; write Replicate()")
        legal = f"legal dims are {-tensor_ndim} to {tensor_ndim - 1}"
        raise ValueError(f"{p} is out of range for a tensor of {tensor_ndim} dims; {legal}")
    return Shard(p.dim + tensor_ndim)


def fitting(placements: Sequence[Any] | Any | None, ndim: int) -> tuple[Placement, ...] | None:
    """`placements` for a tensor of `ndim` dims among several of different ndim, as a module's parameters are:
    a Shard of a dim that this one lacks is Replicate.
    """
    if placements is None:
        return None
    given = placements if isinstance(placements, Sequence) else (placements,)
    got = (as_placement(p) for p in given)
    return tuple(p if not isinstance(p, Shard) or -ndim <= p.dim < ndim else REPLICATE for p in got)
