"""Rules of matrix products.

Sharding a contracted dim makes the product Partial("sum"); what is added to the product (addmm's bias) is then
Partial too, so that it counts once.
"""

from __future__ import annotations

from .rule import Call, Dims, Rule, einsum, is_positive, linear, names, partials, rule, untied

__all__: list[str] = []

_PRODUCTS = {
    "mm": "mk,kn->mn",
    "bmm": "bmk,bkn->bmn",
    "mv": "mk,k->m",
    "dot": "k,k->",
    "vdot": "k,k->",
    "outer": "m,n->mn",
    "ger": "m,n->mn",
}
_ADDED = {
    "addmm": "mk,kn->mn",
    "baddbmm": "bmk,bkn->bmn",
    "addmv": "mk,k->m",
    "addbmm": "bmk,bkn->mn",
    "addr": "m,n->mn",
}
_SUMMED = {"k": "sum"}
_SUMMED_BATCH = {"k": "sum", "b": "sum"}


@rule(*_PRODUCTS)
def product(call: Call) -> Rule | None:
    """``mm: [m,k],[k,n] -> [m,n]`` and its like: bilinear, so that either side may be Partial."""
    if len(call.specs) != 2:
        return None
    return einsum(_PRODUCTS[call.stem], reduce=_SUMMED, flows=linear((0,), (1,)))


@rule(*_ADDED, free=("alpha", "beta"))
def added(call: Call) -> Rule | None:
    """``addmm: beta * self + alpha * (mat1 @ mat2)``; self may broadcast."""
    if len(call.specs) != 3:
        return None
    base = einsum(_ADDED[call.stem])
    out = base.outs[0]
    assert out is not None
    bias = broadcast_dims(call.specs[0].shape, call.outs[0].shape, out)  # type: ignore[union-attr]
    batched = call.stem == "addbmm"
    ordered = is_positive(call.arg("beta", 1)) and not call.specs[0].dtype.is_complex
    return Rule(
        (bias, *base.ins),
        base.outs,
        reduce=_SUMMED_BATCH if batched else _SUMMED,
        flows=linear((0, 1), (0, 2)) + (partials(("max", "min"), (0,)) if ordered else ()),
        addend=frozenset({0}),
    )


@rule("linear")
def linear_(call: Call) -> Rule | None:
    """``[…,k],[n,k],[n] -> […,n]``. Composites such as this one arrive whole in inference mode only."""
    x, weight, *bias = call.specs
    if weight.ndim != 2 or x.ndim < 1:
        return None
    batch = names(x.ndim - 1)
    if bias:
        ins = ((*batch, "k"), ("n", "k"), ("n",))
        return Rule(ins, ((*batch, "n"),), reduce=_SUMMED, flows=linear((0, 2), (1, 2)), addend=frozenset({2}))
    return Rule(((*batch, "k"), ("n", "k")), ((*batch, "n"),), reduce=_SUMMED, flows=linear((0,), (1,)))


@rule("matmul")
def matmul(call: Call) -> Rule | None:
    """numpy's matmul with its broadcast batch dims; arrives whole only in inference mode."""
    a, b = call.specs
    out = call.outs[0]
    if out is None or not a.ndim or not b.ndim:
        return None
    rows: Dims = ("m",) if a.ndim > 1 else ()
    columns: Dims = ("n",) if b.ndim > 1 else ()
    nbatch = len(out.shape) - len(rows) - len(columns)
    batch = names(nbatch, "b")
    shape = out.shape[:nbatch]
    left = broadcast_dims(a.shape[: max(a.ndim - 2, 0)], shape, batch)
    right = broadcast_dims(b.shape[: max(b.ndim - 2, 0)], shape, batch)
    ins = ((*left, *rows, "k"), (*right, "k", *columns))
    return Rule(ins, ((*batch, *rows, *columns),), reduce=_SUMMED, flows=linear((0,), (1,)))


def broadcast_dims(shape: tuple[int, ...], out_shape: tuple[int, ...], out: Dims) -> Dims:
    """The factors of a tensor of `shape` that is broadcast to an output of factors `out`."""
    skip = len(out) - len(shape)
    if skip < 0:
        return untied(len(shape))
    return tuple(["" if s == 1 and out_shape[skip + i] != 1 else out[skip + i] for i, s in enumerate(shape)])
