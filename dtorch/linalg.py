"""``torch.linalg``: every function is torch's own, and works on dtorch tensors."""

from __future__ import annotations

from typing import Any

from torch import linalg as _linalg
from torch.linalg import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_linalg, name)


def __dir__() -> list[str]:
    return dir(_linalg)
