"""``torch.nn.utils``: every function is torch's own, and works on modules with dtorch parameters."""

from __future__ import annotations

from typing import Any

from torch.nn import utils as _utils
from torch.nn.utils import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from . import parametrizations, parametrize, prune, rnn, stateless

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    *_utils.__all__,
    "parametrizations",
    "parametrize",
    "prune",
    "rnn",
    "stateless",
]


def __getattr__(name: str) -> Any:
    return getattr(_utils, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_utils)})
