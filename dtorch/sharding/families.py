"""Imports every module of rules, so that they register. One line per family."""

from __future__ import annotations

from . import (
    attention,
    batch_norm,
    cat,
    convolution,
    factory,
    fft,
    foreach,
    index,
    layouts,
    linalg,
    loss,
    matmul,
    normalization,
    pointwise,
    random,
    recurrent,
    reduction,
    scan,
    view,
)

__all__ = [
    "attention",
    "batch_norm",
    "cat",
    "convolution",
    "factory",
    "fft",
    "foreach",
    "index",
    "layouts",
    "linalg",
    "loss",
    "matmul",
    "normalization",
    "pointwise",
    "random",
    "recurrent",
    "reduction",
    "scan",
    "view",
]
