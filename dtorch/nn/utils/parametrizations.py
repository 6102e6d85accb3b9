"""``torch.nn.utils.parametrizations``, under dtorch's name."""

from __future__ import annotations

from typing import Any

from torch.nn.utils import parametrizations as _torch
from torch.nn.utils.parametrizations import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)
