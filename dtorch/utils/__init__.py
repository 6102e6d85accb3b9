"""``torch.utils`` under dtorch's name; :mod:`dtorch.utils.data` draws its random order as the rest of dtorch does."""

from __future__ import annotations

from typing import Any

from torch import utils as _utils

from . import checkpoint, data

__all__ = ["checkpoint", "data"]


def __getattr__(name: str) -> Any:
    return getattr(_utils, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_utils)})
