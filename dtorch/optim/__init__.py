"""``torch.optim`` for parameters on device meshes: same names, same arguments, same bits (:mod:`.optimizers`)."""

from __future__ import annotations

from typing import Any

from torch import optim as _optim
from torch.optim import Optimizer

from . import lr_scheduler, swa_utils
from .optimizers import install, optimizer_class

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "Optimizer",
    "lr_scheduler",
    "swa_utils",
    *(name for name in _optim.__all__ if name not in ("Optimizer", "lr_scheduler", "swa_utils")),
]

install()


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(_optim, name):
        raise AttributeError(f"module 'dtorch.optim' has no attribute {name!r}")
    value: Any = getattr(_optim, name)
    if isinstance(value, type) and issubclass(value, Optimizer):
        value = optimizer_class(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_optim)})
