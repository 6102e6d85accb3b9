"""Rules of embedding bags: the columns of the table are free.

Bags are not: their offsets count from the first item, wherever they are.
"""

from __future__ import annotations

from .rule import Call, Dims, Flow, Rule, linear, rule, untied

__all__: list[str] = []

_WHY = "The table's rows, the indices and the offsets must be whole on every rank; its columns may be sharded."
_MAX = 2


@rule("_embedding_bag", "_embedding_bag_forward_only")
def bag(call: Call) -> Rule:
    """Sums, means or maxima of rows: the result, and what the backward wants."""
    weight, *rest = call.specs
    saved: list[Dims] = [untied(len(m.shape)) if m else () for m in call.outs[1:]]
    picked = call.outs[3]
    if call.arg("mode", 0) == _MAX and picked is not None and len(picked.shape) == 2:
        saved[2] = ("", "d")
    if call.arg("mode", 0) == _MAX:
        flows = ()
    else:
        kinds = [(kind, "same", "same", "same") for kind in ("sum", "avg")]
        flows = tuple([Flow(out[0], frozenset({0}), out) for out in kinds])
    same = [None if "d" in dims else "same" for dims in saved]
    return Rule(
        (("", "d"), *[untied(s.ndim) for s in rest]),
        (("", "d"), *saved),
        reduce={"d": (None, *same)},
        flows=flows if weight.ndim == 2 else (),
        why=_WHY,
    )


@rule("_embedding_bag_backward", "_embedding_bag_dense_backward")
def bag_backward(call: Call) -> Rule:
    """Linear in the gradient."""
    names = call.owners()
    of_column = call.arg("mode") == _MAX
    ins = tuple(
        [
            ("", "d") if name == "grad" or (of_column and name == "maximum_indices" and s.ndim == 2) else untied(s.ndim)
            for name, s in zip(names, call.specs, strict=True)
        ]
    )
    return Rule(ins, (("", "d"),), flows=linear((0,)), why=_WHY)


@rule("_embedding_bag_per_sample_weights_backward")
def bag_weights_backward(call: Call) -> Rule:
    """A sum over the columns, for each item by itself; linear in the gradient, and in the table."""
    _, _, indices, offsets, bags = call.specs
    # The items' bags are told (otherwise the kernel counts them, from the first item of the whole).
    item = ("i",) if bags.numel and bags.shape == indices.shape else ("",)
    ins: tuple[Dims, ...] = (("", "d"), ("", "d"), item, untied(offsets.ndim), item)
    return Rule(ins, (item,), reduce={"d": "sum"}, flows=linear((0,), (1,)), why=_WHY)
