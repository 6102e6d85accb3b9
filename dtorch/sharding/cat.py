"""Rules of operators that join tensors, cut them apart, or put a piece back: cat, split, slice, select, …

The dim along which is joined or cut must be whole on every rank: a view of two rows of five over two ranks would have
pieces of 2 and 0 rows, which is no placement.
"""

from __future__ import annotations

from ..spec import TensorSpec
from .rule import Call, Dims, Flow, Local, Rule, linear, names, partials, rule, untied

__all__ = ["moves_values", "without"]


def without(dims: Dims, *drop: int) -> Dims:
    """`dims` with the dims `drop` tied to nothing."""
    return tuple("" if d in drop else f for d, f in enumerate(dims))


def moves_values(spec: TensorSpec, *sets: tuple[int, ...]) -> tuple[Flow, ...]:
    """Flows of an operator that only moves the values of its inputs `sets`, of the dtype of `spec`: all kinds pass."""
    sets = sets or ((0,),)
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        sums: tuple[str, ...] = () if spec.dtype.itemsize == 1 else ("sum",)
    else:
        sums = ("sum", "avg")
    orders = () if spec.dtype.is_complex else ("max", "min")
    return partials(sums + orders, *sets)


@rule("cat", "stack")
def cat(call: Call) -> Rule:
    """Joined along a whole dim; the others are tied through all tensors."""
    parts, new = call.specs, call.stem == "stack"
    n = max(t.ndim for t in parts)
    dim = call.arg("dim", 0) % (n + new)
    tied = names(n) if new else without(names(n), dim)
    # cat ignores tensors of shape (0,), for old times' sake.
    ins = tuple(untied(1) if t.ndim == 1 and n > 1 else tied for t in parts)
    out = (*tied[:dim], "", *tied[dim:]) if new else tied
    every = tuple(range(len(parts)))
    flows: tuple[Flow, ...] = ()
    if all(t.dtype == parts[0].dtype for t in parts):
        flows = moves_values(parts[0], every)
        flows += tuple(Flow(f.op, frozenset({i})) for f in flows if f.op in ("max", "min") for i in every)
    return Rule(ins, (out,), flows=flows, why=f"The dim along which {call.stem} joins must be whole on every rank.")


@rule(
    *("split", "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"),
    *("split_copy", "split_with_sizes_copy", "unbind_copy"),
)
def split(call: Call) -> Rule:
    """Cut along a whole dim."""
    x = call.specs[0]
    dim = call.arg("dim", 0) % x.ndim
    tied = without(names(x.ndim), dim)
    out = tied[:dim] + tied[dim + 1 :] if call.stem.startswith("unbind") else tied
    why = f"The dim that {call.stem} cuts must be whole on every rank."
    return Rule((tied,), (out,) * len(call.outs), flows=moves_values(x), why=why)


def _is_whole(start: int | None, end: int | None, step: int, size: int) -> bool:
    return step == 1 and start in (None, 0, -size) and (end is None or end >= size)


@rule("slice")
def slice_(call: Call) -> Rule | None:
    """A dim may be sharded only where the slice takes all of it."""
    if call.overload != "Tensor":
        return None
    x, dim = call.specs[0], call.arg("dim", 0) % call.specs[0].ndim
    tied = names(x.ndim)
    if not _is_whole(call.arg("start"), call.arg("end"), call.arg("step", 1), x.shape[dim]):
        tied = without(tied, dim)
    return Rule((tied,), (tied,), flows=moves_values(x), why="The sliced dim must be whole on every rank.")


@rule("narrow_copy")
def narrow_copy(call: Call) -> Rule:
    """A dim may be sharded only where all of it is taken."""
    x, dim = call.specs[0], call.arg("dim") % call.specs[0].ndim
    tied = names(x.ndim)
    if call.arg("length") != x.shape[dim]:
        tied = without(tied, dim)
    return Rule((tied,), (tied,), flows=moves_values(x), why="The narrowed dim must be whole on every rank.")


@rule("select")
def select(call: Call) -> Rule | None:
    """The dim that disappears must be whole."""
    if call.overload != "int":
        return None
    x, dim = call.specs[0], call.arg("dim") % call.specs[0].ndim
    tied = without(names(x.ndim), dim)
    why = "The dim that an index is taken of must be whole on every rank."
    return Rule((tied,), (tied[:dim] + tied[dim + 1 :],), flows=moves_values(x), why=why)


def _local_sizes(local: Local) -> None:
    local.set("input_sizes", list(local.out_shape()))


@rule("slice_backward", "select_backward", "diagonal_backward", "unfold_backward")
def put_back(call: Call) -> Rule:
    """The gradient of a piece, put back among zeros of the size of the whole."""
    sizes, n = call.arg("input_sizes"), len(call.arg("input_sizes"))
    out = names(n)
    if not n:
        return Rule((untied(call.specs[0].ndim),), ((),), flows=linear((0,)))
    if call.stem == "diagonal_backward":
        d1, d2 = call.arg("dim1") % n, call.arg("dim2") % n
        out = without(out, d1, d2)
        grad = (*(f for d, f in enumerate(out) if d not in (d1, d2)), "")
    else:
        dim = call.arg("dim") % n
        if call.stem == "slice_backward" and _is_whole(
            call.arg("start"), call.arg("end"), call.arg("step"), sizes[dim]
        ):
            return Rule((out,), (out,), flows=linear((0,)), local=_local_sizes)
        out = without(out, dim)
        grad = out[:dim] + out[dim + 1 :] if call.stem == "select_backward" else out
        if call.stem == "unfold_backward":
            grad = (*out, "")
    return Rule((grad,), (out,), flows=linear((0,)), local=_local_sizes)


@rule("slice_scatter", "select_scatter", "diagonal_scatter")
def scatter_piece(call: Call) -> Rule:
    """A copy of self with one piece replaced."""
    x = call.specs[0]
    n, out = x.ndim, names(x.ndim)
    if call.stem == "diagonal_scatter":
        d1, d2 = call.arg("dim1", 0) % n, call.arg("dim2", 1) % n
        out = without(out, d1, d2)
        src = (*(f for d, f in enumerate(out) if d not in (d1, d2)), "")
    else:
        dim = call.arg("dim", 0) % n
        out = without(out, dim)
        src = out[:dim] + out[dim + 1 :] if call.stem == "select_scatter" else out
    return Rule((out, src), (out,), flows=moves_values(x, (0, 1)))
