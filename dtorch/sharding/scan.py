"""Rules of operators that need all of one dim at once and keep it: sort, topk, cumsum, …"""

from __future__ import annotations

import torch

from .cat import without
from .rule import Call, Local, Rule, linear, names, partials, rule

__all__: list[str] = []


@rule("sort", "topk", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "renorm")
def scan(call: Call) -> Rule:
    """The dim must be whole; all others are free."""
    x = call.specs[0]
    tied = names(x.ndim)
    # renorm treats the slices of its dim one by one: all other dims are the ones it needs whole.
    dim = call.arg("dim", -1) % x.ndim if x.ndim else 0
    tied = tuple(f if d == dim else "" for d, f in enumerate(tied)) if call.stem == "renorm" else without(tied, dim)
    flows = linear((0,)) if call.stem == "cumsum" and x.dtype.is_floating_point else ()
    why = f"The dim of {call.stem} must be whole on every rank."
    return Rule((tied,), (tied,) * len(call.outs), flows=flows, why=why)


@rule("searchsorted", "bucketize")
def search(call: Call) -> Rule | None:
    """One row of boundaries for all values, or one per row of values."""
    sorter = call.arg("sorter") if call.stem == "searchsorted" else None
    if len(call.specs) != (2 if sorter is None else 3):
        return None  # a number is searched
    values = call.specs[0 if call.stem == "bucketize" else 1]
    boundaries = call.specs[1 if call.stem == "bucketize" else 0]
    tied = names(values.ndim)
    if boundaries.ndim > 1:
        tied = without(tied, values.ndim - 1)
    # Of sharded boundaries each rank counts those before a value: the counts add up.
    ins = ((*tied[:-1], "v") if boundaries.ndim > 1 else ("v",), tied)
    if sorter is not None:  # says in which order the whole of the boundaries is read
        row = without(ins[0], boundaries.ndim - 1)
        return Rule((row, tied, row), (tied,))
    return Rule(ins[::-1] if call.stem == "bucketize" else ins, (tied,), reduce={"v": "sum"})


def _diagonal(local: Local) -> None:
    # Row and column of a piece are shifted by its offset, and so is the diagonal.
    shape, dims = local.call.specs[0].shape, local.rule.ins[0]
    row, column = local.span(shape[-2], dims[-2])[0], local.span(shape[-1], dims[-1])[0]
    local.set("diagonal", local.arg("diagonal", 0) + row - column)


@rule("tril", "triu")
def triangle(call: Call) -> Rule:
    """Any dim may be sharded: the diagonal moves with the piece."""
    x = call.specs[0]
    kinds: tuple[str, ...] = ("sum", "avg") if x.dtype.is_floating_point or x.dtype.is_complex else ()
    if x.dtype.is_floating_point:
        kinds += ("max", "min")
    elif not kinds and x.dtype != torch.bool:
        kinds = ("sum",)
    return Rule((names(x.ndim),), (names(x.ndim),), flows=partials(kinds, (0,)), local=_diagonal)
