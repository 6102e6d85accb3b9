"""``torch.nn.init``: every function is torch's own, and fills dtorch tensors in place, on any placements."""

from __future__ import annotations

from typing import Any

from torch.nn import init as _init
from torch.nn.init import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_init, name)


def __dir__() -> list[str]:
    return dir(_init)
