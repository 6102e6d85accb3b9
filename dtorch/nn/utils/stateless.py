"""``torch.nn.utils.stateless``, under dtorch's name."""

from __future__ import annotations

from typing import Any

from torch.nn.utils import stateless as _torch
from torch.nn.utils.stateless import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)
