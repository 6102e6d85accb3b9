"""Imports every module of rules, so that they register. One line per family."""

from __future__ import annotations

from . import (
    attention,
    cat,
    factory,
    index,
    matmul,
    normalization,
    pointwise,
    random,
    reduction,
    scan,
    view,
)

__all__ = [
    "attention",
    "cat",
    "factory",
    "index",
    "matmul",
    "normalization",
    "pointwise",
    "random",
    "reduction",
    "scan",
    "view",
]
