"""Imports every module of rules, so that they register. One line per family."""

from __future__ import annotations

from . import cat, factory, index, matmul, pointwise, random, reduction, scan, view

__all__ = ["cat", "factory", "index", "matmul", "pointwise", "random", "reduction", "scan", "view"]
