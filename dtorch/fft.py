"""``torch.fft``: transforms are torch's own, and work on dtorch tensors; fftfreq and rfftfreq are made on a mesh."""

from __future__ import annotations

from typing import Any

from torch import fft as _fft
from torch.fft import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from .constants import fftfreq, rfftfreq

__all__ = ["fftfreq", "rfftfreq", *(name for name in dir(_fft) if name.endswith(("fft", "fft2", "fftn", "shift")))]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return getattr(_fft, name)


def __dir__() -> list[str]:
    return dir(_fft)
