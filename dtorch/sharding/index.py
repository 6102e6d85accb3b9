"""Rules of operators that look up or write by index: gather, scatter, index_select, index, embedding, …

Three kinds of dims. Those the index does not touch are tied through. Those of the index itself may be sharded like any
batch dim: a lookup is then sharded, an accumulation becomes Partial. The dim that is looked *into* (the factor "v") may
be sharded too where a kernel of `executor.kernels_index` answers what falls into its slice and leaves zeros for the
rest, so that the sum over ranks is the answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..spec import TensorSpec
from .cat import moves_values, without
from .rule import Call, Dims, Local, Rule, linear, names, rule, untied

__all__: list[str] = []


def _into_slice(kernel: str, dim: int, *arguments: str, inplace: bool | None = None) -> Callable[[Local], None]:
    """A ``local`` that runs `kernel` on these arguments where the dim looked into is sharded."""

    def edit(local: Local) -> None:
        if local.sharded("v"):
            size = local.call.specs[0].shape[dim]
            start, _ = local.span(size, "v")
            args = [local.arg(a) for a in arguments]
            local.use(kernel, *args, start, size, *([] if inplace is None else [inplace]))

    return edit


def _value_on_lead(local: Local) -> None:
    # Where self is Partial("sum") one rank alone writes the number; the others write zeros.
    if not local.lead():
        local.set("value", 0)


def _spread(t: TensorSpec, onto: Dims, shape: tuple[int, ...]) -> Dims:
    """Factors of a tensor that is broadcast to `shape`, whose factors are `onto`."""
    lead = len(shape) - t.ndim
    return tuple("" if s == 1 and shape[lead + d] != 1 else onto[lead + d] for d, s in enumerate(t.shape))


# ---- along one dim, the index as long as self elsewhere --------------------------------------------------


def _same_size(x: TensorSpec, dim: int, *others: TensorSpec) -> Dims:
    """Factors of the dims other than `dim` in which all of the tensors have one size."""
    return tuple(
        f if d != dim and all(t.shape[d] == x.shape[d] for t in others) else "" for d, f in enumerate(names(x.ndim))
    )


@rule("gather")
def gather(call: Call) -> Rule:
    """``out[i][j] = self[index[i][j]][j]``"""
    x, index = call.specs[:2]
    if not x.ndim or index.ndim != x.ndim:  # an index without elements may have any number of dims
        return Rule((untied(x.ndim), untied(index.ndim)), (untied(index.ndim),), flows=moves_values(x))
    dim = call.arg("dim") % x.ndim
    tied = _same_size(x, dim, index)
    into = (*tied[:dim], "v", *tied[dim + 1 :])
    picked = (*tied[:dim], "i", *tied[dim + 1 :])
    return Rule(
        (into, picked),
        (picked,),
        reduce={"v": "sum"} if x.dtype is not torch.bool else {},
        flows=moves_values(x),
        local=_into_slice("dtorch.gather_slice", dim, "self", "dim", "index"),
    )


@rule("scatter", "scatter_add", "scatter_reduce", free=("value",))
def scatter(call: Call) -> Rule:
    """``self[index[i][j]][j] = src[i][j]``; scatter_add accumulates, so that its index may be sharded along `dim`."""
    x, index, *rest = call.specs
    src = rest[0] if rest else None
    add = call.stem == "scatter_add"
    if not x.ndim or any([t.ndim != x.ndim for t in call.specs]):
        return Rule(tuple(untied(t.ndim) for t in call.specs), (untied(x.ndim),))
    dim = call.arg("dim") % x.ndim
    tied = _same_size(x, dim, *call.specs[1:])
    plain = add or call.overload in ("src", "value")
    out = (*tied[:dim], "v" if plain else "", *tied[dim + 1 :])
    along = "i" if add and src is not None and src.shape[dim] == index.shape[dim] and x.dtype is not torch.bool else ""
    items = (*tied[:dim], along, *tied[dim + 1 :])
    into = _into_slice("dtorch.scatter_add_slice", dim, "self", "dim", "index", "src", inplace=call.sig.inplace)
    if not add:
        value = "value" if src is None else "src"
        into = _into_slice("dtorch.scatter_slice", dim, "self", "dim", "index", value, inplace=call.sig.inplace)

    def local(local: Local) -> None:
        if call.overload == "value":
            _value_on_lead(local)
        into(local)

    flows = linear((0, 2)) if add else moves_values(x, (0, 2) if src is not None else (0,)) if plain else ()
    return Rule(
        (out, *([items] * (len(call.specs) - 1))),
        (out,),
        reduce={"i": "sum"} if along else {},
        addend=frozenset({0}) if along else frozenset(),
        flows=flows,
        local=local,
        why="The dim that is scattered into must be whole on every rank.",
    )


# ---- along one dim, with a list of indices ----------------------------------------------------------------


@rule("index_select")
def index_select(call: Call) -> Rule:
    """Rows (columns, …) of self, in the order of the index."""
    x, index = call.specs[:2]
    i = ("i",) * index.ndim
    if not x.ndim:
        return Rule(((), untied(index.ndim)), ((),), flows=moves_values(x))
    dim = call.arg("dim") % x.ndim
    tied = names(x.ndim)
    return Rule(
        ((*tied[:dim], "v", *tied[dim + 1 :]), i),
        ((*tied[:dim], *(i or ("",)), *tied[dim + 1 :]),),
        reduce={"v": "sum"} if x.dtype is not torch.bool else {},
        flows=moves_values(x),
        local=_into_slice("dtorch.index_select_slice", dim, "self", "dim", "index"),
    )


@rule("index_add", free=("alpha",))
def index_add(call: Call) -> Rule:
    """Rows of `source` added to rows of self; the rows added may be sharded."""
    x, index, source = call.specs
    if not x.ndim or not index.ndim or not source.ndim:
        return Rule(tuple(untied(t.ndim) for t in call.specs), (untied(x.ndim),), flows=linear((0, 2)))
    dim = call.arg("dim") % x.ndim
    tied = without(names(x.ndim), dim)
    items = (*tied[:dim], "i", *tied[dim + 1 :])
    add = x.dtype is not torch.bool
    return Rule(
        (tied, ("i",), items),
        (tied,),
        reduce={"i": "sum"} if add else {},
        addend=frozenset({0}),
        flows=linear((0, 2)) if add else (),
        why="The dim that is added into must be whole on every rank.",
    )


@rule("index_copy", "index_fill", free=("value",))
def index_copy(call: Call) -> Rule:
    """Rows of self replaced by rows of `source`, or filled with one value."""
    x, index, *rest = call.specs
    dim = call.arg("dim") % x.ndim if x.ndim else 0
    tied = without(names(x.ndim), dim)
    source = [tied if call.stem == "index_copy" and t.ndim == x.ndim else untied(t.ndim) for t in rest]
    return Rule(
        (tied, untied(index.ndim), *source),
        (tied,),
        flows=moves_values(x, (0, 2) if rest else (0,)),
        local=None if rest else _value_on_lead,
        why=f"The dim that {call.stem} writes into must be whole on every rank.",
    )


@rule("index_reduce")
def index_reduce(call: Call) -> Rule:
    """Rows of self multiplied by, averaged or compared with rows of `source`: the other dims are free."""
    x, index, source = call.specs
    dim = call.arg("dim") % x.ndim if x.ndim else 0
    tied = without(names(x.ndim), dim)
    return Rule((tied, untied(index.ndim), tied if source.ndim == x.ndim else untied(source.ndim)), (tied,))


@rule("take")
def take(call: Call) -> Rule:
    """Self is indexed as if it were flat, so it must be whole; the index may be sharded."""
    x, index = call.specs[:2]
    return Rule((untied(x.ndim), names(index.ndim)), (names(index.ndim),), flows=moves_values(x))


# ---- x[i, j, …] ------------------------------------------------------------------------------------------


def _advanced(call: Call) -> tuple[tuple[int, ...], list[Dims], Dims, Dims, tuple[int, ...]] | None:
    """Of ``x[indices]``: indexed dims, factors of each index, of x, of the result, and the result's shape.

    None for masks, whose result has as many rows as they have True.
    """
    x, indices = call.specs[0], call.arg("indices")
    at = tuple(d for d, i in enumerate(indices) if i is not None)
    tensors: list[TensorSpec] = [indices[d] for d in at]
    if not at or any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    b = names(len(shape), "b")
    tied = without(names(x.ndim), *at)
    keep = [d for d in range(x.ndim) if d not in at]
    # The dims of the index stand where they were taken out, or first where that is no single place.
    front = keep if at != tuple(range(at[0], at[-1] + 1)) else [d for d in keep if d > at[-1]]
    before = [d for d in keep if d not in front]
    out = (*(tied[d] for d in before), *b, *(tied[d] for d in front))
    sizes = (*(x.shape[d] for d in before), *shape, *(x.shape[d] for d in front))
    if len(at) == 1:
        tied = (*tied[: at[0]], "v", *tied[at[0] + 1 :])
    return at, [_spread(t, b, shape) for t in tensors], tied, out, sizes


@rule("index", "_unsafe_index")
def index(call: Call) -> Rule | None:
    """``x[i, :, j]``; with a single index tensor the dim looked into may be sharded."""
    found = _advanced(call)
    x = call.specs[0]
    if found is None:
        return None
    at, picks, tied, out, _ = found

    def local(local: Local) -> None:
        if local.sharded("v"):
            size = x.shape[at[0]]
            start, _ = local.span(size, "v")
            local.use("dtorch.index_slice", local.arg("self"), at[0], local.arg("indices")[at[0]], start, size)

    return Rule(
        (tied, *picks),
        (out,),
        reduce={"v": "sum"} if x.dtype is not torch.bool else {},
        flows=moves_values(x),
        local=local,
        why="Dims indexed by several tensors must be whole on every rank.",
    )


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call) -> Rule | None:
    """``x[i, :, j] = values``, or ``+=`` with `accumulate`, where the items may be sharded."""
    x, *picks, values = call.specs
    if call.arg("values") is not values:
        return None
    accumulate, last = bool(call.arg("accumulate", False)), len(call.specs) - 1
    flows = linear((0, last)) if accumulate else moves_values(x, (0, last))
    if len(picks) == 1 and picks[0].dtype is torch.bool and values.numel == 1:
        # One value for all places of a mask: each rank writes where its piece of the mask says.
        first = next(d for d, i in enumerate(call.arg("indices")) if i is not None)
        tied, n = names(x.ndim), picks[0].ndim
        return Rule((tied, tied[first : first + n], untied(values.ndim)), (tied,), flows=flows)
    found = _advanced(call)
    if found is None:
        return None
    at, index_dims, tied, out, shape = found
    batch = {f for dims in index_dims for f in dims if f}
    add = accumulate and x.dtype is not torch.bool

    def local(local: Local) -> None:
        if local.sharded("v"):
            size = x.shape[at[0]]
            start, _ = local.span(size, "v")
            picked = local.arg("indices")[at[0]]
            args = (local.arg("self"), at[0], picked, local.arg("values"), accumulate)
            local.use("dtorch.index_put_slice", *args, start, size, call.sig.inplace)

    return Rule(
        (tied, *index_dims, _spread(values, out, shape)),
        (tied,),
        reduce=dict.fromkeys(batch, "sum") if add else {},
        addend=frozenset({0}) if add else frozenset(),
        flows=flows,
        local=local,
        why="Dims indexed by several tensors must be whole on every rank.",
    )


# ---- embedding -------------------------------------------------------------------------------------------


@rule("embedding")
def embedding(call: Call) -> Rule:
    """Rows of a table: batch, table columns, or the vocabulary (Partial then) may be sharded."""
    weight, indices = call.specs
    batch = names(indices.ndim, "b")

    def local(local: Local) -> None:
        if local.sharded("v"):
            start, _ = local.span(weight.shape[0], "v")
            local.use("dtorch.embedding_slice", local.arg("weight"), local.arg("indices"), start, weight.shape[0])

    return Rule(
        (("v", "d"), batch), ((*batch, "d"),), reduce={"v": "sum"}, flows=moves_values(weight, (0,)), local=local
    )


@rule("embedding_dense_backward")
def embedding_backward(call: Call) -> Rule:
    """Every item adds to a row of the gradient, so that a sharded batch makes it Partial."""
    batch = names(call.specs[1].ndim, "b")
    # Scaling by frequency counts over the whole batch.
    reduce = {} if call.arg("scale_grad_by_freq") else dict.fromkeys(batch, "sum")
    return Rule(((*batch, "d"), batch), (("", "d"),), reduce=reduce, flows=linear((0,)))
