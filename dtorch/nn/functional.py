"""``torch.nn.functional``: every function is torch's own, and works on dtorch tensors."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as _functional
from torch.nn.functional import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_functional, name)


def __dir__() -> list[str]:
    return dir(_functional)
