"""``torch.special``: every function is torch's own, and works on dtorch tensors."""

from __future__ import annotations

from typing import Any

from torch import special as _special
from torch.special import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_special, name)


def __dir__() -> list[str]:
    return dir(_special)
