"""Rules of Fourier transforms: the transformed dims are whole, all others free, and the transform is linear."""

from __future__ import annotations

from .cat import without
from .rule import Call, Rule, dims_of, linear, names, rule

__all__: list[str] = []


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def transform(call: Call) -> Rule:
    """Complex to complex, real to complex (half of the last dim), and back."""
    n = call.specs[0].ndim
    dim = call.arg("dim")
    tied = without(names(n), *(dims_of(dim, n) if dim else ()))
    return Rule((tied,), (tied,), flows=linear((0,)), why="A dim that is transformed must be whole on every rank.")
