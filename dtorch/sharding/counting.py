"""Rules of operators that count, bin, test membership or reduce segments."""

from __future__ import annotations

from typing import Any

from .rule import Call, Dims, Rule, linear, names, partials, rule, untied

__all__: list[str] = []


@rule("histc")
def histc(call: Call) -> Rule:
    """Counts add up where the range is given; otherwise it is that of the values, which must be whole."""
    x = names(call.specs[0].ndim)
    given = call.arg("min", 0) != call.arg("max", 0)
    return Rule(
        (x,),
        (("",),),
        reduce=dict.fromkeys(x, "sum") if given else {},
        why="Without min and max the range is that of the values, which must be whole on every rank.",
    )


@rule("histogram", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "_histogramdd_bin_edges")
def histogram(call: Call) -> Rule:
    """Counts (or weights) add up; a density would be divided by the sum of all, and a range of one's own differs."""
    x, owners = call.specs[0], call.owners()
    # _histogramdd: one point a row.
    dims = names(x.ndim) if call.stem == "histogram" else (*names(x.ndim - 1), "")
    fixed = "tensor" in call.overload or "tensor" in call.stem or call.arg("range") is not None
    adds = fixed and not call.arg("density", False)
    ins: list[Dims] = [dims]
    for name, s in zip(owners[1:], call.specs[1:], strict=True):
        ins.append(tuple([f for f in dims if f]) if name == "weight" else untied(s.ndim))
    counted = 0 if call.stem.endswith("edges") else 1
    kinds = ("sum",) * counted + ("same",) * (len(call.outs) - counted)
    return Rule(
        tuple(ins),
        tuple([untied(len(m.shape)) if m else None for m in call.outs]),
        reduce={f: kinds for f in dims if f} if adds else {},
        why="A histogram of shards needs its range given, and no density.",
    )


@rule("isin")
def isin(call: Call) -> Rule | None:
    """An element is in the whole set where any piece of the set has it."""
    if call.overload != "Tensor_Tensor":
        return None
    elements, tests = call.specs
    out, among = names(elements.ndim), names(tests.ndim, "t")
    kind = "min" if call.arg("invert", False) else "max"
    return Rule((out, among), (out,), reduce=dict.fromkeys(among, kind))


def _segment_dims(call: Call) -> tuple[Dims, Dims, Dims]:
    """Factors of the data, of the lengths or offsets, and of the result."""
    data, axis = call.arg("data"), call.arg("axis", 0)
    n = data.ndim
    lead, trail = names(axis), names(n - axis - 1, "t")
    return (*lead, "", *trail), (*lead, ""), (*lead, "", *trail)


@rule("segment_reduce")
def segment_reduce(call: Call) -> Rule:
    """Segments of one dim; the dims before it have lengths of their own, the dims after it are free."""
    data, lengths, out = _segment_dims(call)
    flows = linear((0,)) if call.arg("reduce") in ("sum", "mean") and call.arg("initial") is None else ()
    if call.arg("reduce") in ("max", "min") and call.arg("initial") is None:
        flows = partials((call.arg("reduce"),), (0,))
    why = "The dim of the segments must be whole on every rank."
    return Rule((data, *[lengths] * (len(call.specs) - 1)), (out,), flows=flows, why=why)


@rule("_segment_reduce_backward")
def segment_reduce_backward(call: Call) -> Rule:
    """Linear in the gradient."""
    data, lengths, out = _segment_dims(call)
    ins: list[Any] = [out, out, data, *[lengths] * (len(call.specs) - 3)]
    return Rule(tuple(ins), (data,), flows=linear((0,)), why="The dim of the segments must be whole on every rank.")
