"""Rules of sampling and gathering over space: unpooling, fractional pooling, grids, folding, gated channels.

As with pooling (see `convolution`), batch and channels are free and the spatial dims whole.
"""

from __future__ import annotations

from typing import Any

from .cat import without
from .rule import Call, Dims, Local, Rule, linear, names, rule, untied

__all__: list[str] = []

_WHY = "The spatial dims must be whole on every rank."


def _leading(n: int, whole: int) -> Dims:
    """Factors of the dims before the last `whole` of `n`."""
    return (*names(n - whole), *untied(whole))


@rule("max_unpool2d", "max_unpool3d")
def unpool(call: Call) -> Rule:
    """Each channel of each sample by itself; linear in the values."""
    dims = _leading(call.specs[0].ndim, 3 if call.stem.endswith("3d") else 2)
    return Rule((dims, dims), (dims,), flows=linear((0,)), why=_WHY)


@rule("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_pool(call: Call) -> Rule:
    """Where the windows lie is drawn beforehand, for each channel of each sample: [n, c, 2 or 3]."""
    n, spatial = call.specs[0].ndim, 3 if call.stem.endswith("3d") else 2
    dims = _leading(n, spatial)
    lead = dims[: n - spatial]
    # Of an input without a batch the draws have one of size 1.
    samples = (*untied(call.specs[1].ndim - 1 - len(lead)), *lead, "")
    return Rule((dims, samples), (dims, dims), why=_WHY)


@rule("fractional_max_pool2d_backward", "fractional_max_pool3d_backward")
def fractional_pool_backward(call: Call) -> Rule:
    """Linear in the gradient."""
    dims = _leading(call.specs[0].ndim, 3 if "3d" in call.stem else 2)
    return Rule((dims,) * 3, (dims,), flows=linear((0,)), local=_dense, why=_WHY)


def _dense(local: Local) -> None:
    # The kernel reads indices as if they were contiguous.
    local.use("dtorch.on_contiguous", local.func, *local.args, **local.kwargs)


@rule("im2col", "col2im")
def columns(call: Call) -> Rule | None:
    """[n, c, h, w] to [n, c·k·k, blocks] and back: the windows of one channel lie together."""
    meta = call.outs[0]
    if meta is None:
        return None
    n, m = call.specs[0].ndim, len(meta.shape)
    image, windows = (n, m) if call.stem == "im2col" else (m, n)
    lead = names(image - 2)
    dims = {image: (*lead, "", ""), windows: (*lead, "")}
    if n == m:  # not an image with or without a batch
        return None
    dtype = call.specs[0].dtype
    flows = linear((0,)) if dtype.is_floating_point or dtype.is_complex else ()
    return Rule((dims[n],), (dims[m],), flows=flows, why=_WHY)


@rule("glu", "glu_backward", "glu_jvp", "glu_backward_jvp")
def gated(call: Call) -> Rule:
    """One half of a dim gates the other: it must be whole."""
    n = call.specs[-1].ndim
    dims = without(names(n), call.arg("dim", -1) % n) if n else ()
    flows = linear((0,)) if call.stem == "glu_backward" else ()
    return Rule((dims,) * len(call.specs), (dims,), flows=flows, why="The dim that glu halves must be whole.")


@rule("grid_sampler_2d", "grid_sampler_3d")
def grid_sample(call: Call) -> Rule:
    """Input [n, c, …] at the points of a grid [n, …, 2 or 3]: linear in the input, and each point by itself."""
    spatial = call.specs[0].ndim - 2
    points = names(spatial, "p")
    image, grid = ("n", "c", *untied(spatial)), ("n", *points, "")
    return Rule((image, grid), (("n", "c", *points),), flows=linear((0,)), why=_WHY)


@rule("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sample_backward(call: Call) -> Rule:
    """The input's gradient is a sum over the points, the grid's over the channels."""
    spatial = call.specs[1].ndim - 2
    points = names(spatial, "p")
    image, grid = ("n", "c", *untied(spatial)), ("n", *points, "")
    outs = tuple([None if m is None else d for m, d in zip(call.outs, (image, grid), strict=True)])
    reduce: dict[str, Any] = {"c": (None, "sum"), **dict.fromkeys(points, ("sum", None))}
    return Rule((("n", "c", *points), image, grid), outs, reduce=reduce, flows=linear((0,)), why=_WHY)
