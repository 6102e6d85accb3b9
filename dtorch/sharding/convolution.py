"""Rules of convolution, pooling and resampling: batch and channels are free, spatial dims must be whole.

A window that crosses the edge of a piece would need the neighbour's rows: refused.
"""

from __future__ import annotations

from typing import Any

from ..spec import TensorSpec
from .rule import Call, Dims, Flow, Local, Rule, linear, names, rule, untied

__all__: list[str] = []

_WHY = "The spatial dims must be whole on every rank."


def _channels(call: Call, weight: TensorSpec) -> tuple[str, str, str]:
    """Factors of the channels of the input, of the weight's input side, and of the output.

    With groups the two sides are cut together, group by group; a factor ties them where each input channel is a group
    of its own (depthwise). Otherwise a cut could fall within a group.
    """
    groups = call.arg("groups")
    if groups == 1:
        return "i", "i", "o"
    per_group = weight.shape[1]
    if call.arg("transposed"):
        depthwise = weight.shape[0] == groups
    else:
        depthwise = per_group == 1
    return ("g", "", "g") if depthwise else ("", "", "")


def _dims(call: Call, x: TensorSpec, weight: TensorSpec) -> tuple[Dims, Dims, Dims, Dims]:
    """Factors of input, weight, bias and output."""
    space = untied(x.ndim - 2)
    i, w, o = _channels(call, weight)
    first, second = (o, w)
    if call.arg("transposed"):
        # [in, out per group, ...]
        first, second = (i, o if call.arg("groups") == 1 else "")
    return ("n", i, *space), (first, second, *space), (o,), ("n", o, *space)


def _groups(local: Local) -> None:
    if local.sharded("g"):
        local.set("groups", local.length(local.call.arg("groups"), "g"))


@rule("convolution")
def convolution(call: Call) -> Rule | None:
    """Sharded input channels are a contraction: the output is Partial, and so must the bias be."""
    x, weight = call.specs[:2]
    if x.ndim != weight.ndim:
        return None
    bias = call.arg("bias") is not None
    ins_, ws, bs, ys = _dims(call, x, weight)

    def local(local: Local) -> None:
        _groups(local)
        local.use("dtorch.convolution", local.out_shape(), *[local.arg(a) for a in call.sig.arguments])

    return Rule(
        (ins_, ws, bs) if bias else (ins_, ws),
        (ys,),
        reduce={"i": "sum"},
        addend=frozenset({2}) if bias else frozenset(),
        flows=linear((0, 2), (1, 2)) if bias else linear((0,), (1,)),
        local=local,
        why=_WHY,
    )


@rule("convolution_backward")
def convolution_backward(call: Call) -> Rule | None:
    """The weight's gradient is a sum over the batch, the input's over the output channels."""
    x, weight = call.specs[1:3]
    if x.ndim != weight.ndim:
        return None
    xs, ws, bs, ys = _dims(call, x, weight)
    outs = tuple(None if m is None else d for m, d in zip(call.outs, (xs, ws, bs), strict=True))

    def local(local: Local) -> None:
        _groups(local)
        if local.arg("bias_sizes") and (bs[0] and local.sharded(bs[0])):
            local.set("bias_sizes", [local.length(ys_size, bs[0])])
        local.use("dtorch.convolution_backward", *[local.arg(a) for a in call.sig.arguments])

    ys_size = call.specs[0].shape[1]
    # The gradient of the bias does not depend on the input, nor on its channels.
    reduce: dict[str, Any] = {"n": (None, "sum", "sum"), "o": ("sum", None, None), "i": (None, None, "same")}
    # Each gradient is bilinear, in the incoming one and in what the other factor was.
    flows = list(linear((0,)))
    for kind in ("sum", "avg"):
        flows.append(Flow(kind, frozenset({1}), ("same", kind, "same")))
        flows.append(Flow(kind, frozenset({2}), (kind, "same", "same")))
        flows.append(Flow(kind, frozenset({1, 2}), (kind, kind, "same")))
    return Rule((ys, xs, ws), outs, reduce=reduce, flows=tuple(flows), local=local, why=_WHY)


# ---- pooling and resampling: every channel of every sample by itself --------------------------------------

# How many trailing dims are spatial.
_SPATIAL = {
    "avg_pool1d": 1,
    "avg_pool2d": 2,
    "avg_pool3d": 3,
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "_adaptive_avg_pool2d": 2,
    "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_nearest3d": 3,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}
_LINEAR = ("avg", "upsample")


@rule(*_SPATIAL)
def window(call: Call) -> Rule | None:
    """Leading dims are free; averages and copies are linear, maxima are not."""
    x, spatial = call.specs[0], _SPATIAL[call.stem]
    out = call.outs[0]
    if len(call.specs) != 1 or out is None:
        return None
    lead = names(x.ndim - spatial)
    # Integers are rounded.
    moves = x.dtype.is_floating_point and any(k in call.stem for k in _LINEAR)
    dims = (*lead, *untied(spatial))
    return Rule((dims,), (dims,) * len(call.outs), flows=linear((0,)) if moves else (), why=_WHY)


def _contiguous(local: Local) -> None:
    local.use("dtorch.on_contiguous", local.func, *local.args, **local.kwargs)


def _input_size(local: Local) -> None:
    local.set("input_size", list(local.out_shape()))


@rule(*(f"{stem}_backward" for stem in _SPATIAL if not stem.startswith("avg_pool1d")))
def window_backward(call: Call) -> Rule | None:
    """Linear in the gradient; the same dims are free."""
    if call.overload in ("grad_input",):
        return None
    spatial = _SPATIAL[call.stem.removesuffix("_backward")]
    n = call.specs[0].ndim
    dims = (*names(n - spatial), *untied(spatial))
    local = _input_size if "input_size" in call.sig.index else None
    if call.stem == "adaptive_max_pool3d_backward":
        local = _contiguous
    return Rule((dims,) * len(call.specs), (dims,), flows=linear((0,)), local=local, why=_WHY)
