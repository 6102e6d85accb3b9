"""Imports every module of rules, so that they register. One line per family."""

from __future__ import annotations

from . import matmul, pointwise, reduction, view

__all__ = ["matmul", "pointwise", "reduction", "view"]
