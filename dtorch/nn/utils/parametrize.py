"""``torch.nn.utils.parametrize``, under dtorch's name."""

from __future__ import annotations

from typing import Any

from torch.nn.utils import parametrize as _torch
from torch.nn.utils.parametrize import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)
